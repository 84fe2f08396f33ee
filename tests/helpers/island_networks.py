"""Small ONNX networks that are compiled, but for a few nodes that only onnxruntime can compute."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tests.helpers.onnx_networks import Array

node = helper.make_node
floats = np.random.default_rng(3).standard_normal


def loop(steps: str, matrix: str, output: str) -> Any:
    """As many products as the request says, of a matrix and itself."""
    kinds = {"step": TensorProto.INT64, "go": TensorProto.BOOL, "before": TensorProto.FLOAT}
    body = helper.make_graph(
        [node("Identity", ["go"], ["again"]), node("MatMul", ["before", matrix], ["after"])],
        "body",
        [helper.make_tensor_value_info(name, kind, [32, 32][: 2 * (kind == 1)]) for name, kind in kinds.items()],
        [
            helper.make_tensor_value_info("again", TensorProto.BOOL, []),
            helper.make_tensor_value_info("after", TensorProto.FLOAT, [32, 32]),
        ],
    )
    return node("Loop", [steps, "", matrix], [output], body=body)


def branch(condition: str, x: str, output: str) -> Any:
    """Products that are worth several threads, of a tensor with weights that the branch sees."""
    result = [helper.make_tensor_value_info("result", TensorProto.FLOAT, [128, 512])]
    wide = [node("MatMul", [x, "wide"], ["once"]), node("MatMul", ["once", "wide"], ["result"])]
    bodies = {
        "then_branch": helper.make_graph(wide, "then", [], result),
        "else_branch": helper.make_graph([node("MatMul", [x, "wide"], ["result"])], "else", [], result),
    }
    return node("If", [condition], [output], **bodies)


def save(path: Path, nodes: list[Any], inputs: dict[str, Any], outputs: list[str], **constants: Array) -> Path:
    graph = helper.make_graph(
        nodes,
        "islands",
        [helper.make_tensor_value_info(name, kind, shape) for name, (kind, shape) in inputs.items()],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def control_flow(folder: Path) -> Path:
    """Islands that last as long as `count` says, that are worth threads, and that refuse lengths."""
    nodes = [
        node("MatMul", ["x", "m"], ["a"]),
        loop("count", "eye", "looped"),
        node("ReverseSequence", ["a", "lengths"], ["turned"], time_axis=1, batch_axis=0),
        node("ReduceSum", ["x"], ["s"], keepdims=0),
        node("Greater", ["s", "zero"], ["positive"]),
        branch("positive", "turned", "branched"),
        node("ReduceSum", ["looped"], ["t"], keepdims=0),
        node("Add", ["branched", "t"], ["y"]),
    ]
    whole = TensorProto.INT64
    inputs = {"x": (TensorProto.FLOAT, [128, 64]), "lengths": (whole, [128]), "count": (whole, [])}
    constants = {"m": floats((64, 512)), "wide": floats((512, 512)) / 23, "eye": np.eye(32), "zero": np.array(0)}
    numbers = {name: value.astype("f") for name, value in constants.items()}
    return save(folder / "model.onnx", nodes, inputs, ["y"], **numbers)


def ranking(folder: Path) -> Path:
    """An island between dense layers that take several rows in a call, and one whose results are the answer."""
    nodes = [
        node("Gemm", ["x", "m"], ["a"]),
        node("TopK", ["a", "ten"], ["b", "places"], sorted=0),
        node("Cast", ["places"], ["numbers"], to=TensorProto.FLOAT),
        node("Add", ["b", "numbers"], ["c"]),
        node("Gemm", ["c", "n"], ["d"]),
        node("TopK", ["d", "five"], ["y", "which"], sorted=0),
        node("Cast", ["which"], ["z"], to=TensorProto.FLOAT),
    ]
    constants = {"m": floats((64, 96)).astype("f"), "n": floats((10, 32)).astype("f")}
    counts = {"ten": np.array([10]), "five": np.array([5])}
    return save(folder / "model.onnx", nodes, {"x": (TensorProto.FLOAT, ["N", 64])}, ["y", "z"], **constants, **counts)
