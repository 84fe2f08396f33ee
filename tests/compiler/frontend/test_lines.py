"""Convolutions of several lines, which are rows of one image, against onnxruntime."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from onnx import helper

pytestmark = pytest.mark.long

node = helper.make_node
RANDOM = np.random.default_rng(5)


def numbers(*shape: int) -> Any:
    return RANDOM.standard_normal(shape, np.float32)


@pytest.mark.parametrize(
    ("lines", "channels", "length", "how"),
    [
        (2, 20, 9, {"strides": [2], "pads": [2, 1]}),
        (5, 3, 17, {"dilations": [3]}),
        (4, 3, 17, {"auto_pad": "SAME_UPPER", "strides": [2]}),
        (33, 1, 12, {"pads": [0, 1]}),
        (3, 8, 3, {}),
        (3, 16, 7, {"group": 16, "pads": [1, 1]}),
    ],
)
def test_windows_and_what_is_between_them(
    check: Callable[..., list[str]], network: Any, lines: int, channels: int, length: int, how: dict[str, Any]
) -> None:
    outputs = 16
    constants = {
        "w": numbers(outputs, channels // how.get("group", 1), 3),
        "v": numbers(outputs, outputs, 1),
        "b": numbers(outputs),
        "each": numbers(outputs, 1),
        "ones": np.array([1], np.int64),
        "end": np.array([-1], np.int64),
        "none": np.array([0], np.int64),
        "last": np.array([2**40], np.int64),
        "per_line": numbers(lines, 1, 1),
    }
    nodes = [
        node("Conv", ["x", "w", "b"], ["c"], **how),
        node("Add", ["c", "each"], ["s"]),
        node("Sigmoid", ["s"], ["gate"]),
        node("Mul", ["s", "gate"], ["swish"]),
        node("Mul", ["swish", "per_line"], ["m"]),
        node("Slice", ["m", "ones", "last", "ones"], ["fewer"]),
        node("Concat", ["fewer", "fewer"], ["twice"], axis=1),
        node("Conv", ["m", "v"], ["d"]),
        node("Add", ["d", "m"], ["residual"]),
        node("Slice", ["residual", "none", "end", "none"], ["without_last_line"]),
        node("ReduceMean", ["residual"], ["means"], axes=[1], keepdims=1),
    ]
    wanted = ["twice", "without_last_line", "means", "residual", "gate"]
    found = check(network(nodes, {"x": [lines, channels, length]}, dict.fromkeys(wanted), constants))
    assert sum("Conv" in operator for operator in found) == 2


@pytest.mark.parametrize("operator", ["MaxPool", "AveragePool"])
def test_pooling(check: Callable[..., list[str]], network: Any, operator: str) -> None:
    more = {"count_include_pad": 1} if operator == "AveragePool" else {}
    nodes = [
        node("Relu", ["x"], ["r"]),
        node(operator, ["r"], ["p"], kernel_shape=[3], strides=[2], pads=[1, 1], **more),
        node("BatchNormalization", ["p", "scale", "shift", "mean", "variance"], ["y"]),
    ]
    constants = {name: np.abs(numbers(18)) for name in ("scale", "shift", "mean", "variance")}
    found = check(network(nodes, {"x": [4, 18, 11]}, {"y": None}, constants))
    assert found.count(operator) == 1


@pytest.mark.parametrize("sizes", [(3, 40, 6), (3, 1, 6)])
def test_a_window_that_reads_an_operand_of_others(
    check: Callable[..., list[str]], network: Any, sizes: Sequence[int]
) -> None:
    """The same lines are read by a convolution, by another operator, and as an output."""
    constants = {"w": numbers(4, sizes[1], 2), "z": numbers(sizes[0], 4, 5)}
    nodes = [
        node("Tanh", ["x"], ["t"]),
        node("Conv", ["t", "w"], ["c"]),
        node("Add", ["c", "z"], ["y"]),
        node("Transpose", ["c"], ["turned"], perm=[2, 0, 1]),
        node("Softmax", ["t"], ["soft"], axis=0),
    ]
    check(network(nodes, {"x": list(sizes)}, dict.fromkeys(["y", "turned", "soft", "t"]), constants))
