"""Rows of the batch in the graphs of Loop, Scan and If."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

from gangway.compiler.errors import UnsupportedModelError
from tests.helpers.batch_networks import SEQUENCE, integers, is_row_by_row, numbers, refusal

node = helper.make_node
CONSTANTS = {
    **{"three": np.array(3), "zero": np.array(0), "first": integers(0), "axis1": integers(1), "limit": np.float32(2)},
    **{"square": numbers(6, 6), "begin": np.zeros((1, 6), np.float32), "true": np.array(True)},
}


def body(nodes: list[Any], inputs: str, outputs: str) -> Any:
    """A graph whose tensors may have any shapes, but for those that say how a loop goes on."""
    kinds = {"step": TensorProto.INT64, "goes": TensorProto.BOOL, "again": TensorProto.BOOL}
    sides = [
        [
            helper.make_tensor_value_info(name, kinds.get(name, TensorProto.FLOAT), [] if name in kinds else None)
            for name in side.split()
        ]
        for side in (inputs, outputs)
    ]
    return helper.make_graph(nodes, "body", *sides)


def loop(
    nodes: list[Any], state: str = "x", results: tuple[str, ...] = ("y",), outputs: str = "again new"
) -> list[Any]:
    """Three steps, each of which makes `new` of `old`."""
    again = [] if any("again" in item.output for item in nodes) else [node("Identity", ["goes"], ["again"])]
    return [
        node("Loop", ["three", "true", state], list(results), body=body([*again, *nodes], "step goes old", outputs))
    ]


def scan(nodes: list[Any], sequence: str, state: str = "begins", **attributes: Any) -> list[Any]:
    """A step for each part of a sequence, whose results lie beside each other."""
    inside = body(nodes, "old part", "new out")
    return [node("Scan", [state, sequence], ["last", "all"], body=inside, num_scan_inputs=1, **attributes)]


ZEROS = [node("ReduceMax", ["x", "axis1"], ["begins"], keepdims=0)]
TIME_FIRST = [node("Transpose", ["x"], ["turned"], perm=[1, 0, 2])]
STEP = [node("Add", ["old", "part"], ["new"]), node("Tanh", ["new"], ["out"])]
APART = {
    "loop that changes each row": loop([node("MatMul", ["old", "square"], ["m"]), node("Tanh", ["m"], ["new"])]),
    "loop that reads each row outside": loop([node("Add", ["old", "x"], ["new"])]),
    "loop that looks at a step of each row": loop(
        [
            node("Gather", ["x", "step"], ["part"], axis=1),
            node("Unsqueeze", ["part", "axis1"], ["wide"]),
            node("Mul", ["old", "wide"], ["new"]),
        ]
    ),
    "loop whose results lie beside each other": [
        *loop(
            [node("Tanh", ["old"], ["new"]), node("ReduceMax", ["new", "axis1"], ["out"], keepdims=0)],
            results=("last", "all"),
            outputs="again new out",
        ),
        node("Transpose", ["all"], ["y"], perm=[1, 0, 2]),
    ],
    "scan over time": [*ZEROS, *TIME_FIRST, *scan(STEP, "turned"), node("Transpose", ["all"], ["y"], perm=[1, 0, 2])],
    "scan over the second axis": [
        *ZEROS,
        *scan(STEP, "x", scan_input_axes=[1], scan_output_axes=[1]),
        node("Identity", ["all"], ["y"]),
    ],
    "branch by the step": loop(
        [
            node("Equal", ["step", "zero"], ["is_first"]),
            node(
                "If",
                ["is_first"],
                ["new"],
                then_branch=body([node("Tanh", ["old"], ["a"])], "", "a"),
                else_branch=body([node("Neg", ["old"], ["b"])], "", "b"),
            ),
        ]
    ),
}
MIXED = {
    "loop that sums up rows": loop(
        [node("ReduceSum", ["old", "first"], ["sum"], keepdims=1), node("Sub", ["old", "sum"], ["new"])]
    ),
    "loop as long as rows decide": loop(
        [
            node("Mul", ["old", "old"], ["new"]),
            node("ReduceMax", ["old"], ["largest"], keepdims=0),
            node("Greater", ["largest", "limit"], ["again"]),
        ]
    ),
    "loop that reads the first row outside": loop(
        [node("Gather", ["x", "zero"], ["row"], axis=0), node("Add", ["old", "row"], ["new"])]
    ),
    "scan over the batch": [
        node("Slice", ["x", "first", "axis1"], ["one"]),
        node("Squeeze", ["one", "first"], ["begins"]),
        *scan(STEP, "x"),
        node("Identity", ["all"], ["y"]),
    ],
    "as many steps as rows": [
        node("Shape", ["x"], ["n1"], start=0, end=1),
        node("Squeeze", ["n1"], ["n"]),
        node(
            "Loop",
            ["n", "true", "x"],
            ["y"],
            body=body(
                [node("Identity", ["goes"], ["again"]), node("Tanh", ["old"], ["new"])], "step goes old", "again new"
            ),
        ),
    ],
    "branch by data": [
        node("ReduceMax", ["x"], ["largest"], keepdims=0),
        node("Greater", ["largest", "limit"], ["is_large"]),
        node(
            "If",
            ["is_large"],
            ["y"],
            then_branch=body([node("Tanh", ["x"], ["a"])], "", "a"),
            else_branch=body([node("Neg", ["x"], ["b"])], "", "b"),
        ),
    ],
}


@pytest.mark.parametrize("name", APART)
def test_graphs_that_keep_rows_apart(network: Any, tmp_path: Path, name: str) -> None:
    graph = network(APART[name], SEQUENCE, {"y": None}, CONSTANTS, opset=18)
    path = graph.save(tmp_path / "model.onnx")
    assert is_row_by_row(path, graph)
    assert refusal(path) is None


@pytest.mark.parametrize("name", MIXED)
def test_graphs_that_mix_rows(network: Any, tmp_path: Path, name: str) -> None:
    graph = network(MIXED[name], SEQUENCE, {"y": None}, CONSTANTS, opset=18)
    path = graph.save(tmp_path / "model.onnx")
    assert isinstance(refusal(path), UnsupportedModelError)
    assert is_row_by_row(path, graph) is False
