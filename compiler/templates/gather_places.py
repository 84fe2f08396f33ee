"""Numbers taken from places that other numbers say, one by one. They are moved, whatever they mean."""

import math
from collections.abc import Iterator
from typing import Any

from gangway.artifact.format import TargetSpec
from gangway.compiler.specs import GatherPlacesSpec, KernelPlan
from gangway.compiler.templates.base import TASK_ELEMENTS, knob, make_plan
from gangway.compiler.templates.builder import (
    REFUSED,
    Argument,
    Buffer,
    Expr,
    at_most,
    bind,
    checked_index,
    kernel,
    quotient,
    remainder,
    repeat,
    store,
)


def candidates(spec: GatherPlacesSpec, target: TargetSpec) -> Iterator[KernelPlan]:
    """The only plan."""
    lines = math.prod(spec.shape[:-1])
    per_task = min(lines, max(1, TASK_ELEMENTS // spec.shape[-1]))
    moved = 2 * per_task * spec.shape[-1] * spec.item_bytes
    text = f"gather places of {per_task} lines"
    yield make_plan(spec, {"lines": per_task}, -(-lines // per_task), text, moved, 1)


def emit(plan: KernelPlan, target: TargetSpec, symbol: str) -> Any:
    """The kernel. Arguments: data, indices, y, refused."""
    spec = plan.spec
    assert isinstance(spec, GatherPlacesSpec)
    per_task, lines, length = knob(plan, "lines"), math.prod(spec.shape[:-1]), spec.shape[-1]

    def task(number: Expr, buffers: tuple[Buffer, ...]) -> None:
        data, indices, y, refused = buffers

        def picked(index: Expr) -> Expr:
            """What the indices add to a place."""
            return sum(
                checked_index(indices[index + item.step], item.length, spec.index_dtype, refused) * item.stride
                for item in spec.picked
            )

        def line(offset: Expr) -> None:
            rest = line_number = bind(number * per_task + offset)
            place, index = 0, 0
            for axis in reversed(range(len(spec.shape) - 1)):
                at, rest = remainder(rest, spec.shape[axis]), quotient(rest, spec.shape[axis])
                place, index = place + at * spec.strides[axis], index + at * spec.index_strides[axis]
            step, index_step = spec.strides[-1], spec.index_strides[-1]
            into = line_number * length
            if index_step:
                repeat(length, lambda i: store(y, into + i, data[place + i * step + picked(index + i * index_step)], 1))
            else:
                begin = bind(place + picked(index))
                repeat(length, lambda i: store(y, into + i, data[begin + i * step], 1))

        repeat(at_most(per_task, lines - number * per_task), line)

    dtype = f"int{8 * spec.item_bytes}"
    reach = sum((length - 1) * stride for length, stride in zip(spec.shape, spec.index_strides, strict=True))
    arguments = [
        Argument("data", spec.elements, dtype),
        Argument("indices", 1 + reach + max(item.step for item in spec.picked), spec.index_dtype),
        Argument("y", math.prod(spec.shape), dtype),
        REFUSED,
    ]
    return kernel(symbol, arguments, task)
