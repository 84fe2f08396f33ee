"""XLNet-base (Yang et al. 2019): inference, one stream, with attention to content, relative position and segment.

Positions are relative: with R = 2S distances from S to 1 - S, query i meets key j at distance i - j, which a shift
brings into place: [S, R] read as [R, S], less its first row, read as [S, R - 1], first S columns (Dai et al. 2019).
"""

from collections.abc import Sequence

import numpy as np
from onnx import TensorProto, numpy_helper

from gangway.zoo.blocks import Size, embed, feed_forward, gelu_scalars, layer_norm, linear, merge_heads, split_heads
from gangway.zoo.blueprint import Blueprint
from gangway.zoo.builder import GraphBuilder

EPSILON = 1e-12
BASE = Size(layers=12, heads=12, hidden=768, vocabulary=32000, positions=0)
SEGMENTS = 2  # same and other
MASKED = -1e30


def xlnet_base(seed: int, sequence: int, size: Size = BASE) -> Blueprint:
    """input_ids, attention_mask, token_type_ids [N, S] -> last_hidden_state [N, S, hidden]."""
    net = GraphBuilder("xlnet_base", seed)
    gelu_scalars(net)
    _constants(net, size, sequence)
    bias = _attention_bias(net, sequence)
    same = _same_segment(net)
    distances = _distances(net, size, sequence)
    x = embed(net, "input_ids", "word_embedding", (size.vocabulary, size.hidden))
    for layer in range(size.layers):
        name = f"layer{layer}"
        y = _attention(net, x, f"{name}.attention", size, distances, same, bias)
        x = layer_norm(net, net.node("Add", [y, x], f"{name}.add1"), f"{name}.norm1", size.hidden, EPSILON)
        y = net.node("Add", [feed_forward(net, x, f"{name}.ffn", size), x], f"{name}.add2")
        output = "last_hidden_state" if layer == size.layers - 1 else f"{name}.norm2"
        x = layer_norm(net, y, output, size.hidden, EPSILON)
    tokens: dict[str, Sequence[int | str]] = dict.fromkeys(
        ("input_ids", "attention_mask", "token_type_ids"), (sequence,)
    )
    return net.finish(tokens, {"last_hidden_state": (sequence, size.hidden)}, TensorProto.INT64)


def _constants(net: GraphBuilder, size: Size, sequence: int) -> None:
    net.scalar("scale", size.head_size**-0.5)
    net.integers("split", [0, sequence, size.heads, size.head_size])
    net.integers("split_distances", [1, 2 * sequence, size.heads, size.head_size])
    net.integers("merge", [0, sequence, size.hidden])
    net.integers("shift.rows", [0, 0, 2 * sequence, sequence])
    net.integers("shift.columns", [0, 0, sequence, 2 * sequence - 1])
    for name, values in {
        "zero": [0],
        "one_row": [1],
        "all_rows": [2 * sequence],
        "keys": [sequence],
        "rows_axis": [2],
        "columns_axis": [3],
    }.items():
        net.integers(name, values)


def _distances(net: GraphBuilder, size: Size, sequence: int) -> str:
    """Sines and cosines of the distances, [1, 2S, hidden]: a Constant node, since it is no parameter."""
    distance = np.arange(sequence, -sequence, -1, dtype=np.float64)
    angle = np.outer(distance, 10000.0 ** -(np.arange(0, size.hidden, 2) / size.hidden))
    value = np.concatenate([np.sin(angle), np.cos(angle)], axis=1)[None].astype(np.float32)
    return net.node("Constant", [], "distances", value=numpy_helper.from_array(value))


