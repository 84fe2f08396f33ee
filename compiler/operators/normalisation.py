"""Softmax, and normalisation over the last axes."""

import math

import numpy as np

from gangway.compiler.graph import Node
from gangway.compiler.layers import Program
from gangway.compiler.operators.registry import lowers
from gangway.compiler.specs import LayerNormSpec, SoftmaxSpec

FLATTENS_UNTIL = 13  # opset; before, softmax took all axes from the given one on as one


@lowers("Softmax", "LogSoftmax")
def softmax(program: Program, node: Node) -> None:
    """Over any axis."""
    kind = program.type(node.inputs[0])
    if kind.dtype != "float32":
        raise node.unsupported(f"element type {kind.dtype}")
    flattens = program.graph.opset < FLATTENS_UNTIL
    axis = node.attributes.get("axis", 1 if flattens else -1) % len(kind.shape)
    end = len(kind.shape) if flattens else axis + 1
    rows, columns, inner = (math.prod(part) for part in (kind.shape[:axis], kind.shape[axis:end], kind.shape[end:]))
    spec = SoftmaxSpec(rows, columns, inner, node.operator == "LogSoftmax")
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
