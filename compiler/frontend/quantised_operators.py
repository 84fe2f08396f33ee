"""Definitions of onnxruntime's operators of 8-bit numbers (com.microsoft), which its quantiser writes.

They dequantise, compute float32 and quantise. Float32 holds the integers of a product exactly up to 2^24. Between two
of them `patterns.py` finds a pair of QuantizeLinear and DequantizeLinear, and makes it an activation function.
"""

import numpy as np
from onnx import TensorProto, helper

from gangway.compiler.frontend.contrib_operators import DOMAIN, embed, optional
from gangway.compiler.frontend.decompositions import Body, defines
from gangway.compiler.frontend.graph import Node

_PAIR_OPSET, _DYNAMIC_OPSET, _CLIP_OPSET, _AXIS_OPSET = 10, 11, 11, 13
_MOST_ARITHMETIC_BYTES = 2  # of an integer that float32 holds exactly
_SOFTMAX_SCALE = 1 / 256  # what quantisers give it
_STEPS = 255.0  # between the ends of uint8


def _single(body: Body, index: int) -> str:
    """A scale or zero point of one number as a scalar; others as they are."""
    name = optional(body, index)
    value = body.graph.constants.get(name) if name else None
    return body.constant(value.reshape(())) if value is not None and value.size == 1 else name


def _dequantised(body: Body, index: int, scale: int, zero_point: int) -> str:
    """An input as float32, by the inputs with its scale and zero point, each of one number."""
    if body.graph.opset < _PAIR_OPSET:
        raise body.node.unsupported(f"in opset {body.graph.opset}; at least {_PAIR_OPSET} is needed")
    if body.type(scale).shape not in ((), (1,)):
        raise body.node.unsupported("a scale for each channel")
    names = [_single(body, scale), _single(body, zero_point)]
    return body.op("DequantizeLinear", body.node.inputs[index], *filter(None, names))


def _quantise(body: Body, x: str, scale: int, zero_point: int, output: str = "") -> None:
    """The output, by the inputs with its scale and zero point."""
    names = [_single(body, scale), _single(body, zero_point)]
    body.op("QuantizeLinear", x, *filter(None, names), output=output or body.node.outputs[0])


@defines("QuantizeLinear", "DequantizeLinear", domain=DOMAIN)
def either(body: Body) -> None:
    """ONNX's own of 8 bits, and of a bias in int32; in 16 bits, which came later, it is arithmetic.

    A quantiser writes these if asked to.
    """
    x, scale, output = *body.node.inputs[:2], body.node.outputs[0]
    zero, quantises = optional(body, 2), body.node.operator == "QuantizeLinear"
    integer = np.dtype(body.type_of(zero).dtype if zero else "uint8" if quantises else body.type(0).dtype)
    axis, rank = body.attribute("axis", 1), len(body.type(0).shape)
    is_bias = integer == np.int32 and not quantises
    if ((integer.kind in "iu" and integer.itemsize == 1) or is_bias) and body.graph.opset >= _PAIR_OPSET:
        along = {"axis": axis} if body.type(1).shape and body.graph.opset >= _AXIS_OPSET else {}
        body.op(body.node.operator, *filter(None, body.node.inputs), output=output, **along)
        return
    if integer.kind not in "iu" or integer.itemsize > _MOST_ARITHMETIC_BYTES or body.graph.opset < _CLIP_OPSET:
        raise body.node.unsupported(f"{integer.name} in opset {body.graph.opset}")
    wide = [1] * rank
    if body.type(1).shape not in ((), (1,)):
        wide[axis % rank] = -1
    scale = body.reshape(scale, wide)
    shift = body.reshape(body.op("Cast", zero, to=TensorProto.FLOAT), wide) if zero else ""
    if not quantises:
        value = body.op("Cast", x, to=TensorProto.FLOAT)
        body.op("Mul", body.op("Sub", value, shift) if shift else value, scale, output=output)
        return
    value = body.op("Round", body.op("Div", x, scale))
    value = body.op("Add", value, shift) if shift else value
    limits = [body.constant(limit, "float32") for limit in (np.iinfo(integer).min, np.iinfo(integer).max)]
    element = helper.np_dtype_to_tensor_dtype(integer)
    body.op("Cast", body.op("Clip", value, *limits), to=element, output=output)


@defines("QEmbedLayerNormalization", domain=DOMAIN)
def quantised_embeddings(body: Body) -> None:
    """All tables have 8 bits: they become float32."""
    tables = [
        _dequantised(body, index, index + 6, index + 11) if optional(body, index) else "" for index in range(2, 7)
    ]
    embed(body, tables, "", "")


@defines("QLinearAdd", "QLinearMul", domain=DOMAIN)
def arithmetic(body: Body) -> None:
    """A sum or product."""
    operands = (_dequantised(body, 0, 1, 2), _dequantised(body, 3, 4, 5))
    _quantise(body, body.op(body.node.operator.removeprefix("QLinear"), *operands), 6, 7)


