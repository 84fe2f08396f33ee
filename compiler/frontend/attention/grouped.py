"""The definition of onnxruntime's GroupQueryAttention (com.microsoft), as its model builders write it for decoders.

Earlier keys and values are a buffer, of which each row of the batch has filled another part. New ones are put behind
that part, so that a position in the buffer is one in the text. What is beyond is zero, and no query sees it.
"""

import math
from collections.abc import Sequence

import numpy as np
from onnx import TensorProto

from gangway.compiler.errors import WrongSizeError
from gangway.compiler.frontend.attention.operators import HEADS_AND_POSITIONS, refuse, rotate
from gangway.compiler.frontend.contrib_operators import DOMAIN, optional, require_one_output
from gangway.compiler.frontend.decompositions import Body, defines

_PAST, _LENGTHS, _TOTAL, _COSINES, _POSITIONS, _BIAS = 3, 5, 6, 7, 9, 10  # inputs
_LEAST_OPSET = 13
_REFUSED = {11: "head_sink", 12: "k_scale", 13: "v_scale", 14: "q_norm_weight", 15: "k_norm_weight"}
_HIDDEN = float(np.finfo(np.float32).min)


@defines("GroupQueryAttention", domain=DOMAIN)
def group_query_attention(body: Body) -> None:
    """Causal attention, in which several heads of queries share one of keys; behind rotary positions, maybe."""
    require_one_output(body, 1, 2)
    refuse(body, _REFUSED, ("smooth_softmax", "sliding_window_cache", "qk_output"))
    if not body.attribute("causal", 1):
        raise body.node.unsupported("causal is 0")
    heads, shared = body.attribute("num_heads", 1), body.attribute("kv_num_heads", 1)
    length, width = body.type(0).shape[1:]
    if length > 1 and optional(body, _POSITIONS):
        raise body.node.unsupported("position_ids of several tokens, of which onnxruntime reads one row's for all rows")
    if body.graph.opset < _LEAST_OPSET:
        raise body.node.unsupported(f"opset {body.graph.opset}")
    size = width // heads if optional(body, 1) else width // (heads + 2 * shared)
    for past in filter(None, (optional(body, _PAST), optional(body, _PAST + 1))):
        if (other := body.type_of(past).shape[3]) != size:
            why = body.node.unsupported(f"'{past}' has heads of {other}, queries of {size}")
            raise WrongSizeError(str(why), past, 3, size)
    kept = body.type(_PAST).shape[2] if optional(body, _PAST) else 0
    begin = _begin(body, length) if kept else ""
    queries, keys, values = _parts(body, heads, shared, size)
    if body.attribute("do_rotary", 0):
        cosines, sines = body.node.inputs[_COSINES : _COSINES + 2]
        angles = (_positions(body, begin, length), cosines, sines)
        to, in_pairs = [0, length, 1, body.type(_COSINES).shape[1]], bool(body.attribute("rotary_interleaved", 0))
        queries, keys = (rotate(body, x, size, angles, to, in_pairs) for x in (queries, keys))
    queries, keys, values = (body.op("Transpose", x, perm=HEADS_AND_POSITIONS) for x in (queries, keys, values))
    outputs = [*body.node.outputs, "", ""]
    if kept:
        buffer = _Buffer(body, begin, length)
        keys, values = (
            buffer.with_new(name, body.node.inputs[_PAST + index], outputs[1 + index])
            for index, name in enumerate((keys, values))
        )
        end = _as_vector(body, body.node.inputs[_TOTAL])
        keys, values = (body.op("Slice", name, body.integers([0]), end, body.integers([2])) for name in (keys, values))
    else:
        for name, output in ((keys, outputs[1]), (values, outputs[2])):
            if output:
                body.op("Identity", name, output=output)
    keys, values = (_shared_by(body, name, heads // shared, size) for name in (keys, values))
    _attend(body, (queries, keys, values), size, _mask(body, begin, length))


def _parts(body: Body, heads: int, shared: int, size: int) -> list[str]:
    """Queries, keys and values, [batch, positions, heads, head size]; they may be one tensor."""
    counts = [heads, shared, shared]
    names = list(body.node.inputs[:3])
    if not names[1]:
        ends = (np.cumsum(counts) * size).tolist()
        names = [body.slice(names[0], 2, end - count * size, end) for end, count in zip(ends, counts, strict=True)]
    return [body.reshape(name, [0, 0, count, size]) for name, count in zip(names, counts, strict=True)]


def _as_vector(body: Body, name: str) -> str:
    return body.reshape(body.op("Cast", name, to=TensorProto.INT64), [1])


def _begin(body: Body, length: int) -> str:
    """How many earlier keys a row has, [batch, 1]: none if all positions are new."""
    last = body.reshape(body.op("Cast", body.node.inputs[_LENGTHS], to=TensorProto.INT64), [-1, 1])
    earlier = body.op("Sub", last, body.integers([length - 1]))
    are_new = body.op("Equal", _as_vector(body, body.node.inputs[_TOTAL]), body.integers([length]))
    return body.op("Where", are_new, body.integers([0]), earlier)


def _positions(body: Body, begin: str, length: int) -> str:
    """Positions of queries in the text, [batch, positions]."""
    if given := optional(body, _POSITIONS):
        return given
    if begin:
        return body.op("Add", begin, body.integers(range(length)))
    nothing = body.op("Mul", body.reshape(body.node.inputs[_LENGTHS], [-1, 1]), body.constant(0, "int32"))
    return body.op("Add", body.op("Cast", nothing, to=TensorProto.INT64), body.integers(range(length)))


def _range(body: Body, count: str, shape: Sequence[int]) -> str:
    return body.reshape(body.op("Range", body.constant(0, "int64"), count, body.constant(1, "int64")), shape)


class _Buffer:
    """Earlier keys, or values, with new ones behind them: [batch, heads, places, head size]."""

    def __init__(self, body: Body, begin: str, length: int) -> None:
        kept = body.type(_PAST).shape[2]
        places = body.op("Max", _as_vector(body, body.node.inputs[_TOTAL]), body.integers([kept]))
        more = body.op("Sub", places, body.integers([kept]))
        every = _range(body, body.op("Squeeze", places, body.integers([0])), [1, 1, -1, 1])
        number = body.op("Sub", every, body.reshape(begin, [-1, 1, 1, 1]))  # of the new key at a place
        chosen = body.op("Equal", number, body.integers(range(length)))
        self._body = body
        self._pads = body.op("Concat", body.integers([0] * 6), more, body.integers([0]), axis=0)
        self._is_earlier = body.op("Less", number, body.integers([0]))
        self._one = chosen if length == 1 else ""
        self._chosen = "" if length == 1 else body.op("Cast", chosen, to=TensorProto.FLOAT)

    def with_new(self, new: str, past: str, output: str) -> str:
        """Return the keys, or values, in their places; zeros are beyond."""
        body, wide = self._body, self._body.op("Pad", past, self._pads)
        if self._one:
            moved = body.op("Where", self._one, new, body.constant(0, "float32"))
        else:
            moved = body.op("MatMul", self._chosen, new)
        return body.op("Where", self._is_earlier, wide, moved, output=output)


def _shared_by(body: Body, name: str, queries: int, size: int) -> str:
    """Keys, or values, for each head of queries."""
    if queries == 1:
        return name
    heads = body.attribute("kv_num_heads", 1)
    apart = body.op("Expand", body.reshape(name, [0, heads, 1, -1, size]), body.integers([1, 1, queries, 1, 1]))
    return body.reshape(apart, [0, heads * queries, -1, size])


def _mask(body: Body, begin: str, length: int) -> str:
    """What is added to scores: a query sees the keys up to its own position, or the last ones of these."""
    query, window = np.arange(length)[:, None], body.attribute("local_window_size", -1)
    if not begin:
        offset = np.arange(length)
        shown = (offset <= query) & ((offset > query - window) | (window < 0))
        return body.constant(np.where(shown, 0, _HIDDEN), "float32")
    count = body.op("Squeeze", _as_vector(body, body.node.inputs[_TOTAL]), body.integers([0]))
    offsets = body.op("Sub", _range(body, count, [1, 1, 1, -1]), body.reshape(begin, [-1, 1, 1, 1]))
    visible = body.op("Less", offsets, body.constant(query + 1, "int64"))
    if window >= 0:
        visible = body.op("And", visible, body.op("Greater", offsets, body.constant(query - window, "int64")))
    return body.op("Where", visible, body.constant(0, "float32"), body.constant(_HIDDEN, "float32"))


def _attend(body: Body, parts: tuple[str, str, str], size: int, mask: str) -> None:
    """softmax(scale Q K^T + masks) V, heads side by side."""
    queries, keys, values = parts
    scale, cap = body.attribute("scale", 0.0) or 1 / math.sqrt(size), body.attribute("softcap", 0.0)
    scores = body.op("MatMul", queries, body.op("Transpose", keys, perm=[0, 1, 3, 2]))
    scores = body.op("Mul", scores, body.constant(scale, "float32"))
    if cap:
        small = body.op("Tanh", body.op("Div", scores, body.constant(cap, "float32")))
        scores = body.op("Mul", small, body.constant(cap, "float32"))
    for bias in (optional(body, _BIAS), mask):
        scores = body.op("Add", scores, bias) if bias else scores
    context = body.op("MatMul", body.op("Softmax", scores, axis=3), values)
    side_by_side = body.op("Transpose", context, perm=HEADS_AND_POSITIONS)
    body.reshape(side_by_side, [0, 0, body.attribute("num_heads", 1) * size], body.node.outputs[0])
