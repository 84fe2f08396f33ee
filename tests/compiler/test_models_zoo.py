"""Convolutional networks of the zoo at their true size, compiled, against onnxruntime."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from gangway.zoo import write_model


@pytest.mark.parametrize("name", ["resnet18", "googlenet", "efficientnet_b0", "inception_v3", "ssd_resnet34"])
def test_answers_match_onnxruntime(
    compile_file: Callable[[Path], Any], load_artifact: Callable[[Path], Any], tmp_path: Path, name: str
) -> None:
    write_model(tmp_path, name)
    path = tmp_path / name / "1" / "model.onnx"
    model = load_artifact(compile_file(path).folder)
    session = onnxruntime.InferenceSession(str(path))
    names = [output.name for output in session.get_outputs()]
    (spec,) = model.manifest.inputs
    random = np.random.default_rng(3)
    for seed in range(2):  # the second run finds the arena as the first one left it
        x = random.standard_normal((1, *spec.shape[1:]), dtype=np.float32)
        answers = model({spec.name: x}, seed)
        for output, expected in zip(names, session.run(names, {spec.name: x}), strict=True):
            assert np.abs(answers[output] - expected).max() <= 1e-4 * np.abs(expected).max()
    if name == "googlenet":  # all branches are computed in their final place
        operators = {layer.operator for layer in model.manifest.layers}
        assert operators == {"Pack", "Conv+Relu", "MaxPool", "GlobalAveragePool", "Gemm", "Unpack"}