@defines("QLinearSigmoid", "QLinearLeakyRelu", domain=DOMAIN)
def function(body: Body) -> None:
    """A function of one number."""
    x = _dequantised(body, 0, 1, 2)
    if body.node.operator == "QLinearSigmoid":
        value = body.op("Sigmoid", x)
    else:
        value = body.op("LeakyRelu", x, alpha=body.attribute("alpha", 0.01))
    _quantise(body, value, 3, 4)


@defines("QLinearSoftmax", domain=DOMAIN)
def softmax(body: Body) -> None:
    """Over the last axis, which means the same in all operator sets; onnxruntime rounds other scales in its own way."""
    rank, scale = len(body.type(0).shape), body.value(3)
    if body.attribute("axis", -1) % rank != rank - 1 or scale is None or (scale != _SOFTMAX_SCALE).any():
        raise body.node.unsupported(f"only the last axis and an output's scale of {_SOFTMAX_SCALE} are possible")
    _quantise(body, body.op("Softmax", _dequantised(body, 0, 1, 2), axis=rank - 1), 3, 4)


@defines("QLinearWhere", domain=DOMAIN)
def where(body: Body) -> None:
    """One of two operands."""
    operands = (_dequantised(body, 1, 2, 3), _dequantised(body, 4, 5, 6))
    _quantise(body, body.op("Where", body.node.inputs[0], *operands), 7, 8)


@defines("QLinearConcat", domain=DOMAIN)
def concat(body: Body) -> None:
    """Operands beside each other; each comes with its scale and zero point."""
    parts = [_dequantised(body, index, index + 1, index + 2) for index in range(2, len(body.node.inputs), 3)]
    _quantise(body, body.op("Concat", *parts, axis=body.attribute("axis", 0)), 0, 1)


@defines("QLinearReduceMean", domain=DOMAIN)
def reduce_mean(body: Body) -> None:
    """Means over some axes, or all."""
    axes = list(body.attribute("axes", ())) or list(range(len(body.type(0).shape)))
    mean = body.reduce("ReduceMean", _dequantised(body, 0, 1, 2), axes, body.attribute("keepdims", 1))
    _quantise(body, mean, 3, 4)


@defines("QLinearAveragePool", "QLinearGlobalAveragePool", domain=DOMAIN)
def average_pool(body: Body) -> None:
    """Means over windows, or over all pixels; channels may be the last axis."""
    x, rank = _dequantised(body, 0, 1, 2), len(body.type(0).shape)
    last = body.attribute("channels_last", 0)
    kept = {name: value for name, value in body.node.attributes.items() if name != "channels_last"}
    x = body.op("Transpose", x, perm=[0, rank - 1, *range(1, rank - 1)]) if last else x
    pooled = body.op(body.node.operator.removeprefix("QLinear"), x, **kept)
    pooled = body.op("Transpose", pooled, perm=[0, *range(2, rank), 1]) if last else pooled
    _quantise(body, pooled, 3, 4)


@defines("NhwcMaxPool", domain=DOMAIN)
def max_pool(body: Body) -> None:
    """Channels are the last axis."""
    kind, rank = body.type(0), len(body.type(0).shape)
    images = body.op(
        "Transpose", body.op("Cast", body.node.inputs[0], to=TensorProto.FLOAT), perm=[0, rank - 1, *range(1, rank - 1)]
    )
    pooled = body.op("MaxPool", images, **body.node.attributes)
    to = TensorProto.UINT8 if kind.dtype == "uint8" else TensorProto.INT8
    body.op("Cast", body.op("Transpose", pooled, perm=[0, *range(2, rank), 1]), to=to, output=body.node.outputs[0])


def _whole(body: Body, index: int, zero_point: int) -> str:
    """An input less its zero point, integers as float32."""
    x = body.op("Cast", body.node.inputs[index], to=TensorProto.FLOAT)
    if not (name := _single(body, zero_point)):
        return x
    return body.op("Sub", x, body.op("Cast", name, to=TensorProto.FLOAT))


@defines("MatMulIntegerToFloat", domain=DOMAIN)
def matmul_integer_to_float(body: Body) -> None:
    """A product of integers, times both scales, plus a bias."""
    x, _, scale, _, zero_point, *_ = [*body.node.inputs, ""]
    source = body.graph.producers().get(scale)
    if source and source.operator == "DynamicQuantizeLinear":
        _integer_product(body, (x, scale, zero_point), 3, 5, optional(body, 6))
        return
    product = body.op("MatMul", _whole(body, 0, 4), _whole(body, 1, 5))
    _scaled(body, product, body.op("Mul", _single(body, 2), _single(body, 3)), optional(body, 6))


