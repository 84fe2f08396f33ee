"""From a graph to layers: by kernels of our own where there are any, else by what ONNX or TVM make of an operator."""

from collections.abc import Mapping

from gangway.compiler.errors import UnsupportedModelError
from gangway.compiler.frontend.functions import expand, has_body
from gangway.compiler.frontend.graph import Graph
from gangway.compiler.frontend.patterns import find_patterns
from gangway.compiler.frontend.shape_inference import state_shapes
from gangway.compiler.frontend.simplify import simplify
from gangway.compiler.lower.layers import Program
from gangway.compiler.lower.operators import has_lowering, lower, refusal


def lower_model(graph: Graph) -> Program:
    """Return the layers of a model.

    A node that no lowering takes is replaced by its definition in simpler operators, if ONNX has one. Raises
    UnsupportedModelError if nodes remain that nothing computes, ModelError if the model is invalid.
    """
    graph = state_shapes(graph)
    replaced: dict[str, UnsupportedModelError] = {}
    while unknown := [node for node in graph.nodes if not has_lowering(node.operator) and has_body(node, graph)]:
        replaced |= {node.outputs[0]: node.unsupported("no kernel computes this operator") for node in unknown}
        graph = state_shapes(expand(graph, {node.outputs[0] for node in unknown}))
    while True:
        simple = find_patterns(simplify(graph))
        program, refusals = lower(simple)
        if not refusals:
            return program
        refused = [node for node in graph.nodes if node.outputs[0] in refusals]
        defined = {node.outputs[0] for node in refused if has_body(node, graph, simple.constants)}
        if not defined:
            break
        replaced |= {name: refusals[name] for name in defined}
        graph = state_shapes(expand(graph, defined, simple.constants))
    from gangway.compiler.lower.relax.lowering import lower_by_relax  # noqa: PLC0415 - TVM's importer takes a second

    program, refusals = lower(simple, lower_by_relax)
    if refusals:
        raise _reason(replaced, refusal(refusals, simple))
    return program


def _reason(replaced: Mapping[str, UnsupportedModelError], error: UnsupportedModelError) -> UnsupportedModelError:
    """Return the error that also tells the first node whose definition was tried in vain."""
    if not replaced:
        return error
    return UnsupportedModelError(f"{next(iter(replaced.values()))}; of simpler operators instead: {error}")
