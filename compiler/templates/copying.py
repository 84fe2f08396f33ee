"""Plain numbers moved: transposition, and concatenation along inner axes. Any alignment, nothing beyond the tensors."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from gangway.artifact.format import TargetSpec
from gangway.compiler.specs import CopySpec, KernelPlan
from gangway.compiler.templates.base import TASK_ELEMENTS, knob, make_plan
from gangway.compiler.templates.builder import (
    Argument,
    Buffer,
    Expr,
    at_most,
    kernel,
    quotient,
    remainder,
    repeat,
    store,
    strided,
)
from gangway.compiler.templates.numbers import memory_dtype

Axis = tuple[int, int, int]  # length, input stride, output stride


def candidates(spec: CopySpec, target: TargetSpec) -> Iterator[KernelPlan]:
    """The only plan."""
    *outer, inner = _axes(spec)
    lines = math.prod(axis[0] for axis in outer)
    per_task = min(lines, max(1, TASK_ELEMENTS // inner[0]))
    moved = 2 * per_task * inner[0] * np.dtype(spec.dtype).itemsize
    yield make_plan(spec, {"lines": per_task}, -(-lines // per_task), f"copy {per_task} lines", moved, 1)


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


def emit(plan: KernelPlan, target: TargetSpec, symbol: str) -> Any:
    """The kernel. Arguments: x, y."""
    spec = plan.spec
    assert isinstance(spec, CopySpec)
    *outer, (length, source_step, into_step) = _axes(spec)
    per_task, lanes = knob(plan, "lines"), target.lanes
    lines = math.prod(axis[0] for axis in outer)

    def task(number: Expr, buffers: tuple[Buffer, ...]) -> None:
        x, y = buffers

        def line(index: Expr) -> None:
            rest, source, into = number * per_task + index, 0, 0
            for axis_length, axis_source, axis_into in reversed(outer):
                position = remainder(rest, axis_length)
                rest = quotient(rest, axis_length)
                source, into = source + position * axis_source, into + position * axis_into
            whole, single = divmod(length, lanes)

            def vector(step: Expr) -> None:
                first = step * lanes
                value = x[strided(source + first * source_step, source_step, lanes)]
                store(y, into + first * into_step, value, lanes, into_step)

            if whole:
                repeat(whole, vector)
            for column in range(length - single, length):
                store(y, into + column * into_step, x[source + column * source_step], 1)

        repeat(at_most(per_task, lines - number * per_task), line)

    # How far the two tensors reach; they may be parts of larger ones.
    reach = [1 + sum((axis[0] - 1) * axis[side] for axis in _axes(spec)) for side in (1, 2)]
    return kernel(
        symbol, [Argument(name, size, memory_dtype(spec.dtype)) for name, size in zip("xy", reach, strict=True)], task
    )
