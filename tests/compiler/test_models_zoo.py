"""A network of branches at its true size, compiled, against onnxruntime.

Residual and depthwise networks are the models that every test run compiles (`test_models.py`), transformers are tested
small (`test_transformers.py`); `python -m benchmarks.kernels.models --models all` checks the answers of the whole zoo.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

from gangway.zoo import inception, write_model

BLOCKS = ("3b", "4e")  # of nine that differ in channels only; each is followed by a pooling


@pytest.mark.long
def test_answers_match_onnxruntime(
    compile_file: Callable[[Path], Any],
    load_artifact: Callable[[Path], Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(inception, "INCEPTIONS", {key: inception.INCEPTIONS[key] for key in BLOCKS})
    write_model(tmp_path, "googlenet")
    path = tmp_path / "googlenet" / "1" / "model.onnx"
    model = load_artifact(compile_file(path).folder)
    session = onnxruntime.InferenceSession(str(path))
    (spec,) = model.manifest.inputs
    random = np.random.default_rng(3)
    for seed in range(2):  # the second run finds the arena as the first one left it
        x = random.standard_normal((1, *spec.shape[1:]), dtype=np.float32)
        (expected,) = session.run(["output"], {spec.name: x})
        assert np.abs(model({spec.name: x}, seed)["output"] - expected).max() <= 1e-4 * np.abs(expected).max()
    operators = {layer.operator for layer in model.manifest.layers}  # all branches are computed in their final place
    unpacked = {"Unpack"} if 1000 % model.manifest.target.lanes else set()  # else the dense layer writes the answer
    assert operators == {"Pack", "Conv+Relu", "MaxPool", "GlobalAveragePool", "Gemm"} | unpacked
