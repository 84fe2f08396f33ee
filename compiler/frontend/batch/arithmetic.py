"""What operators make of numbers that depend on the batch, or that lie between bounds. Both decide on indices.

A rule gets the operands and the outputs, whose numbers are not known yet, and returns those. It raises UndecidedError
where they are no polynomial. An operator without a rule makes numbers of which nothing is known, and none of its
operands may depend on the batch.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial, reduce

import numpy as np

from gangway.compiler.frontend.batch import numbers as of
from gangway.compiler.frontend.batch.numbers import ROW, UNKNOWN, AffineNumbers, UndecidedError
from gangway.compiler.frontend.batch.places import BatchedTensor, Operands
from gangway.compiler.frontend.graph import single
from gangway.compiler.frontend.shapes.rules import slice_range
from gangway.compiler.kernels.specs import Array

NumberRule = Callable[[Operands, tuple[BatchedTensor, ...]], list[AffineNumbers]]
_MOST_FOLDED = 16  # along an axis that is multiplied up, or of which the largest number is sought


def _whole(op: Operands, index: int) -> AffineNumbers:
    """Return an input's numbers, of the shape that it has at batch 1."""
    shape = op.shapes[index]
    return op.numbers[index].each(lambda part: np.broadcast_to(part, shape))


def _reordered(change: Callable[[Array, Operands], Array]) -> NumberRule:
    """A rule for an operator that puts the numbers of input 0 elsewhere, each part of them alike."""

    def rule(op: Operands, outputs: tuple[BatchedTensor, ...]) -> list[AffineNumbers]:
        if op.numbers[0] is UNKNOWN:
            return [UNKNOWN]
        return [_whole(op, 0).each(lambda part: change(part, op))]

    return rule


def _reshaped(part: Array, op: Operands) -> Array:
    return part.reshape(op.output)


def _repeated(part: Array, op: Operands) -> Array:
    return np.broadcast_to(part, op.output)


def _transposed(part: Array, op: Operands) -> Array:
    return np.transpose(part, op.node.attributes.get("perm"))


def _tiled(part: Array, op: Operands) -> Array:
    times = op.tensors[1].value
    if times is None:
        raise UndecidedError("how often it repeats depends on data")
    return np.tile(part, [int(n) for n in times.ravel()])


def _sliced(part: Array, op: Operands) -> Array:
    given = [op.node.attributes.get(name) for name in ("starts", "ends", "axes", "steps")]
    for index, tensor in enumerate(op.tensors[1:]):
        if tensor.value is not None:
            given[index] = [int(n) for n in tensor.value.ravel()]
    starts, ends = given[0] or [], given[1] or []
    axes, steps = given[2] or range(len(starts)), given[3] or [1] * len(starts)
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        part = np.take(part, np.array(slice_range(part.shape[axis], start, end, step), np.int64), axis)
    return part


def _joined(op: Operands, outputs: tuple[BatchedTensor, ...]) -> list[AffineNumbers]:
    axis = op.node.attributes["axis"]
    parts = [_whole(op, index) for index in range(len(op.tensors))]
    return [of.join(parts, lambda arrays: np.concatenate(arrays, axis=axis))]


def _split(op: Operands, outputs: tuple[BatchedTensor, ...]) -> list[AffineNumbers]:
    axis = single(op.node.attributes, "axis", 0, len(op.shapes[0]))
    ends = np.cumsum([output.shape[axis] for output in outputs])
    places = [np.arange(end - output.shape[axis], end) for end, output in zip(ends, outputs, strict=True)]
    return [_whole(op, 0).each(partial(np.take, indices=at, axis=axis)) for at in places]


def _picked(op: Operands, outputs: tuple[BatchedTensor, ...]) -> list[AffineNumbers]:
    """By constant places along an axis; otherwise all numbers must depend on the batch alike."""
    places = op.values[1]
    if op.node.operator != "Gather" or places is None:
        return [_alike(op.numbers[0])]
    axis = op.node.attributes.get("axis", 0)
    return [_whole(op, 0).each(partial(np.take, indices=places.astype(np.int64), axis=axis))]


