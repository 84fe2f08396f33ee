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
from gangway.compiler.kernels.templates import builder as T
from gangway.compiler.kernels.templates.builder import Argument, Buffer, Expr, Register
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
    lanes = T.vector_lanes(target.lanes * FLOAT_BYTES // np.dtype(spec.dtype).itemsize, spec.columns)

    def task(number: Expr, buffers: tuple[Buffer, ...]) -> None:
        x, places, y = buffers
        heap = _Heap(spec, T.scratch(count, spec.dtype), T.scratch(count, "int32"))

        def row(index: Expr) -> None:
            line = T.bind(number * per_task + index)
            begin, into = T.bind(line * spec.columns), T.bind(line * count)

            def first(place: Expr) -> None:
                heap.sink(count - 1 - place, count, x[begin + place], place)

            def look(place: Expr) -> None:
                T.when(
                    _better(spec, x[begin + place], heap.values[0]),
                    lambda: heap.sink(0, count, x[begin + place], place),
                )

            def vector(step: Expr) -> None:
                place = T.bind(count + step * lanes)
                values = T.keep(x[T.lanes_at(begin + place, lanes)])
                better = _better(spec, values, T.splat(T.keep(heap.values[0]), lanes))
                flags = tirx.Select(better, T.constant(1, lanes, "int32"), T.constant(0, lanes, "int32"))
                found = T.lane_maximum(Register(lanes, flags, "int32"), lanes, "int32")
                T.when(found > 0, lambda: T.repeat(lanes, lambda lane: look(place + lane)))

            def last(done: Expr) -> None:
                place, end = T.bind(heap.places[0]), T.bind(count - 1 - done)
                T.store(y, into + end, x[begin + place], 1)
                T.store(places, into + end, tirx.Cast("int64", place), 1)
                heap.sink(0, end, heap.values[end], heap.places[end])

            T.repeat(count, first)
            whole, rest = divmod(spec.columns - count, lanes)
            if whole:
                T.repeat(whole, vector)
            if rest:
                T.repeat(rest, lambda i: look(count + whole * lanes + i))
            T.repeat(count, last)

        T.repeat(T.at_most(per_task, spec.rows - number * per_task), row)

    results = spec.rows * count
    arguments = [
        Argument("x", spec.rows * spec.columns, spec.dtype),
        Argument("places", results, "int64"),
        Argument("y", results, spec.dtype),
    ]
    return T.kernel(symbol, arguments, task)


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
        number, place = T.keep(number), T.bind(T.constant(place, 1, "int32"))
        at, end = Register(1, T.constant(start, 1, "int32"), "int32"), T.bind(T.constant(size, 1, "int32"))

        def move(child: Expr, value: Expr, its_place: Expr) -> None:
            T.store(self.values, at.value, value, 1)
            T.store(self.places, at.value, its_place, 1)
            at.set(child)

        left = Register(1, at.value * 2 + 1, "int32")
        with ir.While(left.value < end):
            a = T.bind(left.value)
            b = T.bind(T.at_most(a + 1, end - 1))  # the left one again, if there is no right one
            first, second = T.keep(self.values[a]), T.keep(self.values[b])
            first_place, second_place = T.bind(self.places[a]), T.bind(self.places[b])
            left.set(end)  # which ends the loop

            def down(child: Expr, value: Expr, its_place: Expr) -> None:
                move(child, value, its_place)
                left.set(at.value * 2 + 1)

            def worse() -> None:
                T.either(
                    self._better(second, second_place, first, first_place),
                    lambda: down(a, first, first_place),
                    lambda: down(b, second, second_place),
                )

            def right_one() -> None:
                T.when(self._better(number, place, second, second_place), lambda: down(b, second, second_place))

            T.either(self._better(number, place, first, first_place), worse, right_one)
        move(at.value, number, place)

    def _better(self, a: Expr, a_place: Expr, b: Expr, b_place: Expr) -> Expr:
        """Whether a number is better than another one."""
        return tirx.Or(_better(self.spec, a, b), tirx.And(tirx.EQ(a, b), a_place < b_place))


def _better(spec: TopSpec, a: Expr, b: Expr) -> Expr:
    return a > b if spec.largest else a < b
