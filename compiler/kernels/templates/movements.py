"""Plain numbers moved, at any alignment, whatever they mean.

Copies follow strides: transposition, concatenation. Remaps follow tables: slices, padding, repetition, resizing to the
nearest. A gather picks rows of a table by number (embeddings), or numbers from places that other numbers say, one by
one. A scatter puts numbers at such places, one after the other: several may go to one place.
"""

import math
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import numpy as np
from tvm import tirx

from gangway.artifact.format import TargetSpec
from gangway.compiler.kernels.extents import expression
from gangway.compiler.kernels.plain_specs import (
    CopySpec,
    GatherPlacesSpec,
    GatherSpec,
    LineSegment,
    RemapSpec,
    ScatterSpec,
    ZerosSpec,
)
from gangway.compiler.kernels.specs import KernelPlan, KernelSpec
from gangway.compiler.kernels.templates import builder as T
from gangway.compiler.kernels.templates.builder import REFUSED, Argument, Buffer, Expr
from gangway.compiler.kernels.templates.tiling import FLOAT_BYTES, TASK_ELEMENTS, UnsupportedSpecError, knob, make_plan

MOST_ELEMENTS = 1 << 31  # beyond, indices of elements would not be 32-bit integers
_ARITHMETIC = ("float32", "int32", "int64")
Axis = tuple[int, int, int]  # length, input stride, output stride


