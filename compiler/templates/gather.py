"""Rows of a table picked by number: embeddings. Numbers are moved, whatever they mean."""

from collections.abc import Iterator
from typing import Any

from gangway.artifact.format import TargetSpec
from gangway.compiler.specs import GatherSpec, KernelPlan
from gangway.compiler.templates.base import FLOAT_BYTES, TASK_ELEMENTS, UnsupportedSpecError, knob, make_plan
from gangway.compiler.templates.builder import (
    REFUSED,
    Argument,
    Buffer,
    Expr,
    at_most,
    bind,
    checked_index,
    kernel,
    lanes_at,
    quotient,
    remainder,
    repeat,
    store,
)

MOST_ELEMENTS = 1 << 31  # beyond, indices of elements would not be 32-bit integers


def candidates(spec: GatherSpec, target: TargetSpec) -> Iterator[KernelPlan]:
    """The only plan. Raises `UnsupportedSpecError`."""
    if spec.outer * max(spec.length, spec.count) * spec.inner >= MOST_ELEMENTS:
        raise UnsupportedSpecError(f"gather from {spec.outer}x{spec.length}x{spec.inner} numbers")
    lines = spec.outer * spec.count
    per_task = min(lines, max(1, TASK_ELEMENTS // spec.inner))
    moved = 2 * per_task * spec.inner * spec.item_bytes
    yield make_plan(spec, {"lines": per_task}, -(-lines // per_task), f"gather {per_task} lines", moved, 1)


def emit(plan: KernelPlan, target: TargetSpec, symbol: str) -> Any:
    """The kernel. Arguments: data, indices, y."""
    spec = plan.spec
    assert isinstance(spec, GatherSpec)
    per_task, lines = knob(plan, "lines"), spec.outer * spec.count
    lanes = target.lanes * FLOAT_BYTES // spec.item_bytes

    def task(number: Expr, buffers: tuple[Buffer, ...]) -> None:
        data, indices, y, refused = buffers

        def line(index: Expr) -> None:
            line_number = number * per_task + index
            outer, column = quotient(line_number, spec.count), remainder(line_number, spec.count)
            picked = checked_index(indices[column], spec.length, spec.index_dtype, refused)
            source = bind((outer * spec.length + picked) * spec.inner)
            into = line_number * spec.inner
            whole, rest = divmod(spec.inner, lanes)

            def vector(step: Expr) -> None:
                store(y, into + step * lanes, data[lanes_at(source + step * lanes, lanes)], lanes)

            if whole:
                repeat(whole, vector)
            if rest:
                first = whole * lanes
                repeat(rest, lambda i: store(y, into + first + i, data[source + first + i], 1))

        repeat(at_most(per_task, lines - number * per_task), line)

    dtype = f"int{8 * spec.item_bytes}"
    arguments = [
        Argument("data", spec.outer * spec.length * spec.inner, dtype),
        Argument("indices", spec.count, spec.index_dtype),
        Argument("y", lines * spec.inner, dtype),
        REFUSED,
    ]
    return kernel(symbol, arguments, task)
