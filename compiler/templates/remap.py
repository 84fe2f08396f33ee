"""Plain numbers moved by tables: slices, padding, repetition, resizing to the nearest. Any alignment."""

import math
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import numpy as np
from tvm import tirx

from gangway.artifact.format import TargetSpec
from gangway.compiler.specs import KernelPlan, RemapSpec, Segment
from gangway.compiler.templates.base import TASK_ELEMENTS, knob, make_plan
from gangway.compiler.templates.builder import (
    Argument,
    Buffer,
    Expr,
    at_most,
    bind,
    either,
    kernel,
    quotient,
    remainder,
    repeat,
    splat,
    store,
    strided,
)
from gangway.compiler.templates.numbers import memory_dtype


def candidates(spec: RemapSpec, target: TargetSpec) -> Iterator[KernelPlan]:
    """The only plan."""
    lines = math.prod(spec.outer)
    per_task = min(lines, max(1, TASK_ELEMENTS // spec.length))
    moved = 2 * per_task * spec.length * np.dtype(spec.dtype).itemsize
    kinds = "+".join(segment.kind for segment in spec.line)
    yield make_plan(spec, {"lines": per_task}, -(-lines // per_task), f"remap {kinds} {per_task} lines", moved, 1)


def emit(plan: KernelPlan, target: TargetSpec, symbol: str) -> Any:
    """The kernel. Arguments: x, table, y."""
    spec = plan.spec
    assert isinstance(spec, RemapSpec)
    per_task, lines = knob(plan, "lines"), math.prod(spec.outer)
    begins = [0, *accumulate(spec.outer)]
    places = [0, *accumulate(segment.length for segment in spec.line)]

    def task(number: Expr, buffers: tuple[Buffer, ...]) -> None:
        _, table, y = buffers

        def line(index: Expr) -> None:
            into = (number * per_task + index) * spec.length
            rest, entries = number * per_task + index, []
            for begin, length in reversed(list(zip(begins, spec.outer, strict=False))):
                entries.append(bind(table[begin + remainder(rest, length)]))
                rest = quotient(rest, length)
            least = entries[0] if entries else tirx.const(0, "int32")
            for entry in entries[1:]:
                least = tirx.Min(least, entry)
            base = sum(entries[1:], entries[0]) if entries else tirx.const(0, "int32")

            def moved() -> None:
                for place, segment in zip(places, spec.line, strict=False):
                    _segment(spec, segment, target.lanes, buffers, base, into + place)

            def filled() -> None:
                _fill(spec, spec.length, target.lanes, y, into)

            either(least >= 0, moved, filled)

        repeat(at_most(per_task, lines - number * per_task), line)

    dtype = memory_dtype(spec.dtype)
    arguments = [Argument("x", spec.reach, dtype), Argument("table", max(1, spec.table), "int32")]
    return kernel(symbol, [*arguments, Argument("y", lines * spec.length, dtype)], task)


def _constant(spec: RemapSpec) -> Expr:
    if spec.dtype == "float16":
        return tirx.const(int(np.float16(spec.fill).view(np.uint16)), "uint16")
    return tirx.const(spec.fill, memory_dtype(spec.dtype))


def _fill(spec: RemapSpec, length: int, lanes: int, y: Buffer, into: Expr) -> None:
    whole, rest = divmod(length, lanes)
    if whole:
        repeat(whole, lambda step: store(y, into + step * lanes, splat(_constant(spec), lanes), lanes))
    for place in range(length - rest, length):
        store(y, into + place, _constant(spec), 1)


def _segment(
    spec: RemapSpec, segment: Segment, lanes: int, buffers: tuple[Buffer, ...], base: Expr, into: Expr
) -> None:
    """One segment of a line."""
    x, table, y = buffers
    if segment.kind == "fill":
        _fill(spec, segment.length, lanes, y, into)
        return
    if segment.kind == "table":

        def number(place: Expr) -> None:
            entry = bind(table[segment.source + place])
            found = x[tirx.Max(base + entry, 0)]
            store(y, into + place, tirx.Select(entry >= 0, found, _constant(spec)), 1)

        repeat(segment.length, number)
        return
    whole, rest = divmod(segment.length, lanes)
    first, step = base + segment.source, segment.step

    def vector(index: Expr) -> None:
        source = first + index * (lanes * step)
        value = splat(x[source], lanes) if step == 0 else x[strided(source, step, lanes)]
        store(y, into + index * lanes, value, lanes)

    if whole:
        repeat(whole, vector)
    for place in range(segment.length - rest, segment.length):
        store(y, into + place, x[first + place * step], 1)
