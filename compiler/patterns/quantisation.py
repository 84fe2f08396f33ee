"""Quantised graphs: a tensor that is quantised and taken back at once only becomes rounder.

Exporters put such a pair (QDQ) at every place where an integer kernel would hand over 8-bit numbers. Here the pair is
one activation function, which a convolution applies before it stores, and weights are taken back while compiling: the
model computes the same numbers in float32. What is left of either operator is spread along its axis.
"""

from dataclasses import replace

import numpy as np

from gangway.compiler.graph import Graph, Node
from gangway.compiler.patterns.editor import Editor
from gangway.compiler.specs import Array

QUANTISED = {"int8": (-128, 127), "uint8": (0, 255)}


def find_quantisation(graph: Graph) -> Graph:
    """Return the graph with pairs of one constant scale as FakeQuantise; other scales are shaped for broadcasting."""
    editor = Editor(graph)
    rounded: dict[str, str] = {}  # by the quantised tensor: what the first pair made of it
    for node in graph.nodes:
        if node.operator == "DequantizeLinear":
            _replace_pair(editor, node, rounded)
    return _spread(editor.result())


def _replace_pair(editor: Editor, node: Node, rounded: dict[str, str]) -> None:
    source = editor.producer(node.inputs[0], "QuantizeLinear")
    if source is None or not editor.is_float(node.outputs[0]) or not editor.is_float(source.inputs[0]):
        return
    scale, zero_point = editor.scalar(source.inputs[1]), _zero_point(editor, source)
    dtype = editor.types[node.inputs[0]].dtype
    if dtype not in QUANTISED or scale is None or zero_point is None:
        return
    if (scale, zero_point) != (editor.scalar(node.inputs[1]), _zero_point(editor, node)):
        return
    output, shape = node.outputs[0], editor.types[node.outputs[0]].shape
    if first := rounded.get(source.outputs[0]):
        editor.replace(output, [editor.node("Identity", (first,), output, shape)])
        return
    rounded[source.outputs[0]] = output
    x, lowest = source.inputs[0], QUANTISED[dtype][0]
    relu = editor.inner(x, "Relu")
    if relu and lowest == zero_point:  # what is negative becomes the lowest anyway
        x = relu.inputs[0]
    parameters = {"scale": scale, "zero_point": int(zero_point), "dtype": dtype}
    editor.replace(output, [editor.node("FakeQuantise", (x,), output, shape, **parameters)])


def _zero_point(editor: Editor, node: Node) -> float | None:
    return editor.scalar(node.inputs[2]) if len(node.inputs) > 2 and node.inputs[2] else 0.0


def _spread(graph: Graph) -> Graph:
    """Shape constant scales and zero points of one number per channel, or block, for broadcasting."""
    constants = dict(graph.constants)
    nodes = []
    for node in graph.nodes:
        if node.operator in ("QuantizeLinear", "DequantizeLinear") and node.inputs[0] in graph.types:
            shape = graph.types[node.inputs[0]].shape
            names = list(node.inputs)
            for index, name in enumerate(names[1:], 1):
                if name in constants and constants[name].size > 1:
                    names[index] = f"{node.outputs[0]}:{name}"
                    constants[names[index]] = _shaped(constants[name], node, shape)
            node = replace(node, inputs=tuple(names))  # noqa: PLW2901
        nodes.append(node)
    return replace(graph, nodes=tuple(nodes), constants=constants)


def _shaped(value: Array, node: Node, shape: tuple[int, ...]) -> Array:
    axis = node.attributes.get("axis", 1) % len(shape)
    if value.ndim > 1:  # one number for each block along the axis
        block = node.attributes.get("block_size", 0) or -(-shape[axis] // value.shape[axis])
        return np.take(np.repeat(value, block, axis), range(shape[axis]), axis)
    return value.reshape([-1 if number == axis else 1 for number in range(len(shape))])
