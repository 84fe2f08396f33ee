"""Operators that move numbers, or make some of positions."""

import numpy as np

from gangway.compiler.bodies.base import Body, defines
from gangway.compiler.specs import FLOATS


@defines("Split")
def split(body: Body) -> None:
    """A Slice for each part."""
    shape = body.type(0).shape
    axis = body.attribute("axis", 0) % len(shape)
    given = body.value(1)
    sizes = body.attribute("split", None) if given is None else given.reshape(-1).tolist()
    if sizes is None:
        size = -(-shape[axis] // len(body.node.outputs))
        sizes = [min(size, shape[axis] - begin) for begin in range(0, shape[axis], size)]
    begin = 0
    for output, size in zip(body.node.outputs, sizes, strict=True):
        if output:
            body.slice(body.node.inputs[0], axis, begin, begin + size, output)
        begin += size


@defines("DepthToSpace")
def depth_to_space(body: Body) -> None:
    """Channels become pixels: two changes of shape around a transposition."""
    _, channels, height, width = body.type(0).shape
    size = body.attribute("blocksize", 1)
    depth = channels // size**2
    if body.attribute("mode", b"DCR") == b"DCR":
        parts, order = [0, size, size, depth, height, width], [0, 3, 4, 1, 5, 2]
    else:
        parts, order = [0, depth, size, size, height, width], [0, 1, 4, 2, 5, 3]
    moved = body.op("Transpose", body.reshape(body.node.inputs[0], parts), perm=order)
    body.reshape(moved, [0, depth, height * size, width * size], body.node.outputs[0])


@defines("SpaceToDepth")
def space_to_depth(body: Body) -> None:
    """Pixels become channels."""
    _, channels, height, width = body.type(0).shape
    size = body.attribute("blocksize", 1)
    parts = [0, channels, height // size, size, width // size, size]
    order = [0, 3, 5, 1, 2, 4] if body.attribute("mode", b"DCR") == b"DCR" else [0, 1, 3, 5, 2, 4]
    moved = body.op("Transpose", body.reshape(body.node.inputs[0], parts), perm=order)
    body.reshape(moved, [0, channels * size**2, height // size, width // size], body.node.outputs[0])


@defines("Trilu")
def trilu(body: Body) -> None:
    """A triangle of the last two axes, zeros elsewhere."""
    kind, offset = body.type(0), body.value(1)
    k = 0 if offset is None else int(offset.reshape(()))
    rows, columns = np.indices(kind.shape[-2:])
    kept = columns - rows >= k if body.attribute("upper", 1) else columns - rows <= k
    zero = body.constant(np.zeros(1, kind.dtype))
    body.op("Where", body.constant(kept), body.node.inputs[0], zero, output=body.node.outputs[0])


@defines("EyeLike")
def eye_like(body: Body) -> None:
    """A constant."""
    rows, columns = body.type(0).shape
    if body.graph.batched:
        raise body.node.unsupported("its size is that of the batch")
    dtype = body.type_of(body.node.outputs[0]).dtype
    eye = body.constant(np.eye(rows, columns, body.attribute("k", 0), dtype))
    body.op("Identity", eye, output=body.node.outputs[0])


@defines("OneHot")
def one_hot(body: Body) -> None:
    """Where an index equals the position; negative ones count from the end."""
    depth = body.value(1)
    assert depth is not None
    length, rank = int(depth.reshape(-1)[0]), len(body.type(0).shape)
    axis = body.attribute("axis", -1) % (rank + 1)
    if body.graph.batched:
        raise body.node.unsupported("indices of a batch")
    shape = list(body.type(0).shape)
    indices = body.reshape(body.node.inputs[0], [*shape[:axis], 1, *shape[axis:]])
    fractions = body.type(0).dtype in FLOATS  # only a whole number is a place
    if not fractions:
        indices = body.op("Cast", indices, to=7)
    positions = np.arange(length, dtype=body.type(0).dtype if fractions else np.int64)
    positions = positions.reshape([-1 if n == axis else 1 for n in range(rank + 1)])
    here = body.op("Equal", indices, body.constant(positions))
    from_end = body.op("Equal", indices, body.constant(positions - length))
    values = body.node.inputs[2]
    off, on = (body.slice(values, 0, n, n + 1) for n in (0, 1))
    body.op("Where", body.op("Or", here, from_end), on, off, output=body.node.outputs[0])


@defines("Hardmax")
def hardmax(body: Body) -> None:
    """1 at the first maximum along an axis."""
    kind = body.type(0)
    if body.graph.opset < _ONE_AXIS:
        raise body.node.unsupported("an axis that means all from there on")
    axis = body.attribute("axis", -1) % len(kind.shape)
    place = body.op("ArgMax", body.node.inputs[0], axis=axis, keepdims=1)
    positions = np.arange(kind.shape[axis]).reshape([-1] + [1] * (len(kind.shape) - axis - 1))
    here = body.op("Equal", place, body.constant(positions))
    one, zero = (body.constant(np.full(1, value, kind.dtype)) for value in (1, 0))
    body.op("Where", here, one, zero, output=body.node.outputs[0])


@defines("CumSum")
def cumulative_sum(body: Body) -> None:
    """Sums of what a triangle of truth values leaves of repeated rows: quadratic, for short axes."""
    kind, given = body.type(0), body.value(1)
    assert given is not None
    rank = len(kind.shape)
    axis = int(given.reshape(-1)[0]) % rank
    length = kind.shape[axis]
    if length > _LONGEST_SUM:
        raise body.node.unsupported(f"of {length} numbers; {_LONGEST_SUM} are possible")
    into, source = np.indices((length, length))
    taken = source >= into if body.attribute("reverse", 0) else source <= into
    taken = taken & (source != into) if body.attribute("exclusive", 0) else taken
    taken = taken.reshape([length, length] + [1] * (rank - axis - 1))
    shape = [kind.shape[0] if axis == 0 else 0, *kind.shape[1:]]
    repeated = body.reshape(body.node.inputs[0], [*shape[:axis], 1, *shape[axis:]])
    kept = body.op("Where", body.constant(taken), repeated, body.constant(np.zeros(1, kind.dtype)))
    summed = body.reduce("ReduceSum", kept, [axis + 1], keepdims=0, wraps=True)
    body.op("Identity", summed, output=body.node.outputs[0])


_ONE_AXIS = 13  # before this operator set, an axis meant all from there on
_LONGEST_SUM = 512
