"""Elementwise operators: arithmetic, activation functions, comparisons, casts and quantisation.

What can be fused into a convolution, or be applied to blocked images and sequences, becomes an `ElementwiseSpec`, whose
memory is chosen later; activation functions are such layers, which `place/fusion.py` lets the layer before them apply.
Everything else becomes a program over plain tensors of any type and shape, broadcast as numpy does it. Quantised
tensors are scaled and rounded to integers, and back; scales of several numbers must be constant.
"""

import math
from collections.abc import Callable, Sequence
from functools import reduce
from typing import cast

import numpy as np

from gangway.compiler.frontend.graph import Node, TensorType
from gangway.compiler.kernels.plain_specs import ELEMENT_TYPES, FLOATS, MOST_OPERANDS
from gangway.compiler.kernels.specs import NONE, RELU, Activation, ActivationName, ElementwiseOperator, ElementwiseSpec
from gangway.compiler.lower.layers import Expression, Program, Value, geometry_of, lowers, operand_kinds

Recipe = Callable[[Expression, Node, list[Value], str], Value]
"""(what grows, the node, its inputs, type of the output) -> the output."""
_SAME_TYPE = {
    "Add": "add",
    "Sub": "sub",
    "Mul": "mul",
    "Div": "div",
    "Neg": "neg",
    "Abs": "abs",
    "Sign": "sign",
    "Floor": "floor",
    "Ceil": "ceil",
    "Round": "round",
    "And": "and",
    "Or": "or",
    "Xor": "xor",
    "Not": "not",
    "BitwiseAnd": "bit_and",
    "BitwiseOr": "bit_or",
    "BitwiseXor": "bit_xor",
    "BitwiseNot": "bit_not",
    "Where": "where",
}
_FLOAT_ONLY = {
    "Sqrt": "sqrt",
    "Exp": "exp",
    "Log": "log",
    "Sin": "sin",
    "Cos": "cos",
    "Tan": "tan",
    "Asin": "asin",
    "Acos": "acos",
    "Atan": "atan",
    "Sinh": "sinh",
    "Cosh": "cosh",
    "Asinh": "asinh",
    "Acosh": "acosh",
    "Atanh": "atanh",
    "Tanh": "tanh",
    "Sigmoid": "sigmoid",
    "Erf": "erf",
}
_COMPARISONS = {
    "Equal": "equal",
    "Less": "less",
    "LessOrEqual": "less_or_equal",
    "Greater": "greater",
    "GreaterOrEqual": "greater_or_equal",
    "IsNaN": "is_nan",
}
_ACTIVATIONS: dict[str, tuple[ActivationName, dict[str, float]]] = {  # and attributes that are its alpha and beta
    "Elu": ("elu", {"alpha": 1.0}),
    "Erf": ("erf", {}),
    "HardSigmoid": ("hard_sigmoid", {"alpha": 0.2, "beta": 0.5}),
    "HardSwish": ("hard_swish", {"alpha": 1 / 6, "beta": 0.5}),  # `patterns` may state other factors than ONNX's
    "LeakyRelu": ("leaky_relu", {"alpha": 0.01}),
    "Mish": ("mish", {}),
    "Sigmoid": ("sigmoid", {}),
    "Softplus": ("softplus", {}),
    "Swish": ("swish", {}),  # by `patterns`, or since opset 24
    "Tanh": ("tanh", {}),
}
_VARIADIC = {"Min": "min", "Max": "max", "Sum": "add"}


def elementwise_spec(operator: ElementwiseOperator, kind: TensorType, activation: Activation = NONE) -> ElementwiseSpec:
    """Return the spec over float32 tensors of this shape."""
    return ElementwiseSpec(operator, "float32", math.prod(kind.shape), activation)


@lowers("Add", "Sub", "Mul", "Div")
def binary(program: Program, node: Node) -> None:
    """Two operands; images are divided by constants only, so that nothing is divided by surplus channels."""
    divisor = program.graph.constants.get(node.inputs[1])
    if node.operator != "Div" or (divisor is not None and np.all(divisor)):
        _binary(program, node, cast(ElementwiseOperator, node.operator.lower()))
    else:
        lower_pointwise(program, node, PLAIN[node.operator])


