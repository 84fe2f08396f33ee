"""Gemm and MatMul with constant weights: dense layers."""

import numpy as np
from gangway.compiler.graph import Node
from gangway.compiler.layers import Geometry, Program, geometry_of
from gangway.compiler.operators.registry import lowers
from gangway.compiler.specs import Array, ConvSpec


@lowers("Gemm")
def gemm(program: Program, node: Node) -> None:
    """y = alpha x B + beta C, of one row."""
    if node.attributes.get("transA", 0):
        raise node.unsupported("transA")
    weights = program.constant(node, 1)
    weights = weights if node.attributes.get("transB", 0) else weights.T
    bias = program.optional(node, 2)
    scaled = None if bias is None else np.float32(node.attributes.get("beta", 1.0)) * bias
    _dense(program, node, np.float32(node.attributes.get("alpha", 1.0)) * weights, scaled)


@lowers("MatMul")
def matmul(program: Program, node: Node) -> None:
    """y = x B, of one row."""
    _dense(program, node, program.constant(node, 1).T, None)


def _dense(program: Program, node: Node, weights: Array, bias: Array | None) -> None:
    """Add a dense layer with weights [outputs, inputs]: a convolution with a window as large as its image."""
    vector = program.geometry(node, node.inputs[0])
    if weights.ndim != 2 or len(program.type(node.inputs[0]).shape) != 2:
        raise node.unsupported("only a row vector times a matrix")
    outputs, inputs = weights.shape
    if inputs != vector.channels:
        raise node.unsupported(f"weights for {inputs} inputs, but '{node.inputs[0]}' has {vector.channels}")
    source, image = _flattened(program, node.inputs[0], vector)
    size = (image.height, image.width)
    spec = ConvSpec(image.channels, *size, outputs, kernel=size)
    full_bias = np.zeros(outputs, np.float32) if bias is None else np.broadcast_to(bias, (1, outputs)).reshape(-1)
    tensors = {"weights": weights.reshape(outputs, image.channels, *size), "bias": full_bias}
    program.add(node, spec, (source,), tensors)


def _flattened(program: Program, name: str, vector: Geometry) -> tuple[str, Geometry]:
    """Return the image that a vector is a view of: a window as large as that needs no other layout than the image's."""
    source = name
    while source in program.views:
        source = program.views[source]
        image = geometry_of(program.type(source))
        if image and not image.is_vector and source not in program.graph.inputs:
            return source, image
    return name, vector
