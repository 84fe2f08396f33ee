"""Products of integers whose scale is found at run time: DynamicQuantizeLinear, then MatMulInteger or ConvInteger.

onnxruntime's dynamic quantisation writes them with a cast, a product of both scales and a bias. Here they become two
nodes of float32 numbers. `DynamicFakeQuantise` is what is left of a tensor once it was uint8, of the scale and zero
point that its own least and largest number give. `QuantisedConv` or `QuantisedMatMul` has weights that were integers.
Its inputs are x, weights as float32, the bias or nothing, then the integers of the weights (int8), their scales and
their zero points, one for each output.

The operator's definition takes all numbers of a tensor together. In a model with a symbolic batch these are the numbers
of one row: so no row changes what another one is answered.
"""

from dataclasses import replace

import numpy as np
from onnx import TensorProto, numpy_helper

from gangway.compiler.frontend.graph import Editor, Graph, Node, Rule, apply_rule, remove_unused
from gangway.compiler.kernels.specs import Array

_OPERATORS = {"ConvInteger": "QuantisedConv", "MatMulInteger": "QuantisedMatMul"}
_RANKS = {"ConvInteger": 4, "MatMulInteger": 2}  # of the weights
_UNSIGNED = 128  # by which numbers of uint8 are moved to be of int8


def find_dynamic_products(graph: Graph) -> Graph:
    """Return an equivalent graph with such nodes; `BIASES` is for later, when constants are folded."""
    graph = apply_rule(graph, Rule(("DynamicQuantizeLinear",), _find_rounding))
    return remove_unused(apply_rule(graph, Rule(tuple(_OPERATORS), _find_product)))


def _find_rounding(editor: Editor, node: Node) -> None:
    """Compute what is left of x beside the integers, of which later rules leave few readers."""
    x, output = node.inputs[0], node.outputs[0]
    if not editor.is_float(x):
        return
    shape, rounded = editor.types[x].shape, _rounded(node)
    if x in editor.wide_shapes:
        editor.wide_shapes[rounded] = editor.wide_shapes[x]
    editor.replace(output, [editor.node("DynamicFakeQuantise", (x,), rounded, shape), node])


def _rounded(node: Node) -> str:
    return f"{node.outputs[0]}:rounded"


def _find_product(editor: Editor, node: Node) -> None:
    """Put a product of float32 numbers in the place of one of integers, its cast and its scale."""
    source = editor.producer(node.inputs[0], "DynamicQuantizeLinear")
    if source is None or not editor.is_float(source.inputs[0]) or node.inputs[2:3] != source.outputs[2:3]:
        return
    weights, end = constant_value(editor, node.inputs[1]), _scaled(editor, node, source)
    if weights is None or weights.ndim != _RANKS[node.operator] or end is None:
        return
    last, scale = end
    axis = 0 if node.operator == "ConvInteger" else 1
    scales = _per_output(scale, weights.shape[axis], 1 if axis == 0 else -1, weights.ndim)
    zero = constant_value(editor, node.inputs[3]) if len(node.inputs) > 3 and node.inputs[3] else np.zeros(1, np.int8)
    zeros = None if zero is None else _per_output(zero, weights.shape[axis], -1, 1)
    if scales is None or zeros is None:
        return
    shift = _UNSIGNED if weights.dtype == np.uint8 else 0
    integers, whole = (weights.astype(np.int16) - shift).astype(np.int8), zeros.astype(np.int32) - shift
    spread = [-1 if index == axis else 1 for index in range(weights.ndim)]
    real = ((integers - whole.reshape(spread)) * scales.reshape(spread)).astype(np.float32)
    output = last.outputs[0]
    names = [
        editor.constant(f"{output}:{name}", value)
        for name, value in (("real", real), ("integers", integers), ("scales", scales), ("zeros", whole))
    ]
    inputs = (_rounded(source), names[0], "", *names[1:])
    editor.replace(output, [Node(node.name, _OPERATORS[node.operator], inputs, (output,), node.attributes)])


def _scaled(editor: Editor, node: Node, source: Node) -> tuple[Node, Array] | None:
    """Return the node that multiplies a product, cast to float32, by both scales, and the scale of the weights."""
    cast = _reader(editor, node, "Cast")
    if cast is None or cast.attributes.get("to") != TensorProto.FLOAT:
        return None
    last = _reader(editor, cast, "Mul")
    if last is None:
        return None
    factor = editor.producer(next((name for name in last.inputs if name != cast.outputs[0]), ""), "Mul")
    if factor is None or source.outputs[1] not in factor.inputs:
        return None
    scale = constant_value(editor, next((name for name in factor.inputs if name != source.outputs[1]), ""))
    return None if scale is None or scale.dtype != np.float32 else (last, scale)


def constant_value(editor: Editor, name: str) -> Array | None:
    """Return a constant, of which definitions make nodes."""
    node = editor.producer(name, "Constant")
    return numpy_helper.to_array(node.attributes["value"]) if node else editor.constants.get(name)


def _reader(editor: Editor, node: Node, operator: str) -> Node | None:
    """Return the only node that reads the result, if it is such an operator."""
    readers = editor.readers[node.outputs[0]]
    alone = len(readers) == 1 and editor.uses[node.outputs[0]] == 1
    return readers[0] if alone and readers[0].operator == operator else None


def _per_output(value: Array, outputs: int, axis: int, rank: int) -> Array | None:
    """Return a number for each output, of one for all or of a tensor along this axis of the result."""
    if value.size == 1:
        return np.full(outputs, value.reshape(()))
    aligned = (1,) * (rank - value.ndim) + value.shape
    long = [index for index, length in enumerate(aligned) if length > 1]
    return value.reshape(-1) if long == [axis % rank] and value.size == outputs else None


def _find_bias(editor: Editor, node: Node) -> None:
    """Let a product add a constant for each output, if nothing else reads what it is without that."""
    for source, other in (node.inputs, node.inputs[::-1]):
        producer, value = editor.inner(source, *_OPERATORS.values()), editor.constants.get(other)
        shape = editor.shape(node.outputs[0])
        if producer is None or producer.inputs[2] or value is None or not shape or editor.shape(source) != shape:
            continue
        axis = 1 if producer.operator == "QuantisedConv" else -1
        shift = _per_output(value, shape[axis], axis, len(shape))
        if shift is None or value.dtype != np.float32:
            continue
        bias = editor.constant(f"{node.outputs[0]}:bias", shift)
        inputs = (*producer.inputs[:2], bias, *producer.inputs[3:])
        editor.remove(producer)
        editor.replace(node.outputs[0], [replace(producer, inputs=inputs, outputs=node.outputs[:1])])
        return


BIASES = Rule(("Add",), _find_bias)
