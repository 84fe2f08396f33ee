"""Operators that are defined by simpler ones here, such as ConvTranspose, against onnxruntime."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from onnx import helper

pytestmark = pytest.mark.long

node = helper.make_node


def test_transposed_convolutions(check: Callable[..., list[str]], network: Any) -> None:
    random = np.random.default_rng(0)
    kinds: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
        "plain": ((5, 7, 3, 3), {}),
        "up": ((5, 6, 4, 4), {"strides": [2, 2], "pads": [1, 1, 1, 1]}),
        "odd": ((5, 6, 3, 2), {"strides": [2, 3], "pads": [1, 0, 0, 1], "output_padding": [1, 2]}),
        "sparse": ((5, 4, 2, 3), {"strides": [2, 1], "dilations": [3, 2]}),
        "same": ((5, 4, 3, 3), {"strides": [2, 2], "auto_pad": "SAME_UPPER"}),
        "given": ((5, 4, 3, 3), {"strides": [3, 2], "output_shape": [19, 15]}),
        "given_more": ((5, 4, 3, 2), {"strides": [3, 2], "output_shape": [18, 15], "auto_pad": "SAME_UPPER"}),
        "given_valid": ((5, 4, 4, 3), {"strides": [3, 2], "output_shape": [16, 12], "auto_pad": "VALID"}),
        "given_whole": ((5, 4, 4, 3), {"strides": [2, 2], "output_shape": [12, 14], "auto_pad": "VALID"}),
        "narrow": ((5, 3, 1, 1), {"strides": [2, 2]}),
    }
    nodes = [node("ConvTranspose", ["x", f"w{name}"], [name], **how) for name, (_, how) in kinds.items()]
    constants = {f"w{name}": random.standard_normal(shape).astype(np.float32) for name, (shape, _) in kinds.items()}
    nodes += [
        node("ConvTranspose", ["x", "wup", "b"], ["biased"], strides=[2, 2], output_padding=[1, 1], pads=[0, 2, 2, 0])
    ]
    nodes += [node("Concat", ["x", "x"], ["twice"], axis=1)]
    nodes += [node("ConvTranspose", ["twice", "wg", "b2"], ["groups"], strides=[2, 2], group=2)]
    nodes += [node("Reshape", ["x", "line"], ["l"]), node("ConvTranspose", ["l", "wl"], ["line_up"], strides=[2])]
    constants |= {
        "b": random.standard_normal(6).astype(np.float32),
        "b2": random.standard_normal(8).astype(np.float32),
        "wg": random.standard_normal((10, 4, 3, 3)).astype(np.float32),
        "wl": random.standard_normal((5, 3, 3)).astype(np.float32),
        "line": np.array([0, 5, -1], np.int64),
    }
    outputs = dict.fromkeys([*kinds, "biased", "groups", "line_up"])
    check(network(nodes, {"x": ["N", 5, 6, 7]}, outputs, constants))


def test_a_sort_of_a_single_number(check: Callable[..., list[str]], network: Any) -> None:
    nodes = [
        node("MatMul", ["x", "w"], ["a"]),
        node("TopK", ["a", "one"], ["top", "place"], axis=2),
        node("Add", ["top", "top"], ["y"]),
        node("Cast", ["place"], ["z"], to=1),
    ]
    constants = {"w": np.ones((4, 1), np.float32), "one": np.array([1])}
    operators = check(network(nodes, {"x": [1, 3, 4]}, {"y": None, "z": None}, constants))
    assert not any("TopK" in operator for operator in operators)


def test_empty_sums_are_zero(same: Callable[..., list[str]]) -> None:
    feeds = {"x": np.zeros(0, np.float32), "y": np.zeros((2, 0, 3), np.float32), "z": np.ones(4, np.float32)}
    nodes = [node("MatMul", ["x", "y"], ["a"]), node("Neg", ["z"], ["b"])]
    same(nodes, feeds)
