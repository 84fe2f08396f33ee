"""DynamicQuantizeLSTM, which onnxruntime's dynamic quantisation makes of LSTM, is computed by kernels."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper
from onnxruntime.quantization import QuantType, quantize_dynamic

from tests.helpers.onnx_models import make_model

Array = Any
STEPS, SEQUENCES, INPUTS, HIDDEN = 7, 2, 20, 24
ROUNDING = 0.02  # onnxruntime rounds inputs and states to 8 bits at each step, and errors add up


def dequantised(path: Path) -> Any:
    """The same model with LSTM and float32 weights."""
    model = onnx.load(path)
    values = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type != "DynamicQuantizeLSTM":
            continue
        for place, name in ((1, node.input[1]), (2, node.input[2])):
            directions = len(values[name])
            scale, zero = (
                values[node.input[index]].reshape(directions, 1, -1) for index in (6 + 2 * place, 7 + 2 * place)
            )
            real = ((values[name].astype(np.float32) - zero) * scale).transpose(0, 2, 1).astype(np.float32)
            model.graph.initializer.append(numpy_helper.from_array(real, f"{name}_real"))
            node.input[place] = f"{name}_real"
        del node.input[8:]
        node.op_type, node.domain = "LSTM", ""
    return model


def run(model: Any, feeds: dict[str, Array]) -> list[Array]:
    """The answers of onnxruntime."""
    found: Any = onnxruntime.InferenceSession(model.SerializeToString()).run(None, feeds)
    return list(found)


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
def test_as_the_float32_model_of_its_weights(
    tmp_path: Path, compile_file: Any, load_artifact: Any, network: Any, direction: str, per_channel: bool
) -> None:
    random = np.random.default_rng(4)
    directions = 2 if direction == "bidirectional" else 1
    shapes = {"w": (4 * HIDDEN, INPUTS), "r": (4 * HIDDEN, HIDDEN), "b": (8 * HIDDEN,)}
    constants = {
        name: (random.standard_normal((directions, *shape)) / 5).astype(np.float32) for name, shape in shapes.items()
    }
    lstm = helper.make_node(
        "LSTM",
        ["x", "w", "r", "b", "", "h", "c"],
        ["y", "yh", "yc"],
        direction=direction,
        hidden_size=HIDDEN,
    )
    state = [directions, SEQUENCES, HIDDEN]
    inputs = {"x": [STEPS, SEQUENCES, INPUTS], "h": state, "c": state}
    outputs = {"y": [STEPS, directions, SEQUENCES, HIDDEN], "yh": state, "yc": state}
    source, path = tmp_path / "float.onnx", tmp_path / "model.onnx"
    network([lstm], inputs, outputs, constants).save(source)
    quantize_dynamic(source, path, weight_type=QuantType.QInt8, per_channel=per_channel, op_types_to_quantize=["LSTM"])
    assert "DynamicQuantizeLSTM" in [node.op_type for node in onnx.load(path).graph.node]
    compiled = compile_file(path)
    assert not compiled.manifest.fallback_reason and not compiled.manifest.islands
    assert any(layer.shape.endswith("int8") for layer in compiled.manifest.layers)
    assert "QuantisedLSTM" in [layer.operator for layer in compiled.manifest.layers]
    feeds = {name: random.standard_normal(shape).astype(np.float32) for name, shape in inputs.items()}
    answers = load_artifact(compiled.folder)(feeds)
    exact, rounded = run(dequantised(path), feeds), run(onnx.load(path), feeds)
    for name, wanted, near in zip(outputs, exact, rounded, strict=True):
        np.testing.assert_allclose(answers[name], wanted, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(answers[name], near, rtol=0, atol=ROUNDING * np.abs(near).max())


@pytest.mark.parametrize(("operator", "how"), [("GRU", {}), ("GRU", {"linear_before_reset": 1}), ("RNN", {})])
def test_dequantised_matrices_of_others(
    tmp_path: Path, compile_file: Any, load_artifact: Any, operator: str, how: dict[str, Any]
) -> None:
    random, gates = np.random.default_rng(6), 3 if operator == "GRU" else 1
    tensors, nodes = [], []
    for name, columns in (("w", INPUTS), ("r", HIDDEN)):
        integers = random.integers(-127, 128, (2 * gates * HIDDEN, columns)).astype(np.int8)
        scales = random.uniform(0.5, 1.5, len(integers)).astype(np.float32) / 400
        shape = np.array([2, gates * HIDDEN, columns])
        values: dict[str, Array] = {f"{name}q": integers, f"{name}s": scales, f"{name}n": shape}
        tensors += [numpy_helper.from_array(value, key) for key, value in values.items()]
        nodes.append(helper.make_node("DequantizeLinear", [f"{name}q", f"{name}s"], [f"{name}d"], axis=0))
        nodes.append(helper.make_node("Reshape", [f"{name}d", f"{name}n"], [name]))
    tensors.append(numpy_helper.from_array(random.standard_normal((2, 2 * gates * HIDDEN)).astype(np.float32), "b"))
    given = ["x", "w", "r", "b"]
    nodes.append(helper.make_node(operator, given, ["y", "h"], direction="bidirectional", hidden_size=HIDDEN, **how))
    shapes = {"y": [STEPS, 2, SEQUENCES, HIDDEN], "h": [2, SEQUENCES, HIDDEN]}
    model = make_model(nodes, {"x": [STEPS, SEQUENCES, INPUTS]}, shapes)
    model.graph.initializer.extend(tensors)
    onnx.save(model, tmp_path / "model.onnx")
    compiled = compile_file(tmp_path / "model.onnx")
    assert any(layer.shape.endswith("int8") for layer in compiled.manifest.layers)
    feeds = {"x": random.standard_normal((STEPS, SEQUENCES, INPUTS)).astype(np.float32)}
    answers = load_artifact(compiled.folder)(feeds)
    for name, wanted in zip(shapes, run(model, feeds), strict=True):
        np.testing.assert_allclose(answers[name], wanted, rtol=1e-5, atol=1e-5)
