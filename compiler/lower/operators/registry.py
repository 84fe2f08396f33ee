"""Which function lowers which ONNX operator. A new operator is one function with `@lowers("Name")` in this package."""

from collections.abc import Callable, Mapping

from gangway.compiler.errors import ModelError, OneEngineError, UnsupportedModelError
from gangway.compiler.frontend.graph import Graph, Node
from gangway.compiler.lower.layers import Program

MAX_TENSOR_BYTES = 1 << 30  # kernels count elements, halos included, in 32 bits

Lowering = Callable[[Program, Node], None]
Resort = Lowering  # for any operator

_lowerings: dict[str, Lowering] = {}


def lowers(*operators: str) -> Callable[[Lowering], Lowering]:
    """Register the decorated function for these operators. It adds layers or views to the program for one node."""

    def register(function: Lowering) -> Lowering:
        _lowerings.update(dict.fromkeys(operators, function))
        return function

    return register


def has_lowering(operator: str) -> bool:
    """Whether there is a function that lowers this operator, though maybe not every node of it."""
    return operator in _lowerings


def lower(graph: Graph, resort: Resort | None = None) -> tuple[Program, dict[str, UnsupportedModelError]]:
    """Return one layer or view per node, and why some nodes, named by their first outputs, have none.

    A node that no lowering takes goes to `resort`, which may add its layers. Raises ModelError for invalid nodes.
    """
    program, refusals = Program(graph), {}
    for node in graph.nodes:
        mark = _mark(program)
        try:
            _lower_node(program, node)
            continue
        except UnsupportedModelError as error:
            _undo(program, mark)
            refusals[node.outputs[0]] = error
        if resort and not isinstance(refusals[node.outputs[0]], OneEngineError):
            try:
                resort(program, node)
                del refusals[node.outputs[0]]
            except UnsupportedModelError as error:
                _undo(program, mark)
                refusals[node.outputs[0]] = UnsupportedModelError(f"{refusals[node.outputs[0]]}; {error}")
    return program, refusals


def refusal(refusals: Mapping[str, UnsupportedModelError], graph: Graph) -> UnsupportedModelError:
    """Return the error that lists all operators without a lowering, or else the first reason."""
    unknown = [node for node in graph.nodes if node.outputs[0] in refusals and not has_lowering(node.operator)]
    if not unknown:
        return next(iter(refusals.values()))
    names = ", ".join(sorted({node.operator for node in unknown}))
    first = refusals[unknown[0].outputs[0]]
    return UnsupportedModelError(f"{len(unknown)} nodes have unsupported operators: {names} (first {first})")


def _mark(program: Program) -> tuple[int, int, int]:
    return len(program.layers), len(program.views), len(program.constants)


def _undo(program: Program, mark: tuple[int, int, int]) -> None:
    """Forget what has been added since."""
    del program.layers[mark[0] :]
    for added, length in ((program.views, mark[1]), (program.constants, mark[2])):
        for name in list(added)[length:]:
            del added[name]


def _lower_node(program: Program, node: Node) -> None:
    if node.operator not in _lowerings:
        raise node.unsupported("no kernel computes this operator")
    _check_types(program, node)
    try:
        _lowerings[node.operator](program, node)
    except (ValueError, IndexError, KeyError, TypeError) as error:
        raise ModelError(f"node '{node.name}' ({node.operator}) is invalid: {error!r}") from error


def _check_types(program: Program, node: Node) -> None:
    for name in filter(None, node.outputs[1:]):
        if program.graph.uses()[name]:
            raise node.unsupported(f"its output '{name}' is used")
    kind = program.type(node.outputs[0])
    if kind.size_bytes > MAX_TENSOR_BYTES:
        raise node.unsupported(f"its output of shape {list(kind.shape)} has more than {MAX_TENSOR_BYTES >> 20} MiB")
