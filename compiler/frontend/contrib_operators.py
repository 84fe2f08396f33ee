"""Definitions of onnxruntime's own operators of floats (com.microsoft), which its optimisers and exporters write.

They are written so that `patterns.py` and `attention/rules.py` find in them what one kernel computes.
"""

import math
from collections.abc import Sequence
from typing import Any

from onnx import TensorProto

from gangway.compiler.frontend.decompositions import Body, defines

DOMAIN = "com.microsoft"
IN_ONNX_DOMAIN = {"LayerNormalization", "SimplifiedLayerNormalization"}  # onnxruntime has them there, too
Parameters = tuple[str, str]
"""Scale and shift; the latter may be empty."""
_GELU_OPSET, _LAYER_NORM_OPSET, _RMS_NORM_OPSET, _CLIP_INPUTS_OPSET, _TRILU_OPSET = 20, 17, 23, 11, 14


def optional(body: Body, index: int) -> str:
    """The name of an input; empty if it is left out."""
    return body.node.inputs[index] if index < len(body.node.inputs) else ""


def require_one_output(body: Body, *others: int) -> None:
    """Raise UnsupportedModelError if the node has more outputs than the first and these."""
    for index, name in enumerate(body.node.outputs):
        if name and index and index not in others:
            raise body.node.unsupported(f"its output {index}, '{name}', is not supported")


def number(body: Body, value: float, index: int = 0) -> str:
    """Add a constant number of the type of an input."""
    return body.constant(value, body.type(index).dtype)


_PARAMETERS = {
    "Clip": ("min", "max"),
    "Elu": ("alpha",),
    "HardSigmoid": ("alpha", "beta"),
    "LeakyRelu": ("alpha",),
    "Relu": (),
    "Sigmoid": (),
    "Tanh": (),
    "ThresholdedRelu": ("alpha",),
    "": (),
}


_SINGLE_PARAMETERS = tuple(f"activation_{name}" for name in ("alpha", "beta", "gamma"))


def _activate(body: Body, x: str) -> None:
    """Add the activation function that the node's attributes name, whose result is the node's."""
    operator, output = body.attribute("activation", b"").decode(), body.node.outputs[0]
    if operator not in _PARAMETERS:
        raise body.node.unsupported(f"activation {operator}")
    given = [body.attribute(name, None) for name in _SINGLE_PARAMETERS]
    values = body.attribute("activation_params", [value for value in given if value is not None])
    parameters = dict(zip(_PARAMETERS[operator], values, strict=False))
    if not operator:
        body.op("Identity", x, output=output)
    elif operator == "Clip" and body.graph.opset >= _CLIP_INPUTS_OPSET:
        body.op("Clip", x, number(body, parameters["min"]), number(body, parameters["max"]), output=output)
    else:
        body.op(operator, x, output=output, **parameters)


def _without_activation(body: Body) -> dict[str, Any]:
    """Return the other attributes of the node."""
    return {name: value for name, value in body.node.attributes.items() if not name.startswith("activation")}


@defines("FusedConv", domain=DOMAIN)
def fused_conv(body: Body) -> None:
    """A convolution, then perhaps a sum with Z, then an activation function."""
    x = body.op("Conv", *(name for name in body.node.inputs[:3] if name), **_without_activation(body))
    if other := optional(body, 3):
        x = body.op("Add", x, other)
    _activate(body, x)


@defines("FusedGemm", domain=DOMAIN)
def fused_gemm(body: Body) -> None:
    """Gemm, then an activation function."""
    inputs = [*body.node.inputs[:2], optional(body, 2) or number(body, 0)]
    _activate(body, body.op("Gemm", *inputs, **_without_activation(body)))


