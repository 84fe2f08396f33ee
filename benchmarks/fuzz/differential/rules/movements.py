"""Operators that move elements, and those that choose places."""

from typing import Any

import numpy as np

from benchmarks.fuzz.differential.draft import Draft, LeftOutError
from benchmarks.fuzz.differential.numbers import Array
from benchmarks.fuzz.differential.rules.registry import rule


@rule("Transpose")
def transposed(draft: Draft) -> None:
    """Axes in another order."""
    shape = draft.shape(0, 5)
    order = draft.random.permutation(len(shape)).tolist()
    draft.finish(draft.tensor(shape, draft.type_of()), perm=draft.pick(None, order or None, order or None))


@rule("Concat")
def joined(draft: Draft) -> None:
    """Beside each other, along any axis; one part may be empty."""
    shape, dtype = draft.shape(1), draft.type_of()
    axis = draft.axis(len(shape))
    parts = []
    for _ in range(draft.whole(1, 4)):
        part = list(shape)
        part[axis] = draft.pick(0, 1, 2, 3)
        parts.append(draft.tensor(part, dtype, constant=0.25))
    draft.finish(*parts, axis=axis)


@rule("Reshape")
def reshaped(draft: Draft) -> None:
    """Another shape, with -1 and 0."""
    shape = draft.shape()
    size = int(np.prod(shape))
    target = draft.pick([-1], [size], [1, -1], [size, 1, 1], [*shape, 1], [-1, 1], [0] * len(shape), [0, -1])
    if 0 in shape and -1 in target and draft.chance(0.5):
        target = list(shape)
    zero = draft.pick(None, 0, 1) if draft.opset >= 14 else None
    draft.finish(draft.tensor(shape, draft.type_of()), draft.weight(target, "int64"), allowzero=zero)


@rule("Flatten")
def flattened(draft: Draft) -> None:
    """A matrix."""
    shape = draft.shape(1)
    low = -len(shape) if draft.opset >= 11 else 0
    draft.finish(draft.tensor(shape, draft.type_of()), axis=draft.pick(None, draft.whole(low, len(shape))))


@rule("Squeeze", "Unsqueeze")
def with_axes(draft: Draft) -> None:
    """Axes of one element, away or added."""
    shape = draft.shape(0, 3)
    ones = [index for index, size in enumerate(shape) if size == 1]
    if draft.operator == "Squeeze":
        axes = [axis - len(shape) if draft.opset >= 11 and draft.chance(0.4) else axis for axis in ones]
        axes = axes[: draft.whole(1, 3)]
    else:
        rank = len(shape) + draft.whole(1, 2)
        axes = draft.random.permutation(rank)[: rank - len(shape)].tolist()
        axes = [axis - rank if draft.opset >= 11 and draft.chance(0.3) else axis for axis in axes]
    x = draft.tensor(shape, draft.type_of())
    if draft.opset >= 13:
        left_out = draft.operator == "Squeeze" and draft.chance(0.3)
        draft.finish(x, *([] if left_out else [draft.weight(axes, "int64")]))
    else:
        draft.finish(x, axes=axes if axes and (draft.operator == "Unsqueeze" or draft.chance(0.7)) else None)


@rule("Expand")
def expanded(draft: Draft) -> None:
    """Repeated along axes of one element."""
    shape = draft.shape()
    draft.finish(draft.tensor(draft.like(shape), draft.type_of()), draft.weight(shape, "int64"))


@rule("Tile")
def tiled(draft: Draft) -> None:
    """Repeated as a whole, also not at all."""
    shape = draft.shape(1, 3)
    repeats = [draft.pick(1, 1, 2, 3, 0) for _ in shape]
    draft.finish(draft.tensor(shape, draft.type_of()), draft.weight(repeats, "int64"))


@rule("Slice")
def sliced(draft: Draft) -> None:
    """From anywhere to anywhere, forwards and backwards."""
    shape = draft.shape(1, 4)
    count = draft.whole(1, len(shape))
    axes = draft.random.permutation(len(shape))[:count].tolist()
    ends = [-(2**31), 2**31 - 1, 2**63 - 1, -(2**63) + 1]
    starts = [draft.pick(0, 1, -1, 2, -3, 100, -100) for _ in axes]
    stops = [draft.pick(0, 1, -1, 3, -2, 100, -100, *ends) for _ in axes]
    x = draft.tensor(shape, draft.type_of())
    if draft.opset < 10:
        draft.finish(x, starts=starts, ends=stops, axes=axes)
        return
    steps = [draft.pick(1, 1, 1, 2, -1, -2, 3) for _ in axes]
    axes = [axis - len(shape) if draft.chance(0.3) else axis for axis in axes]
    given = [draft.weight(starts, "int64"), draft.weight(stops, "int64"), draft.weight(axes, "int64")]
    draft.finish(x, *given, *([draft.weight(steps, "int64")] if draft.chance(0.7) else []))


