"""Small networks that onnxruntime has quantised, on kernels of 8-bit numbers, against onnxruntime without fusions."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

from gangway.compiler.pipeline import CompileResult
from gangway.compiler.target import detect
from tests.helpers.onnx_models import make_model, save_model
from tests.helpers.sampled import sampled

Array = Any
ROWS = 6
SAME = dict[str, Any](pads=[1, 1, 1, 1])

pytestmark = pytest.mark.skipif("avx2" not in detect().features, reason="this machine has no products of 8-bit numbers")


class Network:
    """Nodes that are added one after the other, each reading the one before unless it says otherwise."""

    def __init__(self, shape: Sequence[int]) -> None:
        self.shape, self.last, self._random = [1, *shape], "x", np.random.default_rng(11)
        self._nodes: list[Any] = []
        self._constants: list[Any] = []

    def add(self, operator: str, *others: str, x: str | None = None, **attributes: Any) -> str:
        """A node; its output's name."""
        name = f"{operator.lower()}{len(self._nodes)}"
        self._nodes.append(helper.make_node(operator, [x or self.last, *others], [name], name, **attributes))
        self.last = name
        return name

    def conv(self, shape: Sequence[int], x: str | None = None, **attributes: Any) -> str:
        """A convolution with random weights."""
        scale = np.sqrt(2 / np.prod(shape[1:]))
        weights = self._constant((self._random.standard_normal(shape) * scale).astype(np.float32))
        bias = self._constant((self._random.standard_normal(shape[0]) / 4).astype(np.float32))
        return self.add("Conv", weights, bias, x=x, kernel_shape=shape[2:], **attributes)

    def dense(self, inputs: int, outputs: int) -> str:
        """A dense layer."""
        weights = (self._random.standard_normal((inputs, outputs)) / np.sqrt(inputs)).astype(np.float32)
        return self.add("Gemm", self._constant(weights), self._constant(np.zeros(outputs, np.float32)))

    def _constant(self, value: Array) -> str:
        name = f"constant{len(self._constants)}"
        self._constants.append(numpy_helper.from_array(value, name))
        return name

    def quantise(self, folder: Path, activations: QuantType, reduce_range: bool = False) -> Path:
        """Write the model, quantised; `reduce_range`: weights have 7 bits."""
        source, result = folder / "float.onnx", folder / "model.onnx"
        model = make_model(self._nodes, {"x": self.shape}, {self.last: None})
        model.graph.initializer.extend(self._constants)
        onnx.save(onnx.shape_inference.infer_shapes(model), source)
        quantize_static(
            source,
            result,
            _Rows(self.shape),
            quant_format=QuantFormat.QDQ,
            per_channel=True,
            activation_type=activations,
            weight_type=QuantType.QInt8,
            reduce_range=reduce_range,
        )
        return result


class _Rows(CalibrationDataReader):  # type: ignore[misc]
    def __init__(self, shape: Sequence[int]) -> None:
        self._rows: Iterator[Array] = iter(_inputs(shape))

    def get_next(self) -> dict[str, Array] | None:
        row = next(self._rows, None)
        return None if row is None else {"x": row}


def _inputs(shape: Sequence[int]) -> list[Array]:
    random = np.random.default_rng(5)
    return [random.standard_normal(shape).astype(np.float32) for _ in range(ROWS)]


