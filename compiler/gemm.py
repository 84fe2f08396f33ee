"""Gemms that are no dense layer: alpha A B + beta C in single steps, wherever B is no constant or C no vector."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from gangway.compiler.graph import Graph, Node, TensorType
from gangway.compiler.specs import Array


def split_gemm(graph: Graph) -> Graph:
    """Return the graph with Transpose, MatMul, Mul and Add in the place of such Gemms."""
    splitter = _Splitter(graph)
    nodes = tuple(item for node in graph.nodes for item in splitter.visit(node))
    return replace(graph, nodes=nodes, constants=splitter.constants, types=splitter.types)


class _Splitter:
    def __init__(self, graph: Graph) -> None:
        self.constants = dict(graph.constants)
        self.types = dict(graph.types)

    def visit(self, node: Node) -> Iterator[Node]:
        """Return what stands for a node."""
        known = all(self._shape(name) is not None for name in (*node.inputs, *node.outputs) if name)
        if node.operator != "Gemm" or not known or self._is_dense(node):
            yield node
            return
        matrices = []
        for name, attribute in zip(node.inputs[:2], ("transA", "transB"), strict=True):
            turned = bool(node.attributes.get(attribute, 0))
            matrices.append(f"{node.outputs[0]}:{attribute}" if turned else name)
            if turned and name in self.constants:
                self.constants[matrices[-1]] = self.constants[name].T
            elif turned:
                rows, columns = self._shape(name) or ()
                yield self._node(node, "Transpose", (name,), attribute, (columns, rows), {"perm": [1, 0]})
        yield from self._sum(node, (matrices[0], matrices[1]))

    def _sum(self, node: Node, matrices: tuple[str, str]) -> Iterator[Node]:
        """Product, factors and summand; the last of them computes the output."""
        output, shape = node.outputs[0], self.types[node.outputs[0]].shape
        steps: list[tuple[str, tuple[str, ...]]] = [("MatMul", matrices)]
        alpha, beta = (node.attributes.get(name, 1.0) for name in ("alpha", "beta"))
        if alpha != 1.0:
            steps.append(("Mul", (self._constant(f"{output}:alpha", np.array(alpha, np.float32)),)))
        if len(node.inputs) > 2 and node.inputs[2]:
            summand = node.inputs[2]
            if beta != 1.0:
                factor = self._constant(f"{output}:beta", np.array(beta, np.float32))
                if summand in self.constants:
                    summand = self._constant(f"{output}:summand", self.constants[summand] * np.float32(beta))
                else:
                    yield self._node(node, "Mul", (summand, factor), "scaled", self._shape(summand) or ())
                    summand = f"{output}:scaled"
            steps.append(("Add", (summand,)))
        source: tuple[str, ...] = ()
        for operator, others in steps[:-1]:
            yield self._node(node, operator, (*source, *others), operator, shape)
            source = (f"{output}:{operator}",)
        operator, others = steps[-1]
        yield Node(node.name, operator, (*source, *others), node.outputs)

    def _is_dense(self, node: Node) -> bool:
        """Whether it is an activation times a constant matrix, plus a constant with a number for each column."""
        x, matrix, *bias = node.inputs
        if x in self.constants or matrix not in self.constants or node.attributes.get("transA", 0):
            return False
        value = self.constants.get(bias[0]) if bias and bias[0] else np.zeros(1, np.float32)
        return value is not None and value.size == (value.shape[-1] if value.ndim else 1)

    def _shape(self, name: str) -> tuple[int, ...] | None:
        if name in self.constants:
            return self.constants[name].shape
        return self.types[name].shape if name in self.types else None

    def _constant(self, name: str, value: Array) -> str:
        self.constants[name] = value
        return name

    def _node(
        self,
        node: Node,
        operator: str,
        inputs: tuple[str, ...],
        suffix: str,
        shape: tuple[int, ...],
        attributes: dict[str, object] | None = None,
    ) -> Node:
        output = f"{node.outputs[0]}:{suffix}"
        self.types[output] = TensorType(shape, "float32")
        return Node(f"{node.name}:{suffix}", operator, inputs, (output,), attributes or {})
