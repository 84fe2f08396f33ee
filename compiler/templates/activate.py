"""Activation functions of vectors, in TIR.

Largest errors over all of float32: sigmoid, tanh and erf 2e-7; swish, gelu, gelu_tanh, elu, mish and softplus 2e-7
max(1, |x|). NaN stays NaN.
"""

import math
from functools import partial

from tvm import tirx

from gangway.compiler.activations import Activation
from gangway.compiler.templates.builder import Expr, bind, constant
from gangway.compiler.templates.numbers import is_nan, round_even
from gangway.compiler.templates.vector_math import (
    absolute,
    clip,
    erf,
    erfc,
    exp,
    expm1,
    log,
    log1p_of_fraction,
    one_and_exp,
    sigmoid,
    tanh,
)

__all__ = ["activate", "erf", "exp", "log", "sigmoid", "tanh"]

_GELU_CUBIC = 0.044715  # of Hendrycks and Gimpel's approximation, arXiv 1606.08415
_GELU_TANH_FACTOR = 2 * math.sqrt(2 / math.pi)
_GELU_MOST = 30.0  # erfc is 0 long before; keeps infinity out of a product with it
_MISH_MOST = 40.0  # tanh(softplus(x)) is 1 long before, and exp(2 x) finite


def activate(value: Expr, activation: Activation, lanes: int) -> Expr:
    """The activation function of a vector, or of a number if `lanes` is 1."""
    if activation.name == "none":
        return value
    x, number = bind(value), partial(constant, lanes=lanes)
    match activation.name:
        case "clip":
            return clip(x, activation.alpha, activation.beta, lanes)
        case "leaky_relu":
            return tirx.Select(x < number(0.0), x * number(activation.alpha), x)
        case "sigmoid":
            return sigmoid(x, lanes)
        case "swish":
            return x / one_and_exp(x, lanes)
        case "hard_sigmoid":
            return clip(x * number(activation.alpha) + number(activation.beta), 0.0, 1.0, lanes)
        case "hard_swish":
            return x * clip(x * number(activation.alpha) + number(activation.beta), 0.0, 1.0, lanes)
        case "tanh":
            return tanh(x, lanes)
        case "erf":
            return erf(x, lanes)
        case "gelu":
            return _gelu(x, lanes)
        case "gelu_tanh":
            return _gelu_tanh(x, lanes)
        case "elu":
            return tirx.Select(
                x > number(0.0), x, number(activation.alpha) * expm1(clip(x, -math.inf, 0.0, lanes), lanes)
            )
        case "mish":
            return _mish(x, lanes)
        case "softplus":
            decayed = exp(number(0.0) - absolute(x, lanes), lanes)
            return tirx.Max(number(0.0), x) + log1p_of_fraction(decayed, lanes)
        case "quantise_int8":
            return _quantise(x, activation, -128, 127, lanes)
        case "quantise_uint8":
            return _quantise(x, activation, 0, 255, lanes)


def _quantise(x: Expr, activation: Activation, lowest: int, highest: int, lanes: int) -> Expr:
    scale, zero_point = constant(activation.alpha, lanes), activation.beta
    limited = clip(x / scale, lowest - zero_point, highest - zero_point, lanes)
    lowest_of_nan = constant(lowest - zero_point, lanes)
    return tirx.Select(is_nan(x, "float32", lanes), lowest_of_nan, round_even(limited, "float32", lanes)) * scale


def _gelu(x: Expr, lanes: int) -> Expr:
    """x (1 + erf(x / sqrt 2)) / 2, as max(x, 0) - |x| erfc(|x| / sqrt 2) / 2: nothing cancels in either tail."""
    size = bind(clip(absolute(x, lanes), -math.inf, _GELU_MOST, lanes))
    tail = size * constant(0.5, lanes) * erfc(size * constant(math.sqrt(0.5), lanes), lanes)
    return tirx.Max(constant(0.0, lanes), x) - tail


def _gelu_tanh(x: Expr, lanes: int) -> Expr:
    """x (1 + tanh(u)) / 2 with u = sqrt(2 / pi) (x + 0.044715 x^3), as x sigmoid(2 u)."""
    cubic = constant(1.0, lanes) + constant(_GELU_CUBIC, lanes) * x * x
    return x / one_and_exp(constant(_GELU_TANH_FACTOR, lanes) * x * cubic, lanes)


def _mish(x: Expr, lanes: int) -> Expr:
    """x tanh(log(1 + e^x)), where that tanh is n / (n + 2), n = e^x (e^x + 2)."""
    power, two = bind(exp(clip(x, -math.inf, _MISH_MOST, lanes), lanes)), constant(2.0, lanes)
    n = bind(power * (power + two))
    return x * (n / (n + two))
