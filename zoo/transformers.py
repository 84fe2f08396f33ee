"""Transformers in the nodes that PyTorch's exporter makes of them: BERT, GPT-2 small and XLNet-base.

BERT (Devlin et al. 2018) is the uncased one with its pooler. GPT-2 (Radford et al. 2019) answers with the logits of the
token that follows the last one. Its linear layers are Gemms on [N x S, channels], between two Reshapes, and its head is
the embedding table once more.

XLNet (Yang et al. 2019) has one stream, as for inference, with attention to content, relative position and segment.
There are R = 2S distances, from S to 1 - S. Query i meets key j at distance i - j, which a shift brings into place:
[S, R] read as [R, S], less its first row, read as [S, R - 1], first S columns (Dai et al. 2019).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from onnx import TensorProto, numpy_helper

from gangway.zoo.graph import GraphBuilder, ModelGraph

LOWEST = float(np.finfo(np.float32).min)  # what PyTorch's models add to the score of a masked position


@dataclass(frozen=True)
class Size:
    """Dimensions of a transformer.

    The weights of every linear layer deviate by 1 / sqrt(inputs): nothing fades or grows, and attention is far from
    uniform.
    """

    layers: int
    heads: int
    hidden: int
    vocabulary: int
    positions: int

    @property
    def head_size(self) -> int:
        """Channels of one head."""
        return self.hidden // self.heads

    @property
    def inner(self) -> int:
        """Channels inside the feed-forward part."""
        return 4 * self.hidden


BERT_BASE = Size(layers=12, heads=12, hidden=768, vocabulary=30522, positions=512)
BERT_LARGE = Size(layers=24, heads=16, hidden=1024, vocabulary=30522, positions=512)
BERT_EPSILON = 1e-12
TOKEN_TYPES = 2

GPT2_SMALL = Size(layers=12, heads=12, hidden=768, vocabulary=50257, positions=1024)
GPT2_EPSILON = 1e-5
GPT2_GELU_SCALARS = {"three": 3.0, "cubic": 0.044715, "factor": (2 / np.pi) ** 0.5, "one": 1.0, "half": 0.5}

XLNET_BASE = Size(layers=12, heads=12, hidden=768, vocabulary=32000, positions=0)
XLNET_EPSILON = 1e-12
XLNET_SEGMENTS = 2  # same and other
XLNET_MASKED = -1e30


def bert_base(seed: int, sequence: int, size: Size = BERT_BASE) -> ModelGraph:
    """input_ids, attention_mask, token_type_ids [N, S] -> last_hidden_state [N, S, C], pooler_output [N, C]."""
    return _bert("bert_base", seed, size, sequence)


def bert_large(seed: int, sequence: int) -> ModelGraph:
    """input_ids, attention_mask, token_type_ids [N, S] -> last_hidden_state [N, S, C], pooler_output [N, C]."""
    return _bert("bert_large", seed, BERT_LARGE, sequence)


def _bert(name: str, seed: int, size: Size, sequence: int) -> ModelGraph:
    net = GraphBuilder(name, seed)
    _gelu_scalars(net)
    net.integers("split", [0, sequence, size.heads, size.head_size])
    net.integers("merge", [0, sequence, size.hidden])
    net.scalar("root", size.head_size**0.5)
    bias = _attention_bias(net)
    x = _bert_embeddings(net, size, sequence)
    for layer in range(size.layers):
        last = layer == size.layers - 1
        x = _bert_layer(net, x, f"layer{layer}", "last_hidden_state" if last else f"layer{layer}.output", size, bias)
    first = net.node("Gather", [x, net.constant("first", np.array(0))], "pooler.first", axis=1)
    pooled = net.dense(first, "pooler", size.hidden, size.hidden)
    net.node("Tanh", [pooled], "pooler_output")
    tokens: dict[str, Sequence[int | str]] = dict.fromkeys(
        ("input_ids", "attention_mask", "token_type_ids"), (sequence,)
    )
    outputs = {"last_hidden_state": (sequence, size.hidden), "pooler_output": (size.hidden,)}
    return net.finish(tokens, outputs, TensorProto.INT64)


def _bert_embeddings(net: GraphBuilder, size: Size, sequence: int) -> str:
    words = _embed(net, "input_ids", "embeddings.word", (size.vocabulary, size.hidden))
    types = _embed(net, "token_type_ids", "embeddings.type", (TOKEN_TYPES, size.hidden))
    places = _embed(net, _positions(net, sequence), "embeddings.position", (size.positions, size.hidden))
    x = net.node("Add", [net.node("Add", [words, types], "embeddings.add"), places], "embeddings.sum")
    return _layer_norm(net, x, "embeddings.norm", size.hidden, BERT_EPSILON)


def _bert_layer(net: GraphBuilder, x: str, name: str, output: str, size: Size, bias: str) -> str:
    y = _bert_attention(net, x, f"{name}.attention", size, bias)
    x = _layer_norm(net, net.node("Add", [y, x], f"{name}.add1"), f"{name}.norm1", size.hidden, BERT_EPSILON)
    y = _feed_forward(net, x, f"{name}.ffn", size)
    return _layer_norm(net, net.node("Add", [y, x], f"{name}.add2"), output, size.hidden, BERT_EPSILON)


def _bert_attention(net: GraphBuilder, x: str, name: str, size: Size, bias: str) -> str:
    query, key, value = (_linear(net, x, f"{name}.{part}", size.hidden, size.hidden) for part in "qkv")
    query = _split_heads(net, query, f"{name}.q", "split")
    key = _split_heads(net, key, f"{name}.k", "split", perm=(0, 2, 3, 1))
    value = _split_heads(net, value, f"{name}.v", "split")
    scores = net.node("Div", [net.node("MatMul", [query, key], f"{name}.scores"), "root"], f"{name}.div")
    shares = net.node("Softmax", [net.node("Add", [scores, bias], f"{name}.masked")], f"{name}.softmax", axis=-1)
    mixed = _merge_heads(net, net.node("MatMul", [shares, value], f"{name}.context"), f"{name}.context", "merge")
    return _linear(net, mixed, f"{name}.o", size.hidden, size.hidden)


def gpt2(seed: int, sequence: int, size: Size = GPT2_SMALL) -> ModelGraph:
    """input_ids, attention_mask [N, S] -> logits [N, vocabulary]."""
    net = GraphBuilder("gpt2", seed)
    _gpt2_constants(net, size, sequence)
    bias = _attention_bias(net)
    words = _table(net, "wte", (size.vocabulary, size.hidden))
    places = _embed(net, _positions(net, sequence), "wpe", (size.positions, size.hidden))
    x = net.node("Add", [net.node("Gather", [words, "input_ids"], "wte"), places], "embeddings")
    for layer in range(size.layers):
        name = f"h.{layer}"
        y = _layer_norm(net, x, f"{name}.ln_1", size.hidden, GPT2_EPSILON)
        x = net.node("Add", [_gpt2_attention(net, y, f"{name}.attn", size, bias), x], f"{name}.add1")
        y = _layer_norm(net, x, f"{name}.ln_2", size.hidden, GPT2_EPSILON)
        x = net.node("Add", [x, _gpt2_feed_forward(net, y, f"{name}.mlp", size)], f"{name}.add2")
    x = _layer_norm(net, x, "ln_f", size.hidden, GPT2_EPSILON)
    x = net.node("Gather", [x, net.constant("last", np.array(-1))], "ln_f.last", axis=1)
    net.node("Gemm", [x, words], "logits", transB=1)
    tokens = {"input_ids": (sequence,), "attention_mask": (sequence,)}
    return net.finish(tokens, {"logits": (size.vocabulary,)}, TensorProto.INT64)


def _gpt2_constants(net: GraphBuilder, size: Size, sequence: int) -> None:
    for name, value in GPT2_GELU_SCALARS.items():
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


def _gpt2_attention(net: GraphBuilder, x: str, name: str, size: Size, bias: str) -> str:
    joint = _conv1d(net, x, f"{name}.c_attn", size.hidden, 3 * size.hidden)
    query, key, value = net.nodes("Split", [joint], [f"{name}.{part}" for part in "qkv"], f"{name}.split", axis=2)
    query = _split_heads(net, query, f"{name}.q", "split")
    key = _split_heads(net, key, f"{name}.k", "split", perm=(0, 2, 3, 1))
    value = _split_heads(net, value, f"{name}.v", "split")
    scores = net.node("Div", [net.node("MatMul", [query, key], f"{name}.scores"), "root"], f"{name}.div")
    scores = net.node("Where", ["causal", scores, "lowest"], f"{name}.causal")
    shares = net.node("Softmax", [net.node("Add", [scores, bias], f"{name}.masked")], f"{name}.softmax", axis=-1)
    mixed = _merge_heads(net, net.node("MatMul", [shares, value], f"{name}.context"), f"{name}.context", "merge")
    return _conv1d(net, mixed, f"{name}.c_proj", size.hidden, size.hidden)


def _gpt2_feed_forward(net: GraphBuilder, x: str, name: str, size: Size) -> str:
    y = _gelu_by_tanh(net, _conv1d(net, x, f"{name}.c_fc", size.hidden, size.inner), f"{name}.gelu")
    return _conv1d(net, y, f"{name}.c_proj", size.inner, size.hidden)


def _gelu_by_tanh(net: GraphBuilder, x: str, name: str) -> str:
    """x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))), in eight nodes."""
    y = net.node("Mul", [net.node("Pow", [x, "three"], f"{name}.cube"), "cubic"], f"{name}.cubic")
    y = net.node("Mul", [net.node("Add", [x, y], f"{name}.inner"), "factor"], f"{name}.factor")
    y = net.node("Add", [net.node("Tanh", [y], f"{name}.tanh"), "one"], f"{name}.add")
    return net.node("Mul", [net.node("Mul", [x, "half"], f"{name}.half"), y], name)


def xlnet_base(seed: int, sequence: int, size: Size = XLNET_BASE) -> ModelGraph:
    """input_ids, attention_mask, token_type_ids [N, S] -> last_hidden_state [N, S, hidden]."""
    net = GraphBuilder("xlnet_base", seed)
    _gelu_scalars(net)
    _xlnet_constants(net, size, sequence)
    bias = _xlnet_attention_bias(net, sequence)
    same = _same_segment(net)
    distances = _distances(net, size, sequence)
    x = _embed(net, "input_ids", "word_embedding", (size.vocabulary, size.hidden))
    for layer in range(size.layers):
        name = f"layer{layer}"
        y = _xlnet_attention(net, x, f"{name}.attention", size, distances, same, bias)
        x = _layer_norm(net, net.node("Add", [y, x], f"{name}.add1"), f"{name}.norm1", size.hidden, XLNET_EPSILON)
        y = net.node("Add", [_feed_forward(net, x, f"{name}.ffn", size), x], f"{name}.add2")
        output = "last_hidden_state" if layer == size.layers - 1 else f"{name}.norm2"
        x = _layer_norm(net, y, output, size.hidden, XLNET_EPSILON)
    tokens: dict[str, Sequence[int | str]] = dict.fromkeys(
        ("input_ids", "attention_mask", "token_type_ids"), (sequence,)
    )
    return net.finish(tokens, {"last_hidden_state": (sequence, size.hidden)}, TensorProto.INT64)


def _xlnet_constants(net: GraphBuilder, size: Size, sequence: int) -> None:
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


def _xlnet_attention_bias(net: GraphBuilder, sequence: int) -> str:
    """Mask [N, S] -> [N, 1, S, S]: -1e30 at keys that are no tokens, but each position may see itself."""
    absent = net.node("Equal", ["attention_mask", net.constant("mask.absent", np.array(0))], "mask.equal")
    absent = net.node("Unsqueeze", [absent, net.integers("mask.axes", [1, 2])], "mask.unsqueeze")
    others = net.constant("mask.others", ~np.eye(sequence, dtype=np.bool_)[None, None])
    hidden = net.node("And", [absent, others], "mask.and")
    hidden = net.node("Cast", [hidden], "mask.cast", to=TensorProto.FLOAT)
    return net.node("Mul", [hidden, net.scalar("mask.value", XLNET_MASKED)], "mask.bias")


def _same_segment(net: GraphBuilder) -> str:
    """Token types [N, S] -> bool [N, 1, S, S]: is the query in the key's segment?"""
    query = net.node("Unsqueeze", ["token_type_ids", net.integers("segment.query", [1, 3])], "segment.queries")
    key = net.node("Unsqueeze", ["token_type_ids", net.integers("segment.key", [1, 2])], "segment.keys")
    return net.node("Equal", [query, key], "segment.same")


