"""Constant folding: what depends on constants and known shapes only becomes a constant."""

import numpy as np
from onnx import defs

from gangway.compiler.frontend.graph import Editor, Graph, Node, Rule
from gangway.compiler.frontend.shape_inference import RANDOM, evaluate

_NO_TENSORS = """
    ConcatFromSequence Optional OptionalGetElement OptionalHasElement SequenceAt SequenceConstruct SequenceEmpty
    SequenceErase SequenceInsert SequenceLength SequenceMap SplitToSequence
"""
_UNFOLDED = RANDOM | {"If", "Loop", "Scan", *_NO_TENSORS.split()}


def folded_tensors(graph: Graph) -> set[str]:
    """Return the tensors that are constants once those are folded: that are made of constants and shapes only."""
    known = set(graph.constants)
    for node in graph.nodes:
        is_shape = node.operator == "Shape" and node.inputs[0] in graph.types
        is_made = _is_computed(node) and all(name in known or not name for name in node.inputs)
        if is_shape or is_made:
            known.update(node.outputs)
    return known


def _is_computed(node: Node) -> bool:
    """Whether a node makes the same tensors of the same constants at every time, by an operator of ONNX's own."""
    return node.operator not in _UNFOLDED and not node.domain and defs.has(node.operator)


def _fold_constant(editor: Editor, node: Node) -> None:
    """Replace what does not depend on the inputs by constants, and `Shape` by the shape at batch 1."""
    constants, types = editor.constants, editor.types
    if node.operator == "Shape" and node.inputs[0] in types:
        begin, end = node.attributes.get("start", 0), node.attributes.get("end")
        constants[node.outputs[0]] = np.array(types[node.inputs[0]].shape[begin:end], np.int64)
    elif node.operator == "CastLike" and node.inputs[0] in constants and node.outputs[0] in types:
        constants[node.outputs[0]] = constants[node.inputs[0]].astype(types[node.outputs[0]].dtype)
    elif _is_computed(node) and all(name in constants or not name for name in node.inputs):
        constants.update(evaluate(node, constants, editor.graph.opset))
    else:
        return
    editor.remove(node)


CONSTANTS = Rule((), _fold_constant)
