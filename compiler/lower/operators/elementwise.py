"""Elementwise operators on images and sequences, activation functions, and quantisation.

Layout decides later whether that happens on blocked images. Everything else is pointwise, on plain tensors.
"""

import math
from typing import cast

import numpy as np

from gangway.compiler.frontend.graph import Node, TensorType
from gangway.compiler.kernels.specs import NONE, RELU, Activation, ElementwiseOperator, ElementwiseSpec
from gangway.compiler.lower.expressions import Expression, Value
from gangway.compiler.lower.layers import Program, geometry_of
from gangway.compiler.lower.operators.pointwise import PLAIN, lower_pointwise
from gangway.compiler.lower.operators.registry import lowers


def elementwise_spec(operator: ElementwiseOperator, kind: TensorType, activation: Activation = NONE) -> ElementwiseSpec:
    """Return the spec over float32 tensors of this shape."""
    return ElementwiseSpec(operator, "float32", math.prod(kind.shape), activation)


@lowers("Add", "Sub", "Mul")
def binary(program: Program, node: Node) -> None:
    """Two operands."""
    kind = program.type(node.outputs[0])
    if kind.dtype != "float32" or not all(_fits(program, name, kind) for name in node.inputs):
        lower_pointwise(program, node, PLAIN[node.operator])
        return
    inputs = tuple(_operand(program, node, name) for name in node.inputs)
    program.add(node, elementwise_spec(cast(ElementwiseOperator, node.operator.lower()), kind), inputs)


def _fits(program: Program, name: str, kind: TensorType) -> bool:
    """Whether an operand has the result's shape, is constant, or has one number per channel of an image."""
    if name in program.graph.constants:
        return True
    found = program.type(name)
    return found == kind or (geometry_of(kind) is not None and found.shape == _per_channel(kind))


def _per_channel(kind: TensorType) -> tuple[int, ...]:
    return (*kind.shape[:2], *(1 for _ in kind.shape[2:]))


def _operand(program: Program, node: Node, name: str) -> str:
    """Return the name of an operand. A constant may have to be repeated, which is up to the layout."""
    if name not in program.graph.constants:
        return name
    spread = f"{node.outputs[0]}:{name}"
    program.constants[spread] = program.graph.constants[name]
    return spread


# Activation functions: layers of their own here, which `fusion` lets the layer before them apply where possible.


@lowers("Relu")
def relu(program: Program, node: Node) -> None:
    """max(x, 0)."""
    _add(program, node, RELU)


@lowers("Clip")
def clip(program: Program, node: Node) -> None:
    """Limits are constant inputs, before opset 11 attributes; numbers as large as the largest float limit nothing."""
    if program.type(node.outputs[0]).dtype != "float32" or any(
        name and name not in program.graph.constants for name in node.inputs[1:]
    ):
        lower_pointwise(program, node, PLAIN["Clip"])
        return
    limits = []
    for index, name, default in ((1, "min", -math.inf), (2, "max", math.inf)):
        value = program.optional(node, index)
        limit = node.attributes.get(name, default) if value is None else float(value)
        limits.append(limit if abs(limit) < 3.4e38 else math.copysign(math.inf, limit))
    _add(program, node, Activation("clip", *limits))


@lowers("LeakyRelu")
def leaky_relu(program: Program, node: Node) -> None:
    """x or, below zero, alpha x."""
    _add(program, node, Activation("leaky_relu", node.attributes.get("alpha", 0.01)))


@lowers("Sigmoid", "Tanh", "Swish")
def without_parameters(program: Program, node: Node) -> None:
    """Swish is x sigmoid(x), by `patterns` or since opset 24."""
    if node.attributes.get("alpha", 1.0) != 1.0:
        raise node.unsupported("alpha must be 1")
    match node.operator:
        case "Sigmoid":
            _add(program, node, Activation("sigmoid"))
        case "Swish":
            _add(program, node, Activation("swish"))
        case _:
            _add(program, node, Activation("tanh"))


@lowers("HardSigmoid")
def hard_sigmoid(program: Program, node: Node) -> None:
    """alpha x + beta, between 0 and 1."""
    alpha, beta = node.attributes.get("alpha", 0.2), node.attributes.get("beta", 0.5)
    _add(program, node, Activation("hard_sigmoid", alpha, beta))