@rule("Split")
def split(draft: Draft) -> None:
    """Into parts, equal or given, of which some are empty."""
    shape, dtype = draft.shape(1, 3, empty=0), draft.type_of()
    axis = draft.axis(len(shape))
    outputs = draft.whole(1, 3)
    sizes = [draft.whole(0, 3) for _ in range(outputs)]
    given = draft.chance(0.6)
    shape[axis] = sum(sizes) if given else outputs * draft.whole(1, 3)
    if not given and draft.opset >= 18:
        shape[axis] = max(outputs, shape[axis] - draft.pick(0, 1))
    x = draft.tensor(shape, dtype)
    if draft.opset < 13:
        draft.finish(x, outputs=outputs, axis=axis, split=sizes if given else None)
        return
    count = outputs if draft.opset >= 18 and not given else None
    draft.finish(x, *([draft.weight(sizes, "int64")] if given else []), outputs=outputs, axis=axis, num_outputs=count)


@rule("Pad")
def padded(draft: Draft) -> None:
    """Around a tensor, or cut off it by negative pads."""
    shape, dtype = draft.shape(1, 4, empty=0), draft.type_of()
    mode = draft.pick(None, "constant", "reflect", "edge", *(["wrap"] if draft.opset >= 19 else []))
    axes = list(range(len(shape)))
    if draft.opset >= 18 and draft.chance(0.3):
        axes = sorted(draft.random.permutation(len(shape))[: draft.whole(1, len(shape))].tolist())
    pads = [_pad(draft, shape[axis], mode) for _ in range(2) for axis in axes]
    for at, axis in enumerate(axes):
        if shape[axis] + min(pads[at], 0) + min(pads[at + len(axes)], 0) < 1:
            pads[at] = 0
    x = draft.tensor(shape, dtype)
    value = draft.numbers([], dtype) if draft.chance(0.6) else None
    if draft.opset < 11:
        known = float(value) if value is not None else None
        draft.finish(x, pads=pads, mode=mode, value=known)
        return
    given = [draft.weight(pads, "int64"), draft.weight(value) if value is not None else ""]
    named = [draft.weight(axes, "int64")] if len(axes) < len(shape) else []
    draft.finish(x, *given, *named, mode=mode)


def _pad(draft: Draft, size: int, mode: str | None) -> int:
    if mode == "reflect":
        return draft.whole(0, max(0, size - 1))
    if mode == "wrap":
        return draft.whole(0, size)
    return int(draft.pick(0, 0, 1, 2, 3, -1))


@rule("Trilu")
def triangle(draft: Draft) -> None:
    """A triangle of the last two axes."""
    x = draft.tensor(draft.shape(2), draft.type_of())
    k = [draft.weight(draft.pick(0, 1, -1, 2, -3, 10, -10), "int64")] if draft.chance(0.7) else []
    draft.finish(x, *k, upper=draft.pick(None, 0, 1))


@rule("DepthToSpace", "SpaceToDepth")
def blocks(draft: Draft) -> None:
    """Channels and pixels."""
    size = draft.whole(1, 3)
    batch, depth, height, width = (draft.whole(1, 3) for _ in range(4))
    if draft.operator == "DepthToSpace":
        mode = draft.pick(None, "DCR", "CRD") if draft.opset >= 11 else None
        draft.finish(draft.tensor([batch, depth * size**2, height, width], draft.type_of()), blocksize=size, mode=mode)
    else:
        draft.finish(draft.tensor([batch, depth, height * size, width * size], draft.type_of()), blocksize=size)


@rule("EyeLike")
def eye(draft: Draft) -> None:
    """Ones on a diagonal."""
    dtype = draft.pick(None, 1, 6, 7)
    draft.finish(
        draft.tensor(draft.shape(2, 2), draft.type_of("T1", "float32", "int32", "int64")),
        dtype=dtype,
        k=draft.pick(None, 0, 1, -1, 7),
    )


