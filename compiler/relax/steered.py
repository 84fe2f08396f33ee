"""Slice and reductions whose axes or places come with a request: the output's shape is fixed, what it shows is not."""

from collections.abc import Callable, Mapping
from functools import reduce
from itertools import combinations
from typing import Any

import numpy as np
from tvm import te, tirx

from gangway.compiler.graph import Node, TensorType
from gangway.compiler.relax.expression import Expression
from gangway.compiler.specs import Array

Expr = Any
Types = Mapping[str, TensorType]
MOST_CHOICES = 8  # sets of axes that give one shape
_REDUCERS = {"ReduceSum": te.sum, "ReduceMean": te.sum, "ReduceMax": te.max, "ReduceMin": te.min}


def count_up(node: Node, types: Types, constants: Mapping[str, Array]) -> Expression:
    """Return the expression of Range; where it ends is said by its length."""
    result = types[node.outputs[0]]
    operands: dict[str, Any] = {}

    def scalar(name: str) -> Expr:
        if name in constants:
            return tirx.const(constants[name].item(), result.dtype)
        if name not in operands:
            operands[name] = te.placeholder(types[name].shape, types[name].dtype, name)
        return operands[name][(0,) * len(types[name].shape)]

    start, delta = scalar(node.inputs[0]), scalar(node.inputs[2])
    y = te.compute(result.shape, lambda at: start + tirx.Cast(result.dtype, at) * delta, "y")
    values = zip(node.inputs, (0, result.shape[0], 1), strict=True)
    examples = {name: np.full(types[name].shape, value, types[name].dtype) for name, value in values if name in types}
    return Expression(te.create_prim_func([*operands.values(), y]), tuple(operands), examples)


def slice_at(node: Node, types: Types, constants: Mapping[str, Array]) -> Expression | None:
    """Return the expression of a Slice that some input steers; None if none does."""
    name, *parameters = node.inputs
    if not parameters or all(item in constants for item in parameters if item):
        return None
    shape, result = types[name].shape, types[node.outputs[0]].shape
    x = te.placeholder(shape, types[name].dtype, "x")
    operands: dict[str, Any] = {name: x}
    starts = _vector(parameters[0], types, constants, operands)
    axes = _vector(parameters[2], types, constants, operands) if len(parameters) > 2 and parameters[2] else None
    steps = _vector(parameters[3], types, constants, operands) if len(parameters) > 3 and parameters[3] else None
    count = (constants[parameters[0]] if parameters[0] in constants else types[parameters[0]]).shape[0]

    def of_axis(axis: int, values: Callable[[int], Expr], default: int) -> Expr:
        """The value that is meant for an axis."""
        if axes is None:
            return values(axis) if axis < count else _long(default)
        found = _long(default)
        for at in range(count):
            meant = tirx.Or(axes(at) == _long(axis), axes(at) == _long(axis - len(shape)))
            found = tirx.Select(meant, values(at), found)
        return found

    def source(axis: int, place: Expr) -> Expr:
        length = _long(shape[axis])
        step = of_axis(axis, steps, 1) if steps else _long(1)
        start = of_axis(axis, starts, 0)
        start = tirx.Select(start < _long(0), start + length, start)
        last = tirx.Select(step < _long(0), length - _long(1), length)
        begin = tirx.Max(tirx.Min(start, last), _long(0))
        at = begin + tirx.Cast("int64", place) * step
        return tirx.Max(tirx.Min(at, length - _long(1)), _long(0))

    y = te.compute(result, lambda *place: x[tuple(source(axis, at) for axis, at in enumerate(place))], "y")
    examples = _slice_examples(parameters, types, constants, result, count, shape)
    return Expression(te.create_prim_func([*operands.values(), y]), tuple(operands), examples)


