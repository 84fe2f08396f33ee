"""Convolutions with a depthwise one behind them, compiled, against onnxruntime: which become one layer."""

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

from tests.helpers.sampled import sampled

node = helper.make_node
INPUTS: dict[str, list[int | str]] = {"x": ["N", 8, 45, 51]}
CLIP = {"zero": np.float32(0), "six": np.float32(6)}


def weights(*shape: int) -> Any:
    return np.random.default_rng(len(shape) + shape[0]).standard_normal(shape).astype(np.float32) / np.float32(3)


def block(channels: int = 48, window: int = 3, **attributes: Any) -> list[onnx.NodeProto]:
    return [
        node("Conv", ["x", "w", "b"], ["a"]),
        node("Clip", ["a", "zero", "six"], ["e"]),
        node("Conv", ["e", "d"], ["s"], group=channels, pads=[window // 2] * 4, **attributes),
        node("Clip", ["s", "zero", "six"], ["f"]),
    ]


def constants(channels: int = 48, window: int = 3) -> dict[str, Any]:
    return {
        "w": weights(channels, 8, 1, 1),
        "b": weights(channels),
        "d": weights(channels, 1, window, window),
        "p": weights(8, channels, 1, 1),
        **CLIP,
    }


PROJECT = node("Conv", ["f", "p"], ["c"])


@pytest.mark.parametrize(("window", "stride"), sampled([(3, 1), (3, 2), (5, 2)], [(3, 1)]))
def test_an_inverted_residual_block(check: Any, network: Any, window: int, stride: int) -> None:
    nodes = [*block(window=window, strides=[stride, stride]), PROJECT]
    shortcut = [node("Add", ["c", "x"], ["y"])] if stride == 1 else [node("Relu", ["c"], ["y"])]
    operators = check(network([*nodes, *shortcut], INPUTS, {"y": None}, constants(window=window)))
    assert "Conv+Clip+Conv+Clip" in operators
    assert "Conv+Clip" not in operators


def test_a_first_convolution_of_few_channels(check: Any, network: Any) -> None:
    nodes = [
        node("Conv", ["x", "w"], ["a"], pads=[1, 1, 1, 1], strides=[2, 2]),
        node("Relu", ["a"], ["e"]),
        node("Conv", ["e", "d"], ["y"], group=32, pads=[1, 1, 1, 1]),
    ]
    graph = network(nodes, {"x": ["N", 3, 130, 126]}, {"y": None}, {"w": weights(32, 3, 3, 3), "d": constants(32)["d"]})
    assert "Conv+Relu+Conv" in check(graph)


@pytest.mark.parametrize(
    ("why", "more", "outputs"),
    [
        ("somebody else reads it", [node("Conv", ["e", "p"], ["z"])], ["f", "z"]),
        ("it is an output", [], ["e", "f"]),
        ("it is part of another tensor", [node("Concat", ["e", "f"], ["z"], axis=1)], ["z"]),
    ],
)
def test_what_others_need_is_written(
    check: Any, network: Any, why: str, more: list[onnx.NodeProto], outputs: list[str]
) -> None:
    operators = check(network([*block(), *more], INPUTS, dict.fromkeys(outputs), constants()))
    assert operators.count("Conv+Clip") == 2, why


def test_small_images_stay_apart(check: Any, network: Any) -> None:
    operators = check(network([*block(), PROJECT], {"x": ["N", 8, 14, 14]}, {"c": None}, constants()))
    assert operators.count("Conv+Clip") == 2


def test_wide_images_stay_apart(check: Any, network: Any) -> None:
    """Their lines would not fit on the stack."""
    operators = check(network([*block(16), PROJECT], {"x": ["N", 8, 8, 1100]}, {"c": None}, constants(16)))
    assert operators.count("Conv+Clip") == 2


def test_a_residual_stays_apart(check: Any, network: Any) -> None:
    nodes = [*block()[:2], node("Conv", ["e", "d"], ["s"], group=48, pads=[1, 1, 1, 1]), node("Add", ["s", "e"], ["y"])]
    assert "Conv+Clip" in check(network(nodes, INPUTS, {"y": None}, constants()))