@rule("Shape", "Size")
def measured(draft: Draft) -> None:
    """What a tensor's shape is."""
    ends: dict[str, Any] = {}
    if draft.operator == "Shape" and draft.opset >= 15:
        ends = {"start": draft.pick(None, 0, 1, -1, -9), "end": draft.pick(None, 2, -1, 9)}
    draft.finish(draft.tensor(draft.shape(), draft.type_of()), **ends)


@rule("ConstantOfShape")
def constant(draft: Draft) -> None:
    """One number everywhere."""
    draft.finish(draft.given(draft.shape(1), 0, "int64"))


@rule("Range")
def counted(draft: Draft) -> None:
    """Numbers at equal distances."""
    dtype = draft.type_of()
    start, delta = draft.pick(0, 1, 5), draft.pick(1, 2, 3)
    limit = start + delta * draft.whole(0, 5) + draft.pick(0, 1, -1)
    sign = draft.pick(1, -1)
    scale = 0.5 if np.dtype(dtype).kind == "f" else 1
    draft.finish(*(draft.given(np.array(value * sign * scale, dtype), 0.6) for value in (start, limit, delta)))


def places(draft: Draft, size: int, shape: list[int], wrong: float = 0.05) -> Array:
    """Indices into an axis, from either end; seldom one of them is outside."""
    if size == 0:
        raise LeftOutError("nothing can be looked up")
    found = draft.random.integers(-size, size, shape)
    if draft.chance(0.3):
        found = np.abs(found) % size
    if found.size and draft.chance(wrong):
        found.reshape(-1)[draft.whole(0, found.size - 1)] = draft.pick(size, -size - 1, 2**31 - 1)
    return found


@rule("Gather")
def gathered(draft: Draft) -> None:
    """Slices by their indices."""
    shape = draft.shape(1)
    axis = draft.axis(len(shape))
    indices = places(draft, shape[axis], draft.shape(0, 2))
    x = draft.tensor(shape, draft.type_of())
    draft.finish(x, draft.given(indices, 0.4, draft.type_of("Tind")), axis=draft.pick(axis, axis, axis))


@rule("GatherElements")
def gathered_elements(draft: Draft) -> None:
    """Elements by their indices."""
    shape = draft.shape(1, empty=0)
    axis = draft.axis(len(shape))
    count = [draft.whole(1, size) for size in shape]
    count[axis] = draft.whole(1, 6)
    indices = places(draft, shape[axis], count)
    draft.finish(draft.tensor(shape, draft.type_of()), draft.given(indices, 0.3, draft.type_of("Tind")), axis=axis)


@rule("GatherND")
def gathered_parts(draft: Draft) -> None:
    """Parts by indices of several axes."""
    shape = draft.shape(2, 4, empty=0)
    batch = draft.pick(0, 0, 1) if draft.opset >= 12 else 0
    depth = draft.whole(1, len(shape) - batch)
    leading = [*shape[:batch], *draft.shape(1, 2, empty=0)]
    indices = np.stack([places(draft, shape[batch + at], leading, 0.02) for at in range(depth)], -1)
    given = draft.given(indices, 0.3, "int64")
    x = draft.tensor(shape, draft.type_of())
    draft.finish(x, given, batch_dims=batch or None)


@rule("ScatterElements", "Scatter")
def scattered(draft: Draft) -> None:
    """Elements into places of an axis."""
    shape = draft.shape(1, 3, empty=0)
    axis = draft.axis(len(shape)) if draft.opset >= 11 else draft.whole(0, len(shape) - 1)
    count = [draft.whole(1, size) for size in shape]
    indices = (
        places(draft, shape[axis], count)
        if draft.opset >= 11
        else np.abs(places(draft, shape[axis], count, 0)) % shape[axis]
    )
    reduction = draft.pick(None, "none", "add", "mul") if draft.opset >= 16 else None
    if draft.opset >= 18:
        reduction = draft.pick(None, "none", "add", "mul", "max", "min")
    if reduction in (None, "none"):
        indices = _distinct(draft, indices, axis, shape[axis])
    dtype = draft.type_of()
    x, updates = draft.tensor(shape, dtype), draft.numbers(list(indices.shape), dtype)
    draft.finish(
        x, draft.given(indices, 0.3, draft.type_of("Tind")), draft.given(updates), axis=axis, reduction=reduction
    )


def _distinct(draft: Draft, indices: Array, axis: int, size: int) -> Array:
    """Each place at most once along an axis: which of two writes wins is open."""
    order = np.argsort(
        draft.random.random([*indices.shape[:axis], size, *indices.shape[axis % indices.ndim + 1 :]]), axis
    )
    return np.take(order, range(indices.shape[axis]), axis)