def residual() -> Network:
    """As ResNet is made: a first convolution, pooling, two blocks of which one changes its shape, a dense layer."""
    network = Network((3, 40, 40))
    network.conv((64, 3, 7, 7), pads=[3, 3, 3, 3], strides=[2, 2])
    network.add("Relu")
    start = network.add("MaxPool", kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
    network.conv((64, 64, 1, 1))
    network.add("Relu")
    network.conv((64, 64, 3, 3), strides=[2, 2], **SAME)
    network.add("Relu")
    long = network.conv((160, 64, 1, 1))
    short = network.conv((160, 64, 1, 1), x=start, strides=[2, 2])
    network.add("Add", short, x=long)
    second = network.add("Relu")
    network.conv((160, 160, 3, 3), **SAME)
    network.add("Add", second)
    network.add("Relu")
    network.add("GlobalAveragePool")
    network.add("Flatten")
    network.dense(160, 100)
    return network


def mobile() -> Network:
    """As EfficientNet is made: depthwise convolutions whose input's zero point is not 0, Swish, a gate of channels."""
    network = Network((3, 33, 35))

    def swish() -> str:
        x = network.last
        network.add("Sigmoid")
        return network.add("Mul", x)

    network.conv((24, 3, 3, 3), strides=[2, 2], **SAME)
    swish()
    network.conv((24, 1, 3, 3), group=24, **SAME)
    x = swish()
    network.add("GlobalAveragePool")
    network.conv((8, 24, 1, 1))
    swish()
    network.conv((24, 8, 1, 1))
    network.add("Sigmoid")
    network.add("Mul", x)
    first = network.conv((72, 24, 1, 1))
    network.conv((72, 1, 5, 5), group=72, pads=[2, 2, 2, 2])
    network.add("HardSwish")
    network.add("Add", first)
    network.conv((40, 72, 1, 1))
    return network


def grouped() -> Network:
    """Groups, dilation, parts beside each other, and an input of many channels."""
    network = Network((40, 13, 11))
    first = network.conv((64, 20, 3, 3), group=2, **SAME)
    network.add("Relu")
    second = network.conv((64, 64, 3, 3), dilations=[2, 2], pads=[2, 2, 2, 2])
    network.add("Concat", first, axis=1)
    network.add("Clip")
    network.conv((24, 128, 1, 1))
    assert second
    return network


@dataclass(frozen=True)
class Kind:
    """How a file is quantised and compiled; `products`: a part of what kernels of convolutions are called."""

    activations: QuantType = QuantType.QUInt8
    reduce_range: bool = False
    target: str | None = None
    products: str = "conv int8"


KINDS = {
    "uint8": Kind(),
    "int8": Kind(QuantType.QInt8),
    "without VNNI": Kind(target="avx2", products="conv int8 pairs"),
    "without VNNI, 7 bits": Kind(QuantType.QInt8, True, "avx2", "conv int8 words"),
}


BUILDERS: dict[str, Callable[[], Network]] = {build.__name__: build for build in (residual, mobile, grouped)}
FEW = [*((name, "uint8") for name in BUILDERS), ("residual", "int8"), ("mobile", "without VNNI")]
FEW += [("grouped", "without VNNI, 7 bits")]


@pytest.mark.parametrize(("name", "kind"), sampled(itertools.product(BUILDERS, KINDS), FEW))
def test_network_in_8_bits(
    name: str,
    kind: str,
    compile_file: Callable[..., CompileResult],
    load_artifact: Any,
    tmp_path: Path,
) -> None:
    require_integers(BUILDERS[name](), KINDS[kind], compile_file, load_artifact, tmp_path)


@pytest.mark.parametrize(("name", "images"), [("residual", 3), ("mobile", 2)])
def test_several_images_in_8_bits(
    name: str, images: int, compile_file: Callable[..., CompileResult], load_artifact: Any, tmp_path: Path
) -> None:
    """A file that says how many images it takes."""
    network = BUILDERS[name]()
    network.shape[0] = images
    require_integers(network, KINDS["uint8"], compile_file, load_artifact, tmp_path)


def test_a_convolution_of_some_channels_of_quantised_numbers(check: Callable[..., list[str]], network: Any) -> None:
    random = np.random.default_rng(3)
    constants = {"scale": np.float32(0.0625), "zero": np.uint8(128), "scales": np.full(64, 0.5, np.float32)}
    constants |= {"w": random.integers(-127, 128, (64, 32, 1, 1)).astype(np.int8), "zeros": np.zeros(64, np.int8)}
    constants |= {"one": np.array([1]), "two": np.array([2]), "last": np.array([34])}
    constants["w"][:, 0] = 127
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "scale", "zero"], ["d"]),
        helper.make_node("Slice", ["d", "two", "last", "one"], ["part"]),
        helper.make_node("DequantizeLinear", ["w", "scales", "zeros"], ["weights"], axis=0),
        helper.make_node("Conv", ["part", "weights"], ["y"]),
    ]
    constants = {name: np.asarray(value) for name, value in constants.items()}
    assert "Quantise" in check(network(nodes, {"x": [1, 36, 9, 9]}, {"y": None}, constants))


@pytest.mark.parametrize("groups", [1, 64])
def test_sums_that_lie_half_way(check: Callable[..., list[str]], network: Any, groups: int) -> None:
    """Scales whose roundings decide whether an odd sum ends at .5 or beside it: each becomes onnxruntime's number."""
    random, x_scale, y_scale = np.random.default_rng(3), np.float32(1.93), np.float32(0.03)
    near = (np.array([1.5, 2.5, 3.5, 4.5]) * y_scale / x_scale).astype(np.float32)
    scales = np.resize([np.nextafter(near, np.float32(0)), near, np.nextafter(near, np.float32(1))], 64)
    constants = {"xs": x_scale, "zero": np.uint8(128), "ys": y_scale, "scales": scales}
    constants |= {"w": random.integers(-127, 128, (64, 64 // groups, 3, 3)).astype(np.int8)}
    constants |= {"zeros": np.zeros(64, np.int8)}
    constants["w"][:, 0] = random.integers(-3, 4, (64, 3, 3))
    constants["w"][:, 0, 0, 0] = 127
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "xs", "zero"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "xs", "zero"], ["d"]),
        helper.make_node("DequantizeLinear", ["w", "scales", "zeros"], ["weights"], axis=0),
        helper.make_node("Conv", ["d", "weights"], ["c"], group=groups),
        helper.make_node("QuantizeLinear", ["c", "ys", "zero"], ["r"]),
        helper.make_node("DequantizeLinear", ["r", "ys", "zero"], ["y"]),
    ]
    constants = {name: np.asarray(value) for name, value in constants.items()}
    layers = check(network(nodes, {"x": [1, 64, 20, 20]}, {"y": None}, constants))
    assert any("FakeQuantise" in layer for layer in layers), layers


