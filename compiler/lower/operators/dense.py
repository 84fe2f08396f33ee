"""Gemm and MatMul, attention, softmax, and normalisation over the last axes."""

import math

import numpy as np

from gangway.compiler.frontend.graph import Node
from gangway.compiler.kernels.plain_specs import MatMulSpec, SoftmaxSpec
from gangway.compiler.kernels.specs import Array, ConvSpec, LayerNormSpec
from gangway.compiler.lower.layers import Attention, Geometry, Program, geometry_of, lowers

FLATTENS_UNTIL = 13  # opset; before, softmax took all axes from the given one on as one
Shape = tuple[int, ...]


@lowers("Gemm")
def gemm(program: Program, node: Node) -> None:
    """y = alpha x B + beta C; `simplify` has replaced those whose B is no constant, or whose C is no vector.

    x may have any number of axes before the last one. If beta is 0, C counts nowhere, not even where it is NaN.
    """
    weights = program.constant(node, 1)
    weights = weights if node.attributes.get("transB", 0) else weights.T
    alpha, beta = (np.float32(node.attributes.get(name, 1.0)) for name in ("alpha", "beta"))
    bias = program.optional(node, 2)
    dense(program, node, _scaled(weights, alpha), None if bias is None or not beta else _scaled(bias, beta))


@lowers("MatMul")
def matmul(program: Program, node: Node) -> None:
    """y = x B, or a product of stacks of matrices."""
    left, right = node.inputs
    constants = program.graph.constants
    if left not in constants and right in constants and constants[right].ndim == 2:
        dense(program, node, constants[right].T, None)
        return
    shapes = [constants[name].shape if name in constants else program.type(name).shape for name in node.inputs]
    if program.type(node.outputs[0]).dtype != "float32":
        raise node.unsupported("other numbers than float32")
    program.add(node, _product(*shapes), node.inputs)


def _product(left: Shape, right: Shape) -> MatMulSpec:
    """Return the product of plain tensors; vectors are matrices of one row or column."""
    left = (1, *left) if len(left) == 1 else left
    right = (*right, 1) if len(right) == 1 else right
    batch = np.broadcast_shapes(left[:-2], right[:-2])
    (rows, inner), columns = left[-2:], right[-1]
    return MatMulSpec(
        batch,
        rows,
        inner,
        columns,
        _batch_strides(left, len(batch)),
        _batch_strides(right, len(batch)),
        (inner, 1),
        (columns, 1),
    )


def _batch_strides(shape: Shape, rank: int) -> Shape:
    """Distance of neighbours along each axis of the batch, 0 where the operand is repeated."""
    strides = [math.prod(shape[axis + 1 :]) if shape[axis] > 1 else 0 for axis in range(len(shape) - 2)]
    return (*(0 for _ in range(rank - len(strides))), *strides)


def dense(program: Program, node: Node, weights: Array, bias: Array | None) -> None:
    """Add a dense layer with weights [outputs, inputs]: a convolution of one pixel over a sequence."""
    shape = program.type(node.inputs[0]).shape
    outputs, inputs = weights.shape
    if (dtype := program.type(node.inputs[0]).dtype) != "float32":
        raise node.unsupported(f"element type {dtype}")
    if inputs != shape[-1]:
        raise node.unsupported(f"weights for {inputs} inputs, but '{node.inputs[0]}' has {shape[-1]}")
    full_bias = np.zeros(outputs, np.float32) if bias is None else np.broadcast_to(bias, (1, outputs)).reshape(-1)
    positions = math.prod(shape[:-1])
    if positions == 1:
        _dense_vector(program, node, weights, full_bias)
        return
    tensors = {"weights": weights.reshape(outputs, inputs, 1, 1), "bias": full_bias}
    program.add(node, ConvSpec(inputs, 1, positions, outputs), (node.inputs[0],), tensors, channels_last=True)


def _dense_vector(program: Program, node: Node, weights: Array, bias: Array) -> None:
    """Add a dense layer on one row: a convolution with a window as large as its image."""
    outputs, inputs = weights.shape
    source, image = _flattened(program, node.inputs[0], Geometry(inputs, 1, 1))
    size = (image.height, image.width)
    spec = ConvSpec(image.channels, *size, outputs, kernel=size)
    tensors = {"weights": weights.reshape(outputs, image.channels, *size), "bias": bias}
    program.add(node, spec, (source,), tensors, channels_last=size == (1, 1))


def _flattened(program: Program, name: str, vector: Geometry) -> tuple[str, Geometry]:
    """Return the image that a vector is a view of: a window as large as that needs no other layout than the image's.

    What products of matrices write is in the vector's order already, as an image of one channel is. A window over so
    few channels reads weights four times as slowly.
    """
    source, writer = name, program.writer(name)
    spec = writer.spec if writer else None
    if isinstance(spec, MatMulSpec) or (isinstance(spec, Attention) and not spec.images[-1]):
        return name, vector
    while source in program.views:
        source = program.views[source]
        image = geometry_of(program.type(source))
        if image and not image.is_vector and image.channels > 1 and source not in program.graph.inputs:
            return source, image
    return name, vector


def _scaled(value: Array, factor: np.float32) -> Array:
    """Return the product; the array itself, which may be large, if the factor is 1."""
    return value if factor == 1 else value * factor


@lowers("FusedAttention")
def attention(program: Program, node: Node) -> None:
    """Queries, keys, values and what is added to their products: one layer for all heads."""
    attributes = (node.attributes[name] for name in ("spec", "begins", "images"))
    program.add(node, Attention(*attributes), node.inputs)


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
