"""What a rewritten graph computes, operator by operator, by onnxruntime and, for attention, by numpy."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from gangway.compiler.frontend.graph import Graph, Node
from gangway.compiler.frontend.shape_inference import evaluate
from gangway.compiler.kernels.attention_specs import AttentionSpec


@dataclass
class Interpreter:
    """What a rewritten graph computes, operator by operator."""

    graph: Graph

    def run(self, feeds: dict[str, Any]) -> list[Any]:
        values = {**self.graph.constants, **feeds}
        own = {"FusedAttention": self._attend, "StridedCopy": self._copy}
        for item in self.graph.nodes:
            compute = own.get(item.operator)
            values |= compute(item, values) if compute else evaluate(item, values, self.graph.opset)
        return [values[name] for name in self.graph.outputs]

    def _copy(self, item: Node, values: dict[str, Any]) -> dict[str, Any]:
        (name,), (output,) = item.inputs, item.outputs
        flat = values[name].reshape(-1)[item.attributes["offset"] :]
        strides = [flat.itemsize * step for step in item.attributes["strides"]]
        return {output: np.lib.stride_tricks.as_strided(flat, self.graph.types[output].shape, strides).copy()}

    def _attend(self, item: Node, values: dict[str, Any]) -> dict[str, Any]:
        spec = item.attributes["spec"]
        lengths = (spec.queries, spec.keys, spec.keys)
        query, key, value = (
            _heads(spec, index, values[name], begin, length, item.attributes["images"][index])
            for index, (name, begin, length) in enumerate(
                zip(item.inputs, item.attributes["begins"], lengths, strict=False)
            )
        )
        scores = query.astype(np.float64) @ key.swapaxes(-1, -2)
        names = item.inputs[3:]
        for scaled in (True, False):
            scores = scores if scaled else scores * spec.scale
            if not scaled and spec.softcap:
                scores = spec.softcap * np.tanh(scores / spec.softcap)
            for name, bias in zip(names, spec.biases, strict=True):
                if bias.scaled == scaled:
                    there = (bias.per_window, bias.per_head, bias.per_query, True)
                    full = (spec.windows, spec.heads, spec.queries, spec.keys)
                    shape = [n if is_there else 1 for n, is_there in zip(full, there, strict=True)]
                    scores = scores + values[name].reshape(shape)
        with np.errstate(invalid="ignore", over="ignore"):
            scores = scores.astype(np.float32).astype(np.float64)
            shares = np.exp(scores - scores.max(-1, keepdims=True))
            shares /= shares.sum(-1, keepdims=True)
        if spec.empty_rows == "zero":
            shares[(scores == -np.inf).all(-1)] = 0
        elif spec.empty_rows == "zero and nan":
            shares = np.where(np.isnan(shares), 0, shares)
        mixed = shares @ value
        side_by_side = not spec.strides[3] or spec.strides[3][2] > spec.strides[3][1] > 0
        if item.attributes["images"][3]:
            mixed = mixed.transpose(1, 3, 0, 2)
        elif side_by_side:
            mixed = mixed.swapaxes(1, 2)
        mixed = mixed.astype(np.float32)
        return {item.outputs[0]: mixed.reshape(self.graph.types[item.outputs[0]].shape)}


def _heads(spec: AttentionSpec, index: int, tensor: Any, begin: int, length: int, is_image: bool) -> Any:
    """[windows, heads, positions, channels] of queries, keys or values."""
    size = spec.value_channels if index == 2 else spec.head_size
    count = spec.heads if index == 0 else spec.heads // spec.sharing
    whole = tensor.size // (spec.windows * length)
    strides = spec.strides[index]
    strides = strides if len(strides) == 4 else (length * whole, *(strides or (size,)), whole, 1)
    shape = (spec.windows, count, length, size)
    if is_image:  # its pixels become positions
        tensor = tensor.reshape(whole, -1).T.copy()
    flat = tensor.reshape(-1)[begin:]
    view = np.lib.stride_tricks.as_strided(flat, shape, [4 * step for step in strides], writeable=False)
    return view if index == 0 else np.repeat(view, spec.sharing, 1)
