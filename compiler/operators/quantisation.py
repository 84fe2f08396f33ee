"""Quantised tensors: scaled and rounded to integers, and back. Scales of several numbers must be constant."""

import math

import numpy as np

from gangway.compiler.activations import Activation
from gangway.compiler.expressions import Expression, Value
from gangway.compiler.graph import Node
from gangway.compiler.layers import Program
from gangway.compiler.operators.elementwise import elementwise_spec
from gangway.compiler.operators.pointwise import lower_pointwise
from gangway.compiler.operators.registry import lowers


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
        raise node.unsupported(f"to {dtype}")
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
        raise node.unsupported(f"of {x.dtype}")
    wide = expression.cast(x, "int32")
    if zero_point:
        wide = expression.apply("sub", wide, expression.cast(zero_point[0], "int32"))
    y = expression.apply("mul", expression.cast(wide, "float32"), expression.cast(scale, "float32"))
    return expression.cast(y, dtype)
