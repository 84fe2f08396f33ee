"""Patterns: groups of nodes, as exporters write them, that become one node which one kernel computes.

Here are functions that exporters spell out in several nodes; `attention/rules.py` and `views.py` have larger patterns.

Functions of one number, such as GELU, are recognised by their values. From each node that can be the middle of such a
function (Erf, Clip, ...) the nodes around it are followed as long as they compute one number from one number.
What they compute together is evaluated at sample points and compared with the functions that kernels know. So order,
association and rounding of the constants do not matter.

In a quantised graph exporters put a pair of QuantizeLinear and DequantizeLinear at every place where an integer kernel
would hand over 8-bit numbers: a tensor only becomes rounder. Here the pair is one activation function, which a
convolution applies before it stores, and weights are taken back while compiling: the model computes the same numbers in
float32. What is left of either operator is spread along its axis.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise
from typing import Any

import numpy as np

from gangway.compiler.frontend.attention.rules import ATTENTION
from gangway.compiler.frontend.graph import Editor, Graph, Node, Rule, rewrite
from gangway.compiler.frontend.views import COPIES
from gangway.compiler.kernels.specs import Array

MOST_NODES = 14
SAMPLES = np.concatenate([np.linspace(-9.0, 9.0, 181), [-1e-3, 1e-3, -40.0, 40.0]])
SMALL = 0.1  # nearer to zero a quotient says little
TOLERANCE = 2e-6  # of max(1, |x|); the two forms of GELU differ by 5e-4
CORES = ("Erf", "Tanh", "Clip", "Exp", "HardSigmoid", "Max", "Min", "Relu")
MOVES = ("Flatten", "Gather", "Identity", "MaxPool", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze")
QUANTISED = {"int8": (-128, 127), "uint8": (0, 255)}
_GATED = {"Sigmoid": "Swish", "HardSigmoid": "HardSwish"}
_DEFAULTS = {"HardSigmoid": {"alpha": 0.2, "beta": 0.5}}
Function = Callable[..., Array]


def find_patterns(graph: Graph) -> Graph:
    """Return an equivalent graph with the nodes of known groups replaced; what is not recognised stays as it is."""
    return rewrite(graph, *_RULES)


def _find_function(editor: Editor, core: Node) -> None:
    """Put one node in the place of those around `core`, if they spell out a function of one number."""
    for end in reversed(_chain(editor, core)):
        if _replace(editor, core, end):
            return


def _chain(editor: Editor, core: Node) -> list[Node]:
    """Return the nodes after `core`, each the only reader of the one before."""
    chain = [core]
    while len(chain) < MOST_NODES:
        readers = editor.readers[chain[-1].outputs[0]]
        if len(readers) != 1 or editor.uses[chain[-1].outputs[0]] != 1 or readers[0].operator not in _NAMES:
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
    if len(cone) == 1 or editor.shape(x) != editor.shape(end.outputs[0]) or not editor.is_float(x):
        return False
    with np.errstate(all="ignore"):
        values = _evaluate(editor, x, cone)
        for operator, attributes, function in (*FUNCTIONS, *_hard_functions(values)):
            if np.all(np.abs(values - function(SAMPLES)) <= TOLERANCE * np.maximum(1, np.abs(SAMPLES))):
                node = Node(end.name, operator, (x,), end.outputs, attributes)
                editor.replace(end.outputs[0], [node])
                return True
    return False


def _cone(editor: Editor, core: Node, end: Node) -> tuple[str, list[Node]] | None:
    """Return a tensor x and the nodes, in order, that compute the output of `end` from x and constant numbers only.

    `core` is among them, and no other node reads what they compute in between.
    """
    order = {node.outputs[0]: index for index, node in enumerate(editor.graph.nodes)}
    open_names, cone = {end.outputs[0]}, list[Node]()
    while len(open_names) > 1 or core not in cone:
        latest = max(open_names, key=lambda name: order.get(name, -1))
        node = editor.producer(latest, *_NAMES)
        if node is None or len(cone) == MOST_NODES:
            return None
        cone.append(node)
        open_names.remove(latest)
        for name in filter(None, node.inputs):
            if name not in editor.constants:
                open_names.add(name)
            elif editor.scalar(name) is None:
                return None
    inside = [name for node in cone for name in node.inputs]
    if any(inside.count(node.outputs[0]) != editor.uses[node.outputs[0]] for node in cone[1:]):
        return None
    return open_names.pop(), cone[::-1]


def _hard_functions(values: Array) -> Iterator[tuple[str, dict[str, Any], Function]]:
    """Yield the HardSigmoid, and the HardSwish, through two of these values at the sample points."""
    for operator, gates in (("HardSigmoid", values), ("HardSwish", values / SAMPLES)):
        (sloped,) = np.nonzero((gates > TOLERANCE) & (gates < 1 - TOLERANCE) & (np.abs(SAMPLES) > SMALL))
        if len(sloped) < 2:
            continue
        (first, last), gate = SAMPLES[sloped[[0, -1]]], gates[sloped[[0, -1]]]
        alpha = float((gate[1] - gate[0]) / (last - first))
        beta = float(gate[0] - alpha * first)
        function = partial(_hard_sigmoid if operator == "HardSigmoid" else _hard_swish, alpha=alpha, beta=beta)
        yield operator, {"alpha": alpha, "beta": beta}, function


def _evaluate(editor: Editor, x: str, cone: list[Node]) -> Array:
    values: dict[str, Array] = {x: SAMPLES}
    for node in cone:
        operands = [
            values[name] if name in values else np.float64(editor.scalar(name) or 0.0) if name else None
            for name in node.inputs
        ]
        values[node.outputs[0]] = _value(node, operands)
    return values[cone[-1].outputs[0]]


def _value(node: Node, operands: list[Any]) -> Array:
    """Return what a node makes of its inputs; None is an input that it leaves out."""
    match node.operator:
        case "Clip":
            limits = [node.attributes.get("min"), node.attributes.get("max")]
            least, largest = (operands[1:] + limits[len(operands) - 1 :])[:2]
            least, largest = -np.inf if least is None else least, np.inf if largest is None else largest
            return np.asarray(np.minimum(np.maximum(operands[0], least), largest))
        case "HardSigmoid":
            factors = {**_DEFAULTS[node.operator], **node.attributes}
            return _hard_sigmoid(operands[0], factors["alpha"], factors["beta"])
        case _:
            return OPERATORS[node.operator](*operands)


def erf(x: Array) -> Array:
    """The error function: its series by quadrature of exp(-t^2), exact to 1e-12."""
    nodes, weights = _quadrature()
    half = np.clip(x, -6.0, 6.0)[..., None] / 2
    return np.asarray((np.exp(-((half * (nodes + 1)) ** 2)) * weights).sum(-1) * half[..., 0] * 2 / np.sqrt(np.pi))


@cache
def _quadrature() -> tuple[Array, Array]:
    """Nodes and weights of Gauss and Legendre."""
    nodes, weights = np.polynomial.legendre.leggauss(60)
    return nodes, weights


def _sigmoid(x: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-x)))


def _hard_sigmoid(x: Array, alpha: float, beta: float) -> Array:
    return np.clip(alpha * x + beta, 0, 1)


def _hard_swish(x: Array, alpha: float, beta: float) -> Array:
    return x * _hard_sigmoid(x, alpha, beta)


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
    "Relu": lambda x: np.maximum(x, 0),
    "Min": np.minimum,
    "Max": np.maximum,
    "Reciprocal": np.reciprocal,
    "Identity": lambda x: x,
}
_NAMES = (*OPERATORS, "Clip", "HardSigmoid")
FUNCTIONS: tuple[tuple[str, dict[str, Any], Function], ...] = (
    ("Gelu", {"approximate": b"none"}, lambda x: x / 2 * (1 + erf(x / np.sqrt(2)))),
    (
        "Gelu",
        {"approximate": b"tanh"},
        lambda x: x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
    ),
    ("Swish", {}, lambda x: x * _sigmoid(x)),
    ("Sigmoid", {}, _sigmoid),
    ("Mish", {}, lambda x: x * np.tanh(np.logaddexp(0, x))),
)


def _find_gate(editor: Editor, node: Node) -> None:
    """Put Swish in the place of x * Sigmoid(x), HardSwish with its two factors in that of x * HardSigmoid(x)."""
    for x, gate in (node.inputs, node.inputs[::-1]):
        source = editor.inner(gate, *_GATED)
        if source and source.inputs[0] == x:
            attributes = {**_DEFAULTS.get(source.operator, {}), **source.attributes}
            gated = Node(node.name, _GATED[source.operator], (x,), node.outputs, attributes)
            editor.replace(node.outputs[0], [gated])
            return


def _find_layer_norm(editor: Editor, node: Node) -> None:
    """Put LayerNormalization over the last axis in the place of the nodes that end with this one.

    (x - mean(x)) / sqrt(mean((x - mean(x))^2) + epsilon), then perhaps a scale and a shift of one number per channel:
    so exporters wrote it before ONNX had an operator for it. RMSNormalization is the same of x itself.
    """
    for deviation, rest in (node.inputs, node.inputs[::-1]):
        epsilon = _epsilon(editor, node, rest, deviation)
        centred = _centred(editor, deviation)
        x = centred or deviation
        if epsilon is None or not editor.is_float(x):
            continue
        channels = editor.types[x].shape[-1]
        scale, shift = np.ones(channels, np.float32), np.zeros(channels, np.float32)
        end = node
        if found := _per_channel(editor, end, "Mul", channels):
            end, scale = found
        if found := _per_channel(editor, end, "Add", channels):
            end, shift = found
        output = end.outputs[0]
        inputs = (x, editor.constant(f"{output}:scale", scale), editor.constant(f"{output}:shift", shift))
        operator = "LayerNormalization" if centred else "RMSNormalization"
        editor.replace(output, [Node(end.name, operator, inputs, (output,), {"axis": -1, "epsilon": epsilon})])
        return


def _centred(editor: Editor, name: str) -> str | None:
    """Return x, if the tensor is x less its mean over the last axis."""
    node = editor.producer(name, "Sub")
    if node is None:
        return None
    mean = editor.producer(node.inputs[1], "ReduceMean")
    return node.inputs[0] if mean and mean.inputs[0] == node.inputs[0] and _over_last(editor, mean) else None


def _over_last(editor: Editor, node: Node) -> bool:
    shape = editor.shape(node.inputs[0])
    return bool(shape) and editor.axes(node) == (len(shape or ()) - 1,) and node.attributes.get("keepdims", 1) == 1


def _epsilon(editor: Editor, node: Node, rest: str, deviation: str) -> float | None:
    """Return epsilon, if `node` divides `deviation` by the root of its mean square plus epsilon."""
    if node.operator == "Mul":
        inverse = editor.producer(rest, "Reciprocal", "Div")
        if inverse is None or (inverse.operator == "Div" and editor.scalar(inverse.inputs[0]) != 1.0):
            return None
        rest = inverse.inputs[-1]
    elif rest != node.inputs[1]:
        return None
    root = editor.producer(rest, "Sqrt", "Pow")
    if root is None or (root.operator == "Pow" and editor.scalar(root.inputs[1]) != 0.5):
        return None
    total = editor.producer(root.inputs[0], "Add")
    found = editor.operands(total) if total else None
    if found is None:
        return None
    mean = editor.producer(found[0], "ReduceMean")
    if mean is None or not _over_last(editor, mean) or not _is_square(editor, mean.inputs[0], deviation):
        return None
    return found[1]


def _is_square(editor: Editor, name: str, deviation: str) -> bool:
    """Whether a tensor is the square of `deviation`, or of another tensor that is computed in the same way."""
    node = editor.producer(name, "Mul", "Pow")
    if node is None:
        return False
    square = node.inputs[0] == node.inputs[1] if node.operator == "Mul" else editor.scalar(node.inputs[1]) == 2.0
    x = _centred(editor, deviation)
    return square and (node.inputs[0] == deviation or (x is not None and _centred(editor, node.inputs[0]) == x))


def _per_channel(editor: Editor, node: Node, operator: str, channels: int) -> tuple[Node, np.ndarray] | None:
    """Return the only reader of a node's output and its constant, if it applies one number per channel."""
    name = node.outputs[0]
    readers = editor.readers[name]
    if editor.uses[name] != 1 or not readers or readers[0].operator != operator:
        return None
    (reader,) = readers
    (other,) = (item for item in reader.inputs if item != name)
    value = editor.constants.get(other)
    kind, shape = editor.shape(reader.outputs[0]), editor.shape(name)
    if value is None or value.shape[-1:] != (channels,) or value.size != channels or kind != shape:
        return None
    return reader, value.reshape(-1)


