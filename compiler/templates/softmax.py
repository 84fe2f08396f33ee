"""Softmax, or its logarithm, along one axis of a plain tensor: the maximum, the sum of the exponentials, the quotients.

Along the last axis vectors hold neighbours of one line, which are combined at the end; along another one they hold
as many lines side by side, which never meet.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tvm import tirx

from gangway.artifact.format import TargetSpec
from gangway.compiler.specs import KernelPlan, SoftmaxSpec
from gangway.compiler.templates.base import FLOAT_BYTES, TASK_ELEMENTS, knob, make_plan
from gangway.compiler.templates.builder import (
    Argument,
    Buffer,
    Expr,
    Register,
    at_most,
    constant,
    either,
    kernel,
    lanes_at,
    quotient,
    remainder,
    repeat,
    splat,
    store,
)
from gangway.compiler.templates.vector_math import exp, log

Body = Callable[[Expr, int], None]
Each = Callable[[Body], None]


def _widths(spec: SoftmaxSpec, target: TargetSpec) -> tuple[int, int]:
    """Pieces that the lines of one row are cut into, and the lines of each."""
    lines = 1 if spec.inner == 1 else target.lanes
    return -(-spec.inner // lines), lines


def candidates(spec: SoftmaxSpec, target: TargetSpec) -> Iterator[KernelPlan]:
    """The only plan."""
    pieces, lines = _widths(spec, target)
    total = spec.rows * pieces
    count = min(total, max(1, TASK_ELEMENTS // (spec.columns * lines)))
    moved = 2 * count * lines * spec.columns * FLOAT_BYTES
    name = "log softmax" if spec.logarithm else "softmax"
    yield make_plan(spec, {"pieces": count}, -(-total // count), f"{name} {count}x{lines} lines", moved, 1)


def emit(plan: KernelPlan, target: TargetSpec, symbol: str) -> Any:
    """The kernel. Arguments: x, y."""
    spec = plan.spec
    assert isinstance(spec, SoftmaxSpec)
    (pieces, lines), count = _widths(spec, target), knob(plan, "pieces")

    def task(number: Expr, buffers: tuple[Buffer, ...]) -> None:
        first = number * count

        def piece(index: Expr) -> None:
            row, part = quotient(first + index, pieces), remainder(first + index, pieces)
            line = _Line(spec, target.lanes, buffers, row * (spec.columns * spec.inner) + part * lines)
            if lines == 1:
                line.along()
            else:
                whole, rest = divmod(spec.inner, lines)
                wide = part < whole if whole and rest else bool(whole)
                either(wide, lambda: line.across(0, lines), lambda: repeat(rest, lambda i: line.across(i, 1)))

        repeat(at_most(count, spec.rows * pieces - first), piece)

    size = spec.rows * spec.columns * spec.inner
    return kernel(symbol, [Argument("x", size), Argument("y", size)], task)


@dataclass(frozen=True)
class _Line:
    """Writes the code for the line, or the lines side by side, that begin at element `base`."""

    spec: SoftmaxSpec
    lanes: int
    buffers: tuple[Buffer, ...]
    base: Expr

    def across(self, first: Expr, width: int) -> None:
        """`width` lines from number `first`."""

        def each(body: Body) -> None:
            repeat(self.spec.columns, lambda column: body(column * self.spec.inner + first, width))

        most, total = Register(width, constant(float("-inf"), width)), Register(width, constant(0.0, width))
        each(lambda place, _: most.set(tirx.Max(most.value, self._x(place, width))))
        each(lambda place, _: total.add(self._exponential(place, width, most.value)))
        self._finish(each, lambda _: most.value, total, width)

    def along(self) -> None:
        """One line whose numbers lie side by side."""

        def each(body: Body) -> None:
            whole, rest = divmod(self.spec.columns, self.lanes)
            if whole:
                repeat(whole, lambda index: body(index * self.lanes, self.lanes))
            if rest:
                repeat(rest, lambda index: body(whole * self.lanes + index, 1))

        most = self._reduced(each, float("-inf"), tirx.Max, self._x)

        def top(width: int) -> Expr:
            return most.value if width == 1 else splat(most.value, width)

        total = self._reduced(
            each, 0.0, lambda a, b: a + b, lambda place, width: self._exponential(place, width, top(width))
        )
        self._finish(each, top, total, 1)

    def _x(self, place: Expr, width: int) -> Expr:
        return self.buffers[0][lanes_at(self.base + place, width)]

    def _exponential(self, place: Expr, width: int, most: Expr) -> Expr:
        """Of numbers less the maximum; in y, too, unless their logarithm is wanted."""
        value = exp(self._x(place, width) - most, width)
        if self.spec.logarithm:
            return value
        store(self.buffers[1], self.base + place, value, width)
        return self.buffers[1][lanes_at(self.base + place, width)]

    def _reduced(
        self, each: Each, start: float, combine: Callable[[Expr, Expr], Expr], value: Callable[[Expr, int], Expr]
    ) -> Register:
        """All numbers of a line combined into one."""
        wide, single = Register(self.lanes, constant(start, self.lanes)), Register(1, constant(start, 1))

        def step(place: Expr, width: int) -> None:
            total = wide if width > 1 else single
            total.set(combine(total.value, value(place, width)))

        each(step)
        repeat(self.lanes, lambda lane: single.set(combine(single.value, wide.lane(lane))))
        return single

    def _finish(self, each: Each, most: Callable[[int], Expr], total: Register, lines: int) -> None:
        """Results from the exponentials in y, or from x; `total` is one number for each of the lines."""
        logarithm, y = self.spec.logarithm, self.buffers[1]
        share = Register(lines, log(total.value, lines) if logarithm else constant(1.0, lines) / total.value)

        def result(place: Expr, width: int) -> None:
            factor = share.value if width == lines else splat(share.value, width)
            if logarithm:
                value = self._x(place, width) - most(width) - factor
            else:
                value = y[lanes_at(self.base + place, width)] * factor
            store(y, self.base + place, value, width)

        each(result)
