"""Reductions, and normalisations that are made of them, against ONNX's reference implementation."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from onnx import helper

from tests.helpers.sampled import sampled

node = helper.make_node
Run = Callable[..., list[str]]
AXES = {"last": [-1], "first": [0], "inner": [1, 2], "outer": [0, 2], "all": [0, 1, 2, 3], "odd": [0, 3]}
NAMES = "Sum Mean Max Min Prod L1 L2 LogSum LogSumExp SumSquare".split()  # noqa: SIM905


def numbers(*shape: int, dtype: str = "float32", seed: int = 0) -> Any:
    random = np.random.default_rng(seed)
    if np.dtype(dtype).kind == "f":
        return random.uniform(0.5, 1.5, shape).astype(dtype)
    if dtype == "bool":
        return random.integers(0, 2, shape).astype(bool)
    return random.integers(0 if dtype.startswith("u") else -4, 5, shape).astype(dtype)


def test_every_combination_of_axes(same: Run) -> None:
    nodes = [node("ReduceSum", ["x", name], [f"sum_{name}"], keepdims=0) for name in AXES]
    nodes += [node("ReduceMax", ["x", name], [f"max_{name}"]) for name in AXES]
    nodes += [node("ReduceSum", ["x"], ["everything"]), node("ReduceSum", ["x"], ["nothing"], noop_with_empty_axes=1)]
    constants = {name: np.array(axes, np.int64) for name, axes in AXES.items()}
    same(nodes, {"x": numbers(3, 4, 5, 37)}, constants)


@pytest.mark.parametrize("axes", sampled(["last", "first"], ["last"]))
def test_every_operator(same: Run, axes: str) -> None:
    nodes = [node(f"Reduce{name}", ["x", "axes"], [name], keepdims=n % 2) for n, name in enumerate(NAMES)]
    nodes += [node(f"Arg{name}", ["y"], [f"arg{name}"], axis=AXES[axes][0], keepdims=0) for name in ("Max", "Min")]
    nodes += [node("ArgMax", ["y"], ["last"], axis=AXES[axes][0], select_last_index=1)]
    nodes += [node(name, ["x"], [name], axis=AXES[axes][0]) for name in ("Softmax", "LogSoftmax", "Hardmax")]
    feeds = {"x": numbers(6, 3, 41, seed=1), "y": np.round(numbers(6, 3, 41, seed=2) * 4)}
    same(nodes, feeds, {"axes": np.array(AXES[axes], np.int64)}, tolerance=1e-5)


@pytest.mark.parametrize(
    "dtype", sampled(["float16", "float64", "int32", "int64", "uint8", "bool"], ["float16", "int64", "uint8"])
)
def test_other_types(same: Run, dtype: str) -> None:
    names = ["Max", "Min"] + (["Sum", "Prod", "Mean", "L1"] if dtype not in ("uint8", "bool") else [])
    nodes = [node(f"Reduce{name}", ["x", "axes"], [name]) for name in names]
    nodes += [node("ArgMax", ["x"], ["arg"], axis=1)] if dtype != "bool" else []
    same(nodes, {"x": numbers(5, 3, 19, dtype=dtype)}, {"axes": np.array([2], np.int64)})


def test_normalisations(same: Run) -> None:
    x, vector = numbers(1, 6, 7, 9, seed=3), numbers(6, seed=4)
    nodes = [
        node("InstanceNormalization", ["x", "scale", "shift"], ["instance"]),
        node("BatchNormalization", ["x", "v", "v", "v", "v"], ["batch"]),
        node("MeanVarianceNormalization", ["x"], ["mvn"], axes=[0, 2, 3]),
        node("LpNormalization", ["x"], ["l1"], p=1, axis=1),
        node("LpNormalization", ["x"], ["l2"]),
        node("LayerNormalization", ["x", "ones"], ["layer"], axis=2),
    ]
    constants = {"scale": vector, "shift": vector - 1, "ones": numbers(7, 9, seed=6)}
    same(nodes, {"x": x, "v": vector}, constants, tolerance=2e-5)


def test_lines_are_images_of_one_row(same: Run) -> None:
    nodes = [
        node("Conv", ["x", "w"], ["conv"], pads=[2, 1], strides=[2], dilations=[2]),
        node("MaxPool", ["x"], ["max"], kernel_shape=[3], pads=[1, 1], strides=[2]),
        node("AveragePool", ["x"], ["mean"], kernel_shape=[4]),
        node("GlobalAveragePool", ["x"], ["global"]),
    ]
    same(nodes, {"x": numbers(1, 5, 33)}, {"w": numbers(7, 5, 3, seed=1)}, tolerance=1e-5)


def test_response_normalised_over_channels(check: Callable[..., list[str]], network: Any) -> None:
    nodes = [node("LRN", ["x"], [f"y{size}"], size=size, alpha=0.1, beta=0.6, bias=1.5) for size in (3, 5)]
    check(network(nodes, {"x": ["N", 6, 5, 7]}, {"y3": None, "y5": None}))


def test_maximum_and_norms_of_lines(check: Callable[..., list[str]], network: Any) -> None:
    nodes = [node("GlobalMaxPool", ["x"], ["most"]), node("GlobalLpPool", ["x"], ["norm"], p=2)]
    nodes += [node("LpPool", ["x"], ["pooled"], p=2, kernel_shape=[3], strides=[2])]
    check(network(nodes, {"x": ["N", 6, 41]}, {"most": None, "norm": None, "pooled": None}))
