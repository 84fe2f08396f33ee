"""Small networks that onnxruntime has quantised dynamically, against onnxruntime without fusions, row by row."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper
from onnxruntime.quantization import QuantType, quantize_dynamic

from gangway.artifact.format import Engine
from gangway.compiler.pipeline import CompileResult
from gangway.compiler.place.int8 import NO_INTEGERS
from gangway.compiler.target import detect
from testing.exact_integers import exact_session
from tests.helpers.onnx_models import make_model, save_model
from tests.helpers.sampled import sampled

Array = Any
Answers = Callable[..., tuple[Array, list[str]]]
INTEGERS = "avx2" in detect().features
SAME = dict[str, Any](pads=[1, 1, 1, 1])
WEIGHTS = np.random.default_rng(3)


def weights(*shape: int) -> Array:
    """More positive than negative ones, so that the zero point of uint8 is not in the middle."""
    fan_in = np.prod(shape[1:]) if len(shape) == 4 else shape[0]
    return ((WEIGHTS.standard_normal(shape) + 0.3) / np.sqrt(fan_in)).astype(np.float32)


def images() -> tuple[list[Any], dict[str, Array], list[Any]]:
    """A first convolution of three channels, a strided one, a depthwise one, a residual, means, a dense layer."""
    nodes = [
        helper.make_node("Conv", ["x", "w0", "b0"], ["c0"], "first", strides=[2, 2], **SAME),
        helper.make_node("Relu", ["c0"], ["r0"]),
        helper.make_node("Conv", ["r0", "w1", "b1"], ["c1"], "wide"),
        helper.make_node("Conv", ["c1", "w2", "b2"], ["c2"], "depthwise", group=72, strides=[2, 2], **SAME),
        helper.make_node("Clip", ["c2", "zero", "six"], ["r2"]),
        helper.make_node("Conv", ["r2", "w3"], ["c3"], "narrow"),
        helper.make_node("Conv", ["c3", "w4", "b3"], ["c4"], "square", **SAME),
        helper.make_node("Add", ["c4", "c3"], ["s"]),
        helper.make_node("Relu", ["s"], ["r"]),
        helper.make_node("GlobalAveragePool", ["r"], ["g"]),
        helper.make_node("Flatten", ["g"], ["f"]),
        helper.make_node("MatMul", ["f", "w5"], ["m"], "last"),
        helper.make_node("Add", ["m", "b5"], ["y"]),
    ]
    constants = {
        "w0": weights(24, 3, 3, 3), "b0": weights(1, 24)[0], "w1": weights(72, 24, 1, 1), "b1": weights(1, 72)[0],
        "w2": weights(72, 1, 3, 3), "b2": weights(1, 72)[0], "w3": weights(40, 72, 1, 1), "w4": weights(40, 40, 3, 3),
        "b3": weights(1, 40)[0], "w5": weights(40, 17), "b5": weights(1, 17)[0],
        "zero": np.float32(0), "six": np.float32(6),
    }  # fmt: skip
    return nodes, constants, ["N", 3, 33, 35]


def sequences() -> tuple[list[Any], dict[str, Array], list[Any]]:
    """Two products of one tensor, a residual, a product whose operand was unpacked."""
    nodes = [
        helper.make_node("MatMul", ["x", "w0"], ["m0"], "q"),
        helper.make_node("Add", ["b0", "m0"], ["a0"]),
        helper.make_node("MatMul", ["x", "w1"], ["m1"], "k"),
        helper.make_node("Relu", ["m1"], ["r1"]),
        helper.make_node("Mul", ["a0", "r1"], ["p"]),
        helper.make_node("MatMul", ["p", "w2"], ["m2"], "out"),
        helper.make_node("Add", ["m2", "b2"], ["a2"]),
        helper.make_node("Add", ["a2", "x"], ["s"]),
        helper.make_node("Transpose", ["s"], ["t"], perm=[0, 2, 1]),
        helper.make_node("MatMul", ["t", "w3"], ["y"], "turned"),
    ]
    constants = {
        "w0": weights(96, 70), "b0": weights(1, 70)[0], "w1": weights(96, 70), "w2": weights(70, 96),
        "b2": weights(1, 96)[0], "w3": weights(19, 33),
    }  # fmt: skip
    return nodes, constants, ["N", 19, 96]


NETWORKS = {"images": images, "sequences": sequences}
KINDS = {"uint8": QuantType.QUInt8, "int8": QuantType.QInt8}
TARGETS = {"all instructions": None, "without VNNI": "avx2"}
FEW = [("images", "uint8", "all instructions"), ("sequences", "int8", "without VNNI")]


def quantised(name: str, kind: QuantType, folder: Path, per_channel: bool = False, rows: int | str = "N") -> Path:
    """Write a network as onnxruntime quantises it."""
    nodes, constants, shape = NETWORKS[name]()
    return written(nodes, constants, [rows, *shape[1:]], kind, folder, per_channel)


def written(
    nodes: list[Any],
    constants: dict[str, Array],
    shape: list[Any],
    kind: QuantType,
    folder: Path,
    per_channel: bool = False,
) -> Path:
    """Write nodes as onnxruntime quantises them."""
    source, result = folder / "float.onnx", folder / "model.onnx"
    model = make_model(nodes, {"x": shape}, {"y": None}, constants)
    onnx.save(onnx.shape_inference.infer_shapes(model), source)
    quantize_dynamic(source, result, weight_type=kind, per_channel=per_channel)
    return result


def reference(path: Path, x: Array) -> Array:
    """What the file says."""
    answer: Array = exact_session(path).run(None, {"x": x})[0]
    return answer


@pytest.fixture
def answers(compile_file: Callable[..., CompileResult], load_artifact: Any) -> Answers:
    """Return the function that compiles a file and gives its answer, and what its kernels are."""

    def answers(path: Path, x: Array, target: str | None = None) -> tuple[Array, list[str]]:
        compiled = compile_file(path, target=target)
        assert compiled.manifest.engine is Engine.NATIVE, compiled.manifest.fallback_reason
        runner = load_artifact(compiled.folder)
        return runner({"x": x})["y"], [layer.versions[0].description for layer in runner.manifest.layers]

    return answers


@pytest.mark.skipif(not INTEGERS, reason="this machine has no products of 8-bit numbers")
@pytest.mark.parametrize(("name", "kind", "target"), sampled(itertools.product(NETWORKS, KINDS, TARGETS), FEW))
def test_network_of_integers(name: str, kind: str, target: str, answers: Answers, tmp_path: Path) -> None:
    """All of its sums are exact; only what is between products may differ in a last bit."""
    path = quantised(name, KINDS[kind], tmp_path)
    nodes, _, shape = NETWORKS[name]()
    x = np.random.default_rng(8).standard_normal((1, *shape[1:])).astype(np.float32)
    found, kernels = answers(path, x, TARGETS[target])
    products = sum(node.op_type in ("Conv", "MatMul") for node in nodes)
    integers = [text for text in kernels if text.startswith(("conv int8", "depthwise int8"))]
    assert len(integers) == products, kernels
    expected = reference(path, x)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6 * np.abs(expected).max())


@pytest.mark.skipif(not INTEGERS, reason="this machine has no products of 8-bit numbers")
def test_scales_of_each_output(answers: Answers, tmp_path: Path) -> None:
    path = quantised("sequences", QuantType.QInt8, tmp_path, per_channel=True)
    x = np.random.default_rng(8).standard_normal((1, 19, 96)).astype(np.float32)
    found, kernels = answers(path, x)
    assert sum("conv int8" in text for text in kernels) == 4
    np.testing.assert_allclose(found, reference(path, x), rtol=1e-6, atol=1e-6)


def test_product_of_constants(answers: Answers, tmp_path: Path) -> None:
    """As of a table of relative positions, which the quantiser treats as an activation."""
    nodes = [
        helper.make_node("Relu", ["table"], ["positions"]),
        helper.make_node("MatMul", ["positions", "w0"], ["keys"]),
        helper.make_node("MatMul", ["x", "w1"], ["m"]),
        helper.make_node("Add", ["m", "keys"], ["y"]),
    ]
    constants = {"table": weights(1, 64), "w0": weights(64, 48), "w1": weights(96, 48)}
    path = written(nodes, constants, ["N", 19, 96], QuantType.QInt8, tmp_path)
    x = np.random.default_rng(8).standard_normal((1, 19, 96)).astype(np.float32)
    found, _ = answers(path, x)
    expected = reference(path, x)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6 * np.abs(expected).max())


@pytest.mark.parametrize("name", NETWORKS)
def test_row_of_a_batch_is_a_request_of_one_row(name: str, tmp_path: Path, compile_file: Any) -> None:
    """A scale is that of one row: what is beside it in a batch changes nothing. So the model has a batch."""
    manifest = compile_file(quantised(name, QuantType.QUInt8, tmp_path)).manifest
    assert manifest.batched and not manifest.mixes_rows


def test_rows_of_a_fixed_number_share_a_scale(answers: Answers, tmp_path: Path) -> None:
    """As the definition of DynamicQuantizeLinear says: of all numbers of the tensor."""
    path = quantised("sequences", QuantType.QUInt8, tmp_path, rows=3)
    x = np.random.default_rng(8).standard_normal((3, 19, 96)).astype(np.float32)
    x[1] *= 9
    found, _ = answers(path, x)
    expected = reference(path, x)
    alone = reference(quantised("sequences", QuantType.QUInt8, tmp_path), x[:1])
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6 * np.abs(expected).max())
    assert np.abs(alone - expected[:1]).max() > 1e-3


@pytest.mark.parametrize("numbers", [0.0, 7.0, -7.0, np.nan, np.inf])
def test_numbers_without_a_range(numbers: float, answers: Answers, tmp_path: Path) -> None:
    """All zero, all alike, or not finite: an answer, and the right one if there is one."""
    path = quantised("images", QuantType.QUInt8, tmp_path)
    x = np.full((1, 3, 33, 35), numbers, np.float32)
    found, _ = answers(path, x)
    if np.isfinite(numbers):
        expected = reference(path, x)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


@pytest.mark.long
@pytest.mark.parametrize("name", NETWORKS)
def test_numbers_are_the_same_without_such_instructions(
    name: str, compile_file: Callable[..., CompileResult], load_artifact: Any, tmp_path: Path
) -> None:
    path = quantised(name, QuantType.QUInt8, tmp_path)
    _, _, shape = NETWORKS[name]()
    x = np.random.default_rng(8).standard_normal((1, *shape[1:])).astype(np.float32)
    compiled = compile_file(path, target="baseline")
    assert compiled.manifest.integers == NO_INTEGERS
    found, expected = load_artifact(compiled.folder)({"x": x})["y"], reference(path, x)
    step = np.abs(expected).max() / 255  # a number half way between two may become either
    assert np.abs(found - expected).max() < 2 * step


CONTRIB = {
    "DynamicQuantizeMatMul": [
        helper.make_node("DynamicQuantizeMatMul", ["x", "w", "sw", "zw", "b"], ["y"], domain="com.microsoft")
    ],
    "MatMulIntegerToFloat": [
        helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "s", "z"]),
        helper.make_node("MatMulIntegerToFloat", ["q", "w", "s", "sw", "z", "zw"], ["m"], domain="com.microsoft"),
        helper.make_node("MatMulIntegerToFloat", ["q", "w", "s", "sw", "z", "zw", "b"], ["n"], domain="com.microsoft"),
        helper.make_node("Mul", ["m", "n"], ["y"]),
    ],
}


@pytest.mark.skipif(not INTEGERS, reason="this machine has no products of 8-bit numbers")
@pytest.mark.parametrize("name", CONTRIB)
def test_operators_of_onnxruntime(name: str, answers: Answers, tmp_path: Path) -> None:
    """What its optimiser makes of such products."""
    random = np.random.default_rng(1)
    constants = {
        "w": random.integers(0, 256, (200, 70)).astype(np.uint8), "sw": np.float32(0.004), "zw": np.uint8(117),
        "b": random.standard_normal(70).astype(np.float32),
    }  # fmt: skip
    kinds, domains = ({"x": ["N", 5, 200]}, {"y": ["N", 5, 70]}), {"com.microsoft": 1}
    path = save_model(tmp_path / "model.onnx", CONTRIB[name], *kinds, constants, domains=domains)
    x = random.standard_normal((1, 5, 200)).astype(np.float32)
    found, kernels = answers(path, x)
    assert any("conv int8" in text for text in kernels), kernels
    np.testing.assert_allclose(found, reference(path, x), rtol=1e-6, atol=1e-6)
