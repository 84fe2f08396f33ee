"""Small transformers with random weights, as exporters write them: a decoder with past keys and values, an encoder."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

HEADS = 2
HEAD_SIZE = 16
WIDTH = HEADS * HEAD_SIZE
WORDS = 40
POSITIONS = 138
INTEGER, FLOAT = TensorProto.INT64, TensorProto.FLOAT


@dataclass
class Builder:
    """A graph that grows node by node; names are made up."""

    nodes: list[Any] = field(default_factory=list)
    weights: list[Any] = field(default_factory=list)
    random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def node(self, operator: str, *inputs: str, output: str = "", **attributes: Any) -> str:
        name = output or f"{operator.lower()}{len(self.nodes)}"
        self.nodes.append(helper.make_node(operator, inputs, [name], f"/{name}", **attributes))
        return name

    def constant(self, value: Any, dtype: Any = np.int64) -> str:
        name = f"weight{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(np.array(value, dtype), name))
        return name

    def weight(self, *shape: int) -> str:
        return self.constant(self.random.standard_normal(shape) / 4, np.float32)

    def dense(self, x: str, width: int, result: int) -> str:
        return self.node("Add", self.node("MatMul", x, self.weight(width, result)), self.weight(result))

    def normal(self, x: str) -> str:
        ones = self.constant(np.ones(WIDTH), np.float32)
        return self.node("LayerNormalization", x, ones, self.weight(WIDTH), axis=-1)

    def size(self, x: str, axis: int) -> str:
        return self.node("Gather", self.node("Shape", x), self.constant(axis), axis=0)

    def one(self, number: str) -> str:
        return self.node("Unsqueeze", number, self.constant([0]))

    def heads(self, x: str, rows: str, length: str) -> str:
        shape = [self.one(rows), self.one(length), self.constant([HEADS]), self.constant([HEAD_SIZE])]
        split = self.node("Reshape", x, self.node("Concat", *shape, axis=0))
        return self.node("Transpose", split, perm=[0, 2, 1, 3])

    def attention(self, q: str, k: str, v: str, mask: str, rows: str, length: str) -> str:
        turned = self.node("Transpose", k, perm=[0, 1, 3, 2])
        scores = self.node("Mul", self.node("MatMul", q, turned), self.constant(HEAD_SIZE**-0.5, np.float32))
        shares = self.node("Softmax", self.node("Add", scores, mask), axis=-1)
        merged = self.node("Transpose", self.node("MatMul", shares, v), perm=[0, 2, 1, 3])
        shape = self.node("Concat", self.one(rows), self.one(length), self.constant([WIDTH]), axis=0)
        return self.node("Add", self.node("Reshape", merged, shape), self.weight(WIDTH))

    def save(self, path: Path, inputs: dict[str, tuple[int, Sequence[Any]]], outputs: dict[str, Sequence[Any]]) -> Path:
        values = [helper.make_tensor_value_info(name, *kind) for name, kind in inputs.items()]
        results = [helper.make_tensor_value_info(name, FLOAT, shape) for name, shape in outputs.items()]
        graph = helper.make_graph(self.nodes, "transformer", values, results, self.weights)
        path.parent.mkdir(parents=True, exist_ok=True)
        onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
        return path


def save_decoder(path: Path, layers: int = 1) -> Path:
    """A decoder like GPT-2: tokens and past keys and values in, logits and present ones out; positions from lengths."""
    b = Builder()
    inputs: dict[str, tuple[int, Sequence[Any]]] = {"input_ids": (INTEGER, ["batch", "sequence"])}
    outputs: dict[str, Sequence[Any]] = {"logits": ["batch", "sequence", WORDS]}
    rows, length = b.size("input_ids", 0), b.size("input_ids", 1)
    past = b.size("past.0.key", 2)
    total = b.node("Add", past, length)
    places = b.one(b.node("Range", past, total, b.constant(1)))
    embedded = b.node("Gather", b.weight(WORDS, WIDTH), "input_ids", axis=0)
    x = b.node("Add", embedded, b.node("Gather", b.weight(POSITIONS, WIDTH), places, axis=0))
    seen = b.constant(np.tril(np.ones((1, 1, POSITIONS, POSITIONS))), bool)
    seen = b.node("Slice", seen, b.one(past), b.one(total), b.constant([2]))
    seen = b.node("Slice", seen, b.constant([0]), b.one(total), b.constant([3]))
    mask = b.node("Where", seen, b.constant(0, np.float32), b.constant(-1e9, np.float32))
    for layer in range(layers):
        y = b.normal(x)
        q, k, v = (b.heads(b.dense(y, WIDTH, WIDTH), rows, length) for _ in range(3))
        for kind, part in (("key", k), ("value", v)):
            inputs[f"past.{layer}.{kind}"] = (FLOAT, ["batch", HEADS, "past", HEAD_SIZE])
            outputs[f"present.{layer}.{kind}"] = ["batch", HEADS, "total", HEAD_SIZE]
            b.node("Concat", f"past.{layer}.{kind}", part, output=f"present.{layer}.{kind}", axis=2)
        y = b.attention(q, f"present.{layer}.key", f"present.{layer}.value", mask, rows, length)
        x = b.node("Add", x, b.dense(y, WIDTH, WIDTH))
        x = b.node("Add", x, b.dense(b.node("Tanh", b.dense(b.normal(x), WIDTH, 2 * WIDTH)), 2 * WIDTH, WIDTH))
    b.node("MatMul", b.normal(x), b.weight(WIDTH, WORDS), output="logits")
    return b.save(path, inputs, outputs)


def save_encoder(path: Path) -> Path:
    """An encoder like BERT: tokens and a mask in, a vector for each token out."""
    b = Builder()
    rows, length = b.size("input_ids", 0), b.size("input_ids", 1)
    place = b.node("Slice", b.constant([range(POSITIONS)]), b.constant([0]), b.one(length), b.constant([1]))
    embedded = b.node("Gather", b.weight(WORDS, WIDTH), "input_ids", axis=0)
    x = b.normal(b.node("Add", embedded, b.node("Gather", b.weight(POSITIONS, WIDTH), place, axis=0)))
    seen = b.node("Cast", b.node("Unsqueeze", "attention_mask", b.constant([1, 2])), to=FLOAT)
    hidden = b.node("Sub", b.constant(1, np.float32), seen)
    mask = b.node("Mul", hidden, b.constant(-1e9, np.float32))
    q, k, v = (b.heads(b.dense(x, WIDTH, WIDTH), rows, length) for _ in range(3))
    x = b.normal(b.node("Add", x, b.attention(q, k, v, mask, rows, length)))
    b.node("Add", x, b.dense(b.node("Relu", b.dense(x, WIDTH, 2 * WIDTH)), 2 * WIDTH, WIDTH), output="hidden")
    inputs = {name: (INTEGER, ["batch", "length"]) for name in ("input_ids", "attention_mask")}
    return b.save(path, inputs, {"hidden": ["batch", "length", WIDTH]})


def decoder_feeds(past: int, rows: int, layers: int = 1) -> dict[str, Any]:
    """Return inputs of a step of the decoder."""
    random = np.random.default_rng(past * 10 + rows)
    shape = rows, HEADS, past, HEAD_SIZE
    names = [f"past.{layer}.{kind}" for layer in range(layers) for kind in ("key", "value")]
    caches = {name: random.standard_normal(shape, np.float32) for name in names}
    return {"input_ids": random.integers(0, WORDS, (rows, 1)), **caches}


def encoder_feeds(length: int, rows: int) -> dict[str, Any]:
    """Return inputs of the encoder."""
    random = np.random.default_rng(length * 10 + rows)
    mask = np.ones((rows, length), np.int64)
    mask[-1, -(-length // 2) :] = 0
    return {"input_ids": random.integers(0, WORDS, (rows, length)), "attention_mask": mask}