@lowers("Sum")
def total(program: Program, node: Node) -> None:
    """Of two operands it is an Add."""
    if len(node.inputs) == 2:
        _binary(program, node, "add")
    else:
        lower_pointwise(program, node, variadic)


def _binary(program: Program, node: Node, operator: ElementwiseOperator) -> None:
    kind = program.type(node.outputs[0])
    if kind.dtype != "float32" or not all(_fits(program, name, kind) for name in node.inputs):
        lower_pointwise(program, node, PLAIN[node.operator])
        return
    inputs = tuple(_operand(program, node, name) for name in node.inputs)
    program.add(node, elementwise_spec(operator, kind), inputs)


def _fits(program: Program, name: str, kind: TensorType) -> bool:
    """Whether an operand has the result's shape, is constant, or has one number per channel of an image."""
    if name in program.graph.constants:
        return True
    found = program.type(name)
    return found == kind or (geometry_of(kind) is not None and found.shape == _per_channel(kind))


def _per_channel(kind: TensorType) -> tuple[int, ...]:
    return (*kind.shape[:2], *(1 for _ in kind.shape[2:]))


def _operand(program: Program, node: Node, name: str) -> str:
    """Return the name of an operand. A constant may have to be repeated, which is up to the layout."""
    if name not in program.graph.constants:
        return name
    spread = f"{node.outputs[0]}:{name}"
    program.constants[spread] = program.graph.constants[name]
    return spread


@lowers("Relu", "Gelu", *_ACTIVATIONS)
def activation(program: Program, node: Node) -> None:
    """Functions of one number; those without parameters have no other alpha than 1."""
    if node.operator == "Relu":
        _add(program, node, RELU)
        return
    if node.operator == "Gelu":
        _add(program, node, Activation("gelu_tanh" if node.attributes.get("approximate") == b"tanh" else "gelu"))
        return
    name, defaults = _ACTIVATIONS[node.operator]
    if not defaults and node.attributes.get("alpha", 1.0) != 1.0:
        raise node.unsupported("alpha must be 1")
    _add(program, node, Activation(name, *(node.attributes.get(key, value) for key, value in defaults.items())))


@lowers("Clip")
def clip(program: Program, node: Node) -> None:
    """Limits are constant inputs, before opset 11 attributes; numbers as large as the largest float limit nothing."""
    if program.type(node.outputs[0]).dtype != "float32" or any(
        name and name not in program.graph.constants for name in node.inputs[1:]
    ):
        lower_pointwise(program, node, PLAIN["Clip"])
        return
    limits = []
    for index, name, default in ((1, "min", -math.inf), (2, "max", math.inf)):
        value = program.optional(node, index)
        limit = node.attributes.get(name, default) if value is None else float(value)
        limit = default if math.isnan(limit) else limit  # to onnxruntime it is none
        limits.append(limit if abs(limit) < 3.4e38 else math.copysign(math.inf, limit))
    _add(program, node, Activation("clip", *limits))


@lowers("Min", "Max")
def extreme(program: Program, node: Node) -> None:
    """Of a tensor and a constant number it is an activation function, with one limit."""
    kind, constants = program.type(node.outputs[0]), program.graph.constants
    limits = [constants[name] for name in node.inputs if name in constants and constants[name].size == 1]
    others = [name for name in node.inputs if name not in constants]
    if len(node.inputs) == 2 and limits and others and kind.dtype == "float32" and program.type(others[0]) == kind:
        limit = float(limits[0].reshape(()))
        if not math.isnan(limit):
            activation = Activation("clip", *((limit, math.inf) if node.operator == "Max" else (-math.inf, limit)))
            program.add(node, elementwise_spec("copy", kind, activation), (others[0],))
            return
    lower_pointwise(program, node, variadic)


def _add(program: Program, node: Node, activation: Activation) -> None:
    """Add the layer. Raises UnsupportedModelError for other types than float32 where ONNX defines it otherwise, too."""
    kind = program.type(node.outputs[0])
    if kind.dtype == "float32":
        program.add(node, elementwise_spec("copy", kind, activation), (node.inputs[0],))
    elif node.operator in PLAIN:
        lower_pointwise(program, node, PLAIN[node.operator])
    else:
        raise node.unsupported(f"element type {kind.dtype}")


