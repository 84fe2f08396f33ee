"""Graphs without weights: what is kept of an exported file, and what it becomes again."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from benchmarks.exported.compare import difference
from benchmarks.exported.graphs import exported_files, names_in, pack, unpack, vary


def test_weights_are_left_out_and_drawn_again(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    kept = {"shape": np.array([-1, 8]), "zeros": np.zeros((40, 40), np.float32), "count": np.float32(0.5)}
    drawn: dict[str, Any] = {"weights": random.standard_normal((64, 64)).astype(np.float32),
             "bytes": random.integers(-7, 8, (64, 64)).astype(np.int8)}  # fmt: skip
    value = helper.make_tensor_value_info("x", 1, ["batch", "length", 8])
    weights = [numpy_helper.from_array(array, name) for name, array in {**kept, **drawn}.items()]
    output = helper.make_tensor_value_info("y", 1, None)
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "g", [value], [output], weights)
    described = {"inputs": {"x": {"shape": ["B", "T", 8], "dtype": "float32", "draw": "normal"}},
                 "asks": [{"B": 2, "T": 5}], "tolerance": 1e-3}  # fmt: skip
    onnx.save(helper.make_model(graph), tmp_path / "one.onnx")
    (tmp_path / "one.json").write_text(json.dumps(described))
    archive = tmp_path / "graphs" / "some.tar.xz"
    pack(exported_files(tmp_path), archive)
    assert archive.stat().st_size < 2000
    assert names_in(archive) == ["one"]

    (again,) = unpack(archive, tmp_path / "again")
    found: dict[str, Any] = {each.name: numpy_helper.to_array(each) for each in onnx.load(again.path).graph.initializer}
    for name, array in kept.items():
        np.testing.assert_array_equal(found[name], array)
    for name, array in drawn.items():
        assert (found[name].shape, found[name].dtype) == (array.shape, array.dtype)
    assert (found["bytes"].min(), found["bytes"].max()) == (-7, 7)
    assert again.sizes({"B": 2, "T": 5}) == {"length": 5}
    (request,) = again.requests()
    assert request["x"].shape == (2, 5, 8)


def test_weights_of_one_number_are_varied(tmp_path: Path) -> None:
    x, y = (helper.make_tensor_value_info(name, 1, [2, 8]) for name in "xy")
    same = {"ones": 1, "off": 1e-6, "masked": -3e38, "scale": 1}
    weights: dict[str, Any] = {name: np.full(8, number, np.float32) for name, number in same.items()}
    weights |= {"drawn": np.arange(8, dtype=np.float32), "zero": np.zeros(8, np.int8)}
    nodes = [helper.make_node("Sum", ["x", "ones", "off", "masked", "drawn"], ["s"]),
             helper.make_node("QuantizeLinear", ["s", "scale", "zero"], ["q"], axis=1),
             helper.make_node("DequantizeLinear", ["q", "scale", "zero"], ["y"], axis=1)]  # fmt: skip
    initial = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    onnx.save(helper.make_model(helper.make_graph(nodes, "g", [x], [y], initial)), tmp_path / "one.onnx")
    vary(tmp_path / "one.onnx", tmp_path / "varied.onnx")
    varied = {each.name: numpy_helper.to_array(each) for each in onnx.load(tmp_path / "varied.onnx").graph.initializer}
    changed = {name for name, array in weights.items() if not np.array_equal(array, varied[name])}
    assert changed == {"ones", "off"}
    assert varied["ones"].min() >= 0.5 and np.ptp(varied["off"]) > 0.1


def test_differences() -> None:
    numbers = np.array([1, 2, np.nan], np.float32)
    assert difference(numbers, numbers) == 0
    assert difference(numbers[:2], numbers) == float("inf")
    assert difference(numbers.astype(np.float64), numbers) == float("inf")
    assert difference(np.array([b"a"], object), np.array(["a"], object)) == 0


def test_inputs_have_the_types_of_the_file(tmp_path: Path) -> None:
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT16, ["n", 4]) for name in "xy")
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", [x], [y])
    onnx.save(helper.make_model(graph), tmp_path / "half.onnx")
    described = {"inputs": {"x": {"shape": ["B", 4], "dtype": "float32", "draw": "normal"}}, "asks": [{"B": 2}]}
    (tmp_path / "half.json").write_text(json.dumps(described))
    (file,) = exported_files(tmp_path)
    (request,) = file.requests()
    assert request["x"].dtype == np.float16