@rule("ScatterND")
def scattered_parts(draft: Draft) -> None:
    """Parts into places of several axes."""
    shape = draft.shape(1, 3, empty=0)
    depth = draft.whole(1, len(shape))
    reduction = draft.pick(None, "none", "add", "mul") if draft.opset >= 16 else None
    if draft.opset >= 18:
        reduction = draft.pick(None, "none", "add", "mul", "max", "min")
    all_places = list(np.ndindex(*shape[:depth]))
    count = draft.whole(1, min(4, len(all_places)))
    replaced = reduction not in (None, "none") and draft.chance(0.5)
    chosen = draft.random.choice(len(all_places), count, replace=replaced)
    indices = np.array([all_places[at] for at in chosen], np.int64).reshape(count, depth)
    if draft.chance(0.3):
        indices = indices - np.array(shape[:depth])
    dtype = draft.type_of()
    updates = draft.numbers([count, *shape[depth:]], dtype)
    x = draft.tensor(shape, dtype)
    draft.finish(x, draft.given(indices, 0.3, "int64"), draft.given(updates), reduction=reduction)


@rule("Compress")
def compressed(draft: Draft) -> None:
    """What a condition keeps."""
    shape = draft.shape(1)
    axis = draft.pick(None, draft.axis(len(shape)))
    length = int(np.prod(shape)) if axis is None else shape[axis]
    condition = draft.tensor([max(1, draft.whole(0, length))], "bool", constant=0.6)
    first = draft.tensor(shape, draft.type_of())
    draft.finish(first, condition, axis=axis)


@rule("NonZero")
def nonzero(draft: Draft) -> None:
    """Where numbers are."""
    draft.finish(draft.tensor(draft.shape(1), draft.type_of(), draft.pick("ties", "")))


@rule("Unique")
def unique(draft: Draft) -> None:
    """Each number once."""
    shape = draft.shape(1, empty=0)
    x = draft.tensor(shape, draft.type_of(), "ties")
    draft.finish(
        x, outputs=draft.whole(1, 4), axis=draft.pick(None, draft.axis(len(shape))), sorted=draft.pick(None, 0, 1)
    )


@rule("OneHot")
def one_hot(draft: Draft) -> None:
    """Ones where indices say; an index outside has none."""
    kind, result = draft.type_of("T1", "int64", "int32", "float32", "uint8"), draft.type_of("T3")
    depth = draft.whole(1, 5)
    indices = draft.random.integers(-depth - 1, depth + 2, draft.shape(1, 3))
    indices = np.abs(indices) if kind == "uint8" else indices
    if kind == "float32" and draft.chance(0.3):
        indices = indices + draft.pick(0.5, -0.25)
    given = draft.given(indices, 0, kind)
    values = draft.numbers([2], result)
    low = -indices.ndim - 1
    size = draft.pick(np.array(depth), np.array([depth]))
    axis = draft.pick(None, draft.whole(low, indices.ndim))
    draft.finish(
        given, draft.weight(size, draft.type_of("T2", "int64", "int32", "float32")), draft.given(values, 0.7), axis=axis
    )


@rule("TopK")
def top(draft: Draft) -> None:
    """The largest or smallest ones, the first of equal ones first."""
    shape = draft.shape(1, 3, empty=0)
    axis = draft.axis(len(shape)) if draft.opset >= 11 else draft.whole(0, len(shape) - 1)
    x = draft.tensor(shape, draft.type_of("T"), draft.pick("ties", "plain", "finite"))
    k = draft.whole(1 if draft.chance(0.9) else 0, shape[axis])
    if draft.opset < 10:
        draft.finish(x, outputs=2, axis=axis, k=max(1, k))
        return
    order = {} if draft.opset < 11 else {"largest": draft.pick(None, 0, 1), "sorted": 1}
    draft.finish(x, draft.weight([k], "int64"), outputs=2, axis=axis, **order)


@rule("ReverseSequence")
def reversed_parts(draft: Draft) -> None:
    """The beginnings of sequences, backwards."""
    shape = draft.shape(2, 3, empty=0)
    batch = draft.pick(0, 1)
    lengths = draft.random.integers(0, shape[1 - batch] + 1, shape[batch])
    given = draft.tensor(shape, draft.type_of())
    draft.finish(given, draft.given(lengths, 0.3, "int64"), batch_axis=batch, time_axis=1 - batch)