@lowers("FakeQuantise")
def fake_quantise(program: Program, node: Node) -> None:
    """A pair of both, found by `patterns`: an activation function."""
    parameters = node.attributes["scale"], node.attributes["zero_point"]
    signed = node.attributes["dtype"] == "int8"
    activation = Activation("quantise_int8" if signed else "quantise_uint8", *parameters)
    program.add(node, elementwise_spec("copy", program.type(node.outputs[0]), activation), (node.inputs[0],))


@lowers("QuantizeLinear")
def quantize_linear(program: Program, node: Node) -> None:
    """round(x / scale) + zero point, halves to even, within the limits of the integer type."""
    _check_scales(program, node)
    lower_pointwise(program, node, _quantise)


@lowers("DequantizeLinear")
def dequantize_linear(program: Program, node: Node) -> None:
    """(x - zero point) scale."""
    _check_scales(program, node)
    lower_pointwise(program, node, _dequantise)


def _check_scales(program: Program, node: Node) -> None:
    for name in filter(None, node.inputs[1:]):
        if name not in program.graph.constants and math.prod(program.type(name).shape) > 1:
            raise node.unsupported(f"'{name}' has several numbers and is no constant")


def _quantise(expression: Expression, node: Node, values: list[Value], dtype: str) -> Value:
    if np.dtype(dtype).kind not in "iu":
        raise node.unsupported(f"its output is {dtype}, no integer type")
    x, scale, *zero_point = (expression.cast(value, "float32") for value in values)
    y = expression.apply("round", expression.apply("div", x, scale))
    if zero_point:
        y = expression.apply("add", y, zero_point[0])
    limits = np.iinfo(dtype)
    lowest = expression.constant(limits.min, "float32")
    inside = expression.apply("greater", y, lowest, dtype="bool")
    y = expression.apply("where", inside, y, lowest)  # also of NaN
    y = expression.apply("min", y, expression.constant(limits.max, "float32"))
    return expression.cast(y, dtype)


def _dequantise(expression: Expression, node: Node, values: list[Value], dtype: str) -> Value:
    x, scale, *zero_point = values
    if np.dtype(x.dtype).kind not in "iu":
        raise node.unsupported(f"its input is {x.dtype}, no integer type")
    wide = expression.cast(x, "int32")
    if zero_point:
        wide = expression.apply("sub", wide, expression.cast(zero_point[0], "int32"))
    y = expression.apply("mul", expression.cast(wide, "float32"), expression.cast(scale, "float32"))
    return expression.cast(y, dtype)


def lower_pointwise(program: Program, node: Node, recipe: Recipe, inputs: Sequence[str] | None = None) -> None:
    """Add the layer that computes the node's output as the recipe says, of all inputs or of these.

    Raises UnsupportedModelError.
    """
    result = program.type(node.outputs[0])
    constants = program.graph.constants
    given = [name for name in (node.inputs if inputs is None else inputs) if name]
    for name in given:
        if name not in constants:
            program.type(name)  # known
    kinds = operand_kinds(given, program.graph.types, constants)
    for name, kind in zip((*given, node.outputs[0]), (*kinds, result), strict=True):
        if kind.dtype not in ELEMENT_TYPES:
            raise node.unsupported(f"'{name}' has the element type {kind.dtype}")
    expression = Expression(result.shape)
    values: list[Value | None] = []
    for name, kind in zip(given, kinds, strict=True):
        if name in constants and math.prod(kind.shape) == 1:
            values.append(None)  # a part of the program, which begins after the operands
            continue
        if name in constants:
            program.constants[f"{node.outputs[0]}:{name}"] = constants[name]
            name = f"{node.outputs[0]}:{name}"  # noqa: PLW2901
        values.append(expression.operand(name, kind))
    if len(expression.operands) > MOST_OPERANDS:
        raise node.unsupported(f"{len(expression.operands)} operands; {MOST_OPERANDS} are possible")
    filled = [
        expression.constant(constants[name], kind.dtype) if value is None else value
        for name, kind, value in zip(given, kinds, values, strict=True)
    ]
    found = recipe(expression, node, filled, result.dtype)
    if found.dtype != result.dtype:
        raise node.unsupported(f"gives {found.dtype} instead of {result.dtype}")
    if found.index != len(expression.operands) + len(expression.program) - 1 or not expression.program:
        expression.apply("cast", found)
    program.add(node, expression.spec(), tuple(expression.names))


