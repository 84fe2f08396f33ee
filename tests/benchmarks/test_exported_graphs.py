"""Graphs without weights: what is kept of an exported file, and what it becomes again."""

import json
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper

from benchmarks.exported.compare import difference
from benchmarks.exported.graphs import exported_files, names_in, pack, unpack


def test_weights_are_left_out_and_drawn_again(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    kept = {"shape": np.array([-1, 8]), "zeros": np.zeros((40, 40), np.float32), "count": np.float32(0.5)}
    drawn = {"weights": random.standard_normal((64, 64)).astype(np.float32),
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
    found = {each.name: numpy_helper.to_array(each) for each in onnx.load(again.path).graph.initializer}
    for name, array in kept.items():
        np.testing.assert_array_equal(found[name], array)
    for name, array in drawn.items():
        assert (found[name].shape, found[name].dtype) == (array.shape, array.dtype)
    assert (found["bytes"].min(), found["bytes"].max()) == (-7, 7)
    assert again.sizes({"B": 2, "T": 5}) == {"length": 5}
    (request,) = again.requests()
    assert request["x"].shape == (2, 5, 8)


def test_differences() -> None:
    numbers = np.array([1, 2, np.nan], np.float32)
    assert difference(numbers, numbers) == 0
    assert difference(numbers[:2], numbers) == float("inf")
    assert difference(numbers.astype(np.float64), numbers) == float("inf")
    assert difference(np.array([b"a"], object), np.array(["a"], object)) == 0
