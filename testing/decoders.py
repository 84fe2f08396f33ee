"""Transformers with random weights, as exporters write them: decoders with past keys and values, an encoder.

One decoder is like GPT-2, the other one like T5's: it attends to what an encoder has made of a source, too.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

INTEGER, FLOAT = TensorProto.INT64, TensorProto.FLOAT
DISTANCES = 32  # that have a bias of their own


@dataclass(frozen=True)
class Sizes:
    """How large a transformer is. `source`: tokens that a translator's encoder has read."""

    layers: int = 1
    heads: int = 2
    head_size: int = 16
    words: int = 40
    positions: int = 138
    source: int = 0

    @property
    def width(self) -> int:
        """Numbers of a token between layers."""
        return self.heads * self.head_size

    @property
    def caches(self) -> list[tuple[int, str]]:
        """Layer and kind of all that a decoder keeps of the past."""
        return [(layer, kind) for layer in range(self.layers) for kind in ("key", "value")]


SMALL = Sizes()


@dataclass
class Builder:
    """A graph that grows node by node; names are made up."""

    sizes: Sizes
    nodes: list[Any] = field(default_factory=list)
    weights: list[Any] = field(default_factory=list)
    random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def node(self, operator: str, *inputs: str, output: str = "", **attributes: Any) -> str:
        """Add a node; return its output."""
        name = output or f"{operator.lower()}{len(self.nodes)}"
        self.nodes.append(helper.make_node(operator, inputs, [name], f"/{name}", **attributes))
        return name

    def constant(self, value: Any, dtype: Any = np.int64) -> str:
        """Add a constant; return its name."""
        name = f"weight{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(np.array(value, dtype), name))
        return name

    def weight(self, *shape: int) -> str:
        """Add random numbers; return their name."""
        return self.constant(self.random.standard_normal(shape) / shape[0] ** 0.5, np.float32)

    def dense(self, x: str, width: int, result: int) -> str:
        """Add a product with a matrix, and a bias."""
        return self.node("Add", self.node("MatMul", x, self.weight(width, result)), self.weight(result))

    def normal(self, x: str) -> str:
        """Add a layer normalisation."""
        ones = self.constant(np.ones(self.sizes.width), np.float32)
        return self.node("LayerNormalization", x, ones, self.weight(self.sizes.width), axis=-1)

    def size(self, x: str, axis: int) -> str:
        """Add what reads one size of a tensor."""
        return self.node("Gather", self.node("Shape", x), self.constant(axis), axis=0)

    def one(self, number: str) -> str:
        """Make a vector of a number."""
        return self.node("Unsqueeze", number, self.constant([0]))

    def heads(self, x: str, rows: str, length: str) -> str:
        """Cut each token into heads, [rows, heads, length, head size]."""
        shape = [
            self.one(rows),
            self.one(length),
            self.constant([self.sizes.heads]),
            self.constant([self.sizes.head_size]),
        ]
        split = self.node("Reshape", x, self.node("Concat", *shape, axis=0))
        return self.node("Transpose", split, perm=[0, 2, 1, 3])

    def root_mean_square(self, x: str) -> str:
        """Add a normalisation without a mean."""
        square = self.node("Pow", x, self.constant(2, np.float32))
        mean = self.node("ReduceMean", square, axes=[-1])
        root = self.node("Sqrt", self.node("Add", mean, self.constant(1e-6, np.float32)))
        ones = self.constant(np.ones(self.sizes.width), np.float32)
        return self.node("Mul", self.node("Mul", x, self.node("Reciprocal", root)), ones)

    def attention(self, q: str, k: str, v: str, mask: str, rows: str, length: str, biased: bool = True) -> str:
        """Add attention as exporters spell it out, and its heads put together."""
        turned = self.node("Transpose", k, perm=[0, 1, 3, 2])
        scores = self.node("Mul", self.node("MatMul", q, turned), self.constant(self.sizes.head_size**-0.5, np.float32))
        shares = self.node("Softmax", self.node("Add", scores, mask), axis=-1)
        merged = self.node("Transpose", self.node("MatMul", shares, v), perm=[0, 2, 1, 3])
        shape = self.node("Concat", self.one(rows), self.one(length), self.constant([self.sizes.width]), axis=0)
        whole = self.node("Reshape", merged, shape)
        return self.node("Add", whole, self.weight(self.sizes.width)) if biased else whole

    def save(self, path: Path, inputs: dict[str, tuple[int, Sequence[Any]]], outputs: dict[str, Sequence[Any]]) -> Path:
        """Write the model; return its path."""
        values = [helper.make_tensor_value_info(name, *kind) for name, kind in inputs.items()]
        results = [helper.make_tensor_value_info(name, FLOAT, shape) for name, shape in outputs.items()]
        graph = helper.make_graph(self.nodes, "transformer", values, results, self.weights)
        path.parent.mkdir(parents=True, exist_ok=True)
        onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
        return path