def _integer_product(body: Body, x: tuple[str, str, str], scale: int, zero_point: int, bias: str) -> None:
    """The product of integers of x, with its scale and zero point, and input 1: see `dynamic_quantisation.py`."""
    zeros = filter(None, (x[2], _single(body, zero_point)))
    number = body.op("Cast", body.op("MatMulInteger", x[0], body.node.inputs[1], *zeros), to=TensorProto.FLOAT)
    _scaled(body, number, body.op("Mul", x[1], _single(body, scale)), bias)


def _scaled(body: Body, product: str, scale: str, bias: str) -> None:
    output = body.node.outputs[0]
    scaled = body.op("Mul", product, scale, output="" if bias else output)
    if bias:
        body.op("Add", scaled, bias, output=output)


@defines("DynamicQuantizeMatMul", domain=DOMAIN)
def dynamic_quantise_matmul(body: Body) -> None:
    """Its first operand is quantised to uint8 by its least and largest number, of all rows together."""
    x, rank = body.node.inputs[0], len(body.type(0).shape)
    if body.graph.opset >= _DYNAMIC_OPSET and body.node.inputs[1] in body.graph.constants:
        found = tuple(f"{body.node.outputs[0]}/{name}" for name in ("integers", "scale", "zero"))
        body.nodes.append(Node(f"{body.node.name}/integers", "DynamicQuantizeLinear", (x,), found))
        _integer_product(body, (found[0], found[1], found[2]), 2, 3, optional(body, 4))
        return
    zero, one, steps = (body.constant(value, "float32") for value in (0, 1, _STEPS))
    least = body.op("Min", body.reduce("ReduceMin", x, list(range(rank)), keepdims=0), zero)
    largest = body.op("Max", body.reduce("ReduceMax", x, list(range(rank)), keepdims=0), zero)
    width = body.op("Sub", largest, least)
    scale = body.op("Where", body.op("Equal", width, zero), one, body.op("Div", width, steps))
    zero_point = body.op("Round", body.op("Div", body.op("Neg", least), scale))
    shifted = body.op("Add", body.op("Round", body.op("Div", x, scale)), zero_point)
    quantised = body.op("Min", body.op("Max", shifted, zero), steps)
    product = body.op("MatMul", body.op("Sub", quantised, zero_point), _whole(body, 1, 3))
    _scaled(body, product, body.op("Mul", scale, _single(body, 2)), optional(body, 4))


@defines("QGemm", domain=DOMAIN)
def gemm(body: Body) -> None:
    """Gemm of integers, times alpha and both scales; quantised if there is a scale for that."""
    sides = [_whole(body, 0, 2), _whole(body, 3, 5)]
    for index, attribute in enumerate(("transA", "transB")):
        if body.attribute(attribute, 0):
            sides[index] = body.op("Transpose", sides[index], perm=[1, 0])
    product = body.op("MatMul", *sides)
    if bias := optional(body, 6):
        product = body.op("Add", product, body.op("Cast", bias, to=TensorProto.FLOAT))
    scale = body.op("Mul", _single(body, 1), _single(body, 4))
    alpha = body.attribute("alpha", 1.0)
    scale = scale if alpha == 1.0 else body.op("Mul", scale, body.constant(np.float32(alpha)))
    if optional(body, 7):
        _quantise(body, body.op("Mul", product, scale), 7, 8)
    else:
        body.op("Mul", product, scale, output=body.node.outputs[0])


@defines("DynamicQuantizeLSTM", domain=DOMAIN)
def lstm(body: Body) -> None:
    """LSTM with weights that are dequantised; onnxruntime rounds inputs and states to 8 bits, too, step by step."""
    weights = [_dequantised_gates(body, index) for index in (1, 2)]
    others = [optional(body, index) for index in range(3, 8)]
    inputs = (body.node.inputs[0], *weights, *others)
    body.nodes.append(Node(f"{body.node.name}/LSTM", "LSTM", inputs, body.node.outputs, body.node.attributes))


def _dequantised_gates(body: Body, index: int) -> str:
    """Input 1 or 2, [directions][inputs][gates x hidden] integers, as LSTM wants them; the last axis comes second."""
    given, scales, zeros = (body.value(place) for place in (index, 6 + 2 * index, 7 + 2 * index))
    if given is None or scales is None:
        raise body.node.unsupported("weights or scales are missing")
    integers = np.ascontiguousarray(given.transpose(0, 2, 1))
    outputs = integers.shape[:2]
    zeros = np.zeros(1, integers.dtype) if zeros is None else zeros
    spread = [np.broadcast_to(side.reshape(len(side), -1), outputs).reshape(-1) for side in (scales, zeros)]
    if body.graph.opset < _AXIS_OPSET:
        real = (integers.astype(np.float32) - spread[1].reshape(*outputs, 1)) * spread[0].reshape(*outputs, 1)
        return body.constant(real, "float32")
    names = [body.constant(value) for value in (integers.reshape(-1, integers.shape[2]), *spread)]
    return body.reshape(body.op("DequantizeLinear", *names, axis=0), integers.shape)
