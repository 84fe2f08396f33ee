"""The best numbers of rows, by a heap of those found so far, whose top is the worst of them.

A vector of numbers is looked at one by one only if one of them is better than the top.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm import tirx
from tvm.script.ir_builder import tirx as ir

from gangway.artifact.format import TargetSpec
from gangway.compiler.kernels.plain_specs import MOST_BEST, TopSpec
from gangway.compiler.kernels.specs import KernelPlan
from gangway.compiler.kernels.templates.builder import (
    Argument,
    Buffer,
    Expr,
    Register,
    at_most,
    bind,
    constant,
    either,
    keep,
    kernel,
    lane_maximum,
    lanes_at,
    repeat,
    scratch,
    splat,
    store,
    vector_lanes,
    when,
)
from gangway.compiler.kernels.templates.tiling import FLOAT_BYTES, TASK_ELEMENTS, UnsupportedSpecError, knob, make_plan


def candidates(spec: TopSpec, target: TargetSpec) -> Iterator[KernelPlan]:
    """The only plan: a task is some rows. Raises `UnsupportedSpecError`."""
    if spec.count > MOST_BEST:
        raise UnsupportedSpecError(f"the best {spec.count} numbers; {MOST_BEST} are possible")
    rows = min(spec.rows, max(1, TASK_ELEMENTS * spec.rows // spec.flops))
    moved = rows * (spec.columns + 2 * spec.count) * np.dtype(spec.dtype).itemsize
    text = f"best {spec.count} of {spec.columns}, {rows} rows"
    yield make_plan(spec, {"rows": rows}, -(-spec.rows // rows), text, moved, 1)


def emit(spec: TopSpec, plan: KernelPlan, target: TargetSpec, symbol: str) -> Any:
    """The kernel. Arguments: x, places, y."""
    per_task, count = knob(plan, "rows"), spec.count
    lanes = vector_lanes(target.lanes * FLOAT_BYTES // np.dtype(spec.dtype).itemsize, spec.columns)

    def task(number: Expr, buffers: tuple[Buffer, ...]) -> None:
        x, places, y = buffers
        heap = _Heap(spec, scratch(count, spec.dtype), scratch(count, "int32"))

        def row(index: Expr) -> None:
            line = bind(number * per_task + index)
            begin, into = bind(line * spec.columns), bind(line * count)

            def first(place: Expr) -> None:
                heap.sink(count - 1 - place, count, x[begin + place], place)

            def look(place: Expr) -> None:
                when(
                    _better(spec, x[begin + place], heap.values[0]),
                    lambda: heap.sink(0, count, x[begin + place], place),
                )

            def vector(step: Expr) -> None:
                place = bind(count + step * lanes)
                values = keep(x[lanes_at(begin + place, lanes)])
                better = _better(spec, values, splat(keep(heap.values[0]), lanes))
                flags = tirx.Select(better, constant(1, lanes, "int32"), constant(0, lanes, "int32"))
                found = lane_maximum(Register(lanes, flags, "int32"), lanes, "int32")
                when(found > 0, lambda: repeat(lanes, lambda lane: look(place + lane)))

            def last(done: Expr) -> None:
                place, end = bind(heap.places[0]), bind(count - 1 - done)
                store(y, into + end, x[begin + place], 1)
                store(places, into + end, tirx.Cast("int64", place), 1)
                heap.sink(0, end, heap.values[end], heap.places[end])

            repeat(count, first)
            whole, rest = divmod(spec.columns - count, lanes)
            if whole:
                repeat(whole, vector)
            if rest:
                repeat(rest, lambda i: look(count + whole * lanes + i))
            repeat(count, last)

        repeat(at_most(per_task, spec.rows - number * per_task), row)

    results = spec.rows * count
    arguments = [
        Argument("x", spec.rows * spec.columns, spec.dtype),
        Argument("places", results, "int64"),
        Argument("y", results, spec.dtype),
    ]
    return kernel(symbol, arguments, task)


@dataclass(frozen=True)
class _Heap:
    """A binary heap of numbers and their places: neither child is worse than its parent."""

    spec: TopSpec
    values: Buffer
    places: Buffer

    def sink(self, start: Expr, size: Expr, number: Expr, place: Expr) -> None:
        """Put a number at `start`, or as far below it in a heap of `size` as there are worse ones, which go up.

        Of two children the worse one goes up: the left one if the right one is better than it. All choices are
        branches: they are foreseen half of the time, while what is selected waits for what it is selected by.
        """
        number, place = keep(number), bind(constant(place, 1, "int32"))
        at, end = Register(1, constant(start, 1, "int32"), "int32"), bind(constant(size, 1, "int32"))

        def move(child: Expr, value: Expr, its_place: Expr) -> None:
            store(self.values, at.value, value, 1)
            store(self.places, at.value, its_place, 1)
            at.set(child)

        left = Register(1, at.value * 2 + 1, "int32")
        with ir.While(left.value < end):
            a = bind(left.value)
            b = bind(at_most(a + 1, end - 1))  # the left one again, if there is no right one
            first, second = keep(self.values[a]), keep(self.values[b])
            first_place, second_place = bind(self.places[a]), bind(self.places[b])
            left.set(end)  # which ends the loop

            def down(child: Expr, value: Expr, its_place: Expr) -> None:
                move(child, value, its_place)
                left.set(at.value * 2 + 1)

            def worse() -> None:
                either(
                    self._better(second, second_place, first, first_place),
                    lambda: down(a, first, first_place),
                    lambda: down(b, second, second_place),
                )

            def right_one() -> None:
                when(self._better(number, place, second, second_place), lambda: down(b, second, second_place))

            either(self._better(number, place, first, first_place), worse, right_one)
        move(at.value, number, place)

    def _better(self, a: Expr, a_place: Expr, b: Expr, b_place: Expr) -> Expr:
        """Whether a number is better than another one."""
        return tirx.Or(_better(self.spec, a, b), tirx.And(tirx.EQ(a, b), a_place < b_place))


def _better(spec: TopSpec, a: Expr, b: Expr) -> Expr:
    return a > b if spec.largest else a < b
