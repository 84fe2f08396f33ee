"""Products with a constant that DequantizeLinear makes of integers: the integers stay, and the product scales them.

Recurrent layers have two such constants.
"""

from dataclasses import replace

import numpy as np

from gangway.compiler.frontend.dynamic_quantisation import constant_value
from gangway.compiler.frontend.graph import Editor, Graph, Node, Rule, apply_rule, remove_unused
from gangway.compiler.frontend.packed import PACKED_GATES, PACKED_MATMUL
from gangway.compiler.frontend.packed.weights import PackedWeights, make_weights
from gangway.compiler.frontend.patterns import MOVES
from gangway.compiler.kernels.specs import Array

_SCALE, _ZERO = 1, 2  # inputs of DequantizeLinear


def find_packed_products(graph: Graph) -> Graph:
    """Return an equivalent graph with such nodes, for products of float32 with integers of 4 or 8 bits."""
    graph = apply_rule(graph, Rule(("MatMul", "Gemm"), _find_product))
    return remove_unused(apply_rule(graph, Rule(("LSTM", "GRU", "RNN"), _find_gates)))


def _find_product(editor: Editor, node: Node) -> None:
    """Put a product with integers in the place of one with what they stand for.

    Where the other operand was quantised, too, both may be integers in the kernel: see `place/int8.py`.
    """
    x, matrix, *bias = node.inputs
    turned, source = bool(node.attributes.get("transB", 0)), matrix
    if (transposed := editor.producer(source, "Transpose")) and transposed.attributes.get("perm", [1, 0]) == [1, 0]:
        turned, source = not turned, transposed.inputs[0]
    table = editor.producer(source, "DequantizeLinear")
    if table is None or not editor.is_float(x) or _is_quantised(editor, x):
        return
    if x in editor.constants or node.attributes.get("transA", 0):
        return
    shift = constant_value(editor, bias[0]) if bias and bias[0] else np.zeros(1, np.float32)
    weights = _weights(editor, table, turned)
    plain = all(node.attributes.get(name, 1.0) == 1.0 for name in ("alpha", "beta"))
    if weights is None or shift is None or not plain or shift.size not in (1, len(weights.scales)):
        return
    if shift.ndim and shift.size != shift.shape[-1]:  # a number for each row
        return
    editor.replace(node.outputs[0], [_product(editor, node, x, weights, shift)])


def _is_quantised(editor: Editor, x: str) -> bool:
    """Whether an activation only holds numbers that were integers."""
    while moved := editor.producer(x, *MOVES):
        x = moved.inputs[0]
    source = editor.producer(x, "DequantizeLinear")
    return source is not None and source.inputs[0] not in editor.constants


def _product(editor: Editor, node: Node, x: str, weights: PackedWeights, bias: Array) -> Node:
    output, outputs = node.outputs[0], len(weights.scales)
    names = [
        editor.constant(f"{output}:{name}", value)
        for name, value in (("integers", weights.integers), ("scales", weights.scales))
    ]
    zeros = "" if weights.zeros is None else editor.constant(f"{output}:zeros", weights.zeros)
    shift = editor.constant(f"{output}:bias", np.broadcast_to(bias.reshape(-1), (outputs,)).astype(np.float32))
    attributes = {"bits": weights.bits, "block": weights.block, "outputs": outputs}
    return Node(node.name, PACKED_MATMUL, (x, *names, zeros, shift), (output,), attributes)


def _weights(editor: Editor, table: Node, turned: bool) -> PackedWeights | None:
    """Return the weights of a matrix that is dequantised; `turned`: it is [outputs, inputs], else its transpose."""
    integers, scales = (constant_value(editor, name) for name in table.inputs[:_ZERO])
    zeros = constant_value(editor, table.inputs[_ZERO]) if len(table.inputs) > _ZERO and table.inputs[_ZERO] else None
    if integers is None or integers.ndim != 2 or scales is None or (zeros is None and any(table.inputs[_ZERO:])):
        return None
    axis, inputs = table.attributes.get("axis", 1) % 2, integers.shape[int(turned)]
    outputs, block = integers.shape[int(not turned)], table.attributes.get("block_size", 0)
    if scales.size == 1 or (scales.ndim == 1 and axis == int(not turned)):
        block, scales = inputs, np.broadcast_to(scales.reshape(-1, 1), (outputs, 1))
        zeros = None if zeros is None else np.broadcast_to(zeros.reshape(-1, 1), (outputs, 1))
    elif block and axis == int(turned):
        if not turned:
            scales, zeros = scales.T, None if zeros is None else zeros.T
    else:
        return None
    return make_weights(integers.dtype.name, integers if turned else integers.T, scales, zeros, block)


def _find_gates(editor: Editor, node: Node) -> None:
    """Give a recurrent layer the integers of its matrices, too, unless it may be left to onnxruntime."""
    sides = [_gates(editor, name) for name in node.inputs[1:3]]
    if node.attributes.get("activations") or not editor.is_float(node.inputs[0]):
        return
    output, names = next(filter(None, node.outputs)), []
    for index, side in enumerate(sides):
        if side is None:
            return
        names += [
            editor.constant(f"{output}:{index}{name}", v) for name, v in zip(("integers", "scales"), side, strict=True)
        ]
    inputs = (*node.inputs, *[""] * (PACKED_GATES - len(node.inputs)), *names)
    editor.replace(output, [replace(node, inputs=inputs)])


def _gates(editor: Editor, name: str) -> tuple[Array, Array] | None:
    """Return [directions][outputs][inputs] integers of int8 and [directions][outputs] scales, if that is all."""
    shape, source = editor.shape(name), name
    while view := editor.producer(source, "Reshape"):
        source = view.inputs[0]
    table = editor.producer(source, "DequantizeLinear")
    if table is None or shape is None or len(shape) != 3 or table.attributes.get("block_size", 0):
        return None
    integers, scales, *zeros = (constant_value(editor, each) for each in table.inputs if each)
    if integers is None or integers.dtype != np.int8 or scales is None or scales.dtype != np.float32:
        return None
    if any(zero is None or zero.any() for zero in zeros):
        return None
    directions, outputs, _ = shape
    rows = (directions * outputs,)
    if scales.size > 1 and (table.attributes.get("axis", 1) != 0 or not scales.shape == integers.shape[:1] == rows):
        return None
    return integers.reshape(shape), np.broadcast_to(scales.reshape(-1), rows).reshape(directions, outputs)