@defines("FusedMatMul", "TransposeMatMul", "FusedMatMulActivation", domain=DOMAIN)
def fused_matmul(body: Body) -> None:
    """A product of matrices that are transposed before, times alpha."""
    sides = []
    for index, side in enumerate("AB"):
        rank = len(body.type(index).shape)
        order = list(range(rank))
        if rank > 1 and body.attribute(f"transBatch{side}", 0):
            order = [*order[1:-1], 0, rank - 1]
        if rank > 1 and body.attribute(f"trans{side}", 0):
            order[-2:] = order[:-3:-1]
        name = body.node.inputs[index]
        sides.append(name if order == sorted(order) else body.op("Transpose", name, perm=order))
    product = body.op("MatMul", *sides)
    alpha = body.attribute("alpha", 1.0)
    if alpha != 1.0:
        product = body.op("Mul", product, number(body, alpha))
    _activate(body, product)


def gelu(body: Body, x: str, output: str = "") -> str:
    """x (1 + erf(x / sqrt 2)) / 2."""
    if body.graph.opset >= _GELU_OPSET:
        return body.op("Gelu", x, output=output)
    error = body.op("Erf", body.op("Mul", x, number(body, math.sqrt(0.5))))
    half = body.op("Mul", x, number(body, 0.5))
    return body.op("Mul", half, body.op("Add", error, number(body, 1)), output=output)


@defines("Gelu", domain=DOMAIN)
def gelu_(body: Body) -> None:
    """By the error function."""
    gelu(body, body.node.inputs[0], body.node.outputs[0])


@defines("BiasGelu", domain=DOMAIN)
def bias_gelu(body: Body) -> None:
    """After a sum."""
    gelu(body, body.op("Add", *body.node.inputs[:2]), body.node.outputs[0])


@defines("FastGelu", domain=DOMAIN)
def fast_gelu(body: Body) -> None:
    """By the hyperbolic tangent, after a sum if there is a bias."""
    x, output = body.node.inputs[0], body.node.outputs[0]
    if bias := optional(body, 1):
        x = body.op("Add", x, bias)
    if body.graph.opset >= _GELU_OPSET:
        body.op("Gelu", x, approximate="tanh", output=output)
        return
    cube = body.op("Mul", body.op("Mul", x, x), x)
    inner = body.op("Add", x, body.op("Mul", cube, number(body, 0.044715)))
    wave = body.op("Tanh", body.op("Mul", inner, number(body, math.sqrt(2 / math.pi))))
    half = body.op("Mul", x, number(body, 0.5))
    body.op("Mul", half, body.op("Add", wave, number(body, 1)), output=output)


@defines("QuickGelu", domain=DOMAIN)
def quick_gelu(body: Body) -> None:
    """x sigmoid(alpha x)."""
    (x,), alpha = body.node.inputs, body.attribute("alpha", 1.702)
    scaled = x if alpha == 1.0 else body.op("Mul", x, number(body, alpha))
    body.op("Mul", x, body.op("Sigmoid", scaled), output=body.node.outputs[0])


def normalise(body: Body, x: str, parameters: Parameters, output: str, rank: int, axis: int = -1) -> None:
    """Layer normalisation over the last axes, of numbers of the scale's type."""
    centred, (scale, shift) = "Simplified" not in body.node.operator, parameters
    epsilon = body.attribute("epsilon", 1e-5 if body.node.operator in IN_ONNX_DOMAIN else 1e-12)
    if body.graph.opset >= (_LAYER_NORM_OPSET if centred else _RMS_NORM_OPSET):
        operator = "LayerNormalization" if centred else "RMSNormalization"
        names = [scale, shift] if shift else [scale]
        body.op(operator, x, *names, axis=axis, epsilon=epsilon, output=output)
        return
    axes = list(range(axis % rank, rank))
    if centred:
        x = body.op("Sub", x, body.reduce("ReduceMean", x, axes))
    variance = body.reduce("ReduceMean", body.op("Mul", x, x), axes)
    deviation = body.op("Sqrt", body.op("Add", variance, body.constant(epsilon, body.type_of(scale).dtype)))
    scaled = body.op("Mul", body.op("Div", x, deviation), scale, output="" if shift else output)
    if shift:
        body.op("Add", scaled, shift, output=output)