def save_decoder(path: Path, sizes: Sizes = SMALL) -> Path:
    """A decoder like GPT-2: tokens and past keys and values in, logits and present ones out; positions from lengths."""
    b = Builder(sizes)
    width, places_of = sizes.width, sizes.positions
    inputs: dict[str, tuple[int, Sequence[Any]]] = {"input_ids": (INTEGER, ["batch", "sequence"])}
    outputs: dict[str, Sequence[Any]] = {"logits": ["batch", "sequence", sizes.words]}
    rows, length = b.size("input_ids", 0), b.size("input_ids", 1)
    past = b.size("past.0.key", 2)
    total = b.node("Add", past, length)
    places = b.one(b.node("Range", past, total, b.constant(1)))
    embedded = b.node("Gather", b.weight(sizes.words, width), "input_ids", axis=0)
    x = b.node("Add", embedded, b.node("Gather", b.weight(places_of, width), places, axis=0))
    seen = b.constant(np.tril(np.ones((1, 1, places_of, places_of))), bool)
    seen = b.node("Slice", seen, b.one(past), b.one(total), b.constant([2]))
    seen = b.node("Slice", seen, b.constant([0]), b.one(total), b.constant([3]))
    mask = b.node("Where", seen, b.constant(0, np.float32), b.constant(-1e9, np.float32))
    for layer in range(sizes.layers):
        y = b.normal(x)
        q, k, v = (b.heads(b.dense(y, width, width), rows, length) for _ in range(3))
        for kind, part in (("key", k), ("value", v)):
            inputs[f"past.{layer}.{kind}"] = (FLOAT, ["batch", sizes.heads, "past", sizes.head_size])
            outputs[f"present.{layer}.{kind}"] = ["batch", sizes.heads, "total", sizes.head_size]
            b.node("Concat", f"past.{layer}.{kind}", part, output=f"present.{layer}.{kind}", axis=2)
        y = b.attention(q, f"present.{layer}.key", f"present.{layer}.value", mask, rows, length)
        x = b.node("Add", x, b.dense(y, width, width))
        x = b.node("Add", x, b.dense(b.node("Tanh", b.dense(b.normal(x), width, 4 * width)), 4 * width, width))
    b.node("MatMul", b.normal(x), b.weight(width, sizes.words), output="logits")
    return b.save(path, inputs, outputs)


def save_translator(path: Path, sizes: Sizes = SMALL) -> Path:
    """A decoder like T5's: no biases but one of distances, keys and values of the source, and past ones."""
    b = Builder(sizes)
    width, kept = sizes.width, 4 * sizes.width
    inputs: dict[str, tuple[int, Sequence[Any]]] = {
        "input_ids": (INTEGER, ["batch", "sequence"]),
        "encoder_attention_mask": (INTEGER, ["batch", "source"]),
    }
    outputs: dict[str, Sequence[Any]] = {"logits": ["batch", "sequence", sizes.words]}
    rows, length = b.size("input_ids", 0), b.size("input_ids", 1)
    past = b.size("past.0.key", 2)
    total = b.node("Add", past, length)
    queries, keys = b.node("Range", past, total, b.constant(1)), b.node("Range", b.constant(0), total, b.constant(1))
    distance = b.node("Sub", b.node("Unsqueeze", queries, b.constant([1])), b.node("Unsqueeze", keys, b.constant([0])))
    bucket = b.node("Min", b.node("Max", distance, b.constant(0)), b.constant(DISTANCES - 1))
    nearness = b.node("Gather", b.weight(DISTANCES, sizes.heads), bucket, axis=0)
    bias = b.node("Unsqueeze", b.node("Transpose", nearness, perm=[2, 0, 1]), b.constant([0]))
    hidden = b.node("Less", distance, b.constant(0))
    mask = b.node("Where", hidden, b.constant(-1e9, np.float32), bias)
    seen = b.node("Cast", b.node("Unsqueeze", "encoder_attention_mask", b.constant([1, 2])), to=FLOAT)
    source_mask = b.node("Mul", b.node("Sub", b.constant(1, np.float32), seen), b.constant(-1e9, np.float32))
    x = b.node("Gather", b.weight(sizes.words, width), "input_ids", axis=0)
    for layer in range(sizes.layers):
        y = b.root_mean_square(x)
        q, k, v = (b.heads(b.node("MatMul", y, b.weight(width, width)), rows, length) for _ in range(3))
        for kind, part in (("key", k), ("value", v)):
            inputs[f"past.{layer}.{kind}"] = (FLOAT, ["batch", sizes.heads, "past", sizes.head_size])
            inputs[f"source.{layer}.{kind}"] = (FLOAT, ["batch", sizes.heads, "source", sizes.head_size])
            outputs[f"present.{layer}.{kind}"] = ["batch", sizes.heads, "total", sizes.head_size]
            b.node("Concat", f"past.{layer}.{kind}", part, output=f"present.{layer}.{kind}", axis=2)
        y = b.attention(q, f"present.{layer}.key", f"present.{layer}.value", mask, rows, length, biased=False)
        x = b.node("Add", x, b.node("MatMul", y, b.weight(width, width)))
        q = b.heads(b.node("MatMul", b.root_mean_square(x), b.weight(width, width)), rows, length)
        y = b.attention(q, f"source.{layer}.key", f"source.{layer}.value", source_mask, rows, length, biased=False)
        x = b.node("Add", x, b.node("MatMul", y, b.weight(width, width)))
        y = b.node("Relu", b.node("MatMul", b.root_mean_square(x), b.weight(width, kept)))
        x = b.node("Add", x, b.node("MatMul", y, b.weight(kept, width)))
    b.node("MatMul", b.root_mean_square(x), b.weight(width, sizes.words), output="logits")
    return b.save(path, inputs, outputs)