def _changed(op: Operands, outputs: tuple[BatchedTensor, ...]) -> list[AffineNumbers]:
    """Some numbers of input 0 become numbers of input 2."""
    data, updates = op.numbers[0], op.numbers[2]
    if op.node.attributes.get("reduction", b"none") != b"none":
        raise UndecidedError("data decide which numbers are combined")
    return [of.either(_alike(data), _alike(updates))]


def _alike(numbers: AffineNumbers) -> AffineNumbers:
    """Return any of the numbers, all of which must depend on the batch alike."""
    if any(part.min() != part.max() for part in numbers.terms.values()):
        raise UndecidedError("data pick numbers that depend on the batch in several ways")
    terms = {powers: part.max() for powers, part in numbers.terms.items()}
    return AffineNumbers(np.min(numbers.low), np.max(numbers.high), terms)


def _cast(op: Operands, outputs: tuple[BatchedTensor, ...]) -> list[AffineNumbers]:
    numbers, kinds = op.numbers[0], [np.dtype(tensor.dtype).kind for tensor in (op.tensors[0], outputs[0])]
    if kinds[0] == "b" and numbers is UNKNOWN:
        numbers = of.between(0, 1)
    if kinds[1] == "b" and kinds[0] != "b":
        return [_compared(_is_not_zero, _is_zero, numbers)]
    return [numbers if kinds[1] == "f" else _rounded(np.trunc, numbers)]


def _rounded(change: Callable[[Array], Array], numbers: AffineNumbers) -> AffineNumbers:
    if any((part % 1).any() for part in numbers.terms.values()):
        raise UndecidedError("a fraction that depends on the batch is rounded")
    return AffineNumbers(change(numbers.low), change(numbers.high), numbers.terms)


def _compared(
    holds: Callable[[Array, Array], Array], fails: Callable[[Array, Array], Array], numbers: AffineNumbers
) -> AffineNumbers:
    """Return whether something holds, as bounds of the numbers say."""
    low, high = numbers.span()
    yes, no = holds(low, high), fails(low, high)
    if numbers.terms and not (yes | no).all():
        raise UndecidedError("a comparison depends on the batch")
    return AffineNumbers(yes.astype(np.float64), (~no).astype(np.float64))


def _comparison(
    holds: Callable[[Array, Array], Array], fails: Callable[[Array, Array], Array], reverse: bool = False
) -> NumberRule:
    """A rule for what is said of the difference of two inputs, or of the reverse one."""

    def rule(op: Operands, outputs: tuple[BatchedTensor, ...]) -> list[AffineNumbers]:
        first, second = op.numbers[::-1] if reverse else op.numbers
        return [_compared(holds, fails, of.subtract(first, second))]

    return rule


def _is_less(low: Array, high: Array) -> Array:
    return high < 0


def _is_not_less(low: Array, high: Array) -> Array:
    return low >= 0


def _is_zero(low: Array, high: Array) -> Array:
    return np.asarray((low == 0) & (high == 0))


def _is_not_zero(low: Array, high: Array) -> Array:
    return (low > 0) | (high < 0)


def _larger(first: AffineNumbers, second: AffineNumbers) -> AffineNumbers:
    low, high = of.subtract(first, second).span()
    if not ((low >= 0) | (high <= 0)).all():
        if first.terms or second.terms:
            raise UndecidedError("which number is larger depends on the batch")
        return AffineNumbers(np.maximum(first.low, second.low), np.maximum(first.high, second.high))
    return of.select(low >= 0, first, second)


def _smaller(first: AffineNumbers, second: AffineNumbers) -> AffineNumbers:
    return of.negative(_larger(of.negative(first), of.negative(second)))


def _clipped(op: Operands, outputs: tuple[BatchedTensor, ...]) -> list[AffineNumbers]:
    found = op.numbers[0]
    for index, (name, change) in enumerate((("min", _larger), ("max", _smaller)), start=1):
        given = op.node.attributes.get(name)
        if given is not None:
            found = change(found, of.between(given, given))
        elif len(op.tensors) > index and op.node.inputs[index]:
            found = change(found, op.numbers[index])
    return [found]


