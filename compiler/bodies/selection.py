"""Operators that keep some numbers and replace the others."""

import numpy as np
from gangway.compiler.bodies.base import Body, defines
from onnx import helper


@defines("Hardmax")
def hardmax(body: Body) -> None:
    """1 at the first of the largest numbers along an axis, 0 elsewhere."""
    kind = body.type(0)
    rank, (x,) = len(kind.shape), body.node.inputs
    axis = body.attribute("axis", -1 if body.graph.opset >= 13 else 1) % rank
    if body.graph.opset < 13 and np.prod(kind.shape[axis + 1 :]) != 1:
        raise body.node.unsupported("several axes taken as one")
    places = np.arange(kind.shape[axis], dtype=np.int64).reshape(-1, *(1 for _ in kind.shape[axis + 1 :]))
    largest = body.op("ArgMax", x, axis=axis, keepdims=1)
    chosen = body.op("Equal", largest, body.constant(places))
    element = helper.np_dtype_to_tensor_dtype(np.dtype(kind.dtype))
    body.op("Cast", chosen, to=element, output=body.node.outputs[0])


@defines("ThresholdedRelu")
def thresholded_relu(body: Body) -> None:
    """What is above alpha, else 0."""
    (x,), dtype = body.node.inputs, body.type(0).dtype
    above = body.op("Greater", x, body.constant(body.attribute("alpha", 1.0), dtype))
    body.op("Where", above, x, body.constant(0, dtype), output=body.node.outputs[0])
