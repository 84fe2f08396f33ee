"""Operators that move numbers about: concatenation and transposition."""

from gangway.compiler.graph import Node
from gangway.compiler.layers import Concat, Cut, Program, Transpose
from gangway.compiler.operators.registry import lowers


@lowers("Concat")
def concat(program: Program, node: Node) -> None:
    """Tensors beside each other; those without numbers add nothing."""
    rank = len(program.type(node.outputs[0]).shape)
    constants = program.graph.constants
    inputs = tuple(name for name in node.inputs if name not in constants or constants[name].size)
    program.constants.update((name, constants[name]) for name in inputs if name in constants)
    program.add(node, Concat(node.attributes["axis"] % rank), inputs)


@lowers("StridedCopy")
def strided_copy(program: Program, node: Node) -> None:
    """What `patterns` has found to be cut out of a tensor."""
    program.add(node, Cut(tuple(node.attributes["strides"]), node.attributes["offset"]), node.inputs)


@lowers("Transpose")
def transpose(program: Program, node: Node) -> None:
    """Any order of axes; nothing moves if those longer than 1 keep theirs."""
    shape = program.type(node.inputs[0]).shape
    order = tuple(node.attributes.get("perm", range(len(shape))[::-1]))
    long = [axis for axis in order if shape[axis] > 1]
    if long == sorted(long):
        program.views[node.outputs[0]] = node.inputs[0]
    else:
        program.add(node, Transpose(order), node.inputs)