def _xlnet_attention(net: GraphBuilder, x: str, name: str, size: Size, distances: str, same: str, bias: str) -> str:
    query, key, value = (_linear(net, x, f"{name}.{part}", size.hidden, size.hidden, bias=False) for part in "qkv")
    query = net.node("Reshape", [query, "split"], f"{name}.q.split")
    key = _split_heads(net, key, f"{name}.k", "split", perm=(0, 2, 3, 1))
    value = _split_heads(net, value, f"{name}.v", "split")
    far = _linear(net, distances, f"{name}.r", size.hidden, size.hidden, bias=False)
    far = _split_heads(net, far, f"{name}.r", "split_distances", perm=(0, 2, 3, 1))

    content = net.node("MatMul", [_biased(net, query, f"{name}.r_w_bias", size), key], f"{name}.content")
    position = net.node("MatMul", [_biased(net, query, f"{name}.r_r_bias", size), far], f"{name}.position")
    position = _shift_distances(net, position, f"{name}.shift")
    segment = _segment_scores(net, _biased(net, query, f"{name}.r_s_bias", size), f"{name}.segment", size, same)

    scores = net.node("Add", [net.node("Add", [content, position], f"{name}.add1"), segment], f"{name}.add2")
    scores = net.node("Add", [net.node("Mul", [scores, "scale"], f"{name}.mul"), bias], f"{name}.masked")
    shares = net.node("Softmax", [scores], f"{name}.softmax", axis=-1)
    mixed = _merge_heads(net, net.node("MatMul", [shares, value], f"{name}.context"), f"{name}.context", "merge")
    return _linear(net, mixed, f"{name}.o", size.hidden, size.hidden, bias=False)


