"""Softmax over the rows of a plain matrix: a row's maximum, then exponentials and their sum, then the quotient."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from gangway.artifact.format import TargetSpec
from tvm import tirx

from ..specs import KernelPlan, SoftmaxSpec
from .activate import exp
from .base import FLOAT_BYTES, TASK_ELEMENTS, knob, make_plan
from .builder import Argument, Buffer, Expr, Register, at_most, constant, kernel, lanes_at, repeat, splat, store

Reduction = Callable[[Expr, Expr], Expr]


def candidates(spec: SoftmaxSpec, target: TargetSpec) -> Iterator[KernelPlan]:
    """The only plan."""
    rows = min(spec.rows, max(1, TASK_ELEMENTS // spec.columns))
    moved = 2 * rows * spec.columns * FLOAT_BYTES
    yield make_plan(spec, {"rows": rows}, -(-spec.rows // rows), f"softmax {rows} rows", moved, 1)


def emit(plan: KernelPlan, target: TargetSpec, symbol: str) -> Any:
    """The kernel. Arguments: x, y."""
    spec = plan.spec
    assert isinstance(spec, SoftmaxSpec)
    lanes, rows, columns = target.lanes, knob(plan, "rows"), spec.columns

    def each(body: Callable[[Expr, int], None]) -> None:
        """Emit `body(first column, lanes)` for whole vectors, then for single numbers."""
        whole, rest = divmod(columns, lanes)
        if whole:
            repeat(whole, lambda index: body(index * lanes, lanes))
        if rest:
            repeat(rest, lambda index: body(whole * lanes + index, 1))

    def reduced(start: float, combine: Reduction, value: Callable[[Expr, int], Expr]) -> Register:
        """Emit the reduction of `value(column, lanes)` over a row; the vector's lanes are combined at the end."""
        wide, single = Register(lanes, constant(start, lanes)), Register(1, constant(start, 1))

        def step(column: Expr, width: int) -> None:
            total = wide if width > 1 else single
            total.set(combine(total.value, value(column, width)))

        each(step)
        repeat(lanes, lambda lane: single.set(combine(single.value, wide.lane(lane))))
        return single

    def row(first: Expr, index: Expr, buffers: tuple[Buffer, ...]) -> None:
        x, y = buffers
        base = (first + index) * columns
        most = reduced(float("-inf"), tirx.Max, lambda column, width: x[lanes_at(base + column, width)])

        def exponential(column: Expr, width: int) -> Expr:
            top = most.value if width == 1 else splat(most.value, width)
            value = exp(x[lanes_at(base + column, width)] - top, width)
            store(y, base + column, value, width)
            return y[lanes_at(base + column, width)]

        total = reduced(0.0, lambda a, b: a + b, exponential)
        scale = Register(1, constant(1.0, 1) / total.value)

        def divide(column: Expr, width: int) -> None:
            factor = scale.value if width == 1 else splat(scale.value, width)
            store(y, base + column, y[lanes_at(base + column, width)] * factor, width)

        each(divide)

    def task(number: Expr, buffers: tuple[Buffer, ...]) -> None:
        first = number * rows
        repeat(at_most(rows, spec.rows - first), partial(row, first, buffers=buffers))

    size = spec.rows * columns
    return kernel(symbol, [Argument("x", size), Argument("y", size)], task)