def _two(make: Callable[[AffineNumbers, AffineNumbers], AffineNumbers]) -> NumberRule:
    """A rule for an operator of two inputs, or of any number of them."""

    def rule(op: Operands, outputs: tuple[BatchedTensor, ...]) -> list[AffineNumbers]:
        return [reduce(make, op.numbers)]

    return rule


def _one(make: Callable[[AffineNumbers], AffineNumbers]) -> NumberRule:
    def rule(op: Operands, outputs: tuple[BatchedTensor, ...]) -> list[AffineNumbers]:
        return [make(op.numbers[0])]

    return rule


def _divided(op: Operands, outputs: tuple[BatchedTensor, ...]) -> list[AffineNumbers]:
    first, second = op.numbers
    return [of.divide(first, second, whole=np.dtype(outputs[0].dtype).kind in "iu")]


def _modulo(op: Operands, outputs: tuple[BatchedTensor, ...]) -> list[AffineNumbers]:
    first, second = op.numbers
    if op.node.attributes.get("fmod", 0) and (first.span()[0] < 0).any():
        raise UndecidedError("what is divided may be negative")
    return [of.remainder(first, second)]


def _absolute(numbers: AffineNumbers) -> AffineNumbers:
    return _larger(numbers, of.negative(numbers))


def _negated(numbers: AffineNumbers) -> AffineNumbers:
    """Return what is true where a truth value is not."""
    low, high = np.maximum(numbers.low, 0), np.minimum(numbers.high, 1)
    return AffineNumbers(1 - high, 1 - low)


def _all(first: AffineNumbers, second: AffineNumbers) -> AffineNumbers:
    return AffineNumbers(np.minimum(first.low, second.low).clip(0, 1), np.minimum(first.high, second.high).clip(0, 1))


def _any(first: AffineNumbers, second: AffineNumbers) -> AffineNumbers:
    return AffineNumbers(np.maximum(first.low, second.low).clip(0, 1), np.maximum(first.high, second.high).clip(0, 1))


def _where(op: Operands, outputs: tuple[BatchedTensor, ...]) -> list[AffineNumbers]:
    condition, first, second = op.numbers
    chosen = condition.constant
    return [of.either(first, second) if chosen is None else of.select(chosen != 0, first, second)]


def _reduced(
    sum_up: Callable[..., Array] | None, make: Callable[[AffineNumbers, AffineNumbers], AffineNumbers]
) -> NumberRule:
    """A rule for a reduction of one axis: of each part by `sum_up`, or number by number."""

    def rule(op: Operands, outputs: tuple[BatchedTensor, ...]) -> list[AffineNumbers]:
        axes, keep = op.axes() or range(len(op.shapes[0])), bool(op.node.attributes.get("keepdims", 1))
        found = _whole(op, 0)
        for axis in sorted(axes, reverse=True):
            if sum_up and (make is of.add or not found.terms):
                found = found.each(partial(sum_up, axis=axis, keepdims=keep))
                continue
            count = found.low.shape[axis]
            if not 0 < count <= _MOST_FOLDED:
                raise UndecidedError("many numbers are combined to one")
            parts = [found.each(partial(np.take, indices=[at] if keep else at, axis=axis)) for at in range(count)]
            found = reduce(make, parts)
        return [found]

    return rule


