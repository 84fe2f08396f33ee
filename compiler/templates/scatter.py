"""Numbers put at places that other numbers say, one after the other: several may go to one place."""

import math
from collections.abc import Iterator
from typing import Any

from tvm import tirx

from gangway.artifact.format import TargetSpec
from gangway.compiler.specs import KernelPlan, ScatterSpec
from gangway.compiler.templates.base import UnsupportedSpecError, make_plan
from gangway.compiler.templates.builder import (
    REFUSED,
    Argument,
    Buffer,
    Expr,
    bind,
    checked_index,
    kernel,
    repeat,
    store,
)
from gangway.compiler.templates.numbers import memory_dtype

_ARITHMETIC = ("float32", "int32", "int64")


def candidates(spec: ScatterSpec, target: TargetSpec) -> Iterator[KernelPlan]:
    """The only plan, of one task. Raises `UnsupportedSpecError`."""
    if spec.reduction != "none" and spec.dtype not in _ARITHMETIC:
        raise UnsupportedSpecError(f"scattered {spec.dtype} with the reduction {spec.reduction}")
    yield make_plan(spec, {}, 1, f"scatter {spec.reduction} {math.prod(spec.shape)} numbers", 0, 1)


def emit(plan: KernelPlan, target: TargetSpec, symbol: str) -> Any:
    """The kernel. Arguments: data, indices, updates, y."""
    spec = plan.spec
    assert isinstance(spec, ScatterSpec)

    def task(number: Expr, buffers: tuple[Buffer, ...]) -> None:
        data, indices, updates, y, refused = buffers
        repeat(spec.elements, lambda index: store(y, index, data[index], 1))

        def axis(at: int, update: Expr, place: Expr, index: Expr) -> None:
            """The loops from axis `at` of the updates on."""
            if at < len(spec.shape):
                stride, inner = math.prod(spec.shape[at + 1 :]), at
                repeat(
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
                place = place + checked_index(read, picked.length, spec.index_dtype, refused) * picked.stride
            where = bind(place + tirx.const(0, "int32"))
            store(y, where, _combined(spec, y[where], updates[update]), 1)

        axis(0, 0, 0, 0)

    counts = _index_count(spec), math.prod(spec.shape)
    number = memory_dtype(spec.dtype)
    arguments = [
        Argument("data", spec.elements, number),
        Argument("indices", counts[0], spec.index_dtype),
        Argument("updates", counts[1], number),
        Argument("y", spec.elements, number),
        REFUSED,
    ]
    return kernel(symbol, arguments, task)


def _index_count(spec: ScatterSpec) -> int:
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
