"""Layer normalisation as exporters wrote it before ONNX had an operator for it.

(x - mean(x)) / sqrt(mean((x - mean(x))^2) + epsilon), then perhaps a scale and a shift of one number per channel.
"""

import numpy as np

from gangway.compiler.graph import Graph, Node
from gangway.compiler.patterns.editor import Editor


def find_layer_norm(graph: Graph) -> Graph:
    """Return the graph with LayerNormalization over the last axis in the place of its parts."""
    editor = Editor(graph)
    for node in graph.nodes:
        if node.operator in ("Div", "Mul"):
            _replace(editor, node)
    return editor.result()


def _replace(editor: Editor, node: Node) -> None:
    for deviation, rest in (node.inputs, node.inputs[::-1]):
        epsilon = _epsilon(editor, node, rest, deviation)
        x = _centred(editor, deviation)
        if x is None or epsilon is None or not editor.is_float(x):
            continue
        channels = editor.types[x].shape[-1]
        scale, shift = np.ones(channels, np.float32), np.zeros(channels, np.float32)
        end = node
        if found := _per_channel(editor, end, "Mul", channels):
            end, scale = found
        if found := _per_channel(editor, end, "Add", channels):
            end, shift = found
        output = end.outputs[0]
        inputs = (x, editor.constant(f"{output}:scale", scale), editor.constant(f"{output}:shift", shift))
        attributes = {"axis": -1, "epsilon": epsilon}
        editor.replace(output, [Node(end.name, "LayerNormalization", inputs, (output,), attributes)])
        return


def _centred(editor: Editor, name: str) -> str | None:
    """Return x, if the tensor is x less its mean over the last axis."""
    node = editor.producer(name, "Sub")
    if node is None:
        return None
    mean = editor.producer(node.inputs[1], "ReduceMean")
    return node.inputs[0] if mean and mean.inputs[0] == node.inputs[0] and _over_last(editor, mean) else None


def _over_last(editor: Editor, node: Node) -> bool:
    shape = editor.shape(node.inputs[0])
    return bool(shape) and editor.axes(node) == (len(shape or ()) - 1,) and node.attributes.get("keepdims", 1) == 1


def _epsilon(editor: Editor, node: Node, rest: str, deviation: str) -> float | None:
    """Return epsilon, if `node` divides `deviation` by the root of its mean square plus epsilon."""
    if node.operator == "Mul":
        inverse = editor.producer(rest, "Reciprocal", "Div")
        if inverse is None or (inverse.operator == "Div" and editor.scalar(inverse.inputs[0]) != 1.0):
            return None
        rest = inverse.inputs[-1]
    elif rest != node.inputs[1]:
        return None
    root = editor.producer(rest, "Sqrt", "Pow")
    if root is None or (root.operator == "Pow" and editor.scalar(root.inputs[1]) != 0.5):
        return None
    total = editor.producer(root.inputs[0], "Add")
    found = editor.operands(total) if total else None
    if found is None:
        return None
    mean = editor.producer(found[0], "ReduceMean")
    if mean is None or not _over_last(editor, mean) or not _is_square(editor, mean.inputs[0], deviation):
        return None
    return found[1]


def _is_square(editor: Editor, name: str, deviation: str) -> bool:
    """Whether a tensor is the square of `deviation`, or of another tensor that is computed in the same way."""
    node = editor.producer(name, "Mul", "Pow")
    if node is None:
        return False
    square = node.inputs[0] == node.inputs[1] if node.operator == "Mul" else editor.scalar(node.inputs[1]) == 2.0
    x = _centred(editor, deviation)
    return square and x is not None and (node.inputs[0] == deviation or _centred(editor, node.inputs[0]) == x)


def _per_channel(editor: Editor, node: Node, operator: str, channels: int) -> tuple[Node, np.ndarray] | None:
    """Return the only reader of a node's output and its constant, if it applies one number per channel."""
    name = node.outputs[0]
    readers = editor.readers[name]
    if editor.uses[name] != 1 or not readers or readers[0].operator != operator:
        return None
    (reader,) = readers
    (other,) = (item for item in reader.inputs if item != name)
    value = editor.constants.get(other)
    kind, shape = editor.shape(reader.outputs[0]), editor.shape(name)
    if value is None or value.shape[-1:] != (channels,) or value.size != channels or kind != shape:
        return None
    return reader, value.reshape(-1)
