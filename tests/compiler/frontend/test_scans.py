"""Scan without its steps, against onnxruntime."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

node = helper.make_node
floats = np.random.default_rng(2).standard_normal
Check = Callable[..., list[str]]
POINTS = floats((30, 5)).astype("f")


def steps(nodes: list[Any], states: tuple[tuple[str, str], ...], results: list[str], axes: list[int]) -> Any:
    """A graph that scans `point`; `states` are what the states are called before and after a step."""
    kind = TensorProto.FLOAT
    inputs = [helper.make_tensor_value_info(before, kind, None) for before, _ in states]
    inputs.append(helper.make_tensor_value_info("point", kind, [5]))
    outputs = [helper.make_tensor_value_info(name, kind, None) for name in (*(after for _, after in states), *results)]
    return helper.make_graph(nodes, "steps", inputs, outputs, [numpy_helper.from_array(np.array(axes), "axes")])


EUCLIDEAN = [
    node("Identity", ["all"], ["same"]),
    node("Sub", ["all", "point"], ["difference"]),
    node("ReduceSumSquare", ["difference", "axes"], ["sum"], keepdims=0),
    node("Sqrt", ["sum"], ["root"]),
    node("Identity", ["root"], ["distances"]),
]
MINKOWSKI = [
    node("Sub", ["rows", "point"], ["difference"]),
    node("Abs", ["difference"], ["size"]),
    node("Constant", [], ["three"], value=numpy_helper.from_array(np.array(3, "f"))),
    node("Pow", ["size", "three"], ["power"]),
    node("ReduceSum", ["power", "axes"], ["sums"], keepdims=1),
    node("ReduceMax", ["point"], ["most"]),
    node("Add", ["sums", "most"], ["distances"]),
]


@pytest.mark.parametrize(("opset", "rows"), [(12, 6), (18, "N")])
def test_distances(check: Check, network: Any, opset: int, rows: int | str) -> None:
    """By a state that each step hands on, and by a tensor from outside; vectors are aligned behind the steps."""
    scans = [
        node(
            "Scan", ["rows", "points"], ["unread", "a"], body=steps(EUCLIDEAN, (("all", "same"),), ["distances"], [1])
        ),
        node("Scan", ["points"], ["b"], body=steps(MINKOWSKI, (), ["distances"], [-1])),
    ]
    if opset < 13:  # reductions have their axes as attributes
        for scan, axes in zip(scans, ([1], [-1]), strict=True):
            for inner in scan.attribute[0].g.node:
                if inner.op_type in ("ReduceSumSquare", "ReduceSum"):
                    del inner.input[1:]
                    inner.attribute.append(helper.make_attribute("axes", axes))
    for scan in scans:
        scan.attribute.append(helper.make_attribute("num_scan_inputs", 1))
    turned = [node("Transpose", ["a"], ["y"], perm=[1, 0]), node("Transpose", ["b"], ["z"], perm=[1, 0, 2])]
    nodes = [node("MatMul", ["x", "m"], ["rows"]), *scans, *turned]
    constants = {"m": floats((4, 5)).astype("f"), "points": POINTS}
    operators = check(network(nodes, {"x": [rows, 4]}, {"y": None, "z": None}, constants, opset=opset))
    assert "Scan" not in operators


def test_steps_that_need_each_other(check: Check, network: Any) -> None:
    nodes = [node("Add", ["sum", "point"], ["more"]), node("Mul", ["more", "more"], ["square"])]
    scan = node("Scan", ["start", "rows"], ["y", "z"], body=steps(nodes, (("sum", "more"),), ["square"], [0]))
    scan.attribute.append(helper.make_attribute("num_scan_inputs", 1))
    constants = {"m": floats((4, 5)).astype("f"), "start": floats(5).astype("f")}
    operators = check(
        network([node("MatMul", ["x", "m"], ["rows"]), scan], {"x": [6, 4]}, {"y": None, "z": None}, constants)
    )
    assert "Scan" in operators
