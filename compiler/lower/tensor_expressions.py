"""Operators written as tensor expressions: Resize, and Range, Slice and reductions with parameters of a request."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from itertools import combinations, product
from typing import Any

import numpy as np
from tvm import te, tirx

from gangway.compiler.frontend.graph import Node, TensorType
from gangway.compiler.kernels.specs import Array

Expr = Any
Tap = tuple[Expr, Expr]  # place along an axis, weight
Types = Mapping[str, TensorType]
MOST_CHOICES = 8  # sets of axes that give one shape
_REDUCERS = {"ReduceSum": te.sum, "ReduceMean": te.sum, "ReduceMax": te.max, "ReduceMin": te.min}


@dataclass(frozen=True)
class TensorExpression:
    """A function of TIR, the names of its operands, and examples for those that cannot be any number."""

    function: Any
    operands: tuple[str, ...]
    examples: Mapping[str, Array]


def resize(node: Node, types: Mapping[str, TensorType], constants: Mapping[str, Array]) -> TensorExpression:
    """Return the expression of Resize, in all its modes but antialiasing. Raises UnsupportedModelError.

    Relax knows only images, and only fixed scales. Scales, sizes and the region of interest may be computed by the
    model or come with a request: the output's shape is fixed, but where its numbers come from is not.
    """
    if node.attributes.get("antialias", 0):
        raise node.unsupported("antialiasing")
    operands: dict[str, Any] = {}

    def vector(index: int) -> Callable[[int], Expr] | None:
        """Return what reads an input of the node, None if there is none."""
        name = node.inputs[index] if len(node.inputs) > index else ""
        if not name or (name in constants and not constants[name].size):
            return None
        if name in constants:
            return lambda at: tirx.const(float(constants[name][at]), "float32")
        operands[name] = tensor = te.placeholder(types[name].shape, types[name].dtype, name)
        return lambda at: tirx.Cast("float32", tensor[at])

    kind, result = types[node.inputs[0]], types[node.outputs[0]]
    operands[node.inputs[0]] = x = te.placeholder(kind.shape, kind.dtype, "x")
    roi, scales, sizes = vector(1), vector(2), vector(3)
    rank = len(kind.shape)
    axes = [axis % rank for axis in node.attributes.get("axes", range(rank))]
    lines = {
        axis: _Line(
            node,
            kind.shape[axis],
            result.shape[axis],
            _scale(node, kind.shape, axes, at, scales, sizes),
            (roi(at), roi(at + len(axes))) if roi else None,
        )
        for at, axis in enumerate(axes)
    }

    def value(*place: Expr) -> Expr:
        taps = [lines[axis].taps(at) if axis in lines else [(at, None)] for axis, at in enumerate(place)]
        total: Expr = None
        for chosen in product(*taps):
            term = x[tuple(at for at, _ in chosen)]
            for _, weight in chosen:
                term = term if weight is None else term * weight
            total = term if total is None else total + term
        other = tirx.const(node.attributes.get("extrapolation_value", 0.0), kind.dtype)
        outside = [lines[axis].outside(at) for axis, at in enumerate(place) if axis in lines]
        for condition in outside:
            total = total if condition is None else tirx.Select(condition, other, total)
        return total

    y: Any = te.compute(result.shape, value, "y")
    function = te.create_prim_func([*operands.values(), y])
    return TensorExpression(function, tuple(operands), _examples(node, types, axes))


def _examples(node: Node, types: Mapping[str, TensorType], axes: list[int]) -> dict[str, Array]:
    """Return a region, scales and sizes that fit the shapes."""
    before, after = (np.array(types[name].shape)[axes] for name in (node.inputs[0], node.outputs[0]))
    values = (np.repeat([0.25, 0.75], len(axes)), after / before, after)
    named = zip(node.inputs[1:], values, strict=False)
    return {name: np.asarray(value, types[name].dtype) for name, value in named if name in types}


def _scale(
    node: Node,
    shape: tuple[int, ...],
    axes: list[int],
    at: int,
    scales: Callable[[int], Expr] | None,
    sizes: Callable[[int], Expr] | None,
) -> Expr:
    """The factor by which an axis grows."""
    if scales:
        return scales(at)
    if not sizes:
        raise node.unsupported("neither scales nor sizes")
    ratios = [sizes(index) / tirx.const(float(shape[axis]), "float32") for index, axis in enumerate(axes)]
    match node.attributes.get("keep_aspect_ratio_policy", b"stretch"):
        case b"not_larger":
            return _folded(tirx.Min, ratios)
        case b"not_smaller":
            return _folded(tirx.Max, ratios)
    return ratios[at]


def _folded(operator: Callable[[Expr, Expr], Expr], values: list[Expr]) -> Expr:
    total = values[0]
    for value in values[1:]:
        total = operator(total, value)
    return total


@dataclass(frozen=True)
class _Line:
    """One axis: lengths before and after, scale, begin and end of the region of interest."""

    node: Node
    length: int
    result: int
    scale: Expr
    roi: tuple[Expr, Expr] | None

    @property
    def _transformation(self) -> str:
        return str(self.node.attributes.get("coordinate_transformation_mode", b"half_pixel").decode())

    def _source(self, at: Expr) -> Expr:
        """Where a place of the output lies in the input."""
        place, one = tirx.Cast("float32", at), _number(1)
        resized = self.scale * _number(self.length)  # not rounded
        half = (place + _number(0.5)) / self.scale - _number(0.5)
        match self._transformation:
            case "half_pixel":
                return half
            case "pytorch_half_pixel":
                return half if self.result > 1 else _number(-0.5)
            case "half_pixel_symmetric":
                return _number(self.length / 2) * (one - _number(self.result) / resized) + half
            case "asymmetric":
                return place / self.scale
            case "tf_half_pixel_for_nn":
                return (place + _number(0.5)) / self.scale
            case "align_corners":
                return place * _number(self.length - 1) / (resized - one) if self.result > 1 else _number(0)
            case "tf_crop_and_resize" if self.roi:
                begin, end = self.roi
                last = _number(self.length - 1)
                if self.result > 1:
                    return begin * last + place * (end - begin) * last / (resized - one)
                return begin * last + (end - begin) * last / _number(2)
        raise self.node.unsupported(f"coordinate_transformation_mode {self._transformation}")

    def outside(self, at: Expr) -> Expr | None:
        """Whether a place has no source; None if all have one."""
        if self._transformation != "tf_crop_and_resize":
            return None
        source = self._source(at)
        return tirx.Or(source < _number(0), source > _number(self.length - 1))

    def taps(self, at: Expr) -> list[Tap]:
        """The places that an output is made of."""
        source = self._source(at)
        if self.length == 1:
            return [(0, None)]
        match self.node.attributes.get("mode", b"nearest"):
            case b"nearest":
                return [(self._inside(_nearest(self.node, source)), None)]
            case b"linear":
                low = tirx.floor(source)
                ratio = source - low
                weights = [_number(1) - ratio, ratio]
                return self._edged(tirx.Cast("int32", low), weights)
            case b"cubic":
                low = tirx.floor(source)
                weights = _cubic(source - low, float(self.node.attributes.get("cubic_coeff_a", -0.75)))
                return self._edged(tirx.Cast("int32", low) - 1, weights)
        raise self.node.unsupported("its mode is unknown")

    def _edged(self, first: Expr, weights: list[Expr]) -> list[Tap]:
        """Neighbours from `first` on; those beyond the edges are the edge itself, or left out."""
        if self.node.attributes.get("exclude_outside", 0):
            places = [first + step for step in range(len(weights))]
            inside = [tirx.And(place >= 0, place < self.length) for place in places]
            kept = [tirx.Select(where, weight, _number(0)) for where, weight in zip(inside, weights, strict=True)]
            total = _folded(lambda a, b: a + b, kept)
            weights = [weight / total for weight in kept]
        return [(self._inside(first + step), weight) for step, weight in enumerate(weights)]

    def _inside(self, place: Expr) -> Expr:
        return tirx.Max(tirx.Min(place, tirx.const(self.length - 1, "int32")), tirx.const(0, "int32"))


def _number(value: float) -> Expr:
    return tirx.const(float(np.float32(value)), "float32")


def _nearest(node: Node, source: Expr) -> Expr:
    match node.attributes.get("nearest_mode", b"round_prefer_floor"):
        case b"round_prefer_floor":
            rounded = tirx.ceil(source - _number(0.5))
        case b"round_prefer_ceil":
            rounded = tirx.floor(source + _number(0.5))
        case b"floor":
            rounded = tirx.floor(source)
        case _:
            rounded = tirx.ceil(source)
    return tirx.Cast("int32", rounded)


def _cubic(t: Expr, a: float) -> list[Expr]:
    """Keys' weights of the neighbours at -1, 0, 1 and 2 (Keys 1981, cubic convolution)."""

    def far(distance: Expr) -> Expr:
        return ((_number(a) * distance - _number(5 * a)) * distance + _number(8 * a)) * distance - _number(4 * a)

    def near(distance: Expr) -> Expr:
        return (_number(a + 2) * distance - _number(a + 3)) * distance * distance + _number(1)

    one = _number(1)
    return [far(t + one), near(t), near(one - t), far(_number(2) - t)]


def count_up(node: Node, types: Types, constants: Mapping[str, Array]) -> TensorExpression:
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
    y: Any = te.compute(result.shape, lambda at: start + tirx.Cast(result.dtype, at) * delta, "y")
    values = zip(node.inputs, (0, result.shape[0], 1), strict=True)
    examples = {name: np.full(types[name].shape, value, types[name].dtype) for name, value in values if name in types}
    return TensorExpression(te.create_prim_func([*operands.values(), y]), tuple(operands), examples)


def slice_at(node: Node, types: Types, constants: Mapping[str, Array]) -> TensorExpression | None:
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

    y: Any = te.compute(result, lambda *place: x[tuple(source(axis, at) for axis, at in enumerate(place))], "y")
    examples = _slice_examples(parameters, types, constants, result, count, shape)
    return TensorExpression(te.create_prim_func([*operands.values(), y]), tuple(operands), examples)


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


def reduce_over(node: Node, types: Types, constants: Mapping[str, Array]) -> TensorExpression | None:
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

    y: Any = te.compute(result.shape, value, "y")
    examples = {axes_name: np.array(choices[-1], types[axes_name].dtype)}
    return TensorExpression(te.create_prim_func([x, axes, y]), (name, axes_name), examples)


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
