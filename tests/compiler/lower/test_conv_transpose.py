"""Transposed convolutions of every window, between convolutions and alone, against onnxruntime."""

from typing import Any

import numpy as np
import pytest
from onnx import helper

from tests.helpers.targets import NARROWEST, WIDEST

pytestmark = pytest.mark.long

node = helper.make_node
WINDOWS: list[tuple[tuple[int, int], dict[str, Any]]] = [
    ((2, 2), {"strides": [2, 2]}),
    ((3, 4), {"strides": [3, 4]}),
    ((4, 4), {"strides": [2, 2], "pads": [1, 1, 1, 1]}),
    ((4, 4), {"strides": [2, 2]}),
    ((3, 3), {"strides": [2, 2], "pads": [1, 1, 1, 1], "output_padding": [1, 1]}),
    ((3, 3), {"strides": [2, 2], "pads": [1, 0, 0, 1]}),
    ((8, 8), {"strides": [4, 4], "pads": [2, 2, 2, 2]}),
    ((5, 5), {"strides": [2, 2], "auto_pad": "SAME_LOWER"}),
    ((3, 3), {"pads": [1, 1, 1, 1]}),
    ((2, 3), {"strides": [1, 3], "pads": [0, 0, 1, 0]}),
    ((4, 4), {"strides": [2, 2], "pads": [3, 3, 3, 3]}),
]


def weights(*shape: int) -> Any:
    return (np.random.default_rng(0).standard_normal(shape) / np.sqrt(np.prod(shape[1:]))).astype(np.float32)


@pytest.mark.parametrize(("target", "outputs"), [(WIDEST, 33), (NARROWEST, 5)])
def test_nothing_is_moved(check: Any, network: Any, target: str, outputs: int) -> None:
    """Channels that fill no register, an odd image, an activation, a halo behind."""
    nodes = [node("Conv", ["x", "w"], ["a"], pads=[1, 1, 1, 1])]
    constants = {"w": weights(20, 5, 3, 3), "bias": weights(outputs, 1).ravel(), "v": weights(3, outputs, 3, 3)}
    for index, (kernel, attributes) in enumerate(WINDOWS):
        constants[f"w{index}"] = weights(20, outputs, *kernel)
        nodes += [
            node("ConvTranspose", ["a", f"w{index}", "bias"], [f"t{index}"], **attributes),
            node("Relu", [f"t{index}"], [f"r{index}"]),
            node("Conv", [f"r{index}", "v"], [f"y{index}"], pads=[1, 1, 1, 1]),
        ]
    results = {f"y{index}": None for index in range(len(WINDOWS))}
    operators = check(network(nodes, {"x": ["N", 5, 7, 10]}, results, constants), target)
    assert operators.count("ConvTranspose+Relu") == len(WINDOWS)
    assert set(operators) == {"Pack", "Conv", "ConvTranspose+Relu", "Unpack"}


def test_of_one_pixel(check: Any, network: Any) -> None:
    """As generators of images begin."""
    nodes = [
        node("ConvTranspose", ["x", "w"], ["a"]),
        node("ConvTranspose", ["a", "v"], ["y"], strides=[2, 2], pads=[1, 1, 1, 1]),
    ]
    constants = {"w": weights(37, 20, 4, 4), "v": weights(20, 3, 4, 4)}
    check(network(nodes, {"x": ["N", 37, 1, 1]}, {"y": None}, constants))
