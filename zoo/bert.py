"""BERT, uncased, with its pooler (Devlin et al. 2018), as PyTorch exports it."""

from collections.abc import Sequence

import numpy as np
from onnx import TensorProto

from gangway.zoo.blocks import (
    Size,
    attention_bias,
    embed,
    feed_forward,
    gelu_scalars,
    layer_norm,
    linear,
    merge_heads,
    positions,
    split_heads,
)
from gangway.zoo.blueprint import Blueprint
from gangway.zoo.builder import GraphBuilder

EPSILON = 1e-12
TOKEN_TYPES = 2
BASE = Size(layers=12, heads=12, hidden=768, vocabulary=30522, positions=512)
LARGE = Size(layers=24, heads=16, hidden=1024, vocabulary=30522, positions=512)


def bert_base(seed: int, sequence: int, size: Size = BASE) -> Blueprint:
    """input_ids, attention_mask, token_type_ids [N, S] -> last_hidden_state [N, S, C], pooler_output [N, C]."""
    return _bert("bert_base", seed, size, sequence)


def bert_large(seed: int, sequence: int) -> Blueprint:
    """input_ids, attention_mask, token_type_ids [N, S] -> last_hidden_state [N, S, C], pooler_output [N, C]."""
    return _bert("bert_large", seed, LARGE, sequence)


def _bert(name: str, seed: int, size: Size, sequence: int) -> Blueprint:
    net = GraphBuilder(name, seed)
    gelu_scalars(net)
    net.integers("split", [0, sequence, size.heads, size.head_size])
    net.integers("merge", [0, sequence, size.hidden])
    net.scalar("root", size.head_size**0.5)
    bias = attention_bias(net)
    x = _embeddings(net, size, sequence)
    for layer in range(size.layers):
        last = layer == size.layers - 1
        x = _layer(net, x, f"layer{layer}", "last_hidden_state" if last else f"layer{layer}.output", size, bias)
    first = net.node("Gather", [x, net.constant("first", np.array(0))], "pooler.first", axis=1)
    pooled = net.dense(first, "pooler", size.hidden, size.hidden)
    net.node("Tanh", [pooled], "pooler_output")
    tokens: dict[str, Sequence[int | str]] = dict.fromkeys(
        ("input_ids", "attention_mask", "token_type_ids"), (sequence,)
    )
    outputs = {"last_hidden_state": (sequence, size.hidden), "pooler_output": (size.hidden,)}
    return net.finish(tokens, outputs, TensorProto.INT64)


def _embeddings(net: GraphBuilder, size: Size, sequence: int) -> str:
    words = embed(net, "input_ids", "embeddings.word", (size.vocabulary, size.hidden))
    types = embed(net, "token_type_ids", "embeddings.type", (TOKEN_TYPES, size.hidden))
    places = embed(net, positions(net, sequence), "embeddings.position", (size.positions, size.hidden))
    x = net.node("Add", [net.node("Add", [words, types], "embeddings.add"), places], "embeddings.sum")
    return layer_norm(net, x, "embeddings.norm", size.hidden, EPSILON)


def _layer(net: GraphBuilder, x: str, name: str, output: str, size: Size, bias: str) -> str:
    y = _attention(net, x, f"{name}.attention", size, bias)
    x = layer_norm(net, net.node("Add", [y, x], f"{name}.add1"), f"{name}.norm1", size.hidden, EPSILON)
    y = feed_forward(net, x, f"{name}.ffn", size)
    return layer_norm(net, net.node("Add", [y, x], f"{name}.add2"), output, size.hidden, EPSILON)


def _attention(net: GraphBuilder, x: str, name: str, size: Size, bias: str) -> str:
    query, key, value = (linear(net, x, f"{name}.{part}", size.hidden, size.hidden) for part in "qkv")
    query = split_heads(net, query, f"{name}.q", "split")
    key = split_heads(net, key, f"{name}.k", "split", perm=(0, 2, 3, 1))
    value = split_heads(net, value, f"{name}.v", "split")
    scores = net.node("Div", [net.node("MatMul", [query, key], f"{name}.scores"), "root"], f"{name}.div")
    shares = net.node("Softmax", [net.node("Add", [scores, bias], f"{name}.masked")], f"{name}.softmax", axis=-1)
    mixed = merge_heads(net, net.node("MatMul", [shares, value], f"{name}.context"), f"{name}.context", "merge")
    return linear(net, mixed, f"{name}.o", size.hidden, size.hidden)