def _cumulated(op: Operands, outputs: tuple[BatchedTensor, ...]) -> list[AffineNumbers]:
    """Along an axis; along the batch, each row begins with the sum of those before it."""
    given, numbers = op.values[1], _whole(op, 0)
    if given is None:
        raise UndecidedError("the axis depends on data")
    axis, attributes = int(given.reshape(())) % len(op.shapes[0]), op.node.attributes
    before, reverse = bool(attributes.get("exclusive", 0)), bool(attributes.get("reverse", 0))

    def sums(part: Array) -> Array:
        part = np.flip(part, axis) if reverse else part
        found = np.cumsum(part, axis) - (part if before else 0)
        return np.flip(found, axis) if reverse else found

    rows = op.rows[0]
    if rows is None or rows.axis != axis:
        if np.isfinite([numbers.low, numbers.high]).all():
            return [numbers.each(sums)]
        return [replace(UNKNOWN, terms={powers: sums(part) for powers, part in numbers.terms.items()})]
    constant = numbers.constant
    if constant is None or reverse or rows.before > 1:
        raise UndecidedError("sums run along the batch")
    own = sums(constant)
    return [AffineNumbers(own, own, {ROW: np.broadcast_to(constant.sum(axis, keepdims=True), own.shape)})]


def _counted(op: Operands, outputs: tuple[BatchedTensor, ...]) -> list[AffineNumbers]:
    """`after` numbers for each row, or the same many in all batches."""
    (output,), (start, _, step) = outputs, op.numbers
    numbers = np.arange(output.shape[0], dtype=np.float64)
    index = AffineNumbers(numbers, numbers, {ROW: np.array(output.rows.after, np.float64)} if output.rows else {})
    return [of.add(start, of.multiply(step, index))]


def _place_along(op: Operands, outputs: tuple[BatchedTensor, ...]) -> list[AffineNumbers]:
    """Numbers of places along an axis, the last output."""
    if any(tensor.varies for tensor in op.tensors):
        raise UndecidedError("what is compared depends on the batch")
    default = -1 if op.node.operator == "TopK" else 0
    axis = single(op.node.attributes, "axis", default, len(op.shapes[0]))
    return [*(UNKNOWN for _ in outputs[1:]), of.between(0, op.shapes[0][axis] - 1)]


def _nothing(op: Operands, outputs: tuple[BatchedTensor, ...]) -> list[AffineNumbers]:
    return [UNKNOWN]


NUMBERS: dict[str, NumberRule] = {
    **dict.fromkeys(("Dropout", "Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"), _reordered(_reshaped)),
    **dict.fromkeys(("Gather", "GatherElements", "GatherND"), _picked),
    **dict.fromkeys(("Scatter", "ScatterElements", "ScatterND"), _changed),
    **dict.fromkeys(("TopK", "ArgMax", "ArgMin"), _place_along),
    **dict.fromkeys(("Cast", "CastLike"), _cast),
    **dict.fromkeys(("Add", "Sum"), _two(of.add)),
    "Abs": _one(_absolute),
    "And": _two(_all),
    "Ceil": _one(partial(_rounded, np.ceil)),
    "Clip": _clipped,
    "Concat": _joined,
    "ConstantOfShape": _nothing,
    "CumSum": _cumulated,
    "Div": _divided,
    "Equal": _comparison(_is_zero, _is_not_zero),
    "Expand": _reordered(_repeated),
    "Floor": _one(partial(_rounded, np.floor)),
    "Greater": _comparison(_is_less, _is_not_less, reverse=True),
    "GreaterOrEqual": _comparison(_is_not_less, _is_less),
    "Less": _comparison(_is_less, _is_not_less),
    "LessOrEqual": _comparison(_is_not_less, _is_less, reverse=True),
    "Max": _two(_larger),
    "Min": _two(_smaller),
    "Mod": _modulo,
    "Mul": _two(of.multiply),
    "Neg": _one(of.negative),
    "Not": _one(_negated),
    "Or": _two(_any),
    "Range": _counted,
    "ReduceMax": _reduced(np.max, _larger),
    "ReduceMin": _reduced(np.min, _smaller),
    "ReduceProd": _reduced(None, of.multiply),
    "ReduceSum": _reduced(np.sum, of.add),
    "Relu": _one(lambda numbers: _larger(numbers, of.between(0, 0))),
    "Round": _one(partial(_rounded, np.round)),
    "Slice": _reordered(_sliced),
    "Split": _split,
    "Sub": _two(of.subtract),
    "Tile": _reordered(_tiled),
    "Transpose": _reordered(_transposed),
    "Where": _where,
}
