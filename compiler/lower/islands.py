"""Islands: nodes that no kernel computes become layers that onnxruntime executes, as few as possible.

An island is a group of nodes that no path leaves and enters again, so that it can be one layer. Its inputs and outputs
are tensors in memory: of known shape, and of types that memory has. So nodes with another tensor between them are in
one island, and so is all that lies on paths between the two.

If an output of the model is another tensor, the last island is a *tail*: it makes that output, and all others. Whatever
reads what it makes is in it, so that it can be the last layer.
"""

import heapq
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from onnx import defs, helper

from gangway.artifact.format import MAX_OPERANDS
from gangway.compiler.errors import UnsupportedModelError
from gangway.compiler.frontend.graph import Graph, Node, TensorType
from gangway.compiler.frontend.shape_inference import RANDOM, model_proto, node_proto
from gangway.compiler.frontend.subgraphs import all_nodes
from gangway.compiler.kernels.packed_specs import PackedDenseSpec
from gangway.compiler.kernels.plain_specs import (
    ELEMENT_TYPES,
    DeclaredOutput,
    IslandSpec,
    MatMulSpec,
    TailSpec,
    TreeSpec,
)
from gangway.compiler.kernels.specs import Array, ConvSpec, ConvTransposeSpec, RecurrentSpec, VolumeConvSpec
from gangway.compiler.lower.layers import Attention, LayerSpec, LoweredLayer, Program
from gangway.compiler.lower.reference import best_us, example, run_apart
from gangway.compiler.opsets import restamp

WORTHWHILE: tuple[type[LayerSpec], ...] = (
    ConvSpec,
    ConvTransposeSpec,
    VolumeConvSpec,
    MatMulSpec,
    PackedDenseSpec,
    RecurrentSpec,
    TreeSpec,
    Attention,
)
MAX_BYTES = 1 << 30  # of a tensor, and of an island's constants
ANSWER_TYPES = {*ELEMENT_TYPES, "string"}


def add_islands(program: Program, refused: Collection[str]) -> None:
    """Add layers for the nodes, given by their first outputs, that the program has none for.

    A tail, if there is one, is the last layer. The program's graph has no outputs then: they are in no buffers.
    Raises UnsupportedModelError where that is impossible, and where onnxruntime serves the model better as a whole: if
    no other layer is a matrix product, a convolution or an attention.
    """
    islands = form_islands(program.graph, refused)
    made = {name for nodes in islands for node in nodes for name in node.outputs}
    kept = [layer for layer in program.layers if made.isdisjoint((layer.output, *layer.more_outputs))]
    if not any(isinstance(layer.spec, WORTHWHILE) for layer in kept):
        raise UnsupportedModelError("no other layer is a matrix product, a convolution or an attention")
    layers = [_layer(program.graph, nodes, f"island{number}") for number, nodes in enumerate(islands)]
    program.views = {name: source for name, source in program.views.items() if name not in made}
    tail = next((layer.output for layer in layers if isinstance(layer.spec, TailSpec)), None)
    program.layers = _in_order(program, [*layers, *kept], [tail] if tail else program.graph.outputs)
    if tail:
        program.graph = replace(program.graph, outputs=())


def form_islands(graph: Graph, refused: Collection[str]) -> list[tuple[Node, ...]]:
    """Return the nodes of each island, in their order. Raises UnsupportedModelError."""
    groups = _Groups(graph.nodes)
    wanted = {index for index, node in enumerate(graph.nodes) if node.outputs[0] in refused}
    tail = _tail(graph, groups.edges())
    if tail:
        groups.merge(tail)
        wanted |= tail
    for maker, reader, name in groups.edges():
        if not _is_tensor(name, graph):
            groups.merge(groups.between(maker, reader))
            wanted |= {maker, reader}
    for maker, reader, _ in groups.edges():
        if wanted >= {maker, reader}:
            between = groups.between(maker, reader)
            # Otherwise a path leaves the two and comes back. All outputs are the tail's, so every path comes to it.
            if len(between) == 2 and not (min(tail, default=None) in between and groups.leads_elsewhere(maker, reader)):
                groups.merge(between)
    islands = [sorted(groups.members[number]) for number in sorted({groups.owner[index] for index in wanted})]
    return [tuple(graph.nodes[index] for index in members) for members in islands]


