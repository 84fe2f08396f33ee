"""Replace groups of ONNX nodes, as exporters write them, by one node that one kernel computes."""

from gangway.compiler.frontend.graph import Graph
from gangway.compiler.frontend.patterns.attention import ATTENTION
from gangway.compiler.frontend.patterns.functions import (
    GATES,
    GELU,
    LAYER_NORM,
    QUANTISATION_PAIRS,
    QUANTISATION_SCALES,
)
from gangway.compiler.frontend.patterns.views import COPIES
from gangway.compiler.frontend.rewriting import rewrite

__all__ = ["find_patterns"]

_RULES = (QUANTISATION_PAIRS, QUANTISATION_SCALES, GATES, GELU, LAYER_NORM, ATTENTION, COPIES)


def find_patterns(graph: Graph) -> Graph:
    """Return an equivalent graph with the nodes of known groups replaced; what is not recognised stays as it is."""
    return rewrite(graph, *_RULES)
