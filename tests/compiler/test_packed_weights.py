"""Weights that are integers beside float32 activations: they stay so, and answers are onnxruntime's."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from tests.helpers.onnx_models import make_model
from tests.helpers.sampled import sampled

Array = Any
PACKED = "PackedMatMul"
BLOCKED_OPSET = 21
TYPES = {
    "int4": (TensorProto.INT4, -8, 8),
    "uint4": (TensorProto.UINT4, 0, 16),
    "int8": (TensorProto.INT8, -128, 128),
    "uint8": (TensorProto.UINT8, 0, 256),
}
Answer = Callable[..., tuple[list[str], int]]


@pytest.fixture
def answered(tmp_path: Path, compile_file: Any, load_artifact: Any) -> Answer:
    """Return the function that compares a model's answers; it returns layers' operators and the size of weights."""

    def answered(model: Any, feeds: dict[str, Array]) -> tuple[list[str], int]:
        path = tmp_path / "model.onnx"
        onnx.save(model, path)
        compiled = compile_file(path)
        assert not compiled.manifest.fallback_reason
        answers = load_artifact(compiled.folder)(feeds)
        options = onnxruntime.SessionOptions()  # of whose fusions some round activations to 8 bits, too
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        session = onnxruntime.InferenceSession(str(path), options)
        for spec, wanted in zip(session.get_outputs(), session.run(None, feeds), strict=True):
            np.testing.assert_allclose(answers[spec.name], wanted, rtol=1e-5, atol=2e-5 * np.abs(wanted).max())
        size_bytes = (compiled.folder / "weights.bin").stat().st_size
        return [layer.operator for layer in compiled.manifest.layers], size_bytes

    return answered


class Maker:
    """Makes models of random weights."""

    def __init__(self, seed: int = 3) -> None:
        self.random = np.random.default_rng(seed)
        self.tensors: list[Any] = []
        self.nodes: list[Any] = []

    def constant(self, value: Array, kind: int | None = None) -> str:
        """Add a tensor, of an element type that numpy may lack."""
        name = f"c{len(self.tensors)}"
        if kind is None:
            self.tensors.append(numpy_helper.from_array(np.asarray(value), name))
        else:
            self.tensors.append(helper.make_tensor(name, kind, value.shape, value.reshape(-1).tolist()))
        return name

    def node(self, operator: str, *inputs: str, domain: str = "", **attributes: Any) -> str:
        """Add a node; return its output."""
        output = f"t{len(self.nodes)}"
        self.nodes.append(helper.make_node(operator, list(inputs), [output], domain=domain, **attributes))
        return output

    def scales(self, shape: Sequence[int]) -> str:
        """Add scales."""
        return self.constant((self.random.uniform(0.5, 1.5, shape) / 50).astype(np.float32))

    def bits(
        self, x: str, inputs: int, outputs: int, block: int, bits: int, zeros: str = "", bias: bool | str = False
    ) -> str:
        """Add a MatMulNBits; `zeros`: the type of zero points, if there are any; `bias` may be a tensor."""
        blocks = -(-inputs // block)
        names = [x, self.constant(self.random.integers(0, 256, (outputs, blocks, block * bits // 8), np.uint8))]
        names.append(self.scales((outputs, blocks)))
        if zeros == "uint8":
            names.append(self.constant(self.random.integers(0, 256, (outputs, -(-blocks * bits // 8)), np.uint8)))
        elif zeros:
            names.append(self.constant(self.random.uniform(6, 9, (outputs, blocks)).astype(zeros)))
        if bias:
            shift = bias if isinstance(bias, str) else self.constant(self.random.random(outputs, np.float32))
            names += [""] * (5 - len(names)) + [shift]
        sizes: dict[str, Any] = {"K": inputs, "N": outputs, "bits": bits, "block_size": block}
        return self.node("MatMulNBits", *names, domain="com.microsoft", **sizes)

    def dequantised(
        self, kind: str, shape: tuple[int, int], axis: int | None, block: int = 0, zeros: bool = True
    ) -> str:
        """Add a matrix of integers and its DequantizeLinear; no axis: of one scale."""
        element, least, end = TYPES[kind]
        along = [] if axis is None else [shape[axis]]
        if block and axis is not None:
            along = [-(-n // block) if index == axis else n for index, n in enumerate(shape)]
        names = [self.constant(self.random.integers(least, end, shape), element), self.scales(along)]
        if zeros:
            names.append(self.constant(self.random.integers(least, end, along), element))
        attributes: dict[str, Any] = {} if axis is None else {"axis": axis}
        attributes |= {"block_size": block} if block else {}
        return self.node("DequantizeLinear", *names, **attributes)

    def model(self, shape: Sequence[int | str], opset: int = 17) -> Any:
        """The model; its output is that of the last node."""
        outputs = {self.nodes[-1].output[0]: None}
        model = make_model(
            self.nodes, {"x": [*shape]}, outputs, opset=opset, ir_version=10, domains={"com.microsoft": 1}
        )
        model.graph.initializer.extend(self.tensors)
        return model

    def feeds(self, shape: Sequence[int | str]) -> dict[str, Array]:
        """One row of x."""
        sizes = [1 if isinstance(n, str) else n for n in shape]
        return {"x": self.random.standard_normal(sizes).astype(np.float32)}


@pytest.mark.parametrize(
    ("bits", "block", "zeros", "bias", "inputs", "outputs", "shape"),
    [
        (4, 16, "", False, 64, 32, (1,)),
        (4, 32, "uint8", True, 100, 33, (2, 7)),
        (4, 128, "uint8", False, 300, 31, ("rows",)),
        (4, 64, "", True, 47, 5, ("rows", 40)),
        (8, 16, "uint8", True, 50, 17, ("rows", 3)),
        (8, 256, "", False, 700, 40, (30,)),
    ],
)
def test_blocks_of_bits(
    answered: Answer,
    bits: int,
    block: int,
    zeros: str,
    bias: bool,
    inputs: int,
    outputs: int,
    shape: tuple[int | str, ...],
) -> None:
    maker = Maker()
    maker.bits("x", inputs, outputs, block, bits, zeros, bias)
    operators, _ = answered(maker.model((*shape, inputs)), maker.feeds((*shape, inputs)))
    assert PACKED in operators


@pytest.mark.parametrize(("bits", "zeros"), [(4, "float32"), (2, "uint8")])
def test_what_has_no_kernel_of_integers_is_computed_in_float32(answered: Answer, bits: int, zeros: str) -> None:
    maker = Maker()
    maker.bits("x", 96, 20, 32, bits, zeros)
    operators, _ = answered(maker.model((4, 96)), maker.feeds((4, 96)))
    assert operators.count("MatMul") == 1
    assert PACKED not in operators


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize(
    ("axis", "block", "zeros", "turned"),
    [(None, 0, False, False), (1, 0, True, False), (0, 0, True, True), (0, 32, True, False), (1, 16, False, True)],
)
def test_dequantised_matrices(
    answered: Answer, kind: str, axis: int | None, block: int, zeros: bool, turned: bool
) -> None:
    inputs, outputs = 75, 21
    maker = Maker()
    matrix = maker.dequantised(kind, (outputs, inputs) if turned else (inputs, outputs), axis, block, zeros)
    if turned:
        maker.node("Gemm", "x", matrix, maker.constant(np.arange(outputs, dtype=np.float32)), transB=1)
    else:
        maker.node("MatMul", "x", matrix)
    operators, _ = answered(maker.model((5, inputs), BLOCKED_OPSET), maker.feeds((5, inputs)))
    assert PACKED in operators


@pytest.mark.parametrize(("axis", "block"), [(0, 0), (0, 8), (1, 8)])
def test_other_scales_are_computed_in_float32(answered: Answer, axis: int, block: int) -> None:
    maker = Maker()
    maker.node("MatMul", "x", maker.dequantised("int8", (64, 24), axis, block))
    operators, _ = answered(maker.model((5, 64), BLOCKED_OPSET), maker.feeds((5, 64)))
    assert PACKED not in operators


def test_a_bias_may_be_computed(answered: Answer) -> None:
    maker = Maker()
    bias = maker.node("ReduceMax", "x", axes=[0], keepdims=0)
    maker.bits("x", 48, 48, 16, 4, bias=bias)
    operators, _ = answered(maker.model((3, 48)), maker.feeds((3, 48)))
    assert any(PACKED in name for name in operators)


def test_products_of_two_quantised_operands_are_left_to_kernels_of_integers(answered: Answer) -> None:
    maker = Maker()
    scale, zero = maker.constant(np.float32(0.03)), maker.constant(np.uint8(120))
    rounded = maker.node("DequantizeLinear", maker.node("QuantizeLinear", "x", scale, zero), scale, zero)
    flat = maker.node("Reshape", rounded, maker.constant(np.array([6, 64])))
    maker.node("MatMul", flat, maker.dequantised("int8", (64, 32), 1, zeros=False))
    operators, _ = answered(maker.model((2, 3, 64)), maker.feeds((2, 3, 64)))
    assert not any(PACKED in name for name in operators)


def test_what_follows_is_part_of_the_layer(answered: Answer) -> None:
    maker = Maker()
    first = maker.bits("x", 64, 96, 32, 4)
    scale, shift = (maker.constant(maker.random.standard_normal(96).astype(np.float32)) for _ in range(2))
    hidden = maker.node("Relu", maker.node("Add", maker.node("Mul", first, scale), shift))
    turned = maker.node("Transpose", maker.dequantised("int8", (64, 96), 0), perm=[1, 0])
    maker.node("Add", maker.node("MatMul", hidden, turned), "x")
    operators, _ = answered(maker.model((1, 9, 64), BLOCKED_OPSET), maker.feeds((1, 9, 64)))
    assert [name for name in operators if PACKED in name] == [f"{PACKED}+Relu", f"{PACKED}+Add"]


@pytest.mark.parametrize(("bits", "zeros"), sampled([(4, "uint8"), (8, ""), (4, "")], [(4, "uint8")]))
def test_weights_stay_as_small_as_in_the_file(answered: Answer, bits: int, zeros: str) -> None:
    maker = Maker()
    maker.bits("x", 512, 256, 32, bits, zeros)
    _, size_bytes = answered(maker.model(("rows", 512)), maker.feeds(("rows", 512)))
    file_bytes = sum(len(tensor.raw_data) for tensor in maker.tensors)
    assert size_bytes <= 1.1 * file_bytes + 4 * 256  # the kernel has a bias in any case
    assert size_bytes < 4 * math.prod((512, 256)) * (0.4 if bits == 8 else 0.2)
