"""Functions of each element that are chosen by its value, as simpler operators."""

import numpy as np
from onnx import helper

from gangway.compiler.frontend.decompositions import Body, defines

_FLOAT = 1  # ONNX's number


def _narrowed(body: Body, result: str) -> None:
    """Make the output of a result in float32."""
    dtype = np.dtype(body.type(0).dtype)
    body.op("Cast", result, to=helper.np_dtype_to_tensor_dtype(dtype), output=body.node.outputs[0])


def _widened(body: Body) -> str:
    """The input in float32. Raises UnsupportedModelError if that would round it."""
    if body.type(0).dtype == "float64":
        raise body.node.unsupported("float64 would be rounded")
    return body.op("Cast", body.node.inputs[0], to=_FLOAT)


@defines("ThresholdedRelu")
def thresholded_relu(body: Body) -> None:
    """What is above alpha, else 0."""
    (x,), dtype = body.node.inputs, body.type(0).dtype
    above = body.op("Greater", x, body.constant(body.attribute("alpha", 1.0), dtype))
    body.op("Where", above, x, body.constant(0, dtype), output=body.node.outputs[0])


@defines("Celu")
def celu(body: Body) -> None:
    """max(0, x) + min(0, alpha (exp(x / alpha) - 1)): scaled Elu is something else beyond what x / alpha can be."""
    (x,) = body.node.inputs
    alpha, one, zero = (body.constant(value, "float32") for value in (body.attribute("alpha", 1.0), 1, 0))
    grown = body.op("Sub", body.op("Exp", body.op("Div", x, alpha)), one)
    below = body.op("Min", body.op("Mul", grown, alpha), zero)
    body.op("Add", body.op("Max", x, zero), below, output=body.node.outputs[0])


@defines("Selu")
def selu(body: Body) -> None:
    """Scaled Elu."""
    alpha, gamma = body.attribute("alpha", 1.6732631921768188), body.attribute("gamma", 1.0507010221481323)
    scaled = body.op("Mul", body.op("Elu", _widened(body), alpha=alpha), body.constant(gamma, "float32"))
    _narrowed(body, scaled)


@defines("Softplus")
def softplus(body: Body) -> None:
    """Of halves, in float32: ONNX's definition overflows."""
    if body.type(0).dtype == "float32":
        raise body.node.unsupported("it has a kernel")
    _narrowed(body, body.op("Softplus", _widened(body)))


@defines("Shrink")
def shrink(body: Body) -> None:
    """What is beyond a limit on either side, moved towards 0, else 0; of integers, too, in float32."""
    bias, limit = (body.attribute(name, default) for name, default in (("bias", 0.0), ("lambd", 0.5)))
    x, zero = _widened(body), body.constant(0, "float32")
    moved = [body.op(operator, x, body.constant(bias, "float32")) for operator in ("Add", "Sub")]
    below = body.op("Less", x, body.constant(-limit, "float32"))
    above = body.op("Greater", x, body.constant(limit, "float32"))
    _narrowed(body, body.op("Where", below, moved[0], body.op("Where", above, moved[1], zero)))