def _slice_examples(
    parameters: list[str],
    types: Types,
    constants: Mapping[str, Array],
    result: tuple[int, ...],
    count: int,
    shape: tuple[int, ...],
) -> dict[str, Array]:
    """Return starts, ends, axes and steps that give the output's shape."""
    named = parameters[2] if len(parameters) > 2 else ""
    if named in constants:
        axes = constants[named].tolist()
    else:
        by_change = sorted(range(len(shape)), key=lambda axis: shape[axis] == result[axis])
        axes = by_change[:count] if named else list(range(count))
    values = (np.zeros(count), [result[axis] for axis in axes], axes, np.ones(count))
    pairs = zip(parameters, values, strict=False)
    return {name: np.asarray(value, types[name].dtype) for name, value in pairs if name in types}


def reduce_over(node: Node, types: Types, constants: Mapping[str, Array]) -> Expression | None:
    """Return the expression of a reduction over axes that a request names; None if they are known, or could be many."""
    if len(node.inputs) < 2 or node.inputs[1] not in types or node.inputs[1] in constants:
        return None
    name, axes_name = node.inputs
    kind, result, count = types[name], types[node.outputs[0]], types[axes_name].shape
    keep = node.attributes.get("keepdims", 1)
    choices = _choices(kind.shape, result.shape, count, keep)
    if not 1 <= len(choices) <= MOST_CHOICES:
        return None
    x = te.placeholder(kind.shape, kind.dtype, "x")
    axes = te.placeholder(count, types[axes_name].dtype, "axes")
    totals = [_reduced(node.operator, x, kind, result.shape, choice, keep) for choice in choices]

    def value(*place: Expr) -> Expr:
        found = totals[0][place]
        for choice, total in zip(choices[1:], totals[1:], strict=True):
            meant = [_is_among(axes[at], choice, len(kind.shape)) for at in range(count[0])]
            found = tirx.Select(reduce(tirx.And, meant), total[place], found)
        return found

    y = te.compute(result.shape, value, "y")
    examples = {axes_name: np.array(choices[-1], types[axes_name].dtype)}
    return Expression(te.create_prim_func([x, axes, y]), (name, axes_name), examples)


def _choices(
    before: tuple[int, ...], after: tuple[int, ...], count: tuple[int, ...], keep: int
) -> list[tuple[int, ...]]:
    """The sets of axes that give the output's shape."""
    found = []
    for axes in combinations(range(len(before)), count[0]):
        kept = [1 if axis in axes else length for axis, length in enumerate(before) if keep or axis not in axes]
        if axes and tuple(kept) == after:
            found.append(axes)
    return found


def _reduced(operator: str, x: Any, kind: TensorType, shape: tuple[int, ...], axes: tuple[int, ...], keep: int) -> Any:
    loops = {axis: te.reduce_axis((0, kind.shape[axis]), f"r{axis}") for axis in axes}
    count = tirx.const(float(np.prod([kind.shape[axis] for axis in axes])), "float32")

    def value(*place: Expr) -> Expr:
        outer = [at for index, at in enumerate(place) if not (keep and index in axes)]
        position = tuple(loops[axis] if axis in loops else outer.pop(0) for axis in range(len(kind.shape)))
        number = x[position] / count if operator == "ReduceMean" else x[position]
        return _REDUCERS[operator](number, axis=list(loops.values()))

    return te.compute(shape, value, f"over{''.join(map(str, axes))}")


def _is_among(axis: Expr, choice: tuple[int, ...], rank: int) -> Expr:
    named = [axis == tirx.const(value, "int64") for item in choice for value in (item, item - rank)]
    return reduce(tirx.Or, named)


def _vector(name: str, types: Types, constants: Mapping[str, Array], operands: dict[str, Any]) -> Callable[[int], Expr]:
    """Return what reads a vector of integers, which may be constant."""
    if name in constants:
        return lambda at: _long(int(constants[name][at]))
    operands[name] = tensor = te.placeholder(types[name].shape, types[name].dtype, name)
    return lambda at: tirx.Cast("int64", tensor[at])


def _long(value: int) -> Expr:
    return tirx.const(value, "int64")