def _plan_of_lines(spec: KernelSpec, kind: str, lines: int, length: int, item_bytes: int) -> KernelPlan:
    """The plan whose tasks move some lines of so many numbers."""
    per_task = min(lines, max(1, TASK_ELEMENTS // length))
    moved = 2 * per_task * length * item_bytes
    return make_plan(spec, {"lines": per_task}, -(-lines // per_task), f"{kind} {per_task} lines", moved, 1)


def copy_candidates(spec: CopySpec, target: TargetSpec) -> Iterator[KernelPlan]:
    """The only plan."""
    *outer, inner = _axes(spec)
    lines = math.prod(axis[0] for axis in outer)
    yield _plan_of_lines(spec, "copy", lines, inner[0], np.dtype(spec.dtype).itemsize)


def _axes(spec: CopySpec) -> list[Axis]:
    """The axes of the copy, outermost first, in order of the output; those that are one axis in both tensors merged."""
    axes: list[Axis] = []
    for length, source, into in zip(spec.shape, spec.input_strides, spec.output_strides, strict=True):
        if length == 1:
            continue
        if axes and axes[-1][1:] == (length * source, length * into):
            axes[-1] = (axes[-1][0] * length, source, into)
        else:
            axes.append((length, source, into))
    return axes or [(1, 1, 1)]


def copy_emit(spec: CopySpec, plan: KernelPlan, target: TargetSpec, symbol: str) -> Any:
    """The kernel. Arguments: x, y."""
    *outer, (length, source_step, into_step) = _axes(spec)
    per_task, lanes = knob(plan, "lines"), target.lanes
    lines = math.prod(axis[0] for axis in outer)

    def task(number: Expr, buffers: tuple[Buffer, ...]) -> None:
        x, y = buffers

        def line(index: Expr) -> None:
            rest, source, into = number * per_task + index, 0, 0
            for axis_length, axis_source, axis_into in reversed(outer):
                position = T.remainder(rest, axis_length)
                rest = T.quotient(rest, axis_length)
                source, into = source + position * axis_source, into + position * axis_into
            whole, single = divmod(length, lanes)

            def vector(step: Expr) -> None:
                first = step * lanes
                value = x[T.strided(source + first * source_step, source_step, lanes)]
                T.store(y, into + first * into_step, value, lanes, into_step)

            if whole:
                T.repeat(whole, vector)

            def number_at(index: Expr) -> None:
                column = whole * lanes + index
                T.store(y, into + column * into_step, x[source + column * source_step], 1)

            T.one_by_one(single, number_at)

        T.repeat(T.at_most(per_task, lines - number * per_task), line)

    # How far the two tensors reach; they may be parts of larger ones.
    reach = [1 + sum((axis[0] - 1) * axis[side] for axis in _axes(spec)) for side in (1, 2)]
    return T.kernel(
        symbol, [Argument(name, size, T.memory_dtype(spec.dtype)) for name, size in zip("xy", reach, strict=True)], task
    )


def zeros_candidates(spec: ZerosSpec, target: TargetSpec) -> Iterator[KernelPlan]:
    """The only plan."""
    yield make_plan(spec, {}, 1, "zeros for other sizes", 0, 1)


def zeros_emit(spec: ZerosSpec, plan: KernelPlan, target: TargetSpec, symbol: str) -> Any:
    """The kernel. Arguments: stamp, zeros."""

    def task(number: Expr, buffers: tuple[Buffer, ...]) -> None:
        stamp, zeros = buffers

        def renew() -> None:
            T.repeat(spec.words, lambda i: T.store(zeros, i, T.constant(0, 1, "int32"), 1))
            T.store(stamp, 0, T.constant(0, 1, "int32") + expression(spec.stamp), 1)

        T.when(stamp[0] != expression(spec.stamp), renew)

    return T.kernel(symbol, [Argument("stamp", 1, "int32"), Argument("zeros", spec.words, "int32")], task)


def remap_candidates(spec: RemapSpec, target: TargetSpec) -> Iterator[KernelPlan]:
    """The only plan."""
    kinds = "+".join(segment.kind for segment in spec.line)
    yield _plan_of_lines(spec, f"remap {kinds}", math.prod(spec.outer), spec.length, np.dtype(spec.dtype).itemsize)


def remap_emit(spec: RemapSpec, plan: KernelPlan, target: TargetSpec, symbol: str) -> Any:
    """The kernel. Arguments: x, table, y."""
    per_task, lines = knob(plan, "lines"), math.prod(spec.outer)
    begins = [0, *accumulate(spec.outer)]
    places = [0, *accumulate(segment.length for segment in spec.line)]

    def task(number: Expr, buffers: tuple[Buffer, ...]) -> None:
        _, table, y = buffers

        def line(index: Expr) -> None:
            into = (number * per_task + index) * spec.length
            rest, entries = number * per_task + index, []
            for begin, length in reversed(list(zip(begins, spec.outer, strict=False))):
                entries.append(T.bind(table[begin + T.remainder(rest, length)]))
                rest = T.quotient(rest, length)
            least = entries[0] if entries else tirx.const(0, "int32")
            for entry in entries[1:]:
                least = tirx.Min(least, entry)
            base = sum(entries[1:], entries[0]) if entries else tirx.const(0, "int32")

            def moved() -> None:
                for place, segment in zip(places, spec.line, strict=False):
                    _segment(spec, segment, target.lanes, buffers, base, into + place)

            def filled() -> None:
                _fill(spec, spec.length, target.lanes, y, into)

            T.either(least >= 0, moved, filled)

        T.repeat(T.at_most(per_task, lines - number * per_task), line)

    dtype = T.memory_dtype(spec.dtype)
    arguments = [Argument("x", spec.reach, dtype), Argument("table", max(1, spec.table), "int32")]
    return T.kernel(symbol, [*arguments, Argument("y", lines * spec.length, dtype)], task)


def _constant(spec: RemapSpec) -> Expr:
    if spec.dtype == "float16":
        return tirx.const(int(np.float16(spec.fill).view(np.uint16)), "uint16")
    if spec.dtype == "bfloat16":
        return tirx.const(int(np.float32(spec.fill).view(np.uint32)) >> 16, "uint16")
    return tirx.const(spec.fill, T.memory_dtype(spec.dtype))


def _fill(spec: RemapSpec, length: int, lanes: int, y: Buffer, into: Expr) -> None:
    whole, rest = divmod(length, lanes)
    if whole:
        T.repeat(whole, lambda step: T.store(y, into + step * lanes, T.splat(_constant(spec), lanes), lanes))
    for place in range(length - rest, length):
        T.store(y, into + place, _constant(spec), 1)


def _segment(
    spec: RemapSpec, segment: LineSegment, lanes: int, buffers: tuple[Buffer, ...], base: Expr, into: Expr
) -> None:
    """One segment of a line."""
    x, table, y = buffers
    if segment.kind == "fill":
        _fill(spec, segment.length, lanes, y, into)
        return
    if segment.kind == "table":

        def number(place: Expr) -> None:
            entry = T.bind(table[segment.source + place])
            found = x[T.at_least(base + entry, 0)]
            T.store(y, into + place, tirx.Select(entry >= 0, found, _constant(spec)), 1)

        T.repeat(segment.length, number)
        return
    whole, rest = divmod(segment.length, lanes)
    first, step = base + segment.source, segment.step

    def vector(index: Expr) -> None:
        source = first + index * (lanes * step)
        value = T.splat(x[source], lanes) if step == 0 else x[T.strided(source, step, lanes)]
        T.store(y, into + index * lanes, value, lanes)

    if whole:
        T.repeat(whole, vector)
    for place in range(segment.length - rest, segment.length):
        T.store(y, into + place, x[first + place * step], 1)


def gather_candidates(spec: GatherSpec, target: TargetSpec) -> Iterator[KernelPlan]:
    """The only plan. Raises `UnsupportedSpecError`."""
    if spec.outer * max(spec.length, spec.count) * spec.inner >= MOST_ELEMENTS:
        raise UnsupportedSpecError(f"gather from {spec.outer}x{spec.length}x{spec.inner} numbers")
    yield _plan_of_lines(spec, "gather", spec.outer * spec.count, spec.inner, spec.item_bytes)


def gather_emit(spec: GatherSpec, plan: KernelPlan, target: TargetSpec, symbol: str) -> Any:
    """The kernel. Arguments: data, indices, y."""
    per_task, lines = knob(plan, "lines"), spec.outer * spec.count
    lanes = target.lanes * FLOAT_BYTES // spec.item_bytes

    def task(number: Expr, buffers: tuple[Buffer, ...]) -> None:
        data, indices, y, refused = buffers

        def line(index: Expr) -> None:
            line_number = number * per_task + index
            outer, column = T.quotient(line_number, spec.count), T.remainder(line_number, spec.count)
            picked = T.checked_index(indices[column], spec.length, spec.index_dtype, refused)
            source = T.bind((outer * spec.length + picked) * spec.inner)
            into = line_number * spec.inner
            whole, rest = divmod(spec.inner, lanes)

            def vector(step: Expr) -> None:
                T.store(y, into + step * lanes, data[T.lanes_at(source + step * lanes, lanes)], lanes)

            if whole:
                T.repeat(whole, vector)
            if rest:
                first = whole * lanes
                T.repeat(rest, lambda i: T.store(y, into + first + i, data[source + first + i], 1))

        T.repeat(T.at_most(per_task, lines - number * per_task), line)

    dtype = f"int{8 * spec.item_bytes}"
    arguments = [
        Argument("data", spec.outer * spec.length * spec.inner, dtype),
        Argument("indices", spec.count, spec.index_dtype),
        Argument("y", lines * spec.inner, dtype),
        REFUSED,
    ]
    return T.kernel(symbol, arguments, task)


def gather_places_candidates(spec: GatherPlacesSpec, target: TargetSpec) -> Iterator[KernelPlan]:
    """The only plan."""
    yield _plan_of_lines(spec, "gather places of", math.prod(spec.shape[:-1]), spec.shape[-1], spec.item_bytes)


def gather_places_emit(spec: GatherPlacesSpec, plan: KernelPlan, target: TargetSpec, symbol: str) -> Any:
    """The kernel. Arguments: data, indices, y, refused."""
    per_task, lines, length = knob(plan, "lines"), math.prod(spec.shape[:-1]), spec.shape[-1]

    def task(number: Expr, buffers: tuple[Buffer, ...]) -> None:
        data, indices, y, refused = buffers

        def picked(index: Expr) -> Expr:
            """What the indices add to a place."""
            return sum(
                T.checked_index(indices[index + item.step], item.length, spec.index_dtype, refused) * item.stride
                for item in spec.picked
            )

        def line(offset: Expr) -> None:
            rest = line_number = T.bind(number * per_task + offset)
            place, index = 0, 0
            for axis in reversed(range(len(spec.shape) - 1)):
                at, rest = T.remainder(rest, spec.shape[axis]), T.quotient(rest, spec.shape[axis])
                place, index = place + at * spec.strides[axis], index + at * spec.index_strides[axis]
            step, index_step = spec.strides[-1], spec.index_strides[-1]
            into = line_number * length
            if index_step:
                T.repeat(
                    length, lambda i: T.store(y, into + i, data[place + i * step + picked(index + i * index_step)], 1)
                )
            else:
                begin = T.bind(place + picked(index))
                T.repeat(length, lambda i: T.store(y, into + i, data[begin + i * step], 1))

        T.repeat(T.at_most(per_task, lines - number * per_task), line)

    dtype = f"int{8 * spec.item_bytes}"
    arguments = [
        Argument("data", spec.elements, dtype),
        Argument("indices", _index_count(spec), spec.index_dtype),
        Argument("y", math.prod(spec.shape), dtype),
        REFUSED,
    ]
    return T.kernel(symbol, arguments, task)


def scatter_candidates(spec: ScatterSpec, target: TargetSpec) -> Iterator[KernelPlan]:
    """The only plan, of one task. Raises `UnsupportedSpecError`."""
    if spec.reduction != "none" and spec.dtype not in _ARITHMETIC:
        raise UnsupportedSpecError(f"scattered {spec.dtype} with the reduction {spec.reduction}")
    yield make_plan(spec, {}, 1, f"scatter {spec.reduction} {math.prod(spec.shape)} numbers", 0, 1)


def scatter_emit(spec: ScatterSpec, plan: KernelPlan, target: TargetSpec, symbol: str) -> Any:
    """The kernel. Arguments: data, indices, updates, y."""

    def task(number: Expr, buffers: tuple[Buffer, ...]) -> None:
        data, indices, updates, y, refused = buffers
        T.repeat(spec.elements, lambda index: T.store(y, index, data[index], 1))

        def axis(at: int, update: Expr, place: Expr, index: Expr) -> None:
            """The loops from axis `at` of the updates on."""
            if at < len(spec.shape):
                stride, inner = math.prod(spec.shape[at + 1 :]), at
                T.repeat(
                    spec.shape[at],
                    lambda i: axis(
                        inner + 1,
                        update + i * stride,
                        place + i * spec.strides[inner],
                        index + i * spec.index_strides[inner],
                    ),
                )
                return
            for picked in spec.picked:
                read = indices[index + picked.step]
                place = place + T.checked_index(read, picked.length, spec.index_dtype, refused) * picked.stride
            where = T.bind(place + tirx.const(0, "int32"))
            T.store(y, where, _combined(spec, y[where], updates[update]), 1)

        axis(0, 0, 0, 0)

    number = T.memory_dtype(spec.dtype)
    arguments = [
        Argument("data", spec.elements, number),
        Argument("indices", _index_count(spec), spec.index_dtype),
        Argument("updates", math.prod(spec.shape), number),
        Argument("y", spec.elements, number),
        REFUSED,
    ]
    return T.kernel(symbol, arguments, task)


def _index_count(spec: GatherPlacesSpec | ScatterSpec) -> int:
    """How far indices reach."""
    last = sum((length - 1) * stride for length, stride in zip(spec.shape, spec.index_strides, strict=True))
    return 1 + last + max(picked.step for picked in spec.picked)


def _combined(spec: ScatterSpec, old: Expr, new: Expr) -> Expr:
    match spec.reduction:
        case "none":
            return new
        case "add":
            return old + new
        case "mul":
            return old * new
        case "max":
            return tirx.Max(old, new)
        case "min":
            return tirx.Min(old, new)
