"""Reductions over any axes of plain tensors; means over all pixels of images are pooling."""

import math
from typing import cast

from gangway.compiler.graph import Node
from gangway.compiler.layers import Program, geometry_of
from gangway.compiler.operators.pooling import global_pool
from gangway.compiler.operators.registry import lowers
from gangway.compiler.specs import ELEMENT_TYPES, FLOATS, ReduceSpec
from gangway.compiler.specs.plain import After, Before, Reduction

_REDUCTIONS: dict[str, tuple[Reduction, Before, After]] = {
    "ReduceSum": ("sum", "none", "none"),
    "ReduceMean": ("sum", "none", "mean"),
    "ReduceMax": ("max", "none", "none"),
    "ReduceMin": ("min", "none", "none"),
    "ReduceProd": ("prod", "none", "none"),
    "ReduceL1": ("sum", "abs", "none"),
    "ReduceL2": ("sum", "square", "sqrt"),
    "ReduceSumSquare": ("sum", "square", "none"),
    "ReduceLogSum": ("sum", "none", "log"),
}
_OF_FLOATS = {"ReduceLogSum", "ReduceL2"}


@lowers(*_REDUCTIONS)
def reduce_axes(program: Program, node: Node) -> None:
    """Axes are a constant input or an attribute; none at all mean every axis, or none if the node says so."""
    kind = program.type(node.inputs[0])
    rank = len(kind.shape)
    given = program.optional(node, 1)
    stated = node.attributes.get("axes", ()) if given is None else given.reshape(-1).tolist()
    axes = {axis % rank for axis in stated} if rank else set()
    if not len(stated):
        axes = set() if node.attributes.get("noop_with_empty_axes", 0) else set(range(rank))
    if node.operator in _OF_FLOATS and kind.dtype not in FLOATS:
        raise node.unsupported(f"element type {kind.dtype}")
    image = geometry_of(kind)
    if node.operator == "ReduceMean" and image and axes == {2, 3}:
        program.add(node, global_pool(image), (node.inputs[0],))
    else:
        operator, before, after = _REDUCTIONS[node.operator]
        operator = "wrapping_sum" if node.attributes.get("wraps", 0) else operator
        _add(program, node, axes, operator, before, after)


@lowers("ArgMax", "ArgMin")
def arg(program: Program, node: Node) -> None:
    """The place of the first extreme along an axis, or of the last one."""
    rank = len(program.type(node.inputs[0]).shape)
    prefix = "last_" if node.attributes.get("select_last_index", 0) else ""
    operator = cast(Reduction, f"{prefix}{node.operator.lower()}")
    _add(program, node, {node.attributes.get("axis", 0) % rank}, operator, "none", "none")


def _add(program: Program, node: Node, axes: set[int], operator: Reduction, before: Before, after: After) -> None:
    kind = program.type(node.inputs[0])
    if kind.dtype not in ELEMENT_TYPES:
        raise node.unsupported(f"element type {kind.dtype}")
    shape: list[int] = []
    reduced: list[bool] = []
    for axis, length in enumerate(kind.shape):
        if length == 1 and not (operator.endswith(("argmax", "argmin")) and axis in axes):
            continue
        if reduced and reduced[-1] == (axis in axes):
            shape[-1] *= length
        else:
            shape.append(length)
            reduced.append(axis in axes)
    if not shape:
        shape, reduced = [math.prod(kind.shape)], [bool(axes)]
    spec = ReduceSpec(kind.dtype, tuple(shape), tuple(reduced), operator, before, after)
    program.add(node, spec, (node.inputs[0],))
