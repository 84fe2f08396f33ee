"""Gated activations: x times a sigmoid of x."""

from dataclasses import replace

from gangway.compiler.graph import Graph, Node

_GATED = {"Sigmoid": "Swish", "HardSigmoid": "HardSwish"}
_DEFAULTS = {"HardSigmoid": {"alpha": 0.2, "beta": 0.5}}


def find_gates(graph: Graph) -> Graph:
    """Return the graph with x * Sigmoid(x) as Swish, and x * HardSigmoid(x) as HardSwish with its two factors."""
    uses, producers = graph.uses(), graph.producers()
    replaced: dict[str, Node] = {}
    absorbed: set[str] = set()
    for node in graph.nodes:
        if node.operator != "Mul":
            continue
        for x, gate in (node.inputs, node.inputs[::-1]):
            source = producers.get(gate)
            if source and source.operator in _GATED and source.inputs[0] == x and uses[gate] == 1:
                attributes = {**_DEFAULTS.get(source.operator, {}), **source.attributes}
                replaced[node.outputs[0]] = Node(node.name, _GATED[source.operator], (x,), node.outputs, attributes)
                absorbed.add(gate)
                break
    nodes = (replaced.get(node.outputs[0], node) for node in graph.nodes if node.outputs[0] not in absorbed)
    return replace(graph, nodes=tuple(nodes))
