"""Sequences that are taken apart at once become parts of tensors: compiled, against onnxruntime."""

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnx import helper, numpy_helper

from gangway.artifact.format import Engine
from tests.helpers.onnx_models import save_model

node = helper.make_node


def number(name: str, value: Any) -> Any:
    return node("Constant", [], [name], value=numpy_helper.from_array(np.asarray(value)))


def at(sequence: str, place: int, output: str) -> list[Any]:
    return [number(f"{output} place", place), node("SequenceAt", [sequence, f"{output} place"], [output])]


@pytest.mark.parametrize("opset", [11, 20])
def test_parts_of_a_product(tmp_path: Path, compile_file: Any, load_artifact: Any, opset: int) -> None:
    """As torch's exporter writes `chunk`, `split` and `unbind` with optimize=False, and lists that are joined."""
    nodes = [
        node("MatMul", ["x", "w"], ["p"]),
        number("four", 4),
        node("SplitToSequence", ["p", "four"], ["chunks"], axis=-1),
        number("sizes", [5, 7]),
        node("SplitToSequence", ["p", "sizes"], ["parts"], axis=2),
        node("SplitToSequence", ["p"], ["rows"], axis=1, keepdims=0),
        *at("chunks", 1, "a"), *at("chunks", 2, "b"), *at("parts", -1, "c"), *at("rows", 2, "d"),
        node("SequenceConstruct", ["a", "b", "c"], ["list"]),
        *at("list", -2, "e"),
        node("ConcatFromSequence", ["list"], ["y"], axis=-1),
        node("Sub", ["e", "a"], ["z"]),
        node("Relu", ["d"], ["u"]),
    ]  # fmt: skip
    weight = np.random.default_rng(0).standard_normal((6, 12)).astype(np.float32)
    kinds = {"x": ["N", 3, 6]}, {"y": ["N", 3, 15], "z": ["N", 3, 4], "u": ["N", 12]}
    path = save_model(tmp_path / "model.onnx", nodes, *kinds, {"w": weight}, opset)
    compiled = compile_file(path)
    assert compiled.manifest.engine is Engine.NATIVE, compiled.manifest.fallback_reason
    assert compiled.manifest.batched and not compiled.manifest.islands
    x = np.random.default_rng(1).standard_normal((2, 3, 6)).astype(np.float32)
    wanted = onnxruntime.InferenceSession(path).run(["y", "z", "u"], {"x": x})
    answers = [load_artifact(compiled.folder)({"x": x[row : row + 1]}) for row in range(2)]
    for name, expected in zip(("y", "z", "u"), wanted, strict=True):
        found = np.concatenate([answer[name] for answer in answers])
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6, err_msg=name)
