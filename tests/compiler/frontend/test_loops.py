"""What is known of the shapes that loops compute, and that onnxruntime computes these."""

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from onnx import TensorProto, helper

from gangway.compiler.frontend.importer import read_graph
from tests.helpers.onnx_models import save_model

node = helper.make_node


def save(path: Path, steps: str, condition: str = "", again: str = "go") -> Path:
    """A loop with a state of one shape, a state that grows, one that follows it, and two results that it collects."""
    kinds = {"step": TensorProto.INT64, "go": TensorProto.BOOL, **dict.fromkeys(("h", "g", "f"), TensorProto.FLOAT)}
    results = {"again": TensorProto.BOOL, **dict.fromkeys(("h2", "g2", "f2", "e", "s"), TensorProto.FLOAT)}
    body = helper.make_graph(
        [
            node("Identity", [again], ["again"]),
            node("Mul", ["h", "m"], ["p"]),  # no product of matrices, so that it stays a loop
            node("Add", ["p", "x"], ["h2"]),
            node("Concat", ["g", "h"], ["g2"], axis=0),
            node("Identity", ["g"], ["f2"]),
            node("ReduceMax", ["h2"], ["e"], axes=[0], keepdims=0),
            node("ReduceSum", ["g"], ["s"], keepdims=0),
        ],
        "body",
        [helper.make_tensor_value_info(name, kind, None if kind == 1 else []) for name, kind in kinds.items()],
        [helper.make_tensor_value_info(name, kind, None) for name, kind in results.items()],
    )
    outputs = {**{name: ["?", "?"] for name in "hgfe"}, "s": ["?"]}
    nodes = [node("Relu", ["x"], ["r"]), node("Loop", [steps, condition, "r", "x", "x"], [*outputs], body=body)]
    constants = {"m": np.full(4, 0.5, np.float32), "five": np.array(5), "yes": np.array(True), "no": np.array(False)}
    return save_model(path, nodes, {"x": [3, 4], "count": (TensorProto.INT64, [])}, outputs, constants)


def shapes(path: Path) -> dict[str, tuple[int, ...]]:
    types = read_graph(path).types
    return {name: types[name].shape for name in ("h", "g", "f", "e", "s") if name in types}


def test_shapes_that_all_steps_keep(tmp_path: Path) -> None:
    path = save(tmp_path / "model.onnx", "five")
    assert shapes(path) == {"h": (3, 4), "e": (5, 4)}
    feeds: dict[str, Any] = {"x": np.ones((3, 4), "f"), "count": np.array(2)}
    session = onnxruntime.InferenceSession(str(path))
    answers = dict(zip([item.name for item in session.get_outputs()], session.run(None, feeds), strict=True))
    assert {name: answers[name].shape for name in ("h", "e")} == {"h": (3, 4), "e": (5, 4)}
    assert answers["g"].shape == (18, 4)


def test_a_number_of_steps_that_is_not_known(tmp_path: Path) -> None:
    for steps, condition, again in (("count", "", "go"), ("five", "", "no"), ("", "yes", "go")):
        assert shapes(save(tmp_path / "model.onnx", steps, condition, again)) == {"h": (3, 4)}
    assert shapes(save(tmp_path / "model.onnx", "five", "yes"))["e"] == (5, 4)
    assert shapes(save(tmp_path / "model.onnx", "five", "no"))["e"] == (0, 4)
