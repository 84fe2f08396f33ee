"""Normalisations and reductions that ONNX does not define by simpler operators."""

import math

import numpy as np

from gangway.compiler.bodies.base import Body, defines


@defines("InstanceNormalization")
def instance_normalization(body: Body) -> None:
    """Over all pixels of each channel."""
    x, scale, shift = body.node.inputs
    rank, dtype = len(body.type(0).shape), body.type(0).dtype
    axes = list(range(2, rank))
    mean = body.reduce("ReduceMean", x, axes)
    centred = body.op("Sub", x, mean)
    variance = body.reduce("ReduceMean", body.op("Mul", centred, centred), axes)
    epsilon = body.constant(np.array(body.attribute("epsilon", 1e-5), dtype))
    deviation = body.op("Sqrt", body.op("Add", variance, epsilon))
    columns = [body.reshape(name, [-1, *(1 for _ in axes)]) for name in (scale, shift)]
    scaled = body.op("Mul", body.op("Div", centred, deviation), columns[0])
    body.op("Add", scaled, columns[1], output=body.node.outputs[0])


@defines("BatchNormalization")
def batch_normalization(body: Body) -> None:
    """With statistics that are computed at run time, or of tensors that are no images."""
    if body.attribute("training_mode", 0) or any(body.node.outputs[1:]):
        raise body.node.unsupported("training mode")
    x, *others = body.node.inputs
    pixels = [1] * (len(body.type(0).shape) - 2)
    scale, shift, mean, variance = (body.reshape(name, [-1, *pixels]) if pixels else name for name in others)
    epsilon = body.constant(np.array(body.attribute("epsilon", 1e-5), body.type(4).dtype))
    deviation = body.op("Sqrt", body.op("Add", variance, epsilon))
    factor = body.op("Div", scale, deviation)
    body.op("Add", body.op("Mul", body.op("Sub", x, mean), factor), shift, output=body.node.outputs[0])


@defines("LpNormalization")
def lp_normalization(body: Body) -> None:
    """Divided by a norm, or zero where that is."""
    kind = body.type(0)
    axis, power = body.attribute("axis", -1) % len(kind.shape), body.attribute("p", 2)
    norm = body.reduce(f"ReduceL{power}", body.node.inputs[0], [axis])
    zero = body.constant(np.zeros(1, kind.dtype))
    quotient = body.op("Div", body.node.inputs[0], norm)
    body.op("Where", body.op("Equal", norm, zero), zero, quotient, output=body.node.outputs[0])


@defines("ReduceLogSumExp")
def log_sum_exp(body: Body) -> None:
    """Less the maximum, so that nothing overflows."""
    kind, given = body.type(0), body.value(1)
    stated = body.attribute("axes", ()) if given is None else given.reshape(-1).tolist()
    axes = list(stated)
    if not axes and body.attribute("noop_with_empty_axes", 0):
        body.op("Identity", body.node.inputs[0], output=body.node.outputs[0])
        return
    axes = axes or list(range(len(kind.shape)))
    most = body.reduce("ReduceMax", body.node.inputs[0], axes)
    shifted = body.op("Exp", body.op("Sub", body.node.inputs[0], most))
    logarithm = body.op("Log", body.reduce("ReduceSum", shifted, axes))
    total = body.op("Add", logarithm, most)
    if body.attribute("keepdims", 1):
        body.op("Identity", total, output=body.node.outputs[0])
    else:
        summed = body.reduce("ReduceSum", total, axes, keepdims=0)
        body.op("Identity", summed, output=body.node.outputs[0])


@defines("LRN")
def local_response_normalization(body: Body) -> None:
    """Squares are summed up over neighbouring channels by a convolution of one pixel."""
    kind = body.type(0)
    if len(kind.shape) != 4 or kind.dtype != "float32":
        raise body.node.unsupported("only of images of float32")
    channels, size = kind.shape[1], body.attribute("size", 1)
    into, source = np.indices((channels, channels))
    before, after = (size - 1) // 2, -(-(size - 1) // 2)
    window = (source >= into - before) & (source <= into + after)
    alpha, beta, bias = (body.attribute(*pair) for pair in (("alpha", 1e-4), ("beta", 0.75), ("bias", 1.0)))
    weights = (window * (alpha / size)).astype(np.float32).reshape(channels, channels, 1, 1)
    squares = body.op("Mul", body.node.inputs[0], body.node.inputs[0])
    offset = body.constant(np.full(channels, bias, np.float32))
    sums = body.op("Conv", squares, body.constant(weights), offset)
    scale = body.op("Pow", sums, body.constant(np.array(beta, np.float32)))
    body.op("Div", body.node.inputs[0], scale, output=body.node.outputs[0])


@defines("GlobalLpPool")
def global_lp_pool(body: Body) -> None:
    """A norm of all pixels."""
    kind, power = body.type(0), body.attribute("p", 2)
    axes = list(range(2, len(kind.shape)))
    if power in (1, 2):
        norm = body.reduce(f"ReduceL{power}", body.node.inputs[0], axes)
        body.op("Identity", norm, output=body.node.outputs[0])
        return
    sizes = body.op("Pow", body.op("Abs", body.node.inputs[0]), body.constant(np.array(power, kind.dtype)))
    total = body.reduce("ReduceSum", sizes, axes)
    body.op("Pow", total, body.constant(np.array(1 / power, kind.dtype)), output=body.node.outputs[0])


@defines("LpPool")
def lp_pool(body: Body) -> None:
    """A mean of powers, times how many numbers a window has."""
    kind, power = body.type(0), body.attribute("p", 2)
    window = body.attribute("kernel_shape", ())
    if body.attribute("dilations", None) or body.attribute("ceil_mode", 0):
        raise body.node.unsupported("dilations or ceil_mode")
    names = ("auto_pad", "pads", "strides", "kernel_shape")
    given = {name: body.node.attributes[name] for name in names if name in body.node.attributes}
    sizes = body.op("Pow", body.op("Abs", body.node.inputs[0]), body.constant(np.array(power, kind.dtype)))
    means = body.op("AveragePool", sizes, count_include_pad=1, **given)
    total = body.op("Mul", means, body.constant(np.array(math.prod(window), kind.dtype)))
    body.op("Pow", total, body.constant(np.array(1 / power, kind.dtype)), output=body.node.outputs[0])
