"""Elementwise operators on plain tensors, or on blocked ones of equal geometry (halos stay zero, since every operator
maps 0 to 0).
"""

from collections.abc import Iterator
from typing import Any

from gangway.artifact.format import TargetSpec
from tvm import tirx

from ..specs import ElementwiseSpec, KernelPlan
from .base import knob, make_plan
from .builder import Argument, Buffer, Expr, at_most, kernel, lanes_at, quotient, remainder, repeat, splat, store

TASK_ELEMENTS = 8192
ITEM_BYTES = {"float32": 4, "int32": 4, "int64": 8}


def candidates(spec: ElementwiseSpec, target: TargetSpec) -> Iterator[KernelPlan]:
    """The only plan."""
    elements = min(TASK_ELEMENTS, -(-spec.elements // target.lanes) * target.lanes)
    tasks = -(-spec.elements // elements)
    moved = elements * ITEM_BYTES[spec.dtype] * (1 + _arity(spec))
    yield make_plan(spec, {"elements": elements}, tasks, f"{spec.operator} {elements} elements", moved, 1)


def _arity(spec: ElementwiseSpec) -> int:
    return 2 if spec.operator in ("add", "sub", "mul") else 1


def _compute(spec: ElementwiseSpec, values: list[Expr], lanes: int) -> Expr:
    def limit(number: int) -> Expr:
        value = tirx.const(number, spec.dtype)
        return value if lanes == 1 else splat(value, lanes)

    match spec.operator:
        case "add":
            return values[0] + values[1]
        case "sub":
            return values[0] - values[1]
        case "mul":
            return values[0] * values[1]
        case "relu":
            return tirx.Max(values[0], limit(0))
        case "relu6":
            return tirx.Min(tirx.Max(values[0], limit(0)), limit(6))
        case "copy":
            return values[0]


def emit(plan: KernelPlan, target: TargetSpec, symbol: str) -> Any:
    """The kernel. Arguments: one or two inputs, y."""
    spec = plan.spec
    assert isinstance(spec, ElementwiseSpec)
    lanes, size = target.lanes, knob(plan, "elements")
    names = ["a", "b", "y"] if _arity(spec) == 2 else ["a", "y"]

    def task(number: Expr, buffers: tuple[Buffer, ...]) -> None:
        *inputs, y = buffers
        begin = number * size
        count = at_most(size, spec.elements - begin)
        vectors = quotient(count, lanes)

        def vector(index: Expr) -> None:
            base = begin + index * lanes
            store(y, base, _compute(spec, [x[lanes_at(base, lanes)] for x in inputs], lanes), lanes)

        def single(index: Expr) -> None:
            base = begin + vectors * lanes + index
            store(y, base, _compute(spec, [x[base] for x in inputs], 1), 1)

        repeat(vectors, vector)
        if spec.elements % lanes:
            repeat(remainder(count, lanes), single)

    return kernel(symbol, [Argument(name, spec.elements, spec.dtype) for name in names], task)