def _pointwise(*operators: str) -> Callable[[Recipe], Recipe]:
    """Register a recipe as the lowering of these operators."""

    def register(recipe: Recipe) -> Recipe:
        def lowering(program: Program, node: Node) -> None:
            lower_pointwise(program, node, recipe)

        lowers(*operators)(lowering)
        return recipe

    return register


@_pointwise(*(name for name in _SAME_TYPE if name not in ("Add", "Sub", "Mul", "Div")))
def same_type(expression: Expression, node: Node, values: list[Value], dtype: str) -> Value:
    """One instruction whose result has the type of its operands."""
    return expression.apply(_SAME_TYPE[node.operator], *values)


@_pointwise(*(name for name in _FLOAT_ONLY if name not in ("Tanh", "Sigmoid", "Erf")))
def float_function(expression: Expression, node: Node, values: list[Value], dtype: str) -> Value:
    """One instruction, of floats."""
    if dtype not in FLOATS:
        raise node.unsupported(f"element type {dtype}")
    return expression.apply(_FLOAT_ONLY[node.operator], *values)


@_pointwise(*_COMPARISONS)
def comparison(expression: Expression, node: Node, values: list[Value], dtype: str) -> Value:
    """One instruction that gives truth values."""
    return expression.apply(_COMPARISONS[node.operator], *values, dtype="bool")


def variadic(expression: Expression, node: Node, values: list[Value], dtype: str) -> Value:
    """Any number of operands."""
    return reduce(lambda total, value: expression.apply(_VARIADIC[node.operator], total, value), values)


@_pointwise("Mean")
def mean(expression: Expression, node: Node, values: list[Value], dtype: str) -> Value:
    """The sum of any number of operands over how many there are."""
    total = reduce(lambda total, value: expression.apply("add", total, value), values)
    return expression.apply("div", total, expression.constant(len(values), dtype))


@_pointwise("Reciprocal")
def reciprocal(expression: Expression, node: Node, values: list[Value], dtype: str) -> Value:
    """1 / x."""
    return expression.apply("div", expression.constant(1, dtype), *values)


def plain_cast(expression: Expression, node: Node, values: list[Value], dtype: str) -> Value:
    """Another type."""
    if dtype == "uint32" and values[0].dtype in ("float32", "float64"):
        raise node.one_engine("what onnxruntime makes of numbers out of uint32's range depends on their places")
    return expression.apply("cast", values[0], dtype=dtype)


@lowers("Cast", "CastLike")
def lower_cast(program: Program, node: Node) -> None:
    """The second operand of CastLike only says a type."""
    lower_pointwise(program, node, plain_cast, inputs=node.inputs[:1])


@_pointwise("IsInf")
def is_inf(expression: Expression, node: Node, values: list[Value], dtype: str) -> Value:
    """Infinite, of either sign or one of them."""
    (x,) = values
    result = expression.apply("is_inf", x, dtype="bool")
    for attribute, operator in (("detect_negative", "greater"), ("detect_positive", "less")):
        if not node.attributes.get(attribute, 1):
            side = expression.apply(operator, x, expression.constant(0, x.dtype), dtype="bool")
            result = expression.apply("and", result, side)
    return result


@_pointwise("Mod")
def mod(expression: Expression, node: Node, values: list[Value], dtype: str) -> Value:
    """The rest with the divisor's sign or, of `fmod`, with the dividend's."""
    fmod = node.attributes.get("fmod", 0)
    if dtype in FLOATS and not fmod:
        raise node.unsupported(f"{dtype} is possible with fmod only")
    if dtype in ("int64", "uint64") and fmod:
        raise node.one_engine(f"onnxruntime rounds {dtype} to float64 for fmod")
    return expression.apply("fmod" if fmod else "mod", *values)