def save_encoder(path: Path, sizes: Sizes = SMALL) -> Path:
    """An encoder like BERT: tokens and a mask in, a vector for each token out."""
    b = Builder(sizes)
    width = sizes.width
    rows, length = b.size("input_ids", 0), b.size("input_ids", 1)
    place = b.node("Slice", b.constant([range(sizes.positions)]), b.constant([0]), b.one(length), b.constant([1]))
    embedded = b.node("Gather", b.weight(sizes.words, width), "input_ids", axis=0)
    x = b.normal(b.node("Add", embedded, b.node("Gather", b.weight(sizes.positions, width), place, axis=0)))
    seen = b.node("Cast", b.node("Unsqueeze", "attention_mask", b.constant([1, 2])), to=FLOAT)
    hidden = b.node("Sub", b.constant(1, np.float32), seen)
    mask = b.node("Mul", hidden, b.constant(-1e9, np.float32))
    for _ in range(sizes.layers):
        q, k, v = (b.heads(b.dense(x, width, width), rows, length) for _ in range(3))
        x = b.normal(b.node("Add", x, b.attention(q, k, v, mask, rows, length)))
        x = b.node("Add", x, b.dense(b.node("Relu", b.dense(x, width, 4 * width)), 4 * width, width))
    b.node("Identity", x, output="hidden")
    shape: list[Any] = ["batch", "length"]
    inputs: dict[str, tuple[int, Sequence[Any]]] = dict.fromkeys(("input_ids", "attention_mask"), (INTEGER, shape))
    return b.save(path, inputs, {"hidden": ["batch", "length", width]})


def decoder_feeds(past: int, rows: int, sizes: Sizes = SMALL) -> dict[str, Any]:
    """Return inputs of a step of the decoder."""
    random = np.random.default_rng(past * 10 + rows)
    shape = rows, sizes.heads, past, sizes.head_size
    caches = {f"past.{layer}.{kind}": random.standard_normal(shape, np.float32) for layer, kind in sizes.caches}
    return {"input_ids": random.integers(0, sizes.words, (rows, 1)), **caches}


def translator_feeds(past: int, rows: int, sizes: Sizes = SMALL) -> dict[str, Any]:
    """Return inputs of a step of the decoder of a translator."""
    return {**decoder_feeds(past, rows, sizes), **source_feeds(rows, sizes)}


def source_feeds(rows: int, sizes: Sizes = SMALL) -> dict[str, Any]:
    """Return what an encoder has left of the source: the same at each step; none without a source."""
    if not sizes.source:
        return {}
    random, shape = np.random.default_rng(rows), (rows, sizes.heads, sizes.source, sizes.head_size)
    kept = {f"source.{layer}.{kind}": random.standard_normal(shape, np.float32) for layer, kind in sizes.caches}
    mask = np.ones((rows, sizes.source), np.int64)
    mask[:, -sizes.source // 4 :] = 0
    return {"encoder_attention_mask": mask, **kept}


def encoder_feeds(length: int, rows: int, sizes: Sizes = SMALL) -> dict[str, Any]:
    """Return inputs of the encoder."""
    random = np.random.default_rng(length * 10 + rows)
    mask = np.ones((rows, length), np.int64)
    mask[-1, -(-length // 2) :] = 0
    return {"input_ids": random.integers(0, sizes.words, (rows, length)), "attention_mask": mask}