def _biased(net: GraphBuilder, query: str, name: str, size: Size) -> str:
    """[N, S, heads, head size] plus a bias for all positions -> [N, heads, S, head size]."""
    bias = net.normal(name, (size.heads, size.head_size), 0.2)
    return net.node("Transpose", [net.node("Add", [query, bias], f"{name}.add")], f"{name}.heads", perm=[0, 2, 1, 3])


def _shift_distances(net: GraphBuilder, x: str, name: str) -> str:
    x = net.node("Reshape", [x, "shift.rows"], f"{name}.rows")
    x = net.node("Slice", [x, "one_row", "all_rows", "rows_axis"], f"{name}.less")
    x = net.node("Reshape", [x, "shift.columns"], f"{name}.columns")
    return net.node("Slice", [x, "zero", "keys", "columns_axis"], name)


def _segment_scores(net: GraphBuilder, query: str, name: str, size: Size, same: str) -> str:
    """[N, heads, S, head size] -> score [N, heads, S, S] that depends only on query and whether segments agree."""
    table = net.normal(f"{name}.weight", (XLNET_SEGMENTS, size.heads, size.head_size), 0.5)
    table = net.node("Transpose", [table], f"{name}.transpose", perm=[1, 2, 0])
    both = net.node("MatMul", [query, table], f"{name}.matmul")
    agree, differ = net.nodes("Split", [both], [f"{name}.agree", f"{name}.differ"], f"{name}.split", axis=3)
    return net.node("Where", [same, agree, differ], name)


