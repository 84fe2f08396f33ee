"""Operators that leave the numbers and their order alone: they cost nothing unless the layout differs."""

from gangway.compiler.graph import Node
from gangway.compiler.layers import Program
from gangway.compiler.operators.registry import lowers


@lowers("Identity", "Dropout", "Flatten", "Reshape", "Squeeze", "Unsqueeze")
def view(program: Program, node: Node) -> None:
    """Another shape of the same tensor, which shape inference has found already."""
    if node.attributes.get("training_mode", 0):
        raise node.unsupported("training mode")
    program.views[node.outputs[0]] = node.inputs[0]
