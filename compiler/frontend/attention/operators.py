"""Definitions of onnxruntime's attention operators (com.microsoft), as the nodes that `attention/rules.py` finds.

Masks are added to the scores, as onnxruntime does it: `mask_filter_value` hides a key, not minus infinity.
"""

import math
from collections.abc import Sequence

import numpy as np
from onnx import TensorProto

from gangway.compiler.frontend.contrib_operators import DOMAIN, number, optional, require_one_output
from gangway.compiler.frontend.decompositions import Body, defines

_MASK_FILTER_VALUE = -10000.0
HEADS_AND_POSITIONS = [0, 2, 1, 3]


@defines("Attention", domain=DOMAIN)
def attention(body: Body) -> None:
    """Queries, keys and values are products of one input and one matrix; earlier keys and values are one tensor."""
    require_one_output(body, 1)
    refuse(body, {6: "past_sequence_length"}, ("do_rotary",))
    product = body.op("MatMul", *body.node.inputs[:2])
    if bias := optional(body, 2):
        product = body.op("Add", product, bias)
    width = body.type(1).shape[1]
    sizes = list(body.attribute("qkv_hidden_sizes", ())) or [width // 3] * 3
    _attend_parts(body, product, sizes, mask=3, added=optional(body, 5), past=4)


@defines("QAttention", domain=DOMAIN)
def quantised_attention(body: Body) -> None:
    """The product with the matrix is one of integers; it is computed as floats, which hold them."""
    require_one_output(body)
    refuse(body, {8: "past"}, ("do_rotary",))
    factors = []
    for index, zero_point in ((0, 6), (1, 7)):
        whole = body.op("Cast", body.node.inputs[index], to=TensorProto.FLOAT)
        if name := optional(body, zero_point):
            whole = body.op("Sub", whole, body.op("Cast", name, to=TensorProto.FLOAT))
        factors.append(whole)
    scale = body.op("Mul", *body.node.inputs[3:5])
    scaled = body.op("Mul", body.op("MatMul", *factors), scale)
    product = body.op("Add", scaled, body.node.inputs[2])
    _attend_parts(body, product, [body.type(1).shape[1] // 3] * 3, mask=5, added="")


@defines("MultiHeadAttention", domain=DOMAIN)
def multi_head_attention(body: Body) -> None:
    """Queries, keys and values are given, each in its own tensor."""
    require_one_output(body, 1, 2)
    refuse(body, {8: "past_sequence_length", 9: "cache_indirection"}, ())
    heads, shape = body.attribute("num_heads", 1), body.type(0).shape
    biases = _biases(body, heads)
    if len(shape) != 3 or not optional(body, 2):
        raise body.node.unsupported("queries, keys and values in one tensor")
    known = body.type(1).shape
    lengths = (shape[1], known[2] if len(known) == len(HEADS_AND_POSITIONS) else known[1])
    queries, keys, values = (_headed(body, index, heads, bias) for index, bias in enumerate(biases))
    keys = _after(body, optional(body, 6), keys, _output(body, 1))
    values = _after(body, optional(body, 7), values, _output(body, 2))
    past = body.type(6).shape[2] if optional(body, 6) else 0
    turned = body.op("Transpose", keys, perm=[0, 1, 3, 2])
    _attend(body, (queries, turned, values), lengths, past, shape[2] // heads, mask=4, added=optional(body, 5))


def _output(body: Body, index: int) -> str:
    """The name of an output; empty if nobody wants it."""
    return body.node.outputs[index] if index < len(body.node.outputs) else ""


def _after(body: Body, past: str, new: str, output: str) -> str:
    """Keys, or values, behind earlier ones, [batch, heads, positions, head size]; all of them may be an output."""
    if past:
        return body.op("Concat", past, new, axis=2, output=output)
    return body.op("Identity", new, output=output) if output else new


def refuse(body: Body, inputs: dict[int, str], attributes: Sequence[str]) -> None:
    """Raise UnsupportedModelError if the node has one of these inputs, or one of these attributes that is not 0."""
    given = [name for index, name in inputs.items() if optional(body, index)]
    given += [name for name in attributes if body.attribute(name, 0)]
    if given:
        raise body.node.unsupported(f"{', '.join(given)} is not supported")


def _attend_parts(body: Body, product: str, sizes: Sequence[int], mask: int, added: str, past: int = 0) -> None:
    """Attention of queries, keys and values that lie side by side in [batch, positions, channels].

    `past`: which input has the earlier keys and values, [2, batch, heads, positions, head size].
    """
    heads = body.attribute("num_heads", 1)
    ends = np.cumsum(sizes).tolist()
    parts = [body.slice(product, 2, end - size, end) for size, end in zip(sizes, ends, strict=True)]
    shaped = [body.reshape(part, [0, 0, heads, size // heads]) for part, size in zip(parts, sizes, strict=True)]
    queries, keys, values = (body.op("Transpose", part, perm=HEADS_AND_POSITIONS) for part in shaped)
    positions, earlier = body.type(0).shape[1], 0
    if optional(body, past) and past:
        earlier = body.type(past).shape[3]
        before = [body.slice(body.node.inputs[past], 0, index, index + 1) for index in range(2)]
        axes = [body.reshape(name, list(body.type(past).shape[1:])) for name in before]
        keys, values = (_after(body, *pair, "") for pair in zip(axes, (keys, values), strict=True))
    if present := _output(body, 1):
        shape = [1, -1, heads, positions + earlier, sizes[1] // heads]
        body.op("Concat", *(body.reshape(name, shape) for name in (keys, values)), axis=0, output=present)
    turned = body.op("Transpose", keys, perm=[0, 1, 3, 2])
    _attend(body, (queries, turned, values), (positions, positions), earlier, sizes[0] // heads, mask, added)


def _attend(
    body: Body,
    parts: tuple[str, str, str],
    lengths: tuple[int, int],
    past: int,
    head_size: int,
    mask: int,
    added: str,
) -> None:
    """softmax(scale Q K^T + masks) V, heads side by side. `mask`: which input is the mask; `past`: earlier keys."""
    queries, keys, values = parts
    scale = body.attribute("scale", 0.0) or 1 / math.sqrt(head_size)
    scores = body.op("Mul", body.op("MatMul", queries, keys), body.constant(scale, "float32"))
    biases = (_mask(body, mask, (lengths[0], past + lengths[1])), _causal(body, lengths, past), added)
    for bias in biases:
        scores = body.op("Add", scores, bias) if bias else scores
    context = body.op("MatMul", body.op("Softmax", scores, axis=3), values)
    side_by_side = body.op("Transpose", context, perm=HEADS_AND_POSITIONS)
    body.reshape(side_by_side, [0, 0, _value_channels(body)], body.node.outputs[0])


def _value_channels(body: Body) -> int:
    """Channels of the result."""
    if body.node.operator != "MultiHeadAttention":
        sizes = list(body.attribute("qkv_hidden_sizes", ()))
        return int(sizes[2]) if sizes else body.type(1).shape[1] // 3
    shape = body.type(2).shape
    return shape[1] * shape[3] if len(shape) == len(HEADS_AND_POSITIONS) else shape[2]


def _mask(body: Body, index: int, lengths: tuple[int, int]) -> str:
    """What a mask adds: it shows keys, [batch, keys] or [batch, queries, keys], or counts shown ones, [batch]."""
    name = optional(body, index)
    if not name:
        return ""
    kind, (queries, keys) = body.type(index), lengths
    hidden, nothing = (body.constant(value, "float32") for value in (_filter(body), 0))
    batch = body.type(0).shape[0]
    if kind.shape == (batch,):
        positions = body.constant(np.arange(keys, dtype=kind.dtype))
        shown = body.op("Less", positions, body.reshape(name, [-1, 1, 1, 1]))
        return body.op("Where", shown, nothing, hidden)
    if len(kind.shape) not in (2, 3) or kind.shape[-1] != keys:
        raise body.node.unsupported(f"a mask of shape {list(kind.shape)} is not supported")
    wide = body.reshape(name, [0, 1, 1, keys] if len(kind.shape) == 2 else [0, 1, queries, keys])
    shown = body.op("Greater", wide, body.constant(0, kind.dtype))
    return body.op("Where", shown, nothing, hidden)


def _causal(body: Body, lengths: tuple[int, int], past: int) -> str:
    """A query sees no later keys. The last one sees all of them, also where there are more keys than queries."""
    if not body.attribute("unidirectional", 0):
        return ""
    row, column = np.indices((lengths[0], past + lengths[1]))
    later = (column > row + past) & (row < lengths[0] - 1)
    return body.constant(np.where(later, np.finfo(np.float32).min, 0), "float32")


def _filter(body: Body) -> float:
    return float(body.attribute("mask_filter_value", _MASK_FILTER_VALUE))


def _biases(body: Body, heads: int) -> list[str]:
    """The biases of queries, keys and values, [heads, head size]; empty without any."""
    name = optional(body, 3)
    if not name:
        return ["", "", ""]
    size = body.type(0).shape[2]
    ends = [size, 2 * size, body.type(3).shape[0]]
    begins = [0, *ends[:2]]
    parts = [body.slice(name, 0, begin, end) for begin, end in zip(begins, ends, strict=True)]
    return [body.reshape(part, [heads, -1]) for part in parts]


def _headed(body: Body, index: int, heads: int, bias: str) -> str:
    """[batch, heads, positions, head size] of an input, plus the bias, if any."""
    name, shape = body.node.inputs[index], body.type(index).shape
    if len(shape) == len(HEADS_AND_POSITIONS):  # heads apart already
        if bias:
            raise body.node.unsupported("a bias for heads that lie apart")
        return name
    headed = body.reshape(name, [0, 0, heads, shape[2] // heads])
    return body.op("Transpose", body.op("Add", headed, bias) if bias else headed, perm=HEADS_AND_POSITIONS)


@defines("RotaryEmbedding", domain=DOMAIN)
def rotary_embedding(body: Body) -> None:
    """Pairs of channels, turned by an angle of their position: cosines and sines are tables.

    Pairs are the halves of a head's first channels, or neighbours. Positions are those of each row, or the first one.
    """
    refuse(body, {}, ("is_packed_batching",))
    x, positions, cosines, sines = body.node.inputs
    shape, half = body.type(0).shape, body.type(2).shape[1]
    flat = len(shape) == 3
    heads, size = body.attribute("num_heads", 0), 2 * half
    if flat:
        size = shape[2] // heads if heads else size
        x = body.reshape(x, [0, 0, shape[2] // size, size])
    else:
        size = shape[3]
    length = shape[1] if flat else shape[2]
    if body.type(1).shape in ((1,), ()):
        positions = body.op("Add", positions, body.integers(range(length)))
    elif body.type(1).shape != (shape[0], length):
        raise body.node.unsupported(f"positions of shape {list(body.type(1).shape)}")
    rows = 0 if len(body.type(1).shape) == 2 else 1
    to = [rows, length, 1, half] if flat else [rows, 1, length, half]
    turned = rotate(body, x, size, (positions, cosines, sines), to, bool(body.attribute("interleaved", 0)))
    scale = body.attribute("scale", 1.0)
    turned = turned if scale == 1.0 else body.op("Mul", turned, number(body, scale))
    if flat:
        body.reshape(turned, [0, 0, shape[2]], body.node.outputs[0])
    else:
        body.op("Identity", turned, output=body.node.outputs[0])


def rotate(body: Body, x: str, size: int, angles: tuple[str, str, str], to: Sequence[int], in_pairs: bool) -> str:
    """Turn the first channels of `size`. `angles`: positions, tables of cosines and sines; `to`: shape of the angles.

    `in_pairs`: neighbours are turned together, not the halves.
    """
    positions, *tables = angles
    half = to[-1]
    cosine, sine = (body.reshape(body.op("Gather", table, positions), to) for table in tables)
    turned = _turn(body, x, (cosine, sine), half, in_pairs)
    return body.op("Concat", turned, body.slice(x, 3, 2 * half, size), axis=3) if size > 2 * half else turned


def _turn(body: Body, x: str, angle: tuple[str, str], half: int, in_pairs: bool) -> str:
    """Turn the first 2 x `half` channels of [.., .., .., channels]; `angle`: its cosines and sines."""
    cosine, sine = angle
    if in_pairs:
        apart = body.reshape(body.slice(x, 3, 0, 2 * half), [0, 0, -1, half, 2])
        left, right = (body.reshape(body.slice(apart, 4, index, index + 1), [0, 0, -1, half]) for index in range(2))
    else:
        left, right = body.slice(x, 3, 0, half), body.slice(x, 3, half, 2 * half)
    first = body.op("Sub", body.op("Mul", left, cosine), body.op("Mul", right, sine))
    second = body.op("Add", body.op("Mul", right, cosine), body.op("Mul", left, sine))
    if not in_pairs:
        return body.op("Concat", first, second, axis=3)
    wide = [body.reshape(name, [0, 0, -1, half, 1]) for name in (first, second)]
    return body.reshape(body.op("Concat", *wide, axis=4), [0, 0, -1, 2 * half])