def _find_pair(editor: Editor, node: Node) -> None:
    """Put FakeQuantise in the place of a pair of one constant scale; later pairs of the same tensor are the same."""
    source = editor.producer(node.inputs[0], "QuantizeLinear")
    if source is None or not editor.is_float(node.outputs[0]) or not editor.is_float(source.inputs[0]):
        return
    scale, zero_point = editor.scalar(source.inputs[1]), _zero_point(editor, source)
    dtype = editor.types[node.inputs[0]].dtype
    if dtype not in QUANTISED or scale is None or zero_point is None:
        return
    if (scale, zero_point) != (editor.scalar(node.inputs[1]), _zero_point(editor, node)):
        return
    output, shape = node.outputs[0], editor.types[node.outputs[0]].shape
    for reader in editor.readers[source.outputs[0]]:
        if first := editor.producer(reader.outputs[0], "FakeQuantise"):
            editor.replace(output, [editor.node("Identity", first.outputs, output, shape)])
            return
    x, lowest = source.inputs[0], QUANTISED[dtype][0]
    relu = editor.inner(x, "Relu")
    if relu and lowest == zero_point:  # what is negative becomes the lowest anyway
        x = relu.inputs[0]
    parameters = {"scale": scale, "zero_point": int(zero_point), "dtype": dtype}
    if _is_rounded(editor, x, parameters):
        editor.replace(output, [editor.node("Identity", (x,), output, shape)])
        return
    editor.replace(output, [editor.node("FakeQuantise", (x,), output, shape, **parameters)])