def require_integers(
    network: Network, chosen: Kind, compile_file: Callable[..., CompileResult], load_artifact: Any, tmp_path: Path
) -> None:
    """Compile a network to kernels of 8-bit numbers whose answers are onnxruntime's integers, but for roundings."""
    path = network.quantise(tmp_path, chosen.activations, chosen.reduce_range)
    runner = load_artifact(compile_file(path, target=chosen.target).folder)
    kernels = [layer.versions[0].description for layer in runner.manifest.layers]
    assert sum("int8" in text for text in kernels) > len(kernels) // 2
    products = [text for text in kernels if text.startswith("conv int8")]
    assert all(text.startswith(chosen.products) for text in products), products
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(str(path), options)
    step = _output_step(path)
    for x in _inputs(network.shape):
        (expected,) = session.run(None, {"x": x})
        found = runner({"x": x})[network.last].reshape(expected.shape)
        steps = np.rint((found - expected) / step)
        # A number half way between two may become either, and what follows multiplies that.
        assert np.abs(steps).max() <= 3
        assert np.mean(np.abs(steps) > 1) < 0.01
        assert np.mean(steps != 0) < 0.25


def test_float32_where_winograd_is_faster(
    compile_file: Callable[..., CompileResult], load_artifact: Any, tmp_path: Path
) -> None:
    """Without VNNI a network of little but 3x3 convolutions computes these in float32; its numbers are the same."""
    network = Network((3, 64, 64))
    network.conv((64, 3, 3, 3), **SAME)
    for _ in range(3):
        network.add("Relu")
        network.conv((64, 64, 3, 3), **SAME)
    network.add("Relu")
    network.conv((64, 64, 1, 1))
    path = network.quantise(tmp_path, QuantType.QUInt8)
    runner = load_artifact(compile_file(path, target="avx2").folder)
    kernels = [layer.versions[0].description for layer in runner.manifest.layers]
    assert sum("winograd" in text for text in kernels) == 3, kernels
    assert any(text.startswith("conv int8") for text in kernels), kernels
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    x = _inputs(network.shape)[0]
    (expected,) = onnxruntime.InferenceSession(str(path), options).run(None, {"x": x})
    steps = np.rint((runner({"x": x})[network.last].reshape(expected.shape) - expected) / _output_step(path))
    assert np.abs(steps).max() <= 2
    assert np.mean(steps != 0) < 0.05


def _output_step(path: Path) -> float:
    """The scale of the output."""
    model = onnx.load(path)
    (last,) = (node for node in model.graph.node if model.graph.output[0].name in node.output)
    (scale,) = (each for each in model.graph.initializer if each.name == last.input[1])
    return float(numpy_helper.to_array(scale))


def test_table_of_integers_stays_one(
    compile_file: Callable[..., CompileResult], load_artifact: Any, tmp_path: Path
) -> None:
    """Dequantised are the rows that are looked up, not the table."""
    table = np.random.default_rng(2).integers(0, 256, (500, 64)).astype(np.uint8)
    scale, zero = np.array(0.02, np.float32), np.array(120, np.uint8)
    nodes = [
        helper.make_node("DequantizeLinear", ["table", "scale", "zero"], ["rows"]),
        helper.make_node("Gather", ["rows", "x"], ["y"]),
    ]
    constants = {"table": table, "scale": scale, "zero": zero}
    path = save_model(tmp_path / "model.onnx", nodes, {"x": (TensorProto.INT64, ["N", 7])}, {"y": None}, constants)
    folder = compile_file(path).folder
    places = np.array([[0, 499, 3, 3, 70, 255, 256]], np.int64)
    found = load_artifact(folder)({"x": places})["y"]
    np.testing.assert_array_equal(found, (table[places].astype(np.float32) - 120) * scale)
    assert (folder / "weights.bin").stat().st_size < 2 * table.nbytes
