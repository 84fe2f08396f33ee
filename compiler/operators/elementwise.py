"""Add, Sub and Mul of two float tensors, one of which may be constant or hold one number per channel of an image.

Layout decides later whether that happens on blocked images. Everything else is pointwise, on plain tensors.
"""

import math
from typing import cast

from gangway.compiler.activations import NONE, Activation
from gangway.compiler.graph import Node, TensorType
from gangway.compiler.layers import Program, geometry_of
from gangway.compiler.operators.pointwise import PLAIN, lower_pointwise
from gangway.compiler.operators.registry import lowers
from gangway.compiler.specs import ElementwiseOperator, ElementwiseSpec


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
