"""Quantised graphs against onnxruntime without its own fusions, which round elsewhere."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper

from gangway.compiler.pipeline import CompileResult
from tests.helpers.onnx_models import save_model

Array = Any


def save(nodes: list[Any], outputs: dict[str, int], constants: dict[str, Array], path: Path) -> Path:
    kinds = {"x": ["N", 24, 14, 14]}, {name: (kind, None) for name, kind in outputs.items()}
    return save_model(path, nodes, *kinds, constants, opset=21, ir_version=10)


@pytest.fixture
def answers(compile_file: Callable[..., CompileResult], load_artifact: Any) -> Callable[[Path], tuple[Any, Any, Any]]:
    def answers(path: Path) -> tuple[Any, Any, Any]:
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        session = onnxruntime.InferenceSession(str(path), options)
        x = np.random.default_rng(3).standard_normal((1, 24, 14, 14)).astype(np.float32)
        names = [output.name for output in session.get_outputs()]
        runner = load_artifact(compile_file(path).folder)
        return runner({"x": x}), dict(zip(names, session.run(names, {"x": x}), strict=True)), runner.manifest

    return answers


def pair(name: str, source: str, scale: str, zero_point: str) -> list[Any]:
    return [
        helper.make_node("QuantizeLinear", [source, scale, zero_point], [f"{name}_q"]),
        helper.make_node("DequantizeLinear", [f"{name}_q", scale, zero_point], [name]),
    ]


def test_pairs_become_activations(answers: Any, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    constants = {
        "sx": np.float32(0.03),
        "zx": np.int8(3),
        "sy": np.float32(0.02),
        "zy": np.int8(-128),
        "sz": np.float32(0.05),
        "zz": np.uint8(10),
        "w_q": random.integers(-127, 128, (40, 24, 3, 3)).astype(np.int8),
        "sw": random.uniform(0.0005, 0.002, 40).astype(np.float32),
        "zw": np.zeros(40, np.int8),
        "b_q": random.integers(-1000, 1000, 40).astype(np.int32),
        "sb": np.float32(0.001),
    }
    nodes = [
        *pair("x1", "x", "sx", "zx"),
        helper.make_node("DequantizeLinear", ["w_q", "sw", "zw"], ["w"], axis=0),
        helper.make_node("DequantizeLinear", ["b_q", "sb"], ["b"]),
        helper.make_node("Conv", ["x1", "w", "b"], ["c"], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c"], ["r"]),
        *pair("y1", "r", "sy", "zy"),
        helper.make_node("DequantizeLinear", ["y1_q", "sy", "zy"], ["y2"]),
        helper.make_node("MaxPool", ["y1"], ["p"], kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("MaxPool", ["y2"], ["q"], kernel_shape=[3, 3], strides=[2, 2], pads=[0, 0, 1, 1]),
        helper.make_node("Add", ["p", "q"], ["s"]),
        *pair("z", "s", "sz", "zz"),
    ]
    got, wanted, manifest = answers(save(nodes, {"z": TensorProto.FLOAT}, constants, tmp_path / "model.onnx"))
    difference = np.abs(got["z"] - wanted["z"])
    # A sum that lies between two integers may round the other way: one step, seldom.
    assert difference.max() <= 0.05 * 1.001
    assert (difference > 1e-6).mean() < 0.005
    assert sum("QuantizeLinear" in layer.operator for layer in manifest.layers) == 0
    assert any("Conv+FakeQuantise" in layer.operator for layer in manifest.layers)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint16])
def test_each_operator_alone(dtype: Any, answers: Any, tmp_path: Path) -> None:
    limits = np.iinfo(dtype)
    random = np.random.default_rng(1)
    constants = {
        "s": random.uniform(0.001, 0.1, 24).astype(np.float32),
        "z": random.integers(limits.min, limits.max, 24).astype(dtype),
        "s1": np.float32(0.01),
        "sb": random.uniform(0.001, 0.1, (1, 24, 14, 7)).astype(np.float32),
    }
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["a"]),
        helper.make_node("DequantizeLinear", ["a", "s", "z"], ["b"]),
        helper.make_node("DequantizeLinear", ["a", "s1"], ["c"]),
        helper.make_node("DequantizeLinear", ["a", "sb"], ["d"], axis=3, block_size=2),
    ]
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    outputs = {"a": kind, **dict.fromkeys("bcd", TensorProto.FLOAT)}
    got, wanted, _ = answers(save(nodes, outputs, constants, tmp_path / "model.onnx"))
    for name, expected in wanted.items():
        assert got[name].dtype == expected.dtype
        np.testing.assert_allclose(got[name], expected, rtol=1e-6, err_msg=name)