@defines("LayerNormalization", "SimplifiedLayerNormalization", domain=DOMAIN)
def layer_normalization(body: Body) -> None:
    """Operators that onnxruntime has in ONNX's domain in operator sets without them."""
    require_one_output(body)
    x, scale = body.node.inputs[:2]
    axis, rank = body.attribute("axis", -1), len(body.type(0).shape)
    normalise(body, x, (scale, optional(body, 2)), body.node.outputs[0], rank, axis)


@defines("SkipLayerNormalization", "SkipSimplifiedLayerNormalization", domain=DOMAIN)
def skip_layer_normalization(body: Body) -> None:
    """Of a sum, which is an output, too."""
    require_one_output(body, 3)
    x, skip, scale = body.node.inputs[:3]
    shifts = body.node.operator == "SkipLayerNormalization"
    shift, bias = (optional(body, 3), optional(body, 4)) if shifts else ("", optional(body, 3))
    result, _, _, sum_name = [*body.node.outputs, "", "", ""][:4]
    if bias:  # which a dense layer then takes in
        products = {name for node in body.graph.nodes if node.operator == "MatMul" for name in node.outputs}
        x, skip = (skip, x) if skip in products and x not in products else (x, skip)
        x = body.op("Add", x, bias)
    total = body.op("Add", x, skip, output=sum_name)
    normalise(body, total, (scale, shift), result, len(body.type(0).shape))


@defines("EmbedLayerNormalization", domain=DOMAIN)
def embed_layer_normalization(body: Body) -> None:
    """The sum of embeddings of words, positions and segments, normalised; how many words a mask shows."""
    tables = [optional(body, index) for index in range(2, 7)]
    embed(body, tables, optional(body, 8), [*body.node.outputs, "", ""][2])


def embed(body: Body, tables: Sequence[str], positions: str, sum_name: str) -> None:
    """The same; `tables`: of words, positions and segments, then scale and shift. `sum_name`: output of the sum."""
    ids, segments = body.node.inputs[:2]
    words, places, kinds, scale, shift = tables
    total = body.op("Gather", words, ids)
    known = body.op("Gather", places, positions) if positions else body.slice(places, 0, 0, body.type(0).shape[1])
    total = body.op("Add", total, known, output="" if segments else sum_name)
    if segments:
        total = body.op("Add", total, body.op("Gather", kinds, segments), output=sum_name)
    normalise(body, total, (scale, shift), body.node.outputs[0], len(body.type(0).shape) + 1)
    mask, count = optional(body, 7), [*body.node.outputs, ""][1]
    if count:
        shown = body.op("Equal", mask, number(body, 1, 7)) if mask else ""
        counted = body.op("Cast", shown, to=TensorProto.INT32) if shown else body.op("Sub", ids, ids)
        body.op("Identity", body.reduce("ReduceSum", counted, [1], keepdims=0), output=count)


@defines("CDist", domain=DOMAIN)
def distances(body: Body) -> None:
    """Between each of some points and each of others, by products, as onnxruntime computes them."""
    points, others = body.node.inputs
    product = body.op("MatMul", points, body.op("Transpose", others, perm=[1, 0]))
    squares = [body.reduce("ReduceSum", body.op("Mul", name, name), [1]) for name in (points, others)]
    both = body.op("Add", squares[0], body.op("Transpose", squares[1], perm=[1, 0]))
    apart = body.op("Relu", body.op("Sub", both, body.op("Mul", product, number(body, 2))))
    root = body.attribute("metric", b"sqeuclidean") == b"euclidean"
    body.op("Sqrt" if root else "Identity", apart, output=body.node.outputs[0])


@defines("Trilu", domain=DOMAIN)
def triangle(body: Body) -> None:
    """An operator that ONNX has now, too."""
    if body.graph.opset < _TRILU_OPSET:
        raise body.node.unsupported(f"in opset {body.graph.opset}; at least {_TRILU_OPSET} is needed")
    body.op("Trilu", *body.node.inputs, output=body.node.outputs[0], upper=body.attribute("upper", 1))
