"""Counting parameters and operations, on models of one node whose counts are known by hand."""

from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper

from gangway.zoo.cost import Counts, count


def model(nodes: list[Any], weights: dict[str, tuple[int, ...]], x: list[int | str], y: list[Any]) -> onnx.ModelProto:
    """A model x -> y whose weights have shapes but no numbers."""
    tensors = [TensorProto(name=name, dims=dims, data_type=TensorProto.FLOAT) for name, dims in weights.items()]
    sides = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in (("x", x), ("y", y))]
    graph = helper.make_graph(nodes, "g", sides[:1], sides[1:], initializer=tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.parametrize(
    ("node", "weights", "x", "y", "expected"),
    [
        (
            helper.make_node("Conv", ["x", "w"], ["y"], group=4, strides=[2, 2], pads=[1] * 4),
            {"w": (8, 1, 3, 3)},
            ["N", 4, 10, 10],
            ["N", 8, 5, 5],
            Counts(72, 8 * 25 * 9),
        ),
        (
            helper.make_node("ConvTranspose", ["x", "w"], ["y"], strides=[2, 2]),
            {"w": (4, 6, 2, 2)},
            ["N", 4, 5, 5],
            ["N", 6, 10, 10],
            Counts(96, 100 * 24),
        ),
        (
            helper.make_node("Gemm", ["x", "w", "b"], ["y"], transA=1, transB=1),
            {"w": (5, 7), "b": (5,)},
            [7, 3],
            [3, 5],
            Counts(40, 3 * 5 * 7),
        ),
        (helper.make_node("MatMul", ["x", "w"], ["y"]), {"w": (7, 5)}, ["N", 3, 7], ["N", 3, 5], Counts(35, 105)),
        (
            helper.make_node("BatchNormalization", ["x", "s", "b", "m", "v"], ["y"]),
            dict.fromkeys("sbmv", (6,)),
            ["N", 6, 2, 2],
            ["N", 6, 2, 2],
            Counts(12, 0),
        ),
    ],
)
def test_one_node(node: Any, weights: Any, x: Any, y: Any, expected: Counts) -> None:
    assert count(model([node], weights, x, y)) == expected


def test_what_depends_on_no_input_is_no_operation_and_a_shared_weight_counts_once() -> None:
    nodes = [
        helper.make_node("MatMul", ["w", "w"], ["square"]),
        helper.make_node("MatMul", ["x", "square"], ["z"]),
        helper.make_node("MatMul", ["z", "w"], ["y"]),
    ]
    assert count(model(nodes, {"w": (4, 4)}, ["N", 4], ["N", 4])) == Counts(16, 2 * 16)


def test_an_unknown_shape_is_an_error() -> None:
    nodes = [
        helper.make_node("Unheard", ["x"], ["z"], domain="example"),
        helper.make_node("MatMul", ["z", "w"], ["y"]),
    ]
    unknown = model(nodes, {"w": (4, 4)}, ["N", 4], ["N", 4])
    unknown.opset_import.append(helper.make_opsetid("example", 1))
    with pytest.raises(ValueError, match="shape of 'z'"):
        count(unknown)
