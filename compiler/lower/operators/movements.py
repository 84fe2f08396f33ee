"""Operators that move numbers: views, transposition, concatenation, slices, padding, gather and scatter.

Views leave the numbers and their order alone, and cost nothing unless the layout differs. Slice, Pad, Tile, Expand and
Gather with constant indices are remaps: where each number comes from is known per axis. Scatter and the other kinds of
Gather read an index for each number, or for each slice.
"""

import math
from collections.abc import Sequence
from typing import Literal, cast

import numpy as np

from gangway.compiler.frontend.graph import Node, TensorType
from gangway.compiler.frontend.shapes.rules import slice_range
from gangway.compiler.kernels.plain_specs import (
    GatherPlacesSpec,
    GatherSpec,
    LineSegment,
    Picked,
    RemapSpec,
    ScatterReduction,
    ScatterSpec,
    contiguous,
)
from gangway.compiler.kernels.specs import Array, KernelSpec
from gangway.compiler.lower.layers import (
    AdjacentPart,
    Concat,
    Expression,
    Pick,
    Program,
    StridedCut,
    Transpose,
    Value,
    lowers,
)
from gangway.compiler.lower.operators.elementwise import lower_pointwise

_MOST_SEGMENTS = 8


@lowers("Identity", "Dropout", "Flatten", "Reshape", "Squeeze", "Unsqueeze")
def view(program: Program, node: Node) -> None:
    """Another shape of the same tensor, which shape inference has found already."""
    if node.attributes.get("training_mode", 0):
        raise node.unsupported("training mode")
    program.views[node.outputs[0]] = node.inputs[0]


@lowers("Transpose")
def transpose(program: Program, node: Node) -> None:
    """Any order of axes; nothing moves if those longer than 1 keep theirs."""
    shape = program.type(node.inputs[0]).shape
    order = tuple(node.attributes.get("perm", range(len(shape))[::-1]))
    long = [axis for axis in order if shape[axis] > 1]
    if long == sorted(long):
        program.views[node.outputs[0]] = node.inputs[0]
    else:
        program.add(node, Transpose(order), node.inputs)


@lowers("Concat")
def concat(program: Program, node: Node) -> None:
    """Tensors beside each other; those without numbers add nothing."""
    rank = len(program.type(node.outputs[0]).shape)
    constants = program.graph.constants
    inputs = tuple(name for name in node.inputs if name not in constants or constants[name].size)
    program.constants.update((name, constants[name]) for name in inputs if name in constants)
    program.add(node, Concat(node.attributes["axis"] % rank), inputs)


@lowers("StridedCopy")
def strided_copy(program: Program, node: Node) -> None:
    """What `frontend/views.py` has found to be cut out of a tensor."""
    program.add(node, StridedCut(tuple(node.attributes["strides"]), node.attributes["offset"]), node.inputs)


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
        indices[axis] = np.array(slice_range(shape[axis], starts[number], ends[number], step), np.int64)
    add_remap(program, node, node.inputs[0], indices)


def _numbers(program: Program, node: Node, index: int, attribute: str) -> list[int] | None:
    """Integers that are an input or, in older operator sets, an attribute."""
    given = program.optional(node, index)
    if given is not None:
        return [int(number) for number in given.reshape(-1)]
    value = node.attributes.get(attribute)
    return None if value is None else [int(number) for number in value]


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


@lowers("Gather")
def gather(program: Program, node: Node) -> None:
    """Items of data along `axis`, whose numbers are an activation or constant."""
    data, indices = node.inputs
    constants = program.graph.constants
    kinds = [constants[name] if name in constants else program.type(name) for name in node.inputs]
    shape, positions = kinds[0].shape, kinds[1].shape
    axis = node.attributes.get("axis", 0) % len(shape)
    outer, length, inner = math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])
    if indices in constants and math.prod(positions) == 1:
        index = int(constants[indices].reshape(()))
        if not -length <= index < length:
            raise node.unsupported(f"index {index} of {length}")
        program.add(node, Pick(outer, length, inner, index % length), (data,))
        return
    if indices in constants and data not in constants:
        gather_constant(program, node, axis, constants[indices])
        return
    index_dtype = np.dtype(kinds[1].dtype).name
    if index_dtype not in ("int32", "int64"):
        raise node.unsupported(f"indices of type {index_dtype}")
    item_bytes = np.dtype(kinds[0].dtype).itemsize
    dtype = cast(Literal["int32", "int64"], index_dtype)
    program.add(node, GatherSpec(outer, length, inner, math.prod(positions), item_bytes, dtype), node.inputs)


@lowers("GatherElements", "Scatter", "ScatterElements")
def elements(program: Program, node: Node) -> None:
    """Each number has its own place in data, but along `axis`, where the index says it."""
    data, indices = (_type(program, name) for name in node.inputs[:2])
    axis = node.attributes.get("axis", 0) % len(data.shape)
    strides = contiguous(data.shape)
    picked = (Picked(data.shape[axis], strides[axis], 0),)
    fixed = tuple(0 if at == axis else stride for at, stride in enumerate(strides))
    _add_places(program, node, (data, indices), fixed, contiguous(indices.shape), picked)


