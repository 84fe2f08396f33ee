"""Softmax and normalisation over the last axes."""

import math

import numpy as np
from gangway.compiler.graph import Node
from gangway.compiler.layers import Program
from gangway.compiler.operators.registry import lowers
from gangway.compiler.specs import LayerNormSpec, SoftmaxSpec


@lowers("Softmax")
def softmax(program: Program, node: Node) -> None:
    """Over the last axis, if all axes behind it have length 1.

    Before opset 13 an axis meant all from there on, and 1 was the default, not the last one: what the two readings
    disagree on is unsupported.
    """
    kind = program.type(node.inputs[0])
    axis = node.attributes.get("axis", 1 if len(kind.shape) == 2 else 0) % len(kind.shape)
    if kind.dtype != "float32" or math.prod(kind.shape[axis + 1 :]) != 1:
        raise node.unsupported(f"over axis {axis} of {kind.dtype}{list(kind.shape)}; only float32 over the last one")
    spec = SoftmaxSpec(math.prod(kind.shape[:axis]), kind.shape[axis])
    program.add(node, spec, (node.inputs[0],))


@lowers("LayerNormalization", "RMSNormalization")
def layer_normalization(program: Program, node: Node) -> None:
    """Over all axes from `axis` on: these are the channels, the others the positions of a sequence."""
    kind = program.type(node.inputs[0])
    axis = node.attributes.get("axis", -1) % len(kind.shape)
    channels = math.prod(kind.shape[axis:])
    if kind.dtype != "float32":
        raise node.unsupported(f"element type {kind.dtype}")
    shift = program.optional(node, 2)
    scales = [program.constant(node, 1), np.zeros(1, np.float32) if shift is None else shift]
    scale, shift = (np.ascontiguousarray(np.broadcast_to(x, kind.shape[axis:]).reshape(-1)) for x in scales)
    epsilon, centred = node.attributes.get("epsilon", 1e-5), node.operator == "LayerNormalization"
    spec = LayerNormSpec(channels, math.prod(kind.shape[:axis]), epsilon, centred)
    program.add(node, spec, (node.inputs[0],), {"scale": scale, "shift": shift})
