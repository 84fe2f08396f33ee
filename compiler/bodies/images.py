"""Operators on lines and volumes, made of those on images."""

from gangway.compiler.bodies.base import Body, defines


@defines("Conv", "MaxPool", "AveragePool")
def of_a_line(body: Body) -> None:
    """A line of pixels is an image of one row."""
    kind = body.type(0)
    if len(kind.shape) != 3 or any(body.node.outputs[1:]):
        raise body.node.unsupported("only of lines")
    attributes = dict(body.node.attributes)
    for name, one in (("kernel_shape", 1), ("strides", 1), ("dilations", 1)):
        if name in attributes:
            attributes[name] = [one, *attributes[name]]
    if "pads" in attributes:
        begin, end = attributes["pads"]
        attributes["pads"] = [0, begin, 0, end]
    x, *others = body.node.inputs
    image = body.reshape(x, [0, kind.shape[1], 1, kind.shape[2]])
    if body.node.operator == "Conv":
        outputs, inputs, length = body.type(1).shape
        others[0] = body.reshape(others[0], [outputs, inputs, 1, length])
    result = body.op(body.node.operator, image, *others, **attributes)
    _, channels, length = body.type_of(body.node.outputs[0]).shape
    body.reshape(result, [0, channels, length], body.node.outputs[0])


@defines("GlobalAveragePool", "GlobalMaxPool")
def of_everything(body: Body) -> None:
    """Means and maxima of lines and volumes."""
    axes = list(range(2, len(body.type(0).shape)))
    operator = "ReduceMean" if body.node.operator == "GlobalAveragePool" else "ReduceMax"
    result = body.reduce(operator, body.node.inputs[0], axes)
    body.op("Identity", result, output=body.node.outputs[0])
