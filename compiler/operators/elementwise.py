"""Add, Sub, Mul of tensors of equal shape or with a constant; Relu and Clip."""

import math
from typing import Literal, cast

import numpy as np
from gangway.compiler.graph import Node, TensorType
from gangway.compiler.layers import Program
from gangway.compiler.operators.registry import lowers
from gangway.compiler.specs import ElementwiseSpec

Operator = Literal["add", "sub", "mul", "relu", "relu6", "copy"]
Datatype = Literal["float32", "int32", "int64"]


def elementwise_spec(node: Node, operator: Operator, kind: TensorType) -> ElementwiseSpec:
    """Return the spec over plain tensors of this type. Raises UnsupportedModelError for other element types."""
    if kind.dtype not in ("float32", "int32", "int64"):
        raise node.unsupported(f"element type {kind.dtype}")
    return ElementwiseSpec(operator, cast(Datatype, kind.dtype), math.prod(kind.shape))


@lowers("Add", "Sub", "Mul")
def binary(program: Program, node: Node) -> None:
    """Two operands, of which one may be a constant that fits the other's shape."""
    kind = program.type(node.outputs[0])
    inputs = tuple(_operand(program, node, name, kind) for name in node.inputs)
    operator = cast(Operator, node.operator.lower())
    program.add(node, elementwise_spec(node, operator, kind), inputs)


def _operand(program: Program, node: Node, name: str, kind: TensorType) -> str:
    """Return the name of an operand that has exactly the output's shape; constants are spread out to it."""
    if name in program.graph.constants:
        value = program.graph.constants[name]
        spread = f"{node.outputs[0]}:{name}"
        program.constants[spread] = np.ascontiguousarray(np.broadcast_to(value, kind.shape))
        return spread
    if program.type(name) != kind:
        shapes = f"{list(program.type(name).shape)} to {list(kind.shape)}"
        raise node.unsupported(f"'{name}' would have to be broadcast from {shapes}")
    return name


@lowers("Relu")
def relu(program: Program, node: Node) -> None:
    """max(x, 0)."""
    _activation(program, node, "relu")


@lowers("Clip")
def clip(program: Program, node: Node) -> None:
    """Clip to [0, 6] or [0, infinity). Limits are constant inputs, before opset 11 attributes."""
    limits = []
    for index, name, default in ((1, "min", -math.inf), (2, "max", math.inf)):
        value = program.optional(node, index)
        limits.append(node.attributes.get(name, default) if value is None else float(value))
    low, high = limits
    unlimited = high >= float(np.finfo(np.float32).max)
    if low != 0 or not (unlimited or high == 6):
        raise node.unsupported(f"limits {low:g} and {high:g}; only 0 and 6, or 0 and none")
    _activation(program, node, "relu" if unlimited else "relu6")


def _activation(program: Program, node: Node, operator: Operator) -> None:
    kind = program.type(node.outputs[0])
    if kind.dtype != "float32":
        raise node.unsupported(f"element type {kind.dtype}")
    program.add(node, elementwise_spec(node, operator, kind), (node.inputs[0],))
