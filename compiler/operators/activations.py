"""Activation functions: layers of their own here, which `fusion` lets the layer before them apply where possible."""

import math

from gangway.compiler.activations import RELU, Activation
from gangway.compiler.graph import Node
from gangway.compiler.layers import Program
from gangway.compiler.operators.elementwise import elementwise_spec
from gangway.compiler.operators.registry import lowers


@lowers("Relu")
def relu(program: Program, node: Node) -> None:
    """max(x, 0)."""
    _add(program, node, RELU)


@lowers("Clip")
def clip(program: Program, node: Node) -> None:
    """Limits are constant inputs, before opset 11 attributes; numbers as large as the largest float limit nothing."""
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


@lowers("Gelu")
def gelu(program: Program, node: Node) -> None:
    """x times the share of a normal distribution below x, or an approximation of that by a hyperbolic tangent."""
    tanh = node.attributes.get("approximate", b"none") == b"tanh"
    _add(program, node, Activation("gelu_tanh" if tanh else "gelu"))


def _add(program: Program, node: Node, activation: Activation) -> None:
    kind = program.type(node.outputs[0])
    if kind.dtype != "float32":
        raise node.unsupported(f"element type {kind.dtype}")
    program.add(node, elementwise_spec(node, "copy", kind, activation), (node.inputs[0],))
