"""Groups of ONNX nodes that exporters write for what one kernel computes, replaced by one node each."""

from gangway.compiler.graph import Graph
from gangway.compiler.patterns.attention import find_attention
from gangway.compiler.patterns.copies import find_copies
from gangway.compiler.patterns.functions import find_functions
from gangway.compiler.patterns.gates import find_gates
from gangway.compiler.patterns.layer_norm import find_layer_norm
from gangway.compiler.patterns.quantisation import find_quantisation
from gangway.compiler.simplify import remove_unused

__all__ = ["find_patterns"]


def find_patterns(graph: Graph) -> Graph:
    """Return an equivalent graph with the nodes of known groups replaced; what is not recognised stays as it is."""
    for find in (find_quantisation, find_gates, find_functions, find_layer_norm, find_attention, find_copies):
        graph = remove_unused(find(graph))
    return graph