@lowers("GatherND", "ScatterND")
def slices(program: Program, node: Node) -> None:
    """The last axis of the indices says where a slice of data begins, behind the first `batch_dims` axes."""
    data, indices = (_type(program, name) for name in node.inputs[:2])
    outer, depth, batch = len(indices.shape) - 1, indices.shape[-1], node.attributes.get("batch_dims", 0)
    strides = contiguous(data.shape)
    picked = tuple(Picked(data.shape[axis], strides[axis], axis - batch) for axis in range(batch, batch + depth))
    places = (*strides[:batch], *(0 for _ in range(outer - batch)), *strides[batch + depth :])
    index_strides = (*contiguous(indices.shape)[:outer], *(0 for _ in strides[batch + depth :]))
    _add_places(program, node, (data, indices), places, index_strides, picked)


def _add_places(
    program: Program,
    node: Node,
    kinds: tuple[TensorType, TensorType],
    strides: tuple[int, ...],
    index_strides: tuple[int, ...],
    picked: tuple[Picked, ...],
) -> None:
    """Add the layer that reads data at such places, or puts updates there."""
    data, indices = kinds
    index_dtype, count = _index_dtype(node, indices), math.prod(data.shape)
    spec: KernelSpec
    if node.operator.startswith("Scatter"):
        reduction = cast(ScatterReduction, node.attributes.get("reduction", b"none").decode())
        shape = _type(program, node.inputs[2]).shape
        spec = ScatterSpec(data.dtype, index_dtype, count, shape, strides, index_strides, picked, reduction)
    else:
        shape = program.type(node.outputs[0]).shape or (1,)
        item_bytes = np.dtype(data.dtype).itemsize
        spec = GatherPlacesSpec(item_bytes, index_dtype, count, shape, strides or (0,), index_strides or (0,), picked)
    program.add(node, spec, node.inputs)


def _index_dtype(node: Node, indices: TensorType) -> Literal["int32", "int64"]:
    if indices.dtype not in ("int32", "int64"):
        raise node.unsupported(f"indices of type {indices.dtype}")
    return cast(Literal["int32", "int64"], indices.dtype)


def _type(program: Program, name: str) -> TensorType:
    value = program.graph.constants.get(name)
    return program.type(name) if value is None else TensorType(value.shape, value.dtype.name)


def add_remap(program: Program, node: Node, name: str, indices: Sequence[Array], fill: float | int = 0) -> None:
    """Add the layer that moves tensor `name` as `indices` say, or make it a view.

    There is one array for each axis of the result: which index of the same axis of the source each number shows, -1
    where there is none.
    """
    kind = program.type(name)
    offsets = [
        np.where(index < 0, -1, index * step).astype(np.int64)
        for index, step in zip(indices, contiguous(kind.shape), strict=True)
    ]
    axes = _merged(offsets)
    if len(axes) == 1 and (axes[0] >= 0).all() and (np.diff(axes[0]) == 1).all():
        skipped = int(axes[0][0])
        if len(axes[0]) == math.prod(kind.shape):
            program.views[node.outputs[0]] = name
        else:
            program.add(node, AdjacentPart(skipped), (name,))
        return
    *outer, last = axes
    line, entries = _line(last, sum(len(axis) for axis in outer))
    table = np.concatenate([*outer, *entries, np.zeros(0, np.int64)]).astype(np.int32)
    tables = f"{node.outputs[0]}:table"
    program.constants[tables] = table if table.size else np.zeros(1, np.int32)
    lengths = tuple(len(axis) for axis in outer)
    spec = RemapSpec(kind.dtype, lengths, line, math.prod(kind.shape), table.size, fill)
    program.add(node, spec, (name, tables))


def _merged(offsets: list[Array]) -> list[Array]:
    """Drop axes of one number, and put together axes that are one run."""
    axes: list[Array] = []
    constant = 0
    for axis in offsets:
        if len(axis) == 1 and axis[0] >= 0:
            constant += int(axis[0])
            continue
        if axes and _continues(axes[-1], axis):
            axes[-1] = (axes[-1][:, None] + axis[None, :]).reshape(-1)
        else:
            axes.append(axis)
    if not axes:
        return [np.array([constant])]
    axes[-1] = np.where(axes[-1] < 0, -1, axes[-1] + constant)
    return axes


def _continues(outer: Array, inner: Array) -> bool:
    """Whether the inner axis is a run of steps, of which the outer one has the next where it ends."""
    if min(outer.min(), inner.min()) < 0 or inner[0] != 0:
        return False
    steps = np.unique(np.diff(inner))
    return len(steps) == 1 and bool((np.diff(outer) == steps[0] * len(inner)).all())


def _line(offsets: Array, begin: int) -> tuple[tuple[LineSegment, ...], list[Array]]:
    """The innermost axis as a few runs, or as a table, which begins at entry `begin`."""
    segments: list[LineSegment] = []
    start = 0
    while start < len(offsets) and len(segments) <= _MOST_SEGMENTS:
        length, step = _run(offsets, start)
        kind: LineSegment = (
            LineSegment("fill", length) if offsets[start] < 0 else LineSegment("run", length, int(offsets[start]), step)
        )
        segments.append(kind)
        start += length
    if start < len(offsets) or len(segments) > _MOST_SEGMENTS:
        return (LineSegment("table", len(offsets), begin),), [offsets]
    return tuple(segments), []


def _run(offsets: Array, start: int) -> tuple[int, int]:
    """How many numbers from `start` on go on as they begin, and in which step."""
    rest = offsets[start:]
    if rest[0] < 0:
        outside = rest >= 0
        return (int(outside.argmax()) if outside.any() else len(rest)), 0
    if len(rest) == 1 or rest[1] < 0:
        return 1, 1
    step = int(rest[1] - rest[0])
    broken = (np.diff(rest) != step) | (rest[1:] < 0)
    return (int(broken.argmax()) + 1 if broken.any() else len(rest)), step