def _is_rounded(editor: Editor, x: str, parameters: Mapping[str, Any]) -> bool:
    """Whether a tensor only holds numbers that such a pair would leave alone: another one has made them."""
    while source := editor.producer(x, *MOVES):
        x = source.inputs[0]
    first = editor.producer(x, "FakeQuantise")
    return first is not None and dict(first.attributes) == dict(parameters)


def _zero_point(editor: Editor, node: Node) -> float | None:
    return editor.scalar(node.inputs[2]) if len(node.inputs) > 2 and node.inputs[2] else 0.0


def _spread_scales(editor: Editor, node: Node) -> None:
    """Shape constant scales and zero points of one number per channel, or block, for broadcasting."""
    if node.inputs[0] not in editor.types:
        return
    names = list(node.inputs)
    for index, name in enumerate(names[1:], 1):
        if name in editor.constants and editor.constants[name].size > 1:
            value = _shaped(editor.constants[name], node, editor.types[node.inputs[0]].shape)
            names[index] = editor.constant(f"{node.outputs[0]}:{name}", value)
    editor.replace(node.outputs[0], [replace(node, inputs=tuple(names))])


def _shaped(value: Array, node: Node, shape: tuple[int, ...]) -> Array:
    axis = node.attributes.get("axis", 1) % len(shape)
    if value.ndim > 1:  # one number for each block along the axis
        block = node.attributes.get("block_size", 0) or -(-shape[axis] // value.shape[axis])
        return np.take(np.repeat(value, block, axis), range(shape[axis]), axis)
    return value.reshape([-1 if number == axis else 1 for number in range(len(shape))])


GATES = Rule(("Mul",), _find_gate)
FUNCTIONS_OF_ONE = Rule(CORES, _find_function)
LAYER_NORM = Rule(("Div", "Mul"), _find_layer_norm)
QUANTISATION_PAIRS = Rule(("DequantizeLinear",), _find_pair)
QUANTISATION_SCALES = Rule(("QuantizeLinear", "DequantizeLinear"), _spread_scales)
_RULES = (QUANTISATION_PAIRS, QUANTISATION_SCALES, GATES, FUNCTIONS_OF_ONE, LAYER_NORM, ATTENTION, COPIES)
