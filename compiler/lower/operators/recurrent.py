"""LSTM, GRU and RNN: a dense layer for the inputs of all steps, then one layer for the recurrence."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from gangway.compiler.frontend.graph import Node, TensorType
from gangway.compiler.frontend.packed import PACKED_GATES
from gangway.compiler.kernels.packed_specs import PackedDenseSpec
from gangway.compiler.kernels.specs import RELU, Activation, Array, Cell, RecurrentSpec
from gangway.compiler.lower.layers import LoweredLayer, Program, lowers
from gangway.compiler.lower.operators.dense import dense

MAX_HIDDEN = 8192  # units whose states fit on a worker's stack
MAX_ELEMENTS = 1 << 28  # kernels count bytes in 31 bits
_DEFAULTS: dict[Cell, tuple[str, ...]] = {
    "LSTM": ("sigmoid", "tanh", "tanh"),
    "GRU": ("sigmoid", "tanh"),
    "RNN": ("tanh",),
}
_ACTIVATIONS = {  # with alpha and beta as onnxruntime has them if a node gives none, and which of them it may give
    "relu": (RELU, ()),
    "sigmoid": (Activation("sigmoid"), ()),
    "tanh": (Activation("tanh"), ()),
    "softplus": (Activation("softplus"), ()),
    "leakyrelu": (Activation("leaky_relu", 0.01), ("alpha",)),
    "elu": (Activation("elu", 1.0), ("alpha",)),
    "hardsigmoid": (Activation("hard_sigmoid", 0.2, 0.5), ("alpha", "beta")),
}


@lowers("LSTM", "GRU", "RNN")
def recurrent(program: Program, node: Node) -> None:
    """Either or both directions, with constant weights; other activations than those above are refused."""
    kind = program.type(node.inputs[0])
    weights, matrix = program.constant(node, 1), program.constant(node, 2)
    if {kind.dtype, weights.dtype.name, matrix.dtype.name} != {"float32"}:
        raise node.unsupported(f"element type {kind.dtype}")
    cell: Cell = node.operator  # type: ignore[assignment] # one of the three
    spec = _spec(program, node, cell, kind, matrix)
    if spec.hidden > MAX_HIDDEN or spec.channels * math.prod(kind.shape[:2]) > MAX_ELEMENTS:
        raise node.unsupported(f"{spec.hidden} hidden units, or {kind.shape[0]} steps, are too many")
    gates = spec.gates
    biases = program.optional(node, 3)
    both = np.zeros((spec.directions, 2, gates, spec.hidden), np.float32) if biases is None else biases
    both = both.reshape(spec.directions, 2, gates, spec.hidden)
    packed = [program.constant(node, index) for index in range(PACKED_GATES, len(node.inputs))]
    raw: dict[str, Array] = {"recurrent": matrix}
    if packed:
        spec = replace(spec, int8=True)
        raw = {"recurrent": packed[2], "scales": packed[3]}
    added = both[:, 0] + both[:, 1]
    if spec.linear_before_reset:
        added[:, 2] = both[:, 0, 2]
        raw["bias"] = np.ascontiguousarray(both[:, 1, 2])
    if spec.peepholes:
        raw["peepholes"] = program.constant(node, 7)
    products = _products(program, node, spec, packed[:2] or [weights], added)
    names = [name for name, wanted in zip(_three(node), spec.outputs, strict=True) if wanted]
    states = [node.inputs[n] for n, given in ((5, spec.initial_h), (6, spec.initial_c), (4, spec.lengths)) if given]
    inputs = (products, *states)
    operator = f"Quantised{cell}" if packed else cell  # of which onnxruntime may compute one in integers
    program.layers.append(LoweredLayer(node.name, operator, spec, inputs, names[0], raw, more_outputs=tuple(names[1:])))


def _three(node: Node) -> tuple[str, str, str]:
    """Y, Y_h and Y_c, empty where the node leaves them out."""
    first, second, third = (*node.outputs, "", "", "")[:3]
    return first, second, third


def _spec(program: Program, node: Node, cell: Cell, kind: TensorType, matrix: Array) -> RecurrentSpec:
    first = bool(node.attributes.get("layout", 0))
    steps, sequences = kind.shape[1::-1] if first else kind.shape[:2]
    if 0 in kind.shape:
        raise node.unsupported("there are no numbers")
    uses = program.graph.uses()
    wanted = [bool(name) and uses[name] > 0 for name in _three(node)]
    directions, _, hidden = matrix.shape
    state = (sequences, directions, hidden) if first else (directions, sequences, hidden)
    h, c = (_input(program, node, index, TensorType(state, "float32")) for index in (5, 6))
    lengths = _input(program, node, 4, TensorType((sequences,), "int32"))
    peepholes = _input(program, node, 7, TensorType((directions, 3 * hidden), "float32"))
    return RecurrentSpec(
        cell,
        steps,
        sequences,
        hidden,
        _activations(node, cell, directions),
        reverse=node.attributes.get("direction", b"forward") == b"reverse",
        sequences_first=first,
        clip=node.attributes.get("clip", math.inf),
        input_forget=bool(node.attributes.get("input_forget", 0)),
        peepholes=peepholes is not False,
        linear_before_reset=bool(node.attributes.get("linear_before_reset", 0)),
        initial_h=bool(np.any(h)),
        initial_c=bool(np.any(c)),
        lengths=lengths if isinstance(lengths, bool) else bool((lengths != steps).any()),
        outputs=(wanted[0], wanted[1], wanted[2]),
    )


def _input(program: Program, node: Node, index: int, kind: TensorType) -> Array | bool:
    """Whether an optional input is given; its value if that is a constant. Raises ValueError if it has another type."""
    if len(node.inputs) <= index or not node.inputs[index]:
        return False
    name = node.inputs[index]
    value = program.graph.constants.get(name)
    found = program.type(name) if value is None else TensorType(value.shape, value.dtype.name)
    if found != kind:
        raise ValueError(f"'{name}' is {found.dtype}{list(found.shape)}, not {kind.dtype}{list(kind.shape)}")
    return True if value is None else value


def _activations(node: Node, cell: Cell, directions: int) -> tuple[tuple[Activation, ...], ...]:
    """The functions of each direction; alphas and betas are given to those that have them, one after the other."""
    defaults = _DEFAULTS[cell]
    names = [name.decode().lower() for name in node.attributes.get("activations", ())] or [*defaults] * directions
    if len(names) != len(defaults) * directions or any(name not in _ACTIVATIONS for name in names):
        raise node.unsupported(f"activations {', '.join(names)}")
    alphas, betas = (list(node.attributes.get(f"activation_{name}", ())) for name in ("alpha", "beta"))
    functions = []
    for name in names:
        function, parameters = _ACTIVATIONS[name]
        alpha = float(alphas.pop(0)) if alphas and "alpha" in parameters else function.alpha
        beta = float(betas.pop(0)) if betas and "beta" in parameters else function.beta
        functions.append(replace(function, alpha=alpha, beta=beta))
    return tuple(tuple(functions[n : n + len(defaults)]) for n in range(0, len(functions), len(defaults)))


def _products(program: Program, node: Node, spec: RecurrentSpec, weights: Sequence[Array], biases: Array) -> str:
    """Add the dense layer of all steps; return the name of its result. `weights`: matrices, or integers and scales."""
    kind = program.type(node.inputs[0])
    inputs, surplus = kind.shape[2], spec.units - spec.hidden

    def spread(values: Array, columns: int) -> Array:
        shaped = values.reshape(spec.directions, spec.gates, spec.hidden, columns)
        return np.pad(shaped, ((0, 0), (0, 0), (0, surplus), (0, 0))).reshape(spec.channels, columns)

    matrix, *scales = weights
    bias = spread(biases, 1).reshape(-1)
    name = f"{next(filter(None, node.outputs))}/products"
    program.add_types({name: TensorType((*kind.shape[:2], spec.channels), "float32")})
    inner = Node(f"{node.name}/products", "Gemm", (node.inputs[0],), (name,))
    if scales:
        packed = PackedDenseSpec(inputs, math.prod(kind.shape[:2]), spec.channels, 8, inputs)
        raw = {"integers": spread(matrix, inputs), "scales": spread(scales[0], 1), "bias": bias}
        program.add(inner, packed, inner.inputs, raw)
    else:
        dense(program, inner, spread(matrix, inputs), bias)
    return name
