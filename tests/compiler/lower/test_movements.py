"""Slices, padding, repetition and whatever else moves numbers, against ONNX's reference implementation."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from tests.helpers.onnx_models import save_model
from tests.helpers.sampled import sampled

# ScatterElements and ScatterND against onnxruntime, and with indices from nowhere.

node = helper.make_node

DATA = np.arange(60, dtype=np.float32).reshape(3, 4, 5)


def runners(item: Any, shapes: dict[str, list[int]], compile_file: Any, load_artifact: Any, folder: Path) -> Any:
    kinds = {name: (TensorProto.INT64, dims) if name == "indices" else dims for name, dims in shapes.items()}
    path = save_model(folder / "model.onnx", [item], kinds, {"y": shapes["data"]}, opset=18)
    runner, session = load_artifact(compile_file(path).folder), onnxruntime.InferenceSession(str(path))
    assert [layer.operator for layer in runner.manifest.layers] == [item.op_type]
    return runner, lambda feeds: session.run(None, feeds)[0]


@pytest.mark.parametrize("reduction", ["none", "add", "max"])
def test_elements_along_an_axis(compile_file: Any, load_artifact: Any, tmp_path: Path, reduction: str) -> None:
    item = node("ScatterElements", ["data", "indices", "updates"], ["y"], axis=1, reduction=reduction)
    shapes = {"data": [3, 4, 5], "indices": [2, 3, 5], "updates": [2, 3, 5]}
    runner, expected = runners(item, shapes, compile_file, load_artifact, tmp_path)
    random = np.random.default_rng(1)
    indices = random.integers(-4, 4, (2, 3, 5))
    if reduction == "none":  # which of several updates of one place is the last, nobody promises
        indices = np.argsort(random.random((2, 4, 5)), axis=1)[:, :3] - 4 * (np.arange(5) % 2)
    feeds = {"data": DATA, "indices": indices, "updates": random.standard_normal((2, 3, 5)).astype(np.float32)}
    np.testing.assert_allclose(runner(feeds)["y"], expected(feeds), rtol=1e-6)


@pytest.mark.parametrize("reduction", ["none", "mul"])
def test_scattered_slices(compile_file: Any, load_artifact: Any, tmp_path: Path, reduction: str) -> None:
    item = node("ScatterND", ["data", "indices", "updates"], ["y"], reduction=reduction)
    shapes = {"data": [3, 4, 5], "indices": [2, 2, 2], "updates": [2, 2, 5]}
    runner, expected = runners(item, shapes, compile_file, load_artifact, tmp_path)
    indices = np.array([[[0, 1], [2, -1]], [[-3, 0], [1, 3]]])
    feeds = {"data": DATA, "indices": indices, "updates": -np.arange(20, dtype=np.float32).reshape(2, 2, 5)}
    np.testing.assert_array_equal(runner(feeds)["y"], expected(feeds))
    # Places outside are refused; the guards around y stay whole all the same.
    outside = {**feeds, "indices": np.full((2, 2, 2), 1 << 40)}
    y = runner(outside)["y"]
    assert runner.refusals == [f"ScatterND: invalid indice found, indice = {1 << 40}"]
    np.testing.assert_array_equal(y.reshape(12, 5)[:11], DATA.reshape(12, 5)[:11])


Run = Callable[..., list[str]]
LAST = np.iinfo(np.int64).max


def integers(*values: int) -> Any:
    return np.array(values, np.int64)


@pytest.fixture
def x() -> Any:
    return np.arange(3 * 5 * 6 * 37, dtype=np.float32).reshape(3, 5, 6, 37)


def test_slices(same: Run, x: Any) -> None:
    slices: dict[str, tuple[Any, ...]] = {
        "whole": ([0], [LAST], [1], [1]),
        "begin": ([0], [2], [0], [1]),
        "middle": ([1, 2], [3, -1], [0, 3], [1, 1]),
        "back": ([LAST, -1], [-LAST, -8], [3, 2], [-1, -2]),
        "steps": ([1, -30], [5, 100], [1, -1], [3, 7]),
        "one": ([4, 2, 1, 36], [5, 3, 2, 37], [1, 2, 0, 3], [1, 1, 1, 1]),
    }
    constants = {f"{name}{n}": integers(*part) for name, parts in slices.items() for n, part in enumerate(parts)}
    nodes = [node("Slice", ["x", *(f"{name}{n}" for n in range(4))], [name]) for name in slices]
    nodes += [
        node("Constant", [], ["sizes"], value=numpy_helper.from_array(integers(5, 30, 2))),
        node("Split", ["x", "sizes"], ["s0", "s1", "s2"], axis=3),
        node("Split", ["x"], ["h0", "h1"], axis=2, num_outputs=2),
    ]
    nodes += [node("Split", ["x"], ["t0", "t1"], axis=0, num_outputs=2)]
    operators = same(nodes, {"x": x}, constants)
    assert operators.count("Slice") == 8  # parts that lie in the input already are copied only as outputs
    assert operators.count("Copy") == 5


@pytest.mark.parametrize("dtype", sampled(["float32", "float16", "int64", "uint8", "bool"], ["float32", "uint8"]))
def test_padding_and_repetition(same: Run, x: Any, dtype: str) -> None:
    x = (x[:, :4, :5, :19] % 2).astype(dtype)
    nodes = [node("Pad", ["x", "pads", "one"], ["constant"]), node("Pad", ["x", "inner"], ["inner_only"])]
    nodes += [node("Pad", ["x", "some", ""], [mode], mode=mode) for mode in ("edge", "reflect", "wrap")]
    nodes += [node("Tile", ["x", "times"], ["tiled"])]
    nodes += [node("Expand", ["row", "shape"], ["expanded"]), node("Gather", ["x", "picked"], ["gathered"], axis=3)]
    nodes += [node("Gather", ["x", "rows"], ["gathered_rows"], axis=1), node("Concat", ["x", "k", "x"], ["c"], axis=2)]
    constants = {
        "pads": integers(0, 1, 2, 3, 1, 0, 0, 17),
        "some": integers(0, 1, 2, 3, 0, 3, 0, 18),
        "inner": integers(0, 0, 0, 1, 0, 0, 0, 0),
        "one": np.array(1, dtype),
        "times": integers(1, 2, 1, 3),
        "shape": integers(3, 1, 5, 19),
        "picked": np.array([[3, -1], [0, 18], [7, 7]], np.int64),
        "rows": integers(2, 0),
        "k": np.ones((3, 4, 1, 19), dtype),
    }
    same(nodes, {"x": x, "row": x[0, 0, :, :1]}, constants)


def test_channels_become_pixels_and_back(same: Run, x: Any) -> None:
    x = x.reshape(1, -1)[:, : 12 * 4 * 6].reshape(1, 12, 4, 6)
    nodes = [node("DepthToSpace", ["x"], [mode], blocksize=2, mode=mode) for mode in ("DCR", "CRD")]
    nodes += [node("SpaceToDepth", ["x"], ["depth"], blocksize=2), node("Transpose", ["x"], ["t"], perm=[3, 1, 0, 2])]
    same(nodes, {"x": x})


def test_positions(same: Run) -> None:
    x = np.arange(42, dtype=np.float32).reshape(6, 7) - 20
    nodes = [node("Trilu", ["x"], ["upper"]), node("Trilu", ["x", "two"], ["lower"], upper=0)]
    nodes += [node("EyeLike", ["x"], ["eye"], k=1, dtype=7), node("OneHot", ["i", "depth", "values"], ["hot"], axis=1)]
    nodes += [
        node("CumSum", ["x", "first"], ["down"]),
        node("CumSum", ["x", "two"], ["across"], exclusive=1, reverse=1),
        node("Shape", ["x"], ["sizes"]),
        node("CumSum", ["sizes", "first"], ["of_constants"]),
    ]
    constants = {"two": np.array(1, np.int64), "depth": np.array(5, np.int64), "values": np.array([2, 7], np.float32)}
    same(
        nodes, {"x": x, "i": np.array([[0, 4, -1], [3, -5, 2]], np.int64)}, constants | {"first": np.array(0, np.int64)}
    )


@pytest.mark.parametrize("dtype", [np.float32, np.int64, np.int32])
def test_running_sums_of_constants(same: Run, dtype: Any) -> None:
    """Positions as torch counts them: sums of a constant mask, which are computed while the model is compiled."""
    nodes = [node("CumSum", ["ones", "axis"], ["places"]), node("Cast", ["places"], ["as_float"], to=1)]
    nodes += [node("Add", ["x", "as_float"], ["y"])]
    constants = {"ones": np.ones((2, 5), dtype), "axis": np.array(1, np.int64)}
    same(nodes, {"x": np.arange(10, dtype=np.float32).reshape(2, 5)}, constants)


def test_padding_that_cuts_off(check: Run, network: Any) -> None:
    nodes = [node("Pad", ["x", "cut"], ["y"])]
    constants = {"cut": integers(0, -1, 0, -3, 0, 2, 0, -2)}
    check(network(nodes, {"x": ["N", 4, 5, 9]}, {"y": None}, constants))


@pytest.mark.parametrize("batch", ["N", 2])
def test_parts_without_numbers_are_left_out(
    compile_file: Any, load_artifact: Any, network: Any, tmp_path: Path, batch: str | int
) -> None:
    """An exporter's way to pad by nothing: a concatenation with a tensor of no columns, made of the batch's size."""
    nodes = [
        node("Shape", ["x"], ["rows"], end=1),
        node("Concat", ["rows", "rest"], ["shape"], axis=0),
        node("ConstantOfShape", ["shape"], ["zeros"]),
        node("Mul", ["zeros", "half"], ["scaled"]),
        node("Slice", ["x", "end", "end", "last"], ["tail"]),
        node("Concat", ["scaled", "x", "tail"], ["y"], axis=2),
    ]
    constants = {"rest": integers(4, 0), "half": np.array(0.5, np.float32), "end": integers(6), "last": integers(2)}
    path = network(nodes, {"x": [batch, 4, 6]}, {"y": None}, constants).save(tmp_path / "model.onnx")
    runner = load_artifact(compile_file(path).folder)
    x = np.random.default_rng(0).standard_normal((1 if batch == "N" else 2, 4, 6), dtype=np.float32)
    np.testing.assert_array_equal(runner({"x": x})["y"], x)
