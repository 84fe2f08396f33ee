"""GPT-2 small (Radford et al. 2019), as PyTorch exports it: the logits of the token that follows the last one.

Its linear layers are Gemms on [N x S, channels], between two Reshapes. Its head is the embedding table once more.
"""

import numpy as np
from onnx import TensorProto

from gangway.zoo.blocks import (
    LOWEST,
    Size,
    attention_bias,
    embed,
    layer_norm,
    merge_heads,
    positions,
    split_heads,
    table,
)
from gangway.zoo.blueprint import Blueprint
from gangway.zoo.builder import GraphBuilder

EPSILON = 1e-5
SMALL = Size(layers=12, heads=12, hidden=768, vocabulary=50257, positions=1024)
GELU_SCALARS = {"three": 3.0, "cubic": 0.044715, "factor": (2 / np.pi) ** 0.5, "one": 1.0, "half": 0.5}


def gpt2(seed: int, sequence: int, size: Size = SMALL) -> Blueprint:
    """input_ids, attention_mask [N, S] -> logits [N, vocabulary]."""
    net = GraphBuilder("gpt2", seed)
    _constants(net, size, sequence)
    bias = attention_bias(net)
    words = table(net, "wte", (size.vocabulary, size.hidden))
    places = embed(net, positions(net, sequence), "wpe", (size.positions, size.hidden))
    x = net.node("Add", [net.node("Gather", [words, "input_ids"], "wte"), places], "embeddings")
    for layer in range(size.layers):
        name = f"h.{layer}"
        y = layer_norm(net, x, f"{name}.ln_1", size.hidden, EPSILON)
        x = net.node("Add", [_attention(net, y, f"{name}.attn", size, bias), x], f"{name}.add1")
        y = layer_norm(net, x, f"{name}.ln_2", size.hidden, EPSILON)
        x = net.node("Add", [x, _feed_forward(net, y, f"{name}.mlp", size)], f"{name}.add2")
    x = layer_norm(net, x, "ln_f", size.hidden, EPSILON)
    x = net.node("Gather", [x, net.constant("last", np.array(-1))], "ln_f.last", axis=1)
    net.node("Gemm", [x, words], "logits", transB=1)
    tokens = {"input_ids": (sequence,), "attention_mask": (sequence,)}
    return net.finish(tokens, {"logits": (size.vocabulary,)}, TensorProto.INT64)


def _constants(net: GraphBuilder, size: Size, sequence: int) -> None:
    for name, value in GELU_SCALARS.items():
        net.scalar(name, value)
    net.scalar("root", size.head_size**0.5)
    net.scalar("lowest", LOWEST)
    net.constant("causal", np.tril(np.ones((1, 1, sequence, sequence), np.bool_)))
    net.integers("split", [0, sequence, size.heads, size.head_size])
    net.integers("merge", [0, sequence, size.hidden])
    for channels in (size.hidden, size.inner):
        net.integers(f"rows{channels}", [-1, channels])
    for channels in (size.hidden, 3 * size.hidden, size.inner):
        net.integers(f"tokens{channels}", [-1, sequence, channels])


def _conv1d(net: GraphBuilder, x: str, name: str, inputs: int, outputs: int) -> str:
    """A linear layer; the name is that of GPT-2's source."""
    weight = net.normal(f"{name}.weight", (inputs, outputs), inputs**-0.5)
    rows = net.node("Reshape", [x, f"rows{inputs}"], f"{name}.rows")
    rows = net.node("Gemm", [rows, weight, net.normal(f"{name}.bias", (outputs,), 0.05)], f"{name}.gemm")
    return net.node("Reshape", [rows, f"tokens{outputs}"], name)


def _attention(net: GraphBuilder, x: str, name: str, size: Size, bias: str) -> str:
    joint = _conv1d(net, x, f"{name}.c_attn", size.hidden, 3 * size.hidden)
    query, key, value = net.nodes("Split", [joint], [f"{name}.{part}" for part in "qkv"], f"{name}.split", axis=2)
    query = split_heads(net, query, f"{name}.q", "split")
    key = split_heads(net, key, f"{name}.k", "split", perm=(0, 2, 3, 1))
    value = split_heads(net, value, f"{name}.v", "split")
    scores = net.node("Div", [net.node("MatMul", [query, key], f"{name}.scores"), "root"], f"{name}.div")
    scores = net.node("Where", ["causal", scores, "lowest"], f"{name}.causal")
    shares = net.node("Softmax", [net.node("Add", [scores, bias], f"{name}.masked")], f"{name}.softmax", axis=-1)
    mixed = merge_heads(net, net.node("MatMul", [shares, value], f"{name}.context"), f"{name}.context", "merge")
    return _conv1d(net, mixed, f"{name}.c_proj", size.hidden, size.hidden)


def _feed_forward(net: GraphBuilder, x: str, name: str, size: Size) -> str:
    y = _gelu(net, _conv1d(net, x, f"{name}.c_fc", size.hidden, size.inner), f"{name}.gelu")
    return _conv1d(net, y, f"{name}.c_proj", size.inner, size.hidden)


def _gelu(net: GraphBuilder, x: str, name: str) -> str:
    """x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))), in eight nodes."""
    y = net.node("Mul", [net.node("Pow", [x, "three"], f"{name}.cube"), "cubic"], f"{name}.cubic")
    y = net.node("Mul", [net.node("Add", [x, y], f"{name}.inner"), "factor"], f"{name}.factor")
    y = net.node("Add", [net.node("Tanh", [y], f"{name}.tanh"), "one"], f"{name}.add")
    return net.node("Mul", [net.node("Mul", [x, "half"], f"{name}.half"), y], name)