def _embed(net: GraphBuilder, indices: str, name: str, shape: tuple[int, int]) -> str:
    """Look up rows of a table [rows, channels]."""
    return net.node("Gather", [_table(net, name, shape), indices], name)


def _table(net: GraphBuilder, name: str, shape: tuple[int, int]) -> str:
    """Declare an embedding table [rows, channels]."""
    return net.normal(f"{name}.weight", shape, shape[1] ** -0.5)


def _positions(net: GraphBuilder, sequence: int) -> str:
    """0, 1, ... as int64 [1, sequence]."""
    return net.constant("position_ids", np.arange(sequence, dtype=np.int64)[None])


def _linear(net: GraphBuilder, x: str, name: str, inputs: int, outputs: int, bias: bool = True) -> str:
    """x [..., inputs] times a weight [inputs, outputs], plus a bias: MatMul and Add."""
    weight = net.normal(f"{name}.weight", (inputs, outputs), inputs**-0.5)
    if not bias:
        return net.node("MatMul", [x, weight], f"{name}.matmul")
    vector = net.normal(f"{name}.bias", (outputs,), 0.05)
    return net.node("Add", [net.node("MatMul", [x, weight], f"{name}.matmul"), vector], f"{name}.add")


def _layer_norm(net: GraphBuilder, x: str, name: str, channels: int, epsilon: float) -> str:
    """Normalise over the last axis; scale about 1, small shift."""
    weights = [net.uniform(f"{name}.weight", channels, 0.8, 1.2), net.normal(f"{name}.bias", (channels,), 0.1)]
    return net.node("LayerNormalization", [x, *weights], name, axis=-1, epsilon=epsilon)


