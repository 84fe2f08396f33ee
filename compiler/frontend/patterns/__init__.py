"""Groups of ONNX nodes that exporters write for what one kernel computes, replaced by one node each."""

from gangway.compiler.frontend.graph import Graph
from gangway.compiler.frontend.patterns.attention import find_attention
from gangway.compiler.frontend.patterns.functions import find_functions, find_gates, find_layer_norm, find_quantisation
from gangway.compiler.frontend.patterns.views import find_copies
from gangway.compiler.frontend.simplify import remove_unused

__all__ = ["find_patterns"]


def find_patterns(graph: Graph) -> Graph:
    """Return an equivalent graph with the nodes of known groups replaced; what is not recognised stays as it is."""
    for find in (find_quantisation, find_gates, find_functions, find_layer_norm, find_attention, find_copies):
        graph = remove_unused(find(graph))
    return graph
