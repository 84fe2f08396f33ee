"""Add, Sub and Mul of two tensors, one of which may be constant or hold one number per channel."""

import math
from typing import Literal, cast

import numpy as np
from gangway.compiler.activations import NONE, Activation
from gangway.compiler.graph import Node, TensorType
from gangway.compiler.layers import Program, geometry_of
from gangway.compiler.operators.registry import lowers
from gangway.compiler.specs import ElementwiseOperator, ElementwiseSpec

Datatype = Literal["float32", "int32", "int64"]


def elementwise_spec(
    node: Node, operator: ElementwiseOperator, kind: TensorType, activation: Activation = NONE
) -> ElementwiseSpec:
    """Return the spec over plain tensors of this type. Raises UnsupportedModelError for other element types."""
    if kind.dtype not in ("float32", "int32", "int64"):
        raise node.unsupported(f"element type {kind.dtype}")
    return ElementwiseSpec(operator, cast(Datatype, kind.dtype), math.prod(kind.shape), activation)


@lowers("Add", "Sub", "Mul")
def binary(program: Program, node: Node) -> None:
    """Two operands."""
    kind = program.type(node.outputs[0])
    inputs = tuple(_operand(program, node, name, kind) for name in node.inputs)
    operator = cast(ElementwiseOperator, node.operator.lower())
    program.add(node, elementwise_spec(node, operator, kind), inputs)


def _operand(program: Program, node: Node, name: str, kind: TensorType) -> str:
    """Return the name of an operand: a tensor of the output's shape, or of one number per channel of an image."""
    per_channel = (*kind.shape[:2], *(1 for _ in kind.shape[2:]))
    if name in program.graph.constants:
        value = program.graph.constants[name]
        aligned = (1,) * (len(kind.shape) - value.ndim) + value.shape
        small = all(n == 1 for axis, n in enumerate(aligned) if axis != 1)
        spread = f"{node.outputs[0]}:{name}"
        program.constants[spread] = np.ascontiguousarray(np.broadcast_to(value, per_channel if small else kind.shape))
        return spread
    found = program.type(name)
    image = geometry_of(kind)
    if found != kind and (image is None or found.shape != per_channel):
        raise node.unsupported(f"'{name}' would have to be broadcast from {list(found.shape)} to {list(kind.shape)}")
    return name
