"""Numbers too small for full precision: sums of products take them as zeros, all other layers keep them."""

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from gangway.executor.launch import available_cores
from testing.gang_runner import GangRunner
from tests.conftest import CompileKept

SHAPE = ("N", 16, 4, 4)
node = helper.make_node


def test_only_sums_of_products_take_them_as_zeros(tmp_path: Path, compile_kept: CompileKept) -> None:
    nodes = [
        node("Conv", ["x", "w"], ["conv"]),
        node("Add", ["x", "x"], ["sum"]),
        node("MatMul", ["x", "x"], ["product"]),
        node("Add", ["conv", "x"], ["small"]),  # stays a layer of its own, since others read what it adds
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, SHAPE)
    outputs = [helper.make_tensor_value_info(item.output[0], TensorProto.FLOAT, SHAPE) for item in nodes]
    weights = numpy_helper.from_array(np.eye(16, dtype=np.float32)[:, :, None, None], "w")
    graph = helper.make_graph(nodes, "subnormal", [x], outputs, [weights])
    path = tmp_path / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    folder = compile_kept(path, "subnormal", tmp_path).folder
    values = np.full((1, 16, 4, 4), 3e-39, np.float32)
    values[:, ::2] = 2
    values[:, :, 0] = 1e-38  # whose products are smaller still
    with GangRunner(folder.parent, available_cores()[:1]) as runner:
        answers = runner.run(runner.open_model(folder), {"x": values}, 1).outputs
    kept = np.where(values < np.finfo(np.float32).tiny, 0, values)
    np.testing.assert_array_equal(answers["conv"], kept)
    np.testing.assert_array_equal(answers["product"], kept @ kept)
    np.testing.assert_array_equal(answers["sum"], values + values)
    np.testing.assert_array_equal(answers["small"], kept + values)
