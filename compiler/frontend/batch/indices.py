"""Places of the batch in what operators pick by numbers: gathers, scatters, slices, and tensors made of a shape.

Along the batch, numbers may pick what a row has itself. An axis of `before` x n x `after` items is one, flattened:
item (p, b, q) is number p n after + b after + q. So numbers whose terms say p and b stay in their row, if q does not
leave it: bounds of numbers that depend on data show that.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from gangway.compiler.frontend.batch.numbers import ROW, ROWS, AffineNumbers
from gangway.compiler.frontend.batch.places import BatchAxis, Operands
from gangway.compiler.frontend.graph import single

_BEYOND_ANY_BATCH = 10**9  # rows: a request has fewer bytes
_PICKS = "it picks rows of the batch"


def gather(op: Operands) -> BatchAxis | None:
    """Data without the batch and indices with it, or the reverse along another axis, or a row's own items."""
    data, indices = op.rows
    axis = op.node.attributes.get("axis", 0) % len(op.shapes[0])
    if data is None or indices is None:
        _require_same(op, op.numbers[1])
    if data is None:
        return indices and replace(indices, axis=indices.axis + axis)
    if indices is None and data.axis != axis:
        return replace(data, axis=data.axis + (len(op.shapes[1]) - 1 if data.axis > axis else 0))
    if indices is None:
        raise op.unknown(_PICKS)
    if data.axis != axis:
        raise op.mixed("both inputs depend on the batch")
    _require_own(op, op.numbers[1], data)
    return replace(indices, axis=indices.axis + axis)


def elements(op: Operands) -> BatchAxis | None:
    """Data, places and, if any, new numbers with the batch on the same axis."""
    axis = op.node.attributes.get("axis", 0) % len(op.shapes[0])
    data, indices, *new = op.rows
    if data is None and (not any(op.rows) or (indices and not new and indices.axis == axis)):
        _require_same(op, op.numbers[1])
        return indices
    if data is None or indices is None or None in new:
        raise op.unknown("not all inputs have the batch")
    if data.axis != axis:
        _require_same(op, op.numbers[1])
        return op.common(rows for _, rows in op.batched())
    if indices.axis != axis or any(rows != indices for rows in new):
        raise op.unknown(_PICKS)
    _require_own(op, op.numbers[1], data)
    return data if new else indices


def gather_nd(op: Operands) -> BatchAxis | None:
    """Tuples of places in the axes after the first `batch_dims`."""
    data, indices = op.rows
    shared, rank = op.node.attributes.get("batch_dims", 0), len(op.shapes[1]) - 1
    if data and indices and data == indices and data.axis < shared:
        _require_same(op, op.numbers[1])
        return data
    if data is None and (indices is None or shared <= indices.axis < rank):
        _require_same(op, op.numbers[1])
        return indices
    if data is None or (data.axis < shared and indices):
        raise op.unknown("the batch is at different places of its inputs")
    return _placed(op, data, shared)


def scatter_nd(op: Operands) -> BatchAxis | None:
    """Each row of the batch gets its own new numbers."""
    data, _, updates = op.rows
    if not any(op.rows):
        _require_same(op, op.numbers[1])
        return None
    if data is None or updates != _placed(op, data, 0):
        raise op.unknown("it changes certain rows of the batch")
    return data


def _placed(op: Operands, data: BatchAxis, shared: int) -> BatchAxis:
    """Return the place in what tuples pick, which are input 1: behind them, or where they say which row they are of."""
    indices, numbers = op.rows[1], op.numbers[1]
    *outer, depth = op.shapes[1]
    if data.axis < shared and indices is None:
        return data
    if data.axis >= shared + depth and indices is None:
        _require_same(op, numbers)
        return replace(data, axis=data.axis - shared - depth + len(outer))
    if indices is None or data.axis >= shared + depth or not shared <= indices.axis < len(outer):
        raise op.unknown(_PICKS)
    for number in range(depth):
        part = numbers.each(lambda part, number=number: np.broadcast_to(part, op.shapes[1])[..., number])  # type: ignore[misc]
        if number == data.axis - shared:
            _require_own(op, part, data)
        else:
            _require_same(op, part)
    return indices


def _require_same(op: Operands, numbers: AffineNumbers) -> None:
    """Raise UnsupportedModelError if the places depend on the batch."""
    if numbers.terms:
        raise op.unknown("which numbers it picks depends on the batch")


def _require_own(op: Operands, numbers: AffineNumbers, data: BatchAxis) -> None:
    """Raise UnsupportedModelError unless all places along the batch are in the row that they are of."""
    terms = dict(numbers.terms)
    step, outer = terms.pop(ROW, np.zeros(())), terms.pop(ROWS, np.zeros(()))
    if terms or (step != data.after).any() or (outer % data.after).any():
        raise op.unknown(_PICKS)
    if (outer < 0).any() or (outer >= data.before * data.after).any():
        raise op.unknown(_PICKS)
    if not ((numbers.low >= 0) & (numbers.high < data.after)).all():
        raise op.unknown("data may lead from one row of the batch to another")


def slice_(op: Operands) -> BatchAxis:
    """Along the batch all of it, or whole parts outside of it."""
    rows, shape = op.rows[0], op.shapes[0]
    if rows is None or any(op.rows[1:]):
        raise op.unknown("where it begins or ends depends on data")
    for (start, more), (end, wide), axis, step in _slices(op):
        if axis % len(shape) != rows.axis:
            if more or wide:
                raise op.unknown("where it ends depends on the batch")
            continue
        first = 0 if start <= -_BEYOND_ANY_BATCH and not more else _part(op, rows, start, more)
        last = rows.before if end >= _BEYOND_ANY_BATCH and not wide else _part(op, rows, end, wide)
        if step != 1 or not 0 <= first < last:
            raise op.unknown(_PICKS)
        rows = replace(rows, before=min(last, rows.before) - first)
    return rows


