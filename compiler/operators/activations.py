"""Activation functions: layers of their own here, which `fusion` lets the layer before them apply where possible."""

import math

from gangway.compiler.activations import RELU, Activation
from gangway.compiler.graph import Node
from gangway.compiler.layers import Program
from gangway.compiler.operators.elementwise import elementwise_spec
from gangway.compiler.operators.pointwise import PLAIN, lower_pointwise
from gangway.compiler.operators.registry import lowers


@lowers("Relu")
def relu(program: Program, node: Node) -> None:
    """max(x, 0)."""
    _add(program, node, RELU)


@lowers("Clip")
def clip(program: Program, node: Node) -> None:
    """Limits are constant inputs, before opset 11 attributes; numbers as large as the largest float limit nothing."""
    if program.type(node.outputs[0]).dtype != "float32" or any(
        name and name not in program.graph.constants for name in node.inputs[1:]
    ):
        lower_pointwise(program, node, PLAIN["Clip"])
        return
    limits = []
    for index, name, default in ((1, "min", -math.inf), (2, "max", math.inf)):
        value = program.optional(node, index)
        limit = node.attributes.get(name, default) if value is None else float(value)
        limits.append(limit if abs(limit) < 3.4e38 else math.copysign(math.inf, limit))
    _add(program, node, Activation("clip", *limits))


@lowers("LeakyRelu")
def leaky_relu(program: Program, node: Node) -> None:
    """x or, below zero, alpha x."""
    _add(program, node, Activation("leaky_relu", node.attributes.get("alpha", 0.01)))


@lowers("Sigmoid", "Tanh", "Swish")
def without_parameters(program: Program, node: Node) -> None:
    """Swish is x sigmoid(x), by `patterns` or since opset 24."""
    if node.attributes.get("alpha", 1.0) != 1.0:
        raise node.unsupported("alpha")
    match node.operator:
        case "Sigmoid":
            _add(program, node, Activation("sigmoid"))
        case "Swish":
            _add(program, node, Activation("swish"))
        case _:
            _add(program, node, Activation("tanh"))


@lowers("HardSigmoid")
def hard_sigmoid(program: Program, node: Node) -> None:
    """alpha x + beta, between 0 and 1."""
    alpha, beta = node.attributes.get("alpha", 0.2), node.attributes.get("beta", 0.5)
    _add(program, node, Activation("hard_sigmoid", alpha, beta))


@lowers("HardSwish")
def hard_swish(program: Program, node: Node) -> None:
    """The product of x and its hard sigmoid; `patterns` may state other factors than ONNX's."""
    alpha, beta = node.attributes.get("alpha", 1 / 6), node.attributes.get("beta", 0.5)
    _add(program, node, Activation("hard_swish", alpha, beta))


@lowers("Erf", "Gelu", "Elu", "Mish", "Softplus")
def of_exponentials(program: Program, node: Node) -> None:
    """As ONNX defines them."""
    match node.operator:
        case "Erf":
            _add(program, node, Activation("erf"))
        case "Elu":
            _add(program, node, Activation("elu", node.attributes.get("alpha", 1.0)))
        case "Mish":
            _add(program, node, Activation("mish"))
        case "Softplus":
            _add(program, node, Activation("softplus"))
        case _:
            tanh = node.attributes.get("approximate", b"none") == b"tanh"
            _add(program, node, Activation("gelu_tanh" if tanh else "gelu"))


def _add(program: Program, node: Node, activation: Activation) -> None:
    """Add the layer. Raises UnsupportedModelError for other types than float32 where ONNX defines it otherwise, too."""
    kind = program.type(node.outputs[0])
    if kind.dtype == "float32":
        program.add(node, elementwise_spec("copy", kind, activation), (node.inputs[0],))
    elif node.operator in PLAIN:
        lower_pointwise(program, node, PLAIN[node.operator])
    else:
        raise node.unsupported(f"element type {kind.dtype}")
