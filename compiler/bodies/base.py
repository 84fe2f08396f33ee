"""Operators that are defined here by simpler ones, since ONNX does not: their bodies, as nodes.

They hold for every operator set that the importer accepts; where sets differ, the helper writes what is right.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from onnx import numpy_helper

from gangway.compiler.errors import UnsupportedModelError
from gangway.compiler.graph import Graph, Node, TensorType
from gangway.compiler.specs import Array

_REDUCED_BY_INPUT = {"ReduceSum": 13}  # the others since 18
_SLICED_BY_INPUT, _PADDED_BY_INPUT = 10, 11


@dataclass
class Body:
    """Nodes in place of one node, while they grow. Names of results are unique in the graph."""

    node: Node
    graph: Graph
    nodes: list[Node] = field(default_factory=list)

    def type(self, index: int) -> TensorType:
        """The type of an input."""
        return self.type_of(self.node.inputs[index])

    def type_of(self, name: str) -> TensorType:
        """The type of a tensor. Raises UnsupportedModelError if it is not known."""
        if name in self.graph.constants:
            value = self.graph.constants[name]
            return TensorType(value.shape, value.dtype.name)
        if name not in self.graph.types:
            raise self.node.unsupported(f"the shape of '{name}' is not known")
        return self.graph.types[name]

    def value(self, index: int) -> Array | None:
        """An input that is constant; None if it is left out. Raises UnsupportedModelError if it is not constant."""
        name = self.node.inputs[index] if index < len(self.node.inputs) else ""
        if not name:
            return None
        if name not in self.graph.constants:
            raise self.node.unsupported(f"its input {index}, '{name}', is not a constant")
        return self.graph.constants[name]

    def attribute(self, name: str, default: Any) -> Any:
        """An attribute of the node."""
        return self.node.attributes.get(name, default)

    def op(self, operator: str, *inputs: str, output: str = "", **attributes: Any) -> str:
        """Add a node with one output; return the output's name."""
        name = output or f"{self.node.outputs[0]}/{len(self.nodes)}"
        self.nodes.append(Node(f"{self.node.name}/{len(self.nodes)}", operator, inputs, (name,), attributes))
        return name

    def constant(self, value: Any, dtype: str = "") -> str:
        """Add a constant."""
        array = np.asarray(value, dtype or None)
        return self.op("Constant", value=numpy_helper.from_array(array))

    def integers(self, values: Sequence[int]) -> str:
        """Add a constant vector of int64."""
        return self.constant(np.asarray(values, np.int64))

    def reshape(self, x: str, shape: Sequence[int], output: str = "") -> str:
        """Another shape; 0 keeps the length of the same axis, as the batch must."""
        return self.op("Reshape", x, self.integers(shape), output=output)

    def reduce(self, operator: str, x: str, axes: Sequence[int], keepdims: int = 1, wraps: bool = False) -> str:
        """A reduction; `wraps`, of integers: a sum that wraps around."""
        attributes: dict[str, Any] = {"keepdims": keepdims, **({"wraps": 1} if wraps else {})}
        if self.graph.opset >= _REDUCED_BY_INPUT.get(operator, 18):
            return self.op(operator, x, self.integers(axes), **attributes)
        return self.op(operator, x, axes=list(axes), **attributes)

    def slice(self, x: str, axis: int, begin: int, end: int, output: str = "") -> str:
        """A part of one axis."""
        if self.graph.opset >= _SLICED_BY_INPUT:
            return self.op("Slice", x, *(self.integers([n]) for n in (begin, end, axis)), output=output)
        return self.op("Slice", x, starts=[begin], ends=[end], axes=[axis], output=output)

    def pad(self, x: str, pads: Sequence[int]) -> str:
        """Zeros around a tensor."""
        if self.graph.opset >= _PADDED_BY_INPUT:
            return self.op("Pad", x, self.integers(pads))
        return self.op("Pad", x, pads=list(pads))


Writer = Callable[[Body], None]
_writers: dict[str, Writer] = {}


def defines(*operators: str) -> Callable[[Writer], Writer]:
    """Register the decorated function as the one that writes the bodies of these operators."""

    def register(writer: Writer) -> Writer:
        _writers.update(dict.fromkeys(operators, writer))
        return writer

    return register


def own_body(node: Node, graph: Graph) -> tuple[Node, ...]:
    """Return the simpler nodes; empty if there are none."""
    if node.operator not in _writers:
        return ()
    body = Body(node, graph)
    try:
        _writers[node.operator](body)
    except UnsupportedModelError:
        return ()
    return tuple(body.nodes)
