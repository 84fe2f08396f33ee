"""The best numbers of rows in a model, against onnxruntime on the whole of it."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

from gangway.artifact.format import Engine

node = helper.make_node
Check = Callable[..., list[str]]


def test_heads_of_detectors_and_of_mixtures(check: Check, network: Any) -> None:
    """Values and places, each of them read alone, too, of many numbers and of few."""
    nodes = [
        node("MatMul", ["x", "m"], ["scores"]),
        node("TopK", ["scores", "two"], ["weights", "experts"]),
        node("Softmax", ["weights"], ["chances"]),
        node("Cast", ["experts"], ["numbers"], to=TensorProto.FLOAT),
        node("Add", ["chances", "numbers"], ["y"]),
        node("Reshape", ["scores", "line"], ["all"]),
        node("TopK", ["all", "nine"], ["best", "unread_too"], axis=-1),
        node("TopK", ["all", "nine"], ["unread", "worst"], axis=1, largest=0),
        node("Cast", ["worst"], ["z"], to=TensorProto.FLOAT),
    ]
    constants = {
        "m": np.random.default_rng(1).standard_normal((6, 16)).astype("f"),
        "two": np.array([2]),
        "nine": np.array([9]),
        "line": np.array([-1, 12 * 16]),
    }
    operators = check(network(nodes, {"x": ["N", 12, 6]}, {"y": None, "z": None, "best": None}, constants))
    assert operators.count("TopK") == 3


@pytest.mark.parametrize(
    ("count", "attributes"),
    [(9, {}), (16, {}), (2, {"axis": 0}), (2, {"sorted": 0})],
    ids=["most of them", "all of them", "another axis", "in any order"],
)
def test_what_stays_with_onnxruntime(
    compile_file: Any, load_artifact: Any, network: Any, tmp_path: Any, count: int, attributes: dict[str, int]
) -> None:
    """Where it finds the best numbers in another way, and NaN ends up elsewhere; axes that no kernel knows."""
    nodes = [node("MatMul", ["x", "m"], ["s"]), node("TopK", ["s", "k"], ["y", "_y"], **attributes)]
    constants = {"m": np.eye(16, dtype="f"), "k": np.array([count])}
    path = network(nodes, {"x": [6, 16]}, {"y": None}, constants).save(tmp_path / "model.onnx")
    manifest = compile_file(path).manifest
    assert manifest.engine is Engine.NATIVE
    assert [layer.operator for layer in manifest.islands] == ["TopK"]