def _part(op: Operands, rows: BatchAxis, own: int, many: int) -> int:
    """Return the part outside of the batch at whose begin a slice begins or ends; the place is own + many n."""
    part, rest = divmod(many, rows.after)
    if own or rest:
        raise op.unknown(_PICKS)
    return part + rows.before if part < 0 else part


def _slices(op: Operands) -> list[tuple[tuple[int, int], tuple[int, int], int, int]]:
    """Start, end, axis and step of each sliced axis, the former as (own, factor of n); once, they are attributes."""
    attributes = op.node.attributes
    starts, ends = (
        _multiples(op, index) if len(op.tensors) > index else [(int(n), 0) for n in attributes[name]]
        for index, name in ((1, "starts"), (2, "ends"))
    )
    given: list[Sequence[int] | None] = [attributes.get("axes"), None]
    for index in (3, 4):
        if len(op.tensors) > index and op.node.inputs[index]:
            value = op.values[index]
            if value is None:
                raise op.unknown("which axes it cuts depends on data")
            given[index - 3] = [int(n) for n in value.ravel()]
    axes, steps = given[0] or range(len(starts)), given[1] or [1] * len(starts)
    return list(zip(starts, ends, axes, steps, strict=True))


def _multiples(op: Operands, index: int) -> list[tuple[int, int]]:
    """Return an input of integers as (own, factor of n) each."""
    numbers, count = op.numbers[index], op.shapes[index]
    value = op.tensors[index].value
    if value is None or set(numbers.terms) - {ROWS}:
        raise op.unknown("where it begins or ends depends on data")
    many = np.broadcast_to(numbers.terms.get(ROWS, np.zeros(())), count).astype(np.int64).ravel()
    return [(int(at_one) - int(factor), int(factor)) for at_one, factor in zip(value.ravel(), many, strict=True)]


def split(op: Operands) -> BatchAxis | tuple[BatchAxis, ...]:
    """Parts of another axis, or whole parts outside of the batch."""
    rows, rank = op.rows[0], len(op.shapes[0])
    if rows is None or any(op.rows[1:]):
        raise op.unknown("how large its parts are depends on data")
    if rows.axis != single(op.node.attributes, "axis", 0, rank):
        if len(op.tensors) > 1:
            _require_same(op, op.numbers[1])
        return rows
    count = len(op.node.outputs)
    if "split" in op.node.attributes or (len(op.tensors) > 1 and op.node.inputs[1]):
        sizes = _multiples(op, 1) if len(op.tensors) > 1 else [(1, 0)]
        if any(own or many <= 0 or many % rows.after for own, many in sizes):
            raise op.unknown(_PICKS)
        return tuple(replace(rows, before=many // rows.after) for _, many in sizes)
    if rows.before % count:
        raise op.unknown(_PICKS)
    return replace(rows, before=rows.before // count)


def concat(op: Operands) -> BatchAxis:
    """Beside the batch, which all inputs have, or one outside of the other."""
    axis = op.node.attributes["axis"] % len(op.output)
    places = [rows for rows in op.rows if rows]
    if len(places) < len(op.rows):
        raise op.unknown("not all inputs have the batch")
    if all(rows.axis == axis and rows.after == places[0].after for rows in places):
        return replace(places[0], before=sum(rows.before for rows in places))
    if any(rows.axis == axis for rows in places):
        raise op.unknown("it puts rows of the batch beside each other")
    return op.common(iter(places))


def expand(op: Operands) -> BatchAxis | None:
    """The axis that is a multiple of the number of rows, where the tensor itself does not depend on the batch."""
    rank, x, grown = len(op.output), op.rows[0], op.grown(1)
    place = replace(x, axis=x.axis + rank - len(op.shapes[0])) if x else None
    if grown is None:
        return place
    grown = replace(grown, axis=grown.axis + rank - op.shapes[1][0])
    if place is None:
        own = (1,) * (rank - len(op.shapes[0])) + op.shapes[0]
        if own[grown.axis] != 1:
            raise op.unknown("it repeats more than one number for each row")
        return grown
    if (place.axis, place.before * place.after) != (grown.axis, grown.after):
        raise op.mixed("the batch is at different places of its inputs")
    return place


def tile(op: Operands) -> BatchAxis | None:
    """Copies of a tensor for each row, or more copies of all rows."""
    x, grown = op.rows[0], op.grown(1)
    if x is None:
        return grown and replace(grown, after=grown.after * op.shapes[0][grown.axis])
    if grown or any(op.rows[1:]) or (times := op.values[1]) is None:
        raise op.unknown("how often it repeats depends on data or on the batch")
    return replace(x, before=x.before * int(times.ravel()[x.axis]))


def filled(op: Operands) -> BatchAxis | None:
    """A tensor of one number, whose shape is the input."""
    return op.grown(0)


def counted(op: Operands) -> BatchAxis | None:
    """Numbers from one to another: `after` for each row, if their count is a multiple of the number of rows."""
    start, limit, step = op.numbers
    if any(op.rows) or step.constant is None or start.own is None or limit.own is None:
        raise op.unknown("how many numbers there are depends on data")
    length = {key: limit.terms.get(key, 0) - start.terms.get(key, 0) for key in {*limit.terms, *start.terms}}
    if not any(length.values()):
        return None
    many = length.pop(ROWS, np.zeros(())) / step.constant
    if any(length.values()) or limit.own - start.own or many % 1 or many <= 0:
        raise op.unknown("how many numbers there are is no multiple of the number of rows")
    return BatchAxis(0, after=int(many))
