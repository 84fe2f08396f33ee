"""A graph while a pattern looks at it and replaces nodes: who computes and reads a tensor, what is constant."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from gangway.compiler.frontend.graph import Graph, Node, TensorType
from gangway.compiler.kernels.specs import Array


class Editor:
    """Replaces nodes one group after the other; those that nobody needs any more stay, for `remove_unused`."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.producers = graph.producers()
        self.constants = dict(graph.constants)
        self.types = dict(graph.types)
        self.uses = graph.uses()
        self.readers: dict[str, list[Node]] = defaultdict(list)
        for node in graph.nodes:
            for name in node.inputs:
                self.readers[name].append(node)
        self._replaced: dict[str, list[Node]] = {}  # by the first output of what stood there

    def result(self) -> Graph:
        """Return the graph with everything replaced."""
        nodes = [item for node in self.graph.nodes for item in self._replaced.get(node.outputs[0], [node])]
        return replace(self.graph, nodes=tuple(nodes), constants=self.constants, types=self.types)

    def producer(self, name: str, *operators: str) -> Node | None:
        """Return the node that computes a tensor as its first output, if it is one of these operators."""
        node = self.producers.get(name)
        return node if node and node.operator in operators and node.outputs[0] == name else None

    def inner(self, name: str, *operators: str) -> Node | None:
        """Return the producer, if nobody else reads the tensor."""
        return self.producer(name, *operators) if self.uses[name] == 1 else None

    def scalar(self, name: str) -> float | None:
        """Return the number, if the tensor is a constant of one."""
        value = self.constants.get(name)
        return float(value.reshape(())) if value is not None and value.size == 1 else None

    def operands(self, node: Node) -> tuple[str, float] | None:
        """Return (activation, number) if one of a node's two inputs is a constant number."""
        for x, other in (node.inputs[:2], node.inputs[1::-1]):
            number = self.scalar(other)
            if number is not None and x not in self.constants:
                return x, number
        return None

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Return a tensor's shape, None if it is not known."""
        if name in self.constants:
            return self.constants[name].shape
        return self.types[name].shape if name in self.types else None

    def is_float(self, name: str) -> bool:
        """Whether a tensor has float32 numbers and a known shape."""
        return name in self.types and self.types[name].dtype == "float32"

    def axes(self, node: Node) -> tuple[int, ...]:
        """Return the axes of a reduction, an attribute or (since opset 13 or 18) input 1; empty: all, or not known."""
        shape = self.shape(node.inputs[0])
        given = node.attributes.get("axes")
        if given is None and len(node.inputs) > 1 and node.inputs[1] in self.constants:
            given = self.constants[node.inputs[1]].ravel().tolist()
        return tuple(axis % len(shape) for axis in given) if given and shape else ()

    def constant(self, name: str, value: Array) -> str:
        """Add a constant and return its name."""
        self.constants[name] = value
        return name

    def node(
        self, operator: str, inputs: tuple[str, ...], output: str, shape: tuple[int, ...], **attributes: Any
    ) -> Node:
        """Return a new node whose float32 output is declared."""
        self.types[output] = TensorType(shape, "float32")
        return Node(output, operator, inputs, (output,), attributes)

    def replace(self, name: str, nodes: list[Node]) -> None:
        """Put nodes, the last of which computes tensor `name`, in the place of its producer."""
        self._replaced[self.producers[name].outputs[0]] = nodes
        for node in nodes:
            for output in node.outputs:
                self.producers[output] = node


def number(value: float) -> Array:
    """Return a float32 scalar."""
    return np.array(value, np.float32)


def single(attributes: Mapping[str, Any], name: str, default: int, rank: int) -> int:
    """Return an axis attribute, counted from the front."""
    return int(attributes.get(name, default)) % rank
