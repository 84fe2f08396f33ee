"""Operators that keep some numbers and replace the others."""

from gangway.compiler.bodies.base import Body, defines


@defines("ThresholdedRelu")
def thresholded_relu(body: Body) -> None:
    """What is above alpha, else 0."""
    (x,), dtype = body.node.inputs, body.type(0).dtype
    above = body.op("Greater", x, body.constant(body.attribute("alpha", 1.0), dtype))
    body.op("Where", above, x, body.constant(0, dtype), output=body.node.outputs[0])
