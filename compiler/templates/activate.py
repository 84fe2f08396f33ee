"""Activation functions of vectors, in TIR. Exponentials are polynomials, computed lane by lane: no calls.

Largest errors over all of float32: exp 2 units in the last place, subnormal results included; sigmoid and tanh 2e-7;
swish 2e-7 max(1, |x|). NaN stays NaN.
"""

from functools import partial, reduce

from tvm import tirx

from ..activations import Activation
from .builder import Expr, Register, bind, constant

_LOG2_E = 1.4426950408889634
# log(2) in two parts; the first has so few bits that its product with a small integer is exact (Cody and Waite 1980).
_LN_2 = (0.693359375, -2.121944400546905e-4)
# Adding and subtracting 1.5 x 2^23 rounds to an integer, which then stands in the low bits of the sum.
_ROUNDER, _ROUNDER_BITS = 12582912.0, 0x4B400000
_MANTISSA_BITS, _EXPONENT_BIAS = 23, 127
# Chebyshev interpolations, highest power first: of (exp(r) - 1 - r) / r^2 for |r| <= log(2) / 2, of (2^r - 1) / r for
# |r| <= 1 / 2, and of (tanh(x) - x) / x^3 as a function of x^2 for |x| <= 0.625.
_EXP = (1.9891030640e-4, 1.3933685861e-3, 8.3333108896e-3, 4.1666464602e-2, 1.6666666682e-1, 5.0000000135e-1)
_EXP2 = (1.3381302537e-3, 9.6663685154e-3, 5.5503810138e-2, 2.4022349038e-1, 6.9314718056e-1)
_TANH = (-6.0967141654e-3, 2.0997178999e-2, -5.3850909578e-2, 1.3332769737e-1, -3.3333328944e-1)
_TANH_SMALL = 0.625
_EXP_RANGE = (-104.0, 89.0)  # beyond it, exp is zero or infinite
_POWER_RANGE = (-126.0, 128.0)  # the scales within it are normal numbers or, since 2^128 is written like it, infinity


def activate(value: Expr, activation: Activation, lanes: int) -> Expr:
    """The activation function of a vector, or of a number if `lanes` is 1."""
    if activation.name == "none":
        return value
    x, number = bind(value), partial(constant, lanes=lanes)
    match activation.name:
        case "clip":
            return _clip(x, activation.alpha, activation.beta, lanes)
        case "leaky_relu":
            return tirx.Select(x < number(0.0), x * number(activation.alpha), x)
        case "sigmoid":
            return _sigmoid(x, lanes)
        case "swish":
            return x / _one_and_exp(x, lanes)
        case "hard_sigmoid":
            return _clip(x * number(activation.alpha) + number(activation.beta), 0.0, 1.0, lanes)
        case "hard_swish":
            return x * _clip(x * number(activation.alpha) + number(activation.beta), 0.0, 1.0, lanes)
        case "tanh":
            return _tanh(x, lanes)


def exp(x: Expr, lanes: int) -> Expr:
    """e to the power of x, for all x; two factors make the scale, since 2^128 and 2^-149 are no normal numbers."""
    mantissa, exponent = _exp_parts(_clip(x, *_EXP_RANGE, lanes), lanes)
    half = bind(exponent >> constant(1, lanes, "int32"))
    return mantissa * _power_of_two(half, lanes) * _power_of_two(exponent - half, lanes)


def _sigmoid(x: Expr, lanes: int) -> Expr:
    return constant(1.0, lanes) / _one_and_exp(x, lanes)


def _one_and_exp(x: Expr, lanes: int) -> Expr:
    """1 + exp(-x), as 1 + 2^n 2^f with an integer n and |f| <= 1 / 2: less exact than `exp`, since the 1 hides it."""
    rounder = constant(_ROUNDER, lanes)
    power = bind(_clip(x * constant(-_LOG2_E, lanes), *_POWER_RANGE, lanes))
    shifted = _opaque(power + rounder, lanes)
    rest = bind(power - (shifted - rounder))
    mantissa = constant(1.0, lanes) + rest * _horner(_EXP2, rest, lanes)
    return constant(1.0, lanes) + mantissa * _power_of_two(_rounded(shifted, lanes), lanes)


def _tanh(x: Expr, lanes: int) -> Expr:
    """1 - 2 / (exp(2 x) + 1), but near 0, where that cancels, a polynomial."""
    one, two = constant(1.0, lanes), constant(2.0, lanes)
    square = bind(x * x)
    small = x + x * square * _horner(_TANH, square, lanes)
    large = one - two * _sigmoid(constant(-2.0, lanes) * x, lanes)
    # Written so that NaN, which is not large, goes through the polynomial.
    return tirx.Select(square > constant(_TANH_SMALL**2, lanes), large, small)


def _exp_parts(x: Expr, lanes: int) -> tuple[Expr, Expr]:
    """(m, n), n integers, with exp(x) = m 2^n."""
    x, rounder = bind(x), constant(_ROUNDER, lanes)
    shifted = _opaque(x * constant(_LOG2_E, lanes) + rounder, lanes)
    whole = bind(shifted - rounder)
    rest = bind(x - whole * constant(_LN_2[0], lanes) - whole * constant(_LN_2[1], lanes))
    mantissa = constant(1.0, lanes) + (rest + rest * rest * _horner(_EXP, rest, lanes))
    return mantissa, bind(_rounded(shifted, lanes))


def _opaque(value: Expr, lanes: int) -> Expr:
    """The value, in a register of its own: TVM would simplify (a + b) - b."""
    return Register(lanes, value).value


def _rounded(shifted: Expr, lanes: int) -> Expr:
    """The integer n of a number n + _ROUNDER."""
    return tirx.reinterpret(_dtype("int32", lanes), shifted) - constant(_ROUNDER_BITS, lanes, "int32")


def _power_of_two(exponent: Expr, lanes: int) -> Expr:
    biased = exponent + constant(_EXPONENT_BIAS, lanes, "int32")
    return tirx.reinterpret(_dtype("float32", lanes), biased << constant(_MANTISSA_BITS, lanes, "int32"))


def _horner(coefficients: tuple[float, ...], x: Expr, lanes: int) -> Expr:
    first, *others = (constant(number, lanes) for number in coefficients)
    return reduce(lambda total, number: total * x + number, others, first)


def _clip(x: Expr, low: float, high: float, lanes: int) -> Expr:
    """NaN stays NaN: of two operands that cannot be compared, `Max` and `Min` take the second."""
    if low > float("-inf"):
        x = tirx.Max(constant(low, lanes), x)
    return tirx.Min(constant(high, lanes), x) if high < float("inf") else x


def _dtype(name: str, lanes: int) -> str:
    return name if lanes == 1 else f"{name}x{lanes}"
