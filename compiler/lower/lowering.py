"""From a graph to layers: by kernels of our own where there are any, else by what ONNX or TVM make of an operator.

What none of them computes becomes islands, layers that onnxruntime executes.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace

from gangway.compiler.errors import ModelError, OneEngineError, UnsupportedModelError, naming
from gangway.compiler.frontend.dynamic_quantisation import find_dynamic_products
from gangway.compiler.frontend.folding import folded_tensors
from gangway.compiler.frontend.functions import expand, has_body
from gangway.compiler.frontend.graph import Graph, Node, remove_unused
from gangway.compiler.frontend.images import has_several_images, split_images
from gangway.compiler.frontend.lines import as_images
from gangway.compiler.frontend.packed.rules import find_packed_products
from gangway.compiler.frontend.patterns import find_patterns
from gangway.compiler.frontend.shapes.stated import state_shapes
from gangway.compiler.frontend.simplify import fold, simplify
from gangway.compiler.lower.islands import add_islands
from gangway.compiler.lower.layers import Lowering, Program
from gangway.compiler.lower.operators import LOWERINGS

MAX_TENSOR_BYTES = 1 << 30  # kernels count elements, halos included, in 32 bits
SEVERAL_OUTPUTS = {"LSTM", "GRU", "RNN", "TopK"}  # operators that are lowered with all of their outputs
Resort = Lowering  # for any operator


def lower_model(graph: Graph, slow: Collection[str] | None = None, is_checked: bool = True) -> Program:
    """Return the layers of a model.

    A node that no lowering takes is replaced by its definition in simpler operators, if ONNX has one. What nothing
    computes becomes islands, and so does what onnxruntime computes faster than a kernel that no template made: `slow`
    are such nodes, by their first outputs; None: they are found by measurement. Layers that TVM's Relax makes are
    compared with onnxruntime if `is_checked`, which takes code; otherwise some of them may not be in the end.

    Raises UnsupportedModelError if there are nodes that cannot be islands, ModelError if the model is invalid.
    """
    graph = fold(find_packed_products(find_dynamic_products(state_shapes(graph))))
    if has_several_images(graph):
        graph = split_images(simplify(graph))
    replaced: dict[str, UnsupportedModelError] = {}
    while unknown := _undefined(graph):
        replaced |= {node.outputs[0]: node.unsupported("no kernel computes this operator") for node in unknown}
        graph = state_shapes(expand(graph, {node.outputs[0] for node in unknown}))
    while True:
        simple = find_patterns(as_images(simplify(graph)))
        program, refusals = lower(simple)
        if not refusals:
            return program
        graph = _with_refused_convolutions(graph, simple, refusals)
        refused = [node for node in graph.nodes if node.outputs[0] in refusals]
        defined = {node.outputs[0] for node in refused if has_body(node, graph, simple.constants)}
        if not defined:
            break
        replaced |= {name: refusals[name] for name in defined}
        graph = state_shapes(expand(graph, defined, simple.constants))
    from gangway.compiler.lower import relax  # noqa: PLC0415 - TVM takes a second

    program, refusals = lower(simple, relax.lower_by_relax if is_checked else relax.lower_unchecked, slow)
    program.refused = {name: str(error) for name, error in refusals.items()}
    try:
        _add_islands(program, refusals)
    except UnsupportedModelError as error:
        reason = UnsupportedModelError(f"{refusal(refusals, simple)}; {error}")
        raise _reason(replaced, reason) from error
    return program


def _undefined(graph: Graph) -> list[Node]:
    """Return the nodes that no function lowers, but that have a definition; not those of which the value is known."""
    folded = folded_tensors(graph)
    return [
        node
        for node in graph.nodes
        if not has_lowering(node.operator) and node.outputs[0] not in folded and has_body(node, graph)
    ]


def _with_refused_convolutions(graph: Graph, simple: Graph, refusals: Collection[str]) -> Graph:
    """Return the graph with these convolutions as `simple` has them: with the scales and shifts behind them."""
    convolutions = [node for node in simple.nodes if node.operator == "Conv" and node.outputs[0] in refusals]
    refused = {node.outputs[0]: node for node in convolutions}
    weights = [name for node in convolutions for name in node.inputs if name in simple.constants]
    constants = {**graph.constants, **{name: simple.constants[name] for name in weights}}
    nodes = tuple(refused.get(node.outputs[0], node) for node in graph.nodes)
    return remove_unused(replace(graph, nodes=nodes, constants=constants))


def _add_islands(program: Program, refusals: Collection[str]) -> None:
    """Make islands of nodes without layers, and of slow ones, if they can be islands, too."""
    if program.slow:
        try:
            add_islands(program, {*refusals, *program.slow})
            return
        except UnsupportedModelError:  # a slow layer is better than none
            program.slow = set()
    if refusals:
        add_islands(program, refusals)


def _reason(replaced: Mapping[str, UnsupportedModelError], error: UnsupportedModelError) -> UnsupportedModelError:
    """Return the error that also tells the first node whose definition was tried in vain."""
    if not replaced:
        return error
    return UnsupportedModelError(f"{next(iter(replaced.values()))}; of simpler operators instead: {error}")


def lower(
    graph: Graph, resort: Resort | None = None, slow: Collection[str] | None = None
) -> tuple[Program, dict[str, UnsupportedModelError]]:
    """Return one layer or view per node, and why some nodes, named by their first outputs, have none.

    A node that no lowering takes goes to `resort`, which may add its layers, and finds whether they are slow if that is
    not known. Raises ModelError for invalid nodes.
    """
    program, refusals = Program(graph, measures=slow is None, slow=set(slow or ())), {}
    for node in graph.nodes:
        mark = _mark(program)
        place = f"node '{node.name}' ({node.operator})"
        try:
            with naming(place):
                _lower_node(program, node)
            continue
        except UnsupportedModelError as error:
            _undo(program, mark)
            refusals[node.outputs[0]] = error
        if resort and not isinstance(refusals[node.outputs[0]], OneEngineError):
            try:
                with naming(place):
                    resort(program, node)
                del refusals[node.outputs[0]]
            except UnsupportedModelError as error:
                _undo(program, mark)
                refusals[node.outputs[0]] = UnsupportedModelError(f"{refusals[node.outputs[0]]}; {error}")
    return program, refusals


def _mark(program: Program) -> tuple[int, int, int]:
    return len(program.layers), len(program.views), len(program.constants)


def _undo(program: Program, mark: tuple[int, int, int]) -> None:
    """Forget what has been added since."""
    del program.layers[mark[0] :]
    for added, length in ((program.views, mark[1]), (program.constants, mark[2])):
        for name in list(added)[length:]:
            del added[name]


def has_lowering(operator: str) -> bool:
    """Whether there is a function that lowers this operator, though maybe not every node of it."""
    return operator in LOWERINGS


def _lower_node(program: Program, node: Node) -> None:
    if node.operator not in LOWERINGS:
        raise node.unsupported("no kernel computes this operator")
    _check_types(program, node)
    try:
        LOWERINGS[node.operator](program, node)
    except (ValueError, IndexError, KeyError, TypeError) as error:
        raise ModelError(f"node '{node.name}' ({node.operator}) is invalid: {error!r}") from error


def _check_types(program: Program, node: Node) -> None:
    first, *others = filter(None, node.outputs)
    for name in filter(None, (*node.inputs, first)):
        constant, kind = program.graph.constants.get(name), program.graph.types.get(name)
        if "object" in (constant.dtype.name if constant is not None else "", kind.dtype if kind else ""):
            raise node.unsupported(f"'{name}' holds strings")
    for name in others if node.operator not in SEVERAL_OUTPUTS else ():
        if program.graph.uses()[name]:
            raise node.unsupported(f"its output '{name}' is used")
    kind = program.type(first)
    if kind.size_bytes > MAX_TENSOR_BYTES:
        raise node.unsupported(f"its output of shape {list(kind.shape)} has more than {MAX_TENSOR_BYTES >> 20} MiB")


def refusal(refusals: Mapping[str, UnsupportedModelError], graph: Graph) -> UnsupportedModelError:
    """Return the error that lists all operators without a lowering, or else the first reason."""
    unknown = [node for node in graph.nodes if node.outputs[0] in refusals and not has_lowering(node.operator)]
    if not unknown:
        return next(iter(refusals.values()))
    names = ", ".join(sorted({node.operator for node in unknown}))
    first = refusals[unknown[0].outputs[0]]
    return UnsupportedModelError(f"{len(unknown)} nodes have unsupported operators: {names} (first {first})")
