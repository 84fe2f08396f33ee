"""Sums, products, extremes and their places, over any axes of a plain tensor.

Where the innermost axis is reduced, a result's numbers are taken in vectors whose lanes are combined at the end; where
it is kept, a vector holds as many results. What is left of a kept axis overlaps with what came before.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm import tirx

from gangway.artifact.format import TargetSpec
from gangway.compiler.kernels.plain_specs import Instruction, ReduceSpec
from gangway.compiler.kernels.specs import KernelPlan
from gangway.compiler.kernels.templates import builder as T
from gangway.compiler.kernels.templates.builder import FLOATS, Argument, Buffer, Expr, Register
from gangway.compiler.kernels.templates.instructions import evaluate
from gangway.compiler.kernels.templates.tiling import TASK_ELEMENTS, knob, make_plan

_COMBINE = {"sum": "add", "wrapping_sum": "add", "prod": "mul", "max": "max", "min": "min"}
_UNROLLED = 4  # independent sums, to hide the latency of additions


@dataclass(frozen=True)
class _Axis:
    """An axis of x: its length and the distance of neighbours in x."""

    length: int
    step: int


@dataclass(frozen=True)
class _Loops:
    """The axes of x by what becomes of them. `inner_kept`: the last axis is kept, and not among `kept`."""

    kept: tuple[_Axis, ...]
    reduced: tuple[_Axis, ...]
    inner_kept: int
    inner_reduced: int


def _loops(spec: ReduceSpec) -> _Loops:
    steps = [math.prod(spec.shape[index + 1 :]) for index in range(len(spec.shape))]
    axes = [_Axis(length, step) for length, step in zip(spec.shape, steps, strict=True)]
    *outer, last = zip(axes, spec.reduced, strict=True)
    kept = tuple(axis for axis, reduced in outer if not reduced)
    over = tuple(axis for axis, reduced in outer if reduced)
    return _Loops(kept, over, 1 if last[1] else last[0].length, last[0].length if last[1] else 1)


def candidates(spec: ReduceSpec, target: TargetSpec) -> Iterator[KernelPlan]:
    """The only plan: a task computes some lines of results, as long as the kept innermost axis, or parts of one."""
    loops = _loops(spec)
    lines = math.prod(axis.length for axis in loops.kept)
    depth = loops.inner_reduced * math.prod(axis.length for axis in loops.reduced)
    part = min(loops.inner_kept, max(target.lanes * 4, TASK_ELEMENTS // depth // target.lanes * target.lanes))
    per_task = min(lines, max(1, TASK_ELEMENTS // (part * depth)))
    tasks = -(-lines // per_task) * -(-loops.inner_kept // part)
    moved = per_task * part * (depth + 1) * np.dtype(spec.dtype).itemsize
    text = f"{spec.operator} of {depth}, {per_task}x{part}"
    yield make_plan(spec, {"lines": per_task, "part": part}, tasks, text, moved, 1)


def emit(spec: ReduceSpec, plan: KernelPlan, target: TargetSpec, symbol: str) -> Any:
    """The kernel. Arguments: x, y."""
    loops, per_task, part = _loops(spec), knob(plan, "lines"), knob(plan, "part")
    lines = math.prod(axis.length for axis in loops.kept)
    parts = -(-loops.inner_kept // part)
    lanes = T.vector_lanes(target.lanes, loops.inner_kept) if loops.inner_kept > 1 else target.lanes

    def task(number: Expr, buffers: tuple[Buffer, ...]) -> None:
        x, y = buffers
        first, begin = T.quotient(number, parts) * per_task, T.remainder(number, parts) * part

        def line(index: Expr) -> None:
            rest, base = first + index, 0
            for axis in reversed(loops.kept):
                base, rest = base + T.remainder(rest, axis.length) * axis.step, T.quotient(rest, axis.length)
            work = _Work(spec, loops, x, base)
            if loops.inner_kept == 1:
                T.store(y, first + index, work.across(lanes), 1)
                return

            def vector(step: Expr) -> None:
                place = T.at_most(begin + step * lanes, loops.inner_kept - lanes)
                T.store(y, (first + index) * loops.inner_kept + place, work.down(place, lanes), lanes)

            T.repeat(T.at_most(-(-part // lanes), T.quotient(loops.inner_kept - begin + lanes - 1, lanes)), vector)

        T.repeat(T.at_most(per_task, lines - first), line)

    result = "int64" if spec.operator.endswith(("argmax", "argmin")) else T.memory_dtype(spec.dtype)
    x, y = math.prod(spec.shape), lines * loops.inner_kept
    return T.kernel(symbol, [Argument("x", x, T.memory_dtype(spec.dtype)), Argument("y", y, result)], task)


@dataclass(frozen=True)
class _Work:
    """The reductions of one line of results, whose numbers begin at `base`."""

    spec: ReduceSpec
    loops: _Loops
    x: Buffer
    base: Expr

    @property
    def _dtype(self) -> str:
        return T.register_dtype(self.spec.number)

    def down(self, place: Expr, lanes: int) -> Expr:
        """Results `place` and following, in a vector."""
        total = self._start(lanes)
        self._outer(lambda offset, index: self._take(total, offset + place, index, lanes))
        return self._finish(total.value(self.spec), place, lanes)

    def across(self, lanes: int) -> Expr:
        """One result, of numbers that lie side by side."""
        length = self.loops.inner_reduced
        whole, rest = divmod(length, lanes)
        unrolled = min(_UNROLLED, whole) or 1
        wide = [self._start(lanes) for _ in range(unrolled if whole else 0)]
        single = self._start(1)

        def line(offset: Expr, index: Expr) -> None:
            def some(step: Expr) -> None:
                for u, total in enumerate(wide):
                    place = (step * unrolled + u) * lanes
                    self._take(total, offset + place, index * length + place, lanes, along=True)

            if whole:
                T.repeat(whole // unrolled, some)
            for u in range(whole % unrolled):
                place = (whole - whole % unrolled + u) * lanes
                self._take(wide[u], offset + place, index * length + place, lanes, along=True)

            def one(step: Expr) -> None:
                place = whole * lanes + step
                self._take(single, offset + place, index * length + place, 1)

            if rest:
                T.repeat(rest, one)

        self._outer(line)
        for total in wide:
            T.repeat(lanes, lambda lane, total=total: single.merge(self.spec, total, lane))  # type: ignore[misc]
        return self._finish(single.value(self.spec), 0, 1)

    def _outer(self, body: Callable[[Expr, Expr], None]) -> None:
        """`body(offset, number)` for every combination of the outer reduced axes."""

        def nest(axes: tuple[_Axis, ...], offset: Expr, number: Expr) -> None:
            if not axes:
                body(offset, number)
                return
            axis, *others = axes
            T.repeat(
                axis.length,
                lambda index: nest(tuple(others), offset + index * axis.step, number * axis.length + index),
            )

        nest(self.loops.reduced, self.base, 0)

    def _start(self, lanes: int) -> "_Total":
        dtype, operator = self._dtype, self.spec.operator
        if operator.endswith(("sum", "prod")):
            start: float | int = 1 if operator == "prod" else 0
        elif self.spec.dtype in FLOATS:
            start = -math.inf if operator.endswith("max") else math.inf
        elif self.spec.dtype == "bool":
            start = 0 if operator.endswith("max") else 1
        else:
            limits = np.iinfo(dtype)
            start = int(limits.min if operator.endswith("max") else limits.max)
        index = Register(lanes, T.constant(0, lanes, "int32"), "int32") if "arg" in operator else None
        return _Total(Register(lanes, T.constant(start, lanes, dtype), dtype), index, lanes)

    def _take(self, total: "_Total", offset: Expr, index: Expr, lanes: int, along: bool = False) -> None:
        """Add the numbers at `offset` to the totals; the first is number `index` of those reduced, the others of a
        vector are the following ones if it lies `along` the reduced axis.
        """
        value = T.convert(self._read(offset, lanes), self.spec.dtype, self.spec.number, lanes)
        match self.spec.before:
            case "abs":
                value = self._apply("abs", [value], lanes)
            case "square":
                value = self._apply("mul", [value, value], lanes)
            case "exp":
                value = self._apply("exp", [value], lanes)
        if total.index is None:
            total.best.set(self._apply(_COMBINE[self.spec.operator], [total.best.value, value], lanes))
            return
        start = tirx.Cast("int32", index) if not isinstance(index, int) else tirx.const(index, "int32")
        number = T.lanes_at(start, lanes) if along or lanes == 1 else T.splat(start, lanes)
        total.take(self.spec, value, number)

    def _apply(self, operator: str, values: list[Expr], lanes: int) -> Expr:
        return evaluate(Instruction(operator, (), self.spec.number), values, self.spec.number, lanes)

    def _read(self, offset: Expr, lanes: int) -> Expr:
        return T.load(self.x[T.lanes_at(offset, lanes)], self.spec.dtype, lanes)

    def _finish(self, value: Expr, place: Expr, lanes: int) -> Expr:
        if "arg" in self.spec.operator:
            if self.spec.dtype in FLOATS:
                odd = T.is_nan(self._read(self.base + place, lanes), self._dtype, lanes)
                value = tirx.Select(odd, T.constant(0, lanes, "int32"), T.keep(value))
            return tirx.Cast("int64" if lanes == 1 else f"int64x{lanes}", value)
        depth = self.loops.inner_reduced * math.prod(axis.length for axis in self.loops.reduced)
        match self.spec.after:
            case "mean":
                value = self._apply("div", [value, T.constant(depth, lanes, self._dtype)], lanes)
            case "sqrt" | "log":
                value = self._apply(self.spec.after, [value], lanes)
        if self.spec.number != self.spec.dtype:
            value = _saturated(T.keep(value), self.spec.dtype, lanes)
        return T.stored(value, self.spec.dtype, lanes)


@dataclass(frozen=True)
class _Total:
    """What has been found so far: totals, or extremes and their places."""

    best: Register
    index: Register | None
    lanes: int

    def value(self, spec: ReduceSpec) -> Expr:
        """The result."""
        return self.best.value if self.index is None else self.index.value

    def take(self, spec: ReduceSpec, value: Expr, number: Expr) -> None:
        """Compare with a number, which comes after all those before."""
        assert self.index is not None
        better = _better(spec, value, self.best.value, spec.operator.startswith("last"))
        number = tirx.Select(better, number, self.index.value)
        self.index.set(number)
        better = _better(spec, value, self.best.value, spec.operator.startswith("last"))
        self.best.set(tirx.Select(better, value, self.best.value))

    def merge(self, spec: ReduceSpec, other: "_Total", lane: Expr) -> None:
        """Add one lane of a vector of totals to this single one."""
        value = other.best.lane(lane)
        if self.index is None or other.index is None:
            combine = Instruction(_COMBINE[spec.operator], (), spec.number)
            self.best.set(evaluate(combine, [self.best.value, value], spec.number, 1))
            return
        value, number = T.keep(value), T.keep(other.index.lane(lane))
        mine, place = T.keep(self.best.value), T.keep(self.index.value)
        earlier = number > place if spec.operator.startswith("last") else number < place
        better = tirx.Or(_better(spec, value, mine, False), tirx.And(tirx.EQ(value, mine), earlier))
        self.best.set(tirx.Select(better, value, mine))
        self.index.set(tirx.Select(better, number, place))


def _saturated(value: Expr, dtype: str, lanes: int) -> Expr:
    """A float64, which is not NaN, as an integer: the largest one if it is larger. A cast gives the least."""
    largest = int(np.iinfo(dtype).max)
    whole = T.keep(T.convert(value, "float64", dtype, lanes))
    above = value >= T.constant(float(largest), lanes, "float64")
    return T.keep(tirx.Select(above, T.constant(largest, lanes, dtype), whole))


def _better(spec: ReduceSpec, value: Expr, best: Expr, equal: bool) -> Expr:
    if spec.operator.endswith("max"):
        return value >= best if equal else value > best
    return value <= best if equal else value < best
