"""Elementwise operators over plain tensors of any type and shape, broadcast as numpy does it.

What can be fused into convolutions, or be applied to blocked images, is tried first by its own module.
"""

import math
from collections.abc import Callable, Sequence
from functools import reduce

import numpy as np

from gangway.compiler.frontend.graph import Node
from gangway.compiler.kernels.plain_specs import ELEMENT_TYPES, FLOATS, MOST_OPERANDS
from gangway.compiler.lower.expressions import Expression, Value, operand_kinds
from gangway.compiler.lower.layers import Program
from gangway.compiler.lower.operators.registry import lowers

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
_VARIADIC = {"Sum": "add", "Min": "min", "Max": "max"}


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


@_pointwise(*(name for name in _SAME_TYPE if name not in ("Add", "Sub", "Mul")))
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


@_pointwise(*_VARIADIC)
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


def cast(expression: Expression, node: Node, values: list[Value], dtype: str) -> Value:
    """Another type."""
    if dtype == "uint32" and values[0].dtype in ("float32", "float64"):
        raise node.one_engine("what onnxruntime makes of numbers out of uint32's range depends on their places")
    return expression.apply("cast", values[0], dtype=dtype)


@lowers("Cast", "CastLike")
def lower_cast(program: Program, node: Node) -> None:
    """The second operand of CastLike only says a type."""
    lower_pointwise(program, node, cast, inputs=node.inputs[:1])


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


def relu(expression: Expression, node: Node, values: list[Value], dtype: str) -> Value:
    """max(x, 0), of any type."""
    return expression.apply("max", *values, expression.constant(0, dtype))


def clip(expression: Expression, node: Node, values: list[Value], dtype: str) -> Value:
    """Limits are inputs of one number, constant or not, of which any may be missing; before opset 11 attributes."""
    x, *limits = values
    names = [name for name, given in zip(("max", "min"), node.inputs[1:3], strict=False) if given]
    for limit, name in zip(limits, names, strict=True):
        x = expression.apply(name, x, limit)
    for attribute, name in (("min", "max"), ("max", "min")):
        if attribute in node.attributes:
            x = expression.apply(name, x, expression.constant(node.attributes[attribute], dtype))
    return expression.apply("cast", x)


def leaky_relu(expression: Expression, node: Node, values: list[Value], dtype: str) -> Value:
    """x or, below zero, alpha x."""
    (x,) = values
    slope = expression.constant(node.attributes.get("alpha", 0.01), dtype)
    return prelu(expression, node, [x, slope], dtype)


PLAIN: dict[str, Recipe] = {
    **dict.fromkeys(("Add", "Sub", "Mul"), same_type),
    **dict.fromkeys(("Tanh", "Sigmoid", "Erf"), float_function),
    "Relu": relu,
    "Clip": clip,
    "LeakyRelu": leaky_relu,
}
"""Operators whose lowering prefers blocked images, and what they are on plain tensors."""
