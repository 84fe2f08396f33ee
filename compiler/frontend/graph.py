"""An ONNX model as a graph, plain data, and the driver of all rewriting of graphs.

A rewrite is an ordered list of rules, each of which sees every node once. A rule looks at a node through an `Editor`,
and replaces it and the nodes around it there, or leaves them alone.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from gangway.compiler.errors import MixedRowsError, OneEngineError, UnsupportedModelError
from gangway.compiler.kernels.specs import Array

PRIVATE_DOMAIN = "gangway"  # of operators that no file has, only definitions
WIDE_BATCH = 7  # the second batch size, at which shapes are inferred to see where the batch is


@dataclass(frozen=True)
class TensorType:
    """Shape at batch 1 and numpy's name of the element type."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def size_bytes(self) -> int:
        """Bytes of the plain tensor."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class Node:
    """One ONNX operator. Optional inputs that are left out are empty strings.

    Operators that only onnxruntime knows have their domain before the name, too: "com.microsoft.FusedConv". `captured`
    are tensors that graphs in attributes read from outside, by their names there; by their present names they are the
    last inputs.
    """

    name: str
    operator: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    domain: str = ""  # empty: ONNX's own
    captured: tuple[str, ...] = ()

    def unsupported(self, why: str) -> UnsupportedModelError:
        """Return the error that says why this node cannot be compiled."""
        return UnsupportedModelError(f"node '{self.name}' ({self.operator}): {why}")

    def mixed(self, why: str) -> MixedRowsError:
        """Return the error that says how this node lets rows of the batch influence each other."""
        return MixedRowsError(f"node '{self.name}' ({self.operator}): it mixes rows of the batch: {why}")

    def one_engine(self, why: str) -> OneEngineError:
        """Return the error that says why onnxruntime alone is to compute this node."""
        return OneEngineError(f"node '{self.name}' ({self.operator}): {why}")


@dataclass(frozen=True)
class Graph:
    """A model. If `batched`, the first dimension of every input and output is a symbolic batch, taken as 1 here."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    batched: bool
    nodes: tuple[Node, ...]
    constants: Mapping[str, Array]
    types: Mapping[str, TensorType]
    wide_shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # in a batch of WIDE_BATCH
    opset: int = 21  # of ONNX's own operators
    domains: Mapping[str, int] = field(default_factory=dict)  # versions of others
    open_types: Mapping[str, TensorType] = field(default_factory=dict)  # of outputs with sizes that are not known: -1
    apart: bool = False  # rows of the batch are known to be computed apart, so that only batch 1 counts

    def uses(self) -> Counter[str]:
        """How often each tensor is read, by nodes or as an output of the model."""
        return Counter([name for node in self.nodes for name in node.inputs] + list(self.outputs))

    def producers(self) -> dict[str, Node]:
        """The node that computes each tensor."""
        return {name: node for node in self.nodes for name in node.outputs}


@dataclass(frozen=True)
class Rule:
    """What is done to each node of some operators, in their order; no operators: to every node."""

    operators: tuple[str, ...]
    apply: Callable[["Editor", Node], object]


def rewrite(graph: Graph, *rules: Rule) -> Graph:
    """Return an equivalent graph after all rules, each applied once, in this order; unused nodes are dropped."""
    graph = remove_unused(graph)
    for rule in rules:
        if (changed := apply_rule(graph, rule)) is not graph:
            graph = remove_unused(changed)
    return graph


def apply_rule(graph: Graph, rule: Rule) -> Graph:
    """Return an equivalent graph after one rule, the same one if it changes nothing; unused nodes stay.

    Most rules find nothing in most graphs.
    """
    nodes = [node for node in graph.nodes if not rule.operators or node.operator in rule.operators]
    if not nodes:
        return graph
    editor = Editor(graph)
    for node in nodes:
        rule.apply(editor, node)
    return editor.result()


def remove_unused(graph: Graph) -> Graph:
    """Drop nodes and constants that no output depends on."""
    needed = set(graph.outputs)
    kept = []
    for node in reversed(graph.nodes):
        if needed.intersection(node.outputs):
            kept.append(node)
            needed.update(node.inputs)
    constants = {name: value for name, value in graph.constants.items() if name in needed}
    return replace(graph, nodes=tuple(reversed(kept)), constants=constants)


