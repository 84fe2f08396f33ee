"""Attention, as `patterns` has found it: one layer for all heads."""

from gangway.compiler.graph import Node
from gangway.compiler.layers import Attention, Program
from gangway.compiler.operators.registry import lowers


@lowers("FusedAttention")
def attention(program: Program, node: Node) -> None:
    """Queries, keys, values and what is added to their products."""
    program.add(node, Attention(node.attributes["spec"], node.attributes["parts"]), node.inputs)
