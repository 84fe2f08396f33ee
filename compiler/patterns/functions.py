"""Functions of one number that exporters spell out, such as GELU, recognised by their values.

From each node that can only be the middle of such a function (Erf, Tanh, ...) the nodes around it are followed as long
as they compute one number from one number. What they compute together is evaluated at sample points and compared with
the functions that kernels know. So neither order nor association nor rounding of the constants matters.
"""

from collections.abc import Callable
from itertools import pairwise

import numpy as np

from gangway.compiler.graph import Graph, Node
from gangway.compiler.patterns.editor import Editor
from gangway.compiler.specs import Array

MOST_NODES = 14
SAMPLES = np.concatenate([np.linspace(-9.0, 9.0, 181), [-1e-3, 1e-3, -40.0, 40.0]])
TOLERANCE = 2e-6  # of max(1, |x|); the two forms of GELU differ by 5e-4

Function = Callable[..., Array]


def erf(x: Array) -> Array:
    """The error function: its series by quadrature of exp(-t^2), exact to 1e-12."""
    nodes, weights = np.polynomial.legendre.leggauss(60)
    half = np.clip(x, -6.0, 6.0)[..., None] / 2
    return np.asarray((np.exp(-((half * (nodes + 1)) ** 2)) * weights).sum(-1) * half[..., 0] * 2 / np.sqrt(np.pi))


def _sigmoid(x: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-x)))


OPERATORS: dict[str, Function] = {
    "Add": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
    "Div": np.divide,
    "Pow": np.power,
    "Neg": np.negative,
    "Sqrt": np.sqrt,
    "Exp": np.exp,
    "Log": np.log,
    "Erf": erf,
    "Tanh": np.tanh,
    "Sigmoid": _sigmoid,
    "Softplus": lambda x: np.logaddexp(0, x),
    "Identity": lambda x: x,
}
CORES = ("Erf", "Tanh")
FUNCTIONS: dict[str, tuple[dict[str, bytes], Function]] = {
    "Gelu": ({"approximate": b"none"}, lambda x: x / 2 * (1 + erf(x / np.sqrt(2)))),
    "GeluTanh": (
        {"approximate": b"tanh"},
        lambda x: x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
    ),
}


def find_functions(graph: Graph) -> Graph:
    """Return the graph with every form of GELU as one Gelu node."""
    editor = Editor(graph)
    for core in graph.nodes:
        if core.operator in CORES:
            for end in reversed(_chain(editor, core)):
                if _replace(editor, core, end):
                    break
    return editor.result()


def _chain(editor: Editor, core: Node) -> list[Node]:
    """Return the nodes after `core`, each the only reader of the one before."""
    chain = [core]
    while len(chain) < MOST_NODES:
        readers = editor.readers[chain[-1].outputs[0]]
        if len(readers) != 1 or editor.uses[chain[-1].outputs[0]] != 1 or readers[0].operator not in OPERATORS:
            break
        chain.append(readers[0])
    assert all(before.outputs[0] in after.inputs for before, after in pairwise(chain))
    return chain


def _replace(editor: Editor, core: Node, end: Node) -> bool:
    """Put one node in the place of those that end with `end`, if a kernel computes what they do."""
    found = _cone(editor, core, end)
    if found is None:
        return False
    x, cone = found
    if editor.shape(x) != editor.shape(end.outputs[0]) or not editor.is_float(x):
        return False
    with np.errstate(all="ignore"):
        values = _evaluate(editor, x, cone)
        for attributes, function in FUNCTIONS.values():
            if np.all(np.abs(values - function(SAMPLES)) <= TOLERANCE * np.maximum(1, np.abs(SAMPLES))):
                node = Node(end.name, "Gelu", (x,), end.outputs, attributes)
                editor.replace(end.outputs[0], [node])
                return True
    return False


def _cone(editor: Editor, core: Node, end: Node) -> tuple[str, list[Node]] | None:
    """Return a tensor x and the nodes, in order, that compute the output of `end` from x and constant numbers only.

    `core` is among them, and nobody else reads what they compute in between.
    """
    order = {node.outputs[0]: index for index, node in enumerate(editor.graph.nodes)}
    open_names, cone = {end.outputs[0]}, list[Node]()
    while len(open_names) > 1 or core not in cone:
        latest = max(open_names, key=lambda name: order.get(name, -1))
        node = editor.producer(latest, *OPERATORS)
        if node is None or len(cone) == MOST_NODES:
            return None
        cone.append(node)
        open_names.remove(latest)
        for name in node.inputs:
            if name not in editor.constants:
                open_names.add(name)
            elif editor.scalar(name) is None:
                return None
    inside = [name for node in cone for name in node.inputs]
    if any(inside.count(node.outputs[0]) != editor.uses[node.outputs[0]] for node in cone[1:]):
        return None
    return open_names.pop(), cone[::-1]


def _evaluate(editor: Editor, x: str, cone: list[Node]) -> Array:
    values: dict[str, Array] = {x: SAMPLES}
    for node in cone:
        operands = [values[name] if name in values else np.float64(editor.scalar(name) or 0.0) for name in node.inputs]
        values[node.outputs[0]] = OPERATORS[node.operator](*operands)
    return values[cone[-1].outputs[0]]
