"""Which function lowers which ONNX operator. A new operator is one function with `@lowers("Name")` in this package."""

from collections.abc import Callable

from gangway.compiler.errors import ModelError, UnsupportedModelError
from gangway.compiler.graph import Graph, Node
from gangway.compiler.layers import Program

MAX_TENSOR_BYTES = 1 << 30  # kernels count elements, halos included, in 32 bits

Lowering = Callable[[Program, Node], None]

_lowerings: dict[str, Lowering] = {}


def lowers(*operators: str) -> Callable[[Lowering], Lowering]:
    """Register the decorated function for these operators. It adds layers or views to the program for one node."""

    def register(function: Lowering) -> Lowering:
        _lowerings.update(dict.fromkeys(operators, function))
        return function

    return register


def lower(graph: Graph) -> Program:
    """Return one layer or view per node.

    Raises UnsupportedModelError that lists every node without a lowering, or names the first whose lowering refuses it.
    """
    if unknown := [node for node in graph.nodes if node.operator not in _lowerings]:
        names = ", ".join(sorted({node.operator for node in unknown}))
        example = f"first at node '{unknown[0].name}'"
        raise UnsupportedModelError(f"{len(unknown)} nodes have unsupported operators: {names} ({example})")
    program = Program(graph)
    for node in graph.nodes:
        _check_types(program, node)
        try:
            _lowerings[node.operator](program, node)
        except (ValueError, IndexError, KeyError, TypeError) as error:
            raise ModelError(f"node '{node.name}' ({node.operator}) is invalid: {error!r}") from error
    return program


def _check_types(program: Program, node: Node) -> None:
    for name in filter(None, node.outputs[1:]):
        if program.graph.uses()[name]:
            raise node.unsupported(f"its output '{name}' is used")
    kind = program.type(node.outputs[0])
    if kind.size_bytes > MAX_TENSOR_BYTES:
        raise node.unsupported(f"its output of shape {list(kind.shape)} has more than {MAX_TENSOR_BYTES >> 20} MiB")