@_pointwise("Pow")
def power(expression: Expression, node: Node, values: list[Value], dtype: str) -> Value:
    """The base's type; small constant exponents are products."""
    x, y = values
    exponent = _constant(expression, y)
    # onnxruntime has products for integers, too, if one exponent is for several numbers.
    if exponent in (2, 3) and (dtype in FLOATS or math.prod(expression.shape) > 1):
        square = expression.apply("mul", x, x)
        return expression.apply("mul", square, x) if exponent == 3 else square
    if dtype not in FLOATS:
        return _integer_power(expression, node, x, y, dtype)
    if exponent == 1:
        return x
    if exponent == 0.5:
        return expression.apply("sqrt", x)
    return expression.apply("pow", x, expression.cast(y, dtype))


def _integer_power(expression: Expression, node: Node, x: Value, y: Value, dtype: str) -> Value:
    """What onnxruntime computes in float64 and cuts, where that can be told without powers of fractions."""
    exponent = _constant(expression, y)
    if dtype == "int64":
        raise node.one_engine("onnxruntime computes powers of int64 in float64")
    if exponent is not None and float(exponent).is_integer() and abs(exponent) <= np.iinfo(dtype).max:
        return expression.apply("pow", x, expression.constant(int(exponent), dtype))
    if exponent is not None or y.dtype in FLOATS or np.dtype(y.dtype).itemsize > np.dtype(dtype).itemsize:
        raise node.one_engine(f"onnxruntime computes powers of {dtype} in float64")
    along = [
        step for step, length in zip(expression.operands[y.index].strides, expression.shape, strict=True) if length > 1
    ]
    if along and not along[-1]:
        raise node.one_engine("in onnxruntime the largest squares depend on how many numbers have one exponent")
    return expression.apply("pow", x, expression.cast(y, dtype))


def _constant(expression: Expression, value: Value) -> float | int | None:
    index = value.index - len(expression.operands)
    instruction = expression.program[index] if index >= 0 else None
    return instruction.parameters[0] if instruction and instruction.operator == "constant" else None


@_pointwise("BitShift")
def shift(expression: Expression, node: Node, values: list[Value], dtype: str) -> Value:
    """By as many bits as the second operand says."""
    return expression.apply(f"shift_{node.attributes['direction'].decode().lower()}", *values)


@_pointwise("PRelu")
def prelu(expression: Expression, node: Node, values: list[Value], dtype: str) -> Value:
    """x or, below zero, slope x."""
    x, slope = values
    negative = expression.apply("less", x, expression.constant(0, dtype), dtype="bool")
    return expression.apply("where", negative, expression.apply("mul", x, slope), x)


def plain_relu(expression: Expression, node: Node, values: list[Value], dtype: str) -> Value:
    """max(x, 0), of any type."""
    return expression.apply("max", *values, expression.constant(0, dtype))


def plain_clip(expression: Expression, node: Node, values: list[Value], dtype: str) -> Value:
    """Limits are inputs of one number, constant or not, of which any may be missing; before opset 11 attributes.

    A limit that is NaN limits nothing.
    """
    x, *limits = values
    names = [name for name, given in zip(("less", "greater"), node.inputs[1:3], strict=False) if given]
    for limit, name in zip(limits, names, strict=True):
        beyond = expression.apply(name, x, limit, dtype="bool")
        x = expression.apply("where", beyond, limit, x)
    for attribute, name in (("min", "max"), ("max", "min")):
        if attribute in node.attributes:
            x = expression.apply(name, x, expression.constant(node.attributes[attribute], dtype))
    return expression.apply("cast", x)


def plain_leaky_relu(expression: Expression, node: Node, values: list[Value], dtype: str) -> Value:
    """x or, below zero, alpha x."""
    (x,) = values
    slope = expression.constant(node.attributes.get("alpha", 0.01), dtype)
    return prelu(expression, node, [x, slope], dtype)


PLAIN: dict[str, Recipe] = {
    **dict.fromkeys(("Add", "Sub", "Mul", "Div"), same_type),
    **dict.fromkeys(("Tanh", "Sigmoid", "Erf"), float_function),
    "Sum": variadic,
    "Relu": plain_relu,
    "Clip": plain_clip,
    "LeakyRelu": plain_leaky_relu,
}
"""Operators whose lowering prefers blocked images, and what they are on plain tensors."""