def _attention_bias(net: GraphBuilder, sequence: int) -> str:
    """Mask [N, S] -> [N, 1, S, S]: -1e30 at keys that are no tokens, but each position may see itself."""
    absent = net.node("Equal", ["attention_mask", net.constant("mask.absent", np.array(0))], "mask.equal")
    absent = net.node("Unsqueeze", [absent, net.integers("mask.axes", [1, 2])], "mask.unsqueeze")
    others = net.constant("mask.others", ~np.eye(sequence, dtype=np.bool_)[None, None])
    hidden = net.node("And", [absent, others], "mask.and")
    hidden = net.node("Cast", [hidden], "mask.cast", to=TensorProto.FLOAT)
    return net.node("Mul", [hidden, net.scalar("mask.value", MASKED)], "mask.bias")


def _same_segment(net: GraphBuilder) -> str:
    """Token types [N, S] -> bool [N, 1, S, S]: is the query in the key's segment?"""
    query = net.node("Unsqueeze", ["token_type_ids", net.integers("segment.query", [1, 3])], "segment.queries")
    key = net.node("Unsqueeze", ["token_type_ids", net.integers("segment.key", [1, 2])], "segment.keys")
    return net.node("Equal", [query, key], "segment.same")


def _attention(net: GraphBuilder, x: str, name: str, size: Size, distances: str, same: str, bias: str) -> str:
    query, key, value = (linear(net, x, f"{name}.{part}", size.hidden, size.hidden, bias=False) for part in "qkv")
    query = net.node("Reshape", [query, "split"], f"{name}.q.split")
    key = split_heads(net, key, f"{name}.k", "split", perm=(0, 2, 3, 1))
    value = split_heads(net, value, f"{name}.v", "split")
    far = linear(net, distances, f"{name}.r", size.hidden, size.hidden, bias=False)
    far = split_heads(net, far, f"{name}.r", "split_distances", perm=(0, 2, 3, 1))

    content = net.node("MatMul", [_biased(net, query, f"{name}.r_w_bias", size), key], f"{name}.content")
    position = net.node("MatMul", [_biased(net, query, f"{name}.r_r_bias", size), far], f"{name}.position")
    position = _shift(net, position, f"{name}.shift")
    segment = _segment(net, _biased(net, query, f"{name}.r_s_bias", size), f"{name}.segment", size, same)

    scores = net.node("Add", [net.node("Add", [content, position], f"{name}.add1"), segment], f"{name}.add2")
    scores = net.node("Add", [net.node("Mul", [scores, "scale"], f"{name}.mul"), bias], f"{name}.masked")
    shares = net.node("Softmax", [scores], f"{name}.softmax", axis=-1)
    mixed = merge_heads(net, net.node("MatMul", [shares, value], f"{name}.context"), f"{name}.context", "merge")
    return linear(net, mixed, f"{name}.o", size.hidden, size.hidden, bias=False)


def _biased(net: GraphBuilder, query: str, name: str, size: Size) -> str:
    """[N, S, heads, head size] plus a bias for all positions -> [N, heads, S, head size]."""
    bias = net.normal(name, (size.heads, size.head_size), 0.2)
    return net.node("Transpose", [net.node("Add", [query, bias], f"{name}.add")], f"{name}.heads", perm=[0, 2, 1, 3])


def _shift(net: GraphBuilder, x: str, name: str) -> str:
    x = net.node("Reshape", [x, "shift.rows"], f"{name}.rows")
    x = net.node("Slice", [x, "one_row", "all_rows", "rows_axis"], f"{name}.less")
    x = net.node("Reshape", [x, "shift.columns"], f"{name}.columns")
    return net.node("Slice", [x, "zero", "keys", "columns_axis"], name)


def _segment(net: GraphBuilder, query: str, name: str, size: Size, same: str) -> str:
    """[N, heads, S, head size] -> score [N, heads, S, S] that depends only on query and whether segments agree."""
    table = net.normal(f"{name}.weight", (SEGMENTS, size.heads, size.head_size), 0.5)
    table = net.node("Transpose", [table], f"{name}.transpose", perm=[1, 2, 0])
    both = net.node("MatMul", [query, table], f"{name}.matmul")
    agree, differ = net.nodes("Split", [both], [f"{name}.agree", f"{name}.differ"], f"{name}.split", axis=3)
    return net.node("Where", [same, agree, differ], name)
