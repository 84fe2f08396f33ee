"""Slice, Pad, Tile, Expand and Gather with constant indices: where each number comes from is known per axis."""

import numpy as np

from gangway.compiler.expressions import Expression, Value
from gangway.compiler.graph import Node
from gangway.compiler.layers import Program
from gangway.compiler.operators.pointwise import lower_pointwise
from gangway.compiler.operators.registry import lowers
from gangway.compiler.remapping import add_remap
from gangway.compiler.specs import Array


@lowers("Slice")
def slice_(program: Program, node: Node) -> None:
    """Any constant starts, ends and steps, which were attributes before opset 10."""
    shape = program.type(node.inputs[0]).shape
    indices = [np.arange(length) for length in shape]
    starts, ends, axes, steps = (
        _numbers(program, node, index, name) for index, name in ((1, "starts"), (2, "ends"), (3, "axes"), (4, "steps"))
    )
    assert starts is not None and ends is not None
    axes = list(range(len(starts))) if axes is None else axes
    for number, axis in enumerate(axes):
        step = steps[number] if steps else 1
        indices[axis] = _taken(shape[axis], starts[number], ends[number], step)
    add_remap(program, node, node.inputs[0], indices)


def _numbers(program: Program, node: Node, index: int, attribute: str) -> list[int] | None:
    """Integers that are an input or, in older operator sets, an attribute."""
    given = program.optional(node, index)
    if given is not None:
        return [int(number) for number in given.reshape(-1)]
    value = node.attributes.get(attribute)
    return None if value is None else [int(number) for number in value]


def _taken(length: int, start: int, end: int, step: int) -> Array:
    """The indices of a slice; what lies outside is cut off."""
    start, end = (number + length if number < 0 else number for number in (start, end))
    if step > 0:
        return np.arange(min(max(start, 0), length), min(max(end, 0), length), step)
    return np.arange(min(max(start, -1), length - 1), min(max(end, -1), length - 1), step)


@lowers("Pad")
def pad(program: Program, node: Node) -> None:
    """Constant, edge, reflect and wrap; negative amounts cut off."""
    shape = program.type(node.inputs[0]).shape
    amounts = _numbers(program, node, 1, "pads")
    assert amounts is not None
    axes = _numbers(program, node, 3, "-") or range(len(shape))
    mode = node.attributes.get("mode", b"constant").decode()
    value = program.optional(node, 2)
    fill = node.attributes.get("value", 0.0) if value is None else value.reshape(-1)[0].item()
    indices = [np.arange(length) for length in shape]
    count = len(amounts) // 2
    for number, axis in enumerate(axes):
        indices[axis] = _padded(indices[axis], amounts[number], amounts[number + count], mode)
    add_remap(program, node, node.inputs[0], indices, fill)


def _padded(index: Array, before: int, after: int, mode: str) -> Array:
    index = index[max(-before, 0) : len(index) - max(-after, 0)]
    amounts = (max(before, 0), max(after, 0))
    if mode == "constant":
        return np.pad(index, amounts, constant_values=-1)
    return np.pad(index, amounts, mode=mode)  # type: ignore[call-overload, no-any-return]


@lowers("Tile")
def tile(program: Program, node: Node) -> None:
    """Whole copies along each axis."""
    repeats = program.constant(node, 1).reshape(-1)
    shape = program.type(node.inputs[0]).shape
    indices = [np.tile(np.arange(length), int(times)) for length, times in zip(shape, repeats, strict=True)]
    add_remap(program, node, node.inputs[0], indices)


@lowers("Expand")
def expand(program: Program, node: Node) -> None:
    """A copy, if nothing that computes can read the tensor with its axes repeated."""
    if program.type(node.inputs[0]).shape == program.type(node.outputs[0]).shape:
        program.views[node.outputs[0]] = node.inputs[0]
    else:
        lower_pointwise(program, node, _copy, inputs=node.inputs[:1])


def _copy(expression: Expression, node: Node, values: list[Value], dtype: str) -> Value:
    return values[0]


def gather_constant(program: Program, node: Node, axis: int, positions: Array) -> None:
    """Gather with indices that are known; negative ones count from the end."""
    shape = program.type(node.inputs[0]).shape
    indices = [np.arange(length) for length in shape]
    taken = positions.reshape(-1).astype(np.int64)
    if taken.min() < -shape[axis] or taken.max() >= shape[axis]:
        raise node.unsupported(f"indices beyond the {shape[axis]} of axis {axis}")
    indices[axis] = np.where(taken < 0, taken + shape[axis], taken)
    add_remap(program, node, node.inputs[0], indices)
