"""ScatterElements and ScatterND against onnxruntime, and with indices from nowhere."""

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper

node = helper.make_node

DATA = np.arange(60, dtype=np.float32).reshape(3, 4, 5)


def runners(item: Any, shapes: dict[str, list[int]], compile_file: Any, load_artifact: Any, folder: Path) -> Any:
    kinds = {"indices": TensorProto.INT64}
    values = [helper.make_tensor_value_info(name, kinds.get(name, TensorProto.FLOAT), s) for name, s in shapes.items()]
    result = helper.make_tensor_value_info("y", TensorProto.FLOAT, shapes["data"])
    graph = helper.make_graph([item], "scatter", values, [result])
    path = folder / "model.onnx"
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    path.write_bytes(model.SerializeToString())
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
def test_slices(compile_file: Any, load_artifact: Any, tmp_path: Path, reduction: str) -> None:
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
