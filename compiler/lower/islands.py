"""Islands: nodes that no kernel computes become layers that onnxruntime executes, as few as possible.

An island is a group of nodes that no path leaves and enters again, so that it can be one layer. Its inputs and outputs
are tensors in memory: of known shape, and of types that memory has. So nodes with another tensor between them are in
one island, and so is all that lies on paths between the two.
"""

import heapq
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from onnx import defs

from gangway.artifact.format import MAX_OPERANDS
from gangway.compiler.errors import UnsupportedModelError
from gangway.compiler.frontend.graph import Graph, Node, TensorType
from gangway.compiler.frontend.shape_inference import model_proto, node_proto
from gangway.compiler.frontend.simplify import RANDOM
from gangway.compiler.frontend.subgraphs import all_nodes
from gangway.compiler.kernels.plain_specs import ELEMENT_TYPES, IslandSpec, MatMulSpec, TreeSpec
from gangway.compiler.kernels.specs import Array, ConvSpec, ConvTransposeSpec, RecurrentSpec, VolumeConvSpec
from gangway.compiler.lower.layers import Attention, Layer, LayerSpec, Program
from gangway.compiler.lower.reference import best_us, example, run_apart

WORTHWHILE: tuple[type[LayerSpec], ...] = (
    ConvSpec,
    ConvTransposeSpec,
    VolumeConvSpec,
    MatMulSpec,
    RecurrentSpec,
    TreeSpec,
    Attention,
)
MAX_BYTES = 1 << 30  # of a tensor, and of an island's constants


def add_islands(program: Program, refused: Collection[str]) -> None:
    """Add layers for the nodes, given by their first outputs, that the program has none for.

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
    program.layers = _in_order(program, [*layers, *kept])


def form_islands(graph: Graph, refused: Collection[str]) -> list[tuple[Node, ...]]:
    """Return the nodes of each island, in their order. Raises UnsupportedModelError."""
    groups = _Groups(graph.nodes)
    wanted = {index for index, node in enumerate(graph.nodes) if node.outputs[0] in refused}
    for maker, reader, name in groups.edges():
        if not _is_tensor(name, graph):
            groups.merge(groups.between(maker, reader))
            wanted |= {maker, reader}
    for maker, reader, _ in groups.edges():
        if wanted >= {maker, reader}:
            between = groups.between(maker, reader)
            if len(between) == 2:  # otherwise a path leaves the two and comes back
                groups.merge(between)
    islands = [sorted(groups.members[number]) for number in sorted({groups.owner[index] for index in wanted})]
    return [tuple(graph.nodes[index] for index in members) for members in islands]


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


def _layer(graph: Graph, nodes: Sequence[Node], name: str) -> Layer:
    made = dict.fromkeys(name for node in nodes for name in node.outputs if name)
    own = {id(node) for node in nodes}
    elsewhere = {name for node in graph.nodes if id(node) not in own for name in node.inputs} | {*graph.outputs}
    read = dict.fromkeys(name for node in nodes for name in node.inputs if name and name not in made)
    constants = {name: graph.constants[name] for name in read if name in graph.constants}
    inputs = tuple(name for name in read if name not in constants)
    output, *more = (name for name in made if name in elsewhere)
    try:
        protos = [node_proto(_with_own_name(node), graph.opset) for node in nodes]
    except defs.SchemaError as error:  # a node that the compiler has made of others
        raise nodes[0].unsupported(f"opset {graph.opset} has no such operator, or one beside it: {error}") from error
    _check(graph, protos, (*inputs, output, *more), constants)
    types = [{name: graph.types[name] for name in names} for names in (inputs, (*more, output))]
    domains = {item.domain: graph.domains[item.domain] for item in all_nodes(protos) if item.domain in graph.domains}
    model = model_proto(protos, types[0], types[1], constants, graph.opset, domains).SerializeToString()
    spec = IslandSpec(model, _row_us(model, *types))
    operators = ", ".join(dict.fromkeys(node.operator for node in nodes))
    title = nodes[0].name if len(nodes) == 1 else name
    return Layer(title, operators, spec, inputs, output, more_outputs=tuple(more))


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


def _row_us(model: bytes, inputs: Mapping[str, TensorType], outputs: Mapping[str, TensorType]) -> int:
    """Return how long onnxruntime takes for a row, 0 if it cannot compute examples.

    Raises UnsupportedModelError if it does not open the model, or thinks that outputs have other types.
    """
    from gangway.artifact.onnx_session import element_type, open_session  # noqa: PLC0415 - most models have no island

    def opened() -> tuple[Any, list[tuple[str, list[object], str]]]:
        session = open_session(model)
        return session, [(item.name, item.shape, element_type(item.type)) for item in session.get_outputs()]

    def timed() -> tuple[list[tuple[str, list[object], str]], float]:
        session, declared = opened()
        feeds = {name: example(kind, 0) for name, kind in inputs.items()}
        try:
            return declared, best_us(lambda: session.run(None, feeds))
        except Exception:  # the examples are not valid
            return declared, 0.0

    try:
        declared, row_us = run_apart(timed)
    except UnsupportedModelError:  # it may be the examples with which it takes too long
        declared, row_us = run_apart(lambda: opened()[1]), 0.0
    for name, shape, dtype in declared:
        if (tuple(shape), dtype) != (outputs[name].shape, outputs[name].dtype):
            raise UnsupportedModelError(f"onnxruntime makes '{name}' {dtype}{shape}, not as declared")
    return math.ceil(row_us)


@dataclass(frozen=True)
class _Flow:
    """Which tensors a layer reads and writes, views resolved."""

    reads: frozenset[str]
    writes: frozenset[str]


def _in_order(program: Program, layers: Sequence[Layer]) -> list[Layer]:
    """Return the layers that are needed, each after those whose results it reads, otherwise in the given order."""
    flows = [
        _Flow(frozenset(map(program.home, layer.inputs)), frozenset((layer.output, *layer.more_outputs)))
        for layer in layers
    ]
    makers = {name: index for index, flow in enumerate(flows) for name in flow.writes}
    sources = [{makers[name] for name in flow.reads if name in makers} for flow in flows]
    needed = _reached_from((makers.get(program.home(name)) for name in program.graph.outputs), sources)
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