def without_empty_parts(graph: Graph) -> Graph:
    """Take tensors without numbers out of concatenations, and what only those needed."""
    empty = {name for name, kind in graph.types.items() if 0 in kind.shape}
    nodes = []
    for node in graph.nodes:
        parts = tuple(name for name in node.inputs if name not in empty)
        if node.operator == "Concat" and node.outputs[0] not in empty and len(parts) < len(node.inputs):
            nodes.append(replace(node, inputs=parts))
        else:
            nodes.append(node)
    if nodes == list(graph.nodes):
        return graph
    kept = remove_unused(replace(graph, nodes=tuple(nodes)))
    names = {*kept.inputs, *(name for node in kept.nodes for name in node.outputs)}
    return replace(kept, types={name: kind for name, kind in kept.types.items() if name in names})


class Editor:
    """A graph while a rule replaces its nodes; unused ones stay, for `remove_unused`.

    `producers`, `constants` and `types` show what has been replaced already; `uses` and `readers` are those of the
    graph as it was when the rule began.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.producers = graph.producers()
        self.constants = dict(graph.constants)
        self.types = dict(graph.types)
        self.wide_shapes = dict(graph.wide_shapes)
        self.uses = graph.uses()
        self.readers: dict[str, list[Node]] = defaultdict(list)
        for node in graph.nodes:
            for name in node.inputs:
                self.readers[name].append(node)
        self._replaced: dict[str, list[Node]] = {}  # by the output of what stood there
        self._behind: dict[str, list[Node]] = defaultdict(list)  # by what they read that is computed last

    def result(self) -> Graph:
        """Return the graph with everything replaced, the same one if nothing is."""
        if not self._is_changed:
            return self.graph
        present = [item for node in self.graph.nodes for item in self._replaced.get(_output(node), [node])]
        nodes = (*self._with_followers(""), *(item for node in present for item in self._with_followers(node)))
        return replace(
            self.graph, nodes=nodes, constants=self.constants, types=self.types, wide_shapes=self.wide_shapes
        )

    @property
    def _is_changed(self) -> bool:
        graph = self.graph
        pairs = (self.constants, graph.constants), (self.types, graph.types), (self.wide_shapes, graph.wide_shapes)
        return bool(self._replaced or self._behind) or not all(_has_same(own, given) for own, given in pairs)

    def _with_followers(self, node: "Node | str") -> list[Node]:
        """A node, and those that stand right behind it."""
        own = [node] if isinstance(node, Node) else []
        names = node.outputs if isinstance(node, Node) else (node,)
        found = (follower for name in names for follower in self._behind.get(name, ()))
        return own + [item for follower in found for item in self._with_followers(follower)]

    def producer(self, name: str, *operators: str) -> Node | None:
        """Return the node that computes a tensor as its first output, if it is one of these operators."""
        node = self.producers.get(name)
        return node if node and node.operator in operators and node.outputs[0] == name else None

    def inner(self, name: str, *operators: str) -> Node | None:
        """Return the producer, if the tensor has one reader only."""
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
        self._replaced[_output(self.producers[name])] = nodes
        for node in nodes:
            for output in node.outputs:
                self.producers[output] = node

    def share(self, node: Node) -> None:
        """Add a node that reads one activation, right behind this, so that all later nodes may read its output."""
        if node.outputs[0] not in self.producers:
            (source,) = (name for name in node.inputs if name and name not in self.constants)
            self._behind[source if source in self.producers else ""].append(node)
            self.producers[node.outputs[0]] = node

    def remove(self, node: Node) -> None:
        """Drop a node, whose outputs are constants by now, or are computed elsewhere."""
        self._replaced[_output(node)] = []


def _has_same(own: Mapping[str, object], given: Mapping[str, object]) -> bool:
    """Whether two mappings hold the same objects."""
    return len(own) == len(given) and all(own.get(name) is value for name, value in given.items())


def _output(node: Node) -> str:
    """The first output that has a name."""
    return next(filter(None, node.outputs), "")


def number(value: float) -> Array:
    """Return a float32 scalar."""
    return np.array(value, np.float32)


def single(attributes: Mapping[str, Any], name: str, default: int, rank: int) -> int:
    """Return an axis attribute, counted from the front."""
    return int(attributes.get(name, default)) % rank
