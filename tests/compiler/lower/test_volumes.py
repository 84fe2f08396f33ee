"""Convolution and pooling of volumes, against onnxruntime."""

from typing import Any

import numpy as np
import pytest
from onnx import helper

from tests.helpers.targets import ENDS, NARROWEST, WIDEST

pytestmark = pytest.mark.long

node = helper.make_node
CONVOLUTIONS: list[tuple[tuple[int, int, int], dict[str, Any]]] = [
    ((3, 3, 3), {"pads": [1] * 6}),
    ((3, 3, 3), {"pads": [1] * 6, "strides": [2, 2, 2]}),
    ((3, 1, 1), {"pads": [1, 0, 0, 1, 0, 0]}),
    ((1, 3, 3), {"pads": [0, 1, 1, 0, 1, 1], "strides": [1, 2, 1]}),
    ((1, 1, 1), {}),
    ((1, 1, 1), {"strides": [2, 2, 2]}),
    ((2, 3, 4), {"pads": [1, 0, 2, 0, 1, 1]}),
    ((3, 2, 3), {"dilations": [2, 3, 1], "pads": [2, 1, 1, 2, 2, 1]}),
    ((3, 3, 3), {"auto_pad": "SAME_UPPER", "strides": [2, 1, 2]}),
    ((5, 3, 3), {"pads": [4, 1, 1, 4, 1, 1]}),
]
POOLS: list[dict[str, Any]] = [
    {"kernel_shape": [2, 2, 2], "strides": [2, 2, 2]},
    {"kernel_shape": [1, 2, 2], "strides": [1, 2, 2]},
    {"kernel_shape": [3, 3, 3], "strides": [2, 2, 2], "pads": [1] * 6},
    {"kernel_shape": [3, 2, 3], "strides": [2, 1, 3], "pads": [1, 0, 0, 0, 1, 2], "ceil_mode": 1},
    {"kernel_shape": [2, 3, 2], "auto_pad": "SAME_LOWER"},
]


def weights(*shape: int) -> Any:
    return (np.random.default_rng(0).standard_normal(shape) / np.sqrt(np.prod(shape[1:]))).astype(np.float32)


@pytest.mark.parametrize(("target", "channels", "outputs"), [(WIDEST, 3, 33), (NARROWEST, 20, 5)])
def test_convolutions(check: Any, network: Any, target: str, channels: int, outputs: int) -> None:
    """Channels that fill no register, odd sizes, an activation."""
    nodes, constants = [], {"bias": weights(outputs, 1).ravel()}
    for index, (kernel, attributes) in enumerate(CONVOLUTIONS):
        constants[f"w{index}"] = weights(outputs, channels, *kernel)
        nodes.append(node("Conv", ["x", f"w{index}", "bias"], [f"c{index}"], **attributes))
        nodes.append(node("Relu", [f"c{index}"], [f"y{index}"]))
    results = {f"y{index}": None for index in range(len(CONVOLUTIONS))}
    operators = check(network(nodes, {"x": ["N", channels, 5, 7, 10]}, results, constants), target)
    assert operators.count("Conv+Relu") == len(CONVOLUTIONS)
    assert operators.count("Pack") == 1


@pytest.mark.parametrize("blocked", [True, False])
@pytest.mark.parametrize("target", ENDS)
def test_pooling(check: Any, network: Any, target: str, blocked: bool) -> None:
    """Of a volume that others read blocked, too, and of one that would be packed for nobody else."""
    nodes = []
    for index, attributes in enumerate(POOLS):
        nodes.append(node("MaxPool", ["x"], [f"m{index}"], **attributes))
        nodes.append(node("AveragePool", ["x"], [f"a{index}"], **attributes))
        if "ceil_mode" not in attributes:
            nodes.append(node("AveragePool", ["x"], [f"c{index}"], count_include_pad=1, **attributes))
    if blocked:
        nodes += [node("GlobalAveragePool", ["x"], ["mean"]), node("GlobalMaxPool", ["x"], ["most"])]
    results = {item.output[0]: None for item in nodes}
    operators = check(network(nodes, {"x": ["N", 20, 5, 7, 10]}, results), target)
    others = {"Pack", "Unpack", "GlobalAveragePool", "GlobalMaxPool"} if blocked else set()
    assert set(operators) == {"MaxPool", "AveragePool", *others}


@pytest.mark.parametrize(("height", "width"), [(1, 2), (2, 3), (9, 16), (6, 75), (40, 33)])
def test_pooling_of_plain_images(check: Any, network: Any, height: int, width: int) -> None:
    """Lines shorter and longer than a vector; windows of any stride."""
    nodes, windows = [], ((1, 1), (1, 2), (2, 2), (3, 1), (3, 2), (2, 3), (3, 4))
    for index, (side, stride) in enumerate(windows):
        how = {"kernel_shape": [side, side], "strides": [stride, stride], "pads": [side // 2] * 4}
        nodes.append(node("MaxPool", ["x"], [f"m{index}"], **how))
        nodes.append(node("AveragePool", ["x"], [f"a{index}"], ceil_mode=int(stride < side), **how))
    results = {item.output[0]: None for item in nodes}
    operators = check(network(nodes, {"x": [1, 3, height, width]}, results))
    assert not {"Pack", "Unpack"}.intersection(operators)


@pytest.mark.parametrize("target", ENDS)
def test_a_network_of_volumes_stays_blocked(check: Any, network: Any, target: str) -> None:
    """Residuals, normalisation, concatenation, a scale per channel, and a dense layer at the end."""
    nodes = [
        node("Conv", ["x", "w"], ["a"], pads=[1] * 6),
        node("BatchNormalization", ["a", "s", "b", "m", "v"], ["n"]),
        node("Relu", ["n"], ["r"]),
        node("Conv", ["r", "w1"], ["c"], pads=[1] * 6),
        node("Add", ["c", "r"], ["d"]),
        node("Relu", ["d"], ["e"]),
        node("ReduceMean", ["e"], ["g"], axes=[2, 3, 4], keepdims=1),
        node("Sigmoid", ["g"], ["h"]),
        node("Mul", ["e", "h"], ["i"]),
        node("Add", ["i", "grid"], ["i2"]),
        node("MaxPool", ["i2"], ["p"], kernel_shape=[2, 2, 2], strides=[2, 2, 2]),
        node("Concat", ["p", "p"], ["k"], axis=1),
        node("Flatten", ["k"], ["f"]),
        node("MatMul", ["f", "w2"], ["y"]),
        node("ReduceMean", ["e"], ["some"], axes=[2, 3], keepdims=1),
    ]
    constants = {name: np.abs(weights(32, 1).ravel()) + 0.5 for name in ("s", "b", "m", "v")}
    constants |= {"w": weights(32, 4, 3, 3, 3), "w1": weights(32, 32, 3, 3, 3), "grid": weights(1, 1, 4, 6, 8)}
    constants |= {"w2": weights(64 * 2 * 3 * 4, 7)}
    check(network(nodes, {"x": ["N", 4, 4, 6, 8]}, {"y": None, "some": None}, constants), target)


def test_groups_go_elsewhere(check: Any, network: Any) -> None:
    nodes = [node("Conv", ["x", "w"], ["y"], group=2, pads=[1] * 6)]
    check(network(nodes, {"x": ["N", 6, 3, 4, 5]}, {"y": None}, {"w": weights(4, 3, 3, 3, 3)}))