def _feed_forward(net: GraphBuilder, x: str, name: str, size: Size) -> str:
    """Linear to the inner channels, GELU, linear back."""
    y = _gelu(net, _linear(net, x, f"{name}.fc1", size.hidden, size.inner), f"{name}.gelu")
    return _linear(net, y, f"{name}.fc2", size.inner, size.hidden)


def _gelu(net: GraphBuilder, x: str, name: str) -> str:
    """x / 2 (1 + erf(x / sqrt 2)), in five nodes. Wants the scalars of `gelu_scalars`."""
    y = net.node("Div", [x, "sqrt_two"], f"{name}.div")
    y = net.node("Add", [net.node("Erf", [y], f"{name}.erf"), "one"], f"{name}.add")
    return net.node("Mul", [net.node("Mul", [x, y], f"{name}.mul"), "half"], f"{name}.half")


def _gelu_scalars(net: GraphBuilder) -> None:
    """Declare what every `gelu` of a model shares."""
    for name, value in (("sqrt_two", 2**0.5), ("one", 1.0), ("half", 0.5)):
        net.scalar(name, value)


def _split_heads(net: GraphBuilder, x: str, name: str, shape: str, perm: Sequence[int] = (0, 2, 1, 3)) -> str:
    """[N, S, hidden] -> [N, S, heads, head size], with `shape` the name of that, -> its axes in the order `perm`."""
    return net.node("Transpose", [net.node("Reshape", [x, shape], f"{name}.split")], f"{name}.heads", perm=list(perm))


def _merge_heads(net: GraphBuilder, x: str, name: str, shape: str) -> str:
    """[N, heads, S, head size] -> [N, S, hidden], with `shape` the name of that."""
    return net.node("Reshape", [net.node("Transpose", [x], f"{name}.back", perm=[0, 2, 1, 3]), shape], f"{name}.merge")


def _attention_bias(net: GraphBuilder, mask: str = "attention_mask") -> str:
    """INT64 mask [N, S], 1 where a token is -> float [N, 1, 1, S], 0 there and the lowest number elsewhere."""
    axes = net.integers("mask.axes", [1, 2])
    x = net.node("Unsqueeze", [mask, axes], "mask.unsqueeze")
    x = net.node("Cast", [x], "mask.cast", to=1)
    x = net.node("Sub", [net.scalar("mask.one", 1.0), x], "mask.sub")
    return net.node("Mul", [x, net.scalar("mask.lowest", LOWEST)], "mask.bias")