def _tail(graph: Graph, edges: Sequence[tuple[int, int, str]]) -> set[int]:
    """Return the nodes that a tail must have; none if memory can hold all outputs."""
    links: dict[int, set[int]] = {index: set() for index in range(len(graph.nodes))}
    for maker, reader, name in edges:
        links[maker].add(reader)
        if not _is_tensor(name, graph):
            links[reader].add(maker)
    opened = {name for name in graph.outputs if not _is_tensor(name, graph)}
    starts = [index for index, node in enumerate(graph.nodes) if not opened.isdisjoint(node.outputs)]
    return set().union(*(_reached(start, links) for start in starts))


def _is_tensor(name: str, graph: Graph) -> bool:
    """Whether memory can hold what the name stands for."""
    if name in graph.constants:
        return True
    kind = graph.types.get(name)
    return kind is not None and kind.dtype in ELEMENT_TYPES and 0 < kind.size_bytes <= MAX_BYTES


class _Groups:
    """Nodes in groups, at first each in its own, and which groups read what others make. Groups have no cycle."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._nodes = nodes
        self._makers = {name: index for index, node in enumerate(nodes) for name in node.outputs if name}
        self.owner = list(range(len(nodes)))
        self.members = {index: {index} for index in self.owner}
        self._after: dict[int, set[int]] = {index: set() for index in self.owner}
        self._before: dict[int, set[int]] = {index: set() for index in self.owner}
        for maker, reader, _ in self.edges():
            self._after[maker].add(reader)
            self._before[reader].add(maker)

    def edges(self) -> list[tuple[int, int, str]]:
        """Return the node that makes, the node that reads, and the tensor, of each."""
        return [
            (self._makers[name], index, name)
            for index, node in enumerate(self._nodes)
            for name in dict.fromkeys(node.inputs)
            if name in self._makers
        ]

    def between(self, maker: int, reader: int) -> set[int]:
        """Return the groups on all paths from one node to another, theirs included."""
        first, last = self.owner[maker], self.owner[reader]
        return {first, last} | (_reached(first, self._after) & _reached(last, self._before))

    def leads_elsewhere(self, maker: int, reader: int) -> bool:
        """Whether another group than that of `reader` reads what the group of `maker` makes."""
        return self._after[self.owner[maker]] != {self.owner[reader]}

    def merge(self, groups: set[int]) -> None:
        """Make one group of several, which must have all that is between them."""
        into = min(groups)
        for group in groups - {into}:
            for member in self.members[group]:
                self.owner[member] = into
            self.members[into] |= self.members.pop(group)
        for links, back in ((self._after, self._before), (self._before, self._after)):
            linked = set().union(*(links.pop(group) for group in groups)) - groups
            links[into] = linked
            for other in linked:
                back[other] = (back[other] - groups) | {into}


def _reached(start: int, links: Mapping[int, set[int]]) -> set[int]:
    reached, waiting = {start}, [start]
    while waiting:
        new = links[waiting.pop()] - reached
        reached |= new
        waiting += new
    return reached


def _layer(graph: Graph, nodes: Sequence[Node], name: str) -> LoweredLayer:
    made = dict.fromkeys(name for node in nodes for name in node.outputs if name)
    is_tail = any(name in made and not _is_tensor(name, graph) for name in graph.outputs)
    own = {id(node) for node in nodes}
    elsewhere = {name for node in graph.nodes if id(node) not in own for name in node.inputs} | {*graph.outputs}
    passed = [name for name in graph.outputs if name not in made] if is_tail else []
    read = dict.fromkeys([*(name for node in nodes for name in node.inputs if name and name not in made), *passed])
    constants = {name: graph.constants[name] for name in read if name in graph.constants}
    inputs = tuple(name for name in read if name not in constants)
    outputs = graph.outputs if is_tail else tuple(name for name in reversed(made) if name in elsewhere)
    try:
        protos = [node_proto(_with_own_name(node), graph.opset) for node in nodes]
    except defs.SchemaError as error:  # a node that the compiler has made of others
        raise nodes[0].unsupported(f"opset {graph.opset} has no such operator, or one beside it: {error}") from error
    _check(graph, protos, inputs if is_tail else (*inputs, *outputs), constants)
    copies = {name: f"{name}:copy" for name in passed}  # what is read cannot be an output, too
    protos += [helper.make_node("Identity", [name], [copy]) for name, copy in copies.items()]
    given = {name: graph.types[name] for name in inputs}
    results = {copies.get(name, name): graph.types.get(name) or graph.open_types.get(name) for name in outputs}
    stated = given, results
    rows = all(kind.shape[:1] == (1,) for kind in given.values())
    if is_tail and graph.batched and rows and all(_is_look_up(node, graph) for node in nodes):
        stated = {name: _open(kind) for name, kind in given.items()}, dict.fromkeys(results)
    domains = {item.domain: graph.domains[item.domain] for item in all_nodes(protos) if item.domain in graph.domains}
    message = model_proto(protos, *stated, constants, graph.opset, domains)
    restamp(message)
    model = message.SerializeToString()
    feeds = {name: example(kind, 0) for name, kind in given.items()}
    if is_tail:  # it selects by a threshold, mostly, which nearly all random numbers would pass
        feeds = {name: np.zeros_like(value) for name, value in feeds.items()}
    declared, row_us = _measured(model, feeds)
    operators = ", ".join(dict.fromkeys(node.operator for node in nodes))
    title = nodes[0].name if len(nodes) == 1 else name
    if is_tail:
        answers = tuple(replace(each, name=name) for each, name in zip(declared, outputs, strict=True))
        _check_answers(answers)
        return LoweredLayer("tail", operators, TailSpec(model, row_us, answers), inputs, next(iter(made)))
    for each in declared:
        kind = graph.types[each.name]
        if (each.shape, each.dtype) != (kind.shape, kind.dtype):
            found = f"{each.dtype}{list(each.shape)}"
            raise UnsupportedModelError(f"onnxruntime makes '{each.name}' {found}, not as declared")
    return LoweredLayer(title, operators, IslandSpec(model, row_us), inputs, outputs[-1], more_outputs=outputs[:-1])


def _is_look_up(node: Node, graph: Graph) -> bool:
    """Whether a tail's node looks up a row's numbers in a table, or does nothing: rows can go through it together."""
    is_table = node.operator == "Gather" and node.inputs[0] in graph.constants and not node.attributes.get("axis", 0)
    return node.operator == "Identity" or (is_table and node.inputs[1] not in graph.constants)


def _open(kind: TensorType) -> TensorType:
    """Return the type of a tensor with any number of rows."""
    return replace(kind, shape=(-1, *kind.shape[1:]))


def _check_answers(answers: Sequence[DeclaredOutput]) -> None:
    """Raise UnsupportedModelError for an output that no request can hold."""
    for answer in answers:
        if answer.dtype not in ANSWER_TYPES:
            raise UnsupportedModelError(f"output '{answer.name}' is {answer.dtype}, not what a request can have")


def _with_own_name(node: Node) -> Node:
    """Return the node, without a name if it only has that of its output: onnxruntime tells clients the name."""
    return replace(node, name="") if node.name in node.outputs else node


def _check(graph: Graph, protos: Iterable[Any], tensors: Sequence[str], constants: Mapping[str, Array]) -> None:
    """Raise UnsupportedModelError for what no island can have."""
    if random := next((item for item in all_nodes(protos) if item.op_type in RANDOM), None):
        raise UnsupportedModelError(f"{random.op_type} node '{random.name}': its result is left to chance")
    for name in tensors:
        if not _is_tensor(name, graph):
            raise UnsupportedModelError(f"tensor '{name}' has no static shape of 1 byte to 1 GiB, or no numbers")
    if len(tensors) > MAX_OPERANDS:
        raise UnsupportedModelError(f"an island would have {len(tensors)} tensors; {MAX_OPERANDS} are possible")
    if sum(value.nbytes for value in constants.values()) > MAX_BYTES:
        raise UnsupportedModelError(f"an island would have more than {MAX_BYTES >> 20} MiB of weights")


def _measured(model: bytes, feeds: Mapping[str, Array]) -> tuple[tuple[DeclaredOutput, ...], int]:
    """Return what onnxruntime says of the outputs, and how long it takes for an example, 0 if it cannot compute that.

    Raises UnsupportedModelError if it does not open the model.
    """
    from gangway.artifact.onnx_session import (  # noqa: PLC0415 - most models have no island
        element_type,
        open_session,
        reason_of,
    )

    def opened() -> tuple[Any, tuple[DeclaredOutput, ...]]:
        try:
            session = open_session(model)
        except Exception as error:  # onnxruntime's own exceptions have no common base
            raise UnsupportedModelError(f"onnxruntime: {reason_of(error)}") from error
        shapes = [[size if isinstance(size, int) else -1 for size in item.shape] for item in session.get_outputs()]
        kinds = [(item.name, element_type(item.type)) for item in session.get_outputs()]
        return session, tuple(DeclaredOutput(*kind, tuple(shape)) for kind, shape in zip(kinds, shapes, strict=True))

    def timed() -> tuple[tuple[DeclaredOutput, ...], float]:
        session, declared = opened()
        try:
            return declared, best_us(lambda: session.run(None, feeds))
        except Exception:  # the example is not valid
            return declared, 0.0

    try:
        declared, row_us = run_apart(timed)
    except UnsupportedModelError:  # it may be the example with which it takes too long
        declared, row_us = run_apart(lambda: opened()[1]), 0.0
    return declared, math.ceil(row_us)


@dataclass(frozen=True)
class _Flow:
    """Which tensors a layer reads and writes, views resolved."""

    reads: frozenset[str]
    writes: frozenset[str]


def _in_order(program: Program, layers: Sequence[LoweredLayer], results: Iterable[str]) -> list[LoweredLayer]:
    """Return the layers that `results` need, each after those whose results it reads, otherwise in the given order."""
    flows = [
        _Flow(frozenset(map(program.home, layer.inputs)), frozenset((layer.output, *layer.more_outputs)))
        for layer in layers
    ]
    makers = {name: index for index, flow in enumerate(flows) for name in flow.writes}
    sources = [{makers[name] for name in flow.reads if name in makers} for flow in flows]
    needed = _reached_from((makers.get(program.home(name)) for name in results), sources)
    readers: dict[int, list[int]] = {index: [] for index in needed}
    for index in needed:
        for source in sources[index]:
            readers[source].append(index)
    missing = {index: len(sources[index]) for index in needed}
    ready = [index for index in needed if not missing[index]]
    heapq.heapify(ready)
    ordered = []
    while ready:
        index = heapq.heappop(ready)
        ordered.append(layers[index])
        for reader in readers[index]:
            missing[reader] -= 1
            if not missing[reader]:
                heapq.heappush(ready, reader)
    assert len(ordered) == len(needed)
    return ordered


def _reached_from(starts: Iterable[int | None], sources: Sequence[set[int]]) -> set[int]:
    links = dict(enumerate(sources))
    return set().union(*(_reached(start, links) for start in starts if start is not None))
