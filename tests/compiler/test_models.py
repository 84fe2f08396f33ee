"""The zoo's models, compiled, against onnxruntime."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest


def reference(path: Path, inputs: dict[str, Any]) -> dict[str, Any]:
    session = onnxruntime.InferenceSession(str(path))
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, inputs), strict=True))


@pytest.mark.parametrize("name", ["resnet50", "mobilenetv2", "mlp"])
def test_answers_match_onnxruntime(compiled_zoo: Any, load_artifact: Callable[[Path], Any], name: str) -> None:
    model = load_artifact(compiled_zoo.artifact(name))
    (spec,) = model.manifest.inputs
    random = np.random.default_rng(3)
    for seed in range(2):  # the second run finds the arena as the first one left it
        x = random.standard_normal((1, *spec.shape[1:]), dtype=np.float32)
        expected = reference(compiled_zoo.onnx_file(name), {"input": x})["output"]
        error = np.abs(model({"input": x}, seed)["output"] - expected).max()
        assert error <= 1e-4 * np.abs(expected).max()


def test_simple_is_exact(compiled_zoo: Any, load_artifact: Callable[[Path], Any]) -> None:
    model = load_artifact(compiled_zoo.artifact("simple"))
    random = np.random.default_rng(3)
    low, high = np.iinfo(np.int32).min, np.iinfo(np.int32).max
    a, b = (random.integers(low, high, (1, 16), np.int32) for _ in range(2))
    answer = model({"INPUT0": a, "INPUT1": b})
    assert (answer["OUTPUT0"] == a + b).all()
    assert (answer["OUTPUT1"] == a - b).all()


def test_resnet50_is_fused_and_lean(compiled_zoo: Any, load_artifact: Callable[[Path], Any]) -> None:
    manifest = load_artifact(compiled_zoo.artifact("resnet50")).manifest
    operators = [layer.operator for layer in manifest.layers]
    assert operators.count("Conv+Add+Relu") == 16
    assert operators.count("Conv+Relu") == 33
    assert operators.count("Conv") == 4
    unpacked = 1000 % manifest.target.lanes > 0  # else dense layers write what is answered
    assert len(operators) == 57 + unpacked  # and pack, max pool, mean, dense
    assert manifest.arena_bytes < 20e6
    assert sum(layer.flops for layer in manifest.layers) == pytest.approx(8.2e9, rel=0.02)
    assert manifest.batched
    assert manifest.inputs[0].shape == (-1, 3, 224, 224)


def test_layers_too_small_to_share_get_one_rank(compiled_zoo: Any, load_artifact: Callable[[Path], Any]) -> None:
    layers = load_artifact(compiled_zoo.artifact("mlp")).manifest.layers
    assert {layer.max_ranks for layer in layers} == {1}
    resnet = load_artifact(compiled_zoo.artifact("resnet50")).manifest.layers
    assert max(layer.max_ranks for layer in resnet) >= 8