@lowers("HardSwish")
def hard_swish(program: Program, node: Node) -> None:
    """The product of x and its hard sigmoid; `patterns` may state other factors than ONNX's."""
    alpha, beta = node.attributes.get("alpha", 1 / 6), node.attributes.get("beta", 0.5)
    _add(program, node, Activation("hard_swish", alpha, beta))


@lowers("Erf", "Gelu", "Elu", "Mish", "Softplus")
def of_exponentials(program: Program, node: Node) -> None:
    """As ONNX defines them."""
    match node.operator:
        case "Erf":
            _add(program, node, Activation("erf"))
        case "Elu":
            _add(program, node, Activation("elu", node.attributes.get("alpha", 1.0)))
        case "Mish":
            _add(program, node, Activation("mish"))
        case "Softplus":
            _add(program, node, Activation("softplus"))
        case _:
            tanh = node.attributes.get("approximate", b"none") == b"tanh"
            _add(program, node, Activation("gelu_tanh" if tanh else "gelu"))


def _add(program: Program, node: Node, activation: Activation) -> None:
    """Add the layer. Raises UnsupportedModelError for other types than float32 where ONNX defines it otherwise, too."""
    kind = program.type(node.outputs[0])
    if kind.dtype == "float32":
        program.add(node, elementwise_spec("copy", kind, activation), (node.inputs[0],))
    elif node.operator in PLAIN:
        lower_pointwise(program, node, PLAIN[node.operator])
    else:
        raise node.unsupported(f"element type {kind.dtype}")


# Quantised tensors: scaled and rounded to integers, and back. Scales of several numbers must be constant.


@lowers("FakeQuantise")
def fake_quantise(program: Program, node: Node) -> None:
    """A pair of both, found by `patterns`: an activation function."""
    parameters = node.attributes["scale"], node.attributes["zero_point"]
    signed = node.attributes["dtype"] == "int8"
    activation = Activation("quantise_int8" if signed else "quantise_uint8", *parameters)
    program.add(node, elementwise_spec("copy", program.type(node.outputs[0]), activation), (node.inputs[0],))


@lowers("QuantizeLinear")
def quantize_linear(program: Program, node: Node) -> None:
    """round(x / scale) + zero point, halves to even, within the limits of the integer type."""
    _check_scales(program, node)
    lower_pointwise(program, node, _quantise)


@lowers("DequantizeLinear")
def dequantize_linear(program: Program, node: Node) -> None:
    """(x - zero point) scale."""
    _check_scales(program, node)
    lower_pointwise(program, node, _dequantise)


def _check_scales(program: Program, node: Node) -> None:
    for name in filter(None, node.inputs[1:]):
        if name not in program.graph.constants and math.prod(program.type(name).shape) > 1:
            raise node.unsupported(f"'{name}' has several numbers and is no constant")


def _quantise(expression: Expression, node: Node, values: list[Value], dtype: str) -> Value:
    if np.dtype(dtype).kind not in "iu":
        raise node.unsupported(f"its output is {dtype}, no integer type")
    x, scale, *zero_point = (expression.cast(value, "float32") for value in values)
    y = expression.apply("round", expression.apply("div", x, scale))
    if zero_point:
        y = expression.apply("add", y, zero_point[0])
    limits = np.iinfo(dtype)
    lowest = expression.constant(limits.min, "float32")
    inside = expression.apply("greater", y, lowest, dtype="bool")
    y = expression.apply("where", inside, y, lowest)  # also of NaN
    y = expression.apply("min", y, expression.constant(limits.max, "float32"))
    return expression.cast(y, dtype)


def _dequantise(expression: Expression, node: Node, values: list[Value], dtype: str) -> Value:
    x, scale, *zero_point = values
    if np.dtype(x.dtype).kind not in "iu":
        raise node.unsupported(f"its input is {x.dtype}, no integer type")
    wide = expression.cast(x, "int32")
    if zero_point:
        wide = expression.apply("sub", wide, expression.cast(zero_point[0], "int32"))
    y = expression.apply("mul", expression.cast(wide, "float32"), expression.cast(scale, "float32"))
    return expression.cast(y, dtype)
