"""Exponentials, logarithms and activation functions of vectors, in TIR: polynomials without calls.

Largest errors over all of float32: exp and log 2 units in the last place, subnormal numbers included; expm1 3 units;
sigmoid, tanh and erf 2e-7, erf also 4 units; `decay` 2e-7; swish, gelu, gelu_tanh, elu, mish and softplus 2e-7
max(1, |x|). NaN stays NaN.
"""

import math
from functools import partial, reduce

from tvm import tirx

from gangway.compiler.kernels.specs import Activation
from gangway.compiler.kernels.templates.builder import Expr, Register, bind, constant, is_nan, keep, round_even

_LOG2_E = 1.4426950408889634
# log(2) in two parts; the first has so few bits that its product with a small integer is exact (Cody and Waite 1980).
_LN_2 = (0.693359375, -2.121944400546905e-4)
# Adding and subtracting 1.5 x 2^23 rounds to an integer, which then stands in the low bits of the sum.
_ROUNDER, _ROUNDER_BITS = 12582912.0, 0x4B400000
_MANTISSA_BITS, _EXPONENT_BIAS = 23, 127
_SMALLEST_NORMAL = 2.0**-126
_ROOT_HALF_BITS = 0x3F3504F3
# Chebyshev interpolations, highest power first: of (exp(r) - 1 - r) / r^2 for |r| <= log(2) / 2, of (2^r - 1) / r for
# |r| <= 1 / 2, of (tanh(x) - x) / x^3 as a function of x^2 for |x| <= 0.625, of (log(1 + f) - f + f^2 / 2) / f^3 for
# 1 + f between the roots of 1 / 2 and 2, of log(1 + t) / t for 0 <= t <= 1, of erf(x) / x as a function of x^2 for
# |x| <= 1.
_EXP = (1.9891030640e-4, 1.3933685861e-3, 8.3333108896e-3, 4.1666464602e-2, 1.6666666682e-1, 5.0000000135e-1)
_EXP2 = (1.3381302537e-3, 9.6663685154e-3, 5.5503810138e-2, 2.4022349038e-1, 6.9314718056e-1)
_TANH = (-6.0967141654e-3, 2.0997178999e-2, -5.3850909578e-2, 1.3332769737e-1, -3.3333328944e-1)
_LOG = (
    *(-7.9027459040e-2, 1.2622320901e-1, -1.2998183459e-1, 1.4214495754e-1),
    *(-1.6641281476e-1, 2.0001045102e-1, -2.5000306422e-1, 3.3333330728e-1),
)
_LOG1P = (
    *(-3.1760570102e-3, 1.9542527221e-2, -5.6373612750e-2, 1.0543623787e-1, -1.5269667069e-1),
    *(1.9663274255e-1, -2.4951616262e-1, 3.3329710499e-1, -4.9999892648e-1, 9.9999999466e-1),
)
_ERF = (-5.6480598653e-4, 4.9217620278e-3, -2.6715054232e-2, 1.1280316653e-1, -3.7612343775e-1, 1.1283791262e0)
# -log2(erfc(z)) / z for 0 <= z <= 4.4, least maximum of the error of erfc; beyond 4.4 float32 does not show it.
_ERFC = (
    *(4.5355670873e-5, -4.4548680504e-4, 1.4893835371e-3, 7.7471058410e-4),
    *(-2.8253740648e-2, 1.4848163754e-1, 9.1841638942e-1, 1.6279085933e0),
)
_TANH_SMALL, _ERF_SMALL = 0.625, 1.0
_EXP_RANGE = (-104.0, 89.0)  # beyond it, exp is zero or infinite
_EXPM1_LEAST = -87.0  # expm1 is -1 long before, and the power of two still normal
_POWER_RANGE = (-126.0, 128.0)  # the scales within it are normal numbers or, since 2^128 is written like it, infinity
_DECAY_LEAST = -127.0  # 2^-127 would be subnormal: its bits, made from an exponent alone, are those of zero
_ERFC_MOST = 30.0
_GELU_CUBIC = 0.044715  # of Hendrycks and Gimpel's approximation, arXiv 1606.08415
_GELU_TANH_FACTOR = 2 * math.sqrt(2 / math.pi)
_GELU_MOST = 30.0  # erfc is 0 long before; keeps infinity out of a product with it
_MISH_MOST = 40.0  # tanh(softplus(x)) is 1 long before, and exp(2 x) finite


def activate(value: Expr, activation: Activation, lanes: int) -> Expr:
    """The activation function of a vector, or of a number if `lanes` is 1."""
    if activation.name == "none":
        return value
    x, number = bind(value), partial(constant, lanes=lanes)

    def factor(value: float) -> Expr:
        """A constant to multiply by: in a register if it is 0, since TVM takes 0 times NaN for 0."""
        return number(value) if value else keep(number(0.0))

    match activation.name:
        case "clip":
            return clip(x, activation.alpha, activation.beta, lanes)
        case "leaky_relu":
            return tirx.Select(x < number(0.0), x * factor(activation.alpha), x)
        case "bounded_leaky_relu":
            leaky = bind(tirx.Select(x < number(0.0), x * factor(activation.alpha), x))
            return clip(leaky, activation.beta, math.inf, lanes)
        case "sigmoid":
            return sigmoid(x, lanes)
        case "swish":
            return x / one_and_exp(x, lanes)
        case "hard_sigmoid":
            return clip(x * factor(activation.alpha) + number(activation.beta), 0.0, 1.0, lanes)
        case "hard_swish":
            return x * clip(x * factor(activation.alpha) + number(activation.beta), 0.0, 1.0, lanes)
        case "tanh":
            return tanh(x, lanes)
        case "erf":
            return erf(x, lanes)
        case "gelu":
            return _gelu(x, lanes)
        case "gelu_tanh":
            return _gelu_tanh(x, lanes)
        case "elu":
            decayed = expm1(clip(x, -math.inf, 0.0, lanes), lanes)
            return tirx.Select(x > number(0.0), x, factor(activation.alpha) * decayed)
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
    limits = (lowest - activation.beta, highest - activation.beta)
    least, largest = (constant(limit, lanes) for limit in limits)
    return quantised(x, constant(activation.alpha, lanes), least, largest, lanes)


def quantised(x: Expr, scale: Expr, least: Expr, largest: Expr, lanes: int) -> Expr:
    """The nearest multiple of a scale between two limits, which are in steps of it; NaN becomes the least."""
    limited = tirx.Max(least, tirx.Min(largest, x / scale))
    nearest = round_even(limited, "float32", lanes)
    return tirx.Select(is_nan(x, "float32", lanes), least, nearest) * scale


def _gelu(x: Expr, lanes: int) -> Expr:
    """x (1 + erf(x / sqrt 2)) / 2, as max(x, 0) - |x| erfc(|x| / sqrt 2) / 2: nothing cancels in either tail.

    -inf gives NaN, as its product with 0 does.
    """
    size = bind(tirx.Max(constant(0.0, lanes) - x, tirx.Min(constant(_GELU_MOST, lanes), x)))
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


def exp(x: Expr, lanes: int) -> Expr:
    """e to the power of x, for all x; two factors make the scale, since 2^128 and 2^-149 are no normal numbers."""
    excess, exponent = _exp_parts(clip(x, *_EXP_RANGE, lanes), lanes)
    half = bind(exponent >> constant(1, lanes, "int32"))
    return (constant(1.0, lanes) + excess) * _power_of_two(half, lanes) * _power_of_two(exponent - half, lanes)


def expm1(x: Expr, lanes: int) -> Expr:
    """exp(x) - 1 for x <= 0, without cancellation."""
    excess, exponent = _exp_parts(clip(x, _EXPM1_LEAST, math.inf, lanes), lanes)
    scale = bind(_power_of_two(exponent, lanes))
    return excess * scale + (scale - constant(1.0, lanes))


def decay(x: Expr, lanes: int) -> Expr:
    """exp(x) for x <= 0 in fewer operations: absolute error 2e-7, exactly 1 at 0, exactly 0 from -88.03 downwards."""
    return exp2_decay(x * constant(_LOG2_E, lanes), lanes)


def exp2_decay(x: Expr, lanes: int) -> Expr:
    """2 to the power of x for x <= 0, exactly 0 from -127 downwards; relative error 2e-7 down to -126."""
    power = bind(clip(x, _DECAY_LEAST, math.inf, lanes))
    shifted = _opaque(power + constant(_ROUNDER, lanes), lanes)
    rest = bind(power - (shifted - constant(_ROUNDER, lanes)))
    mantissa = constant(1.0, lanes) + rest * horner(_EXP2, rest, lanes)
    exponent = _as_bits(shifted, lanes) << constant(_MANTISSA_BITS, lanes, "int32")  # the rounder's own bits drop out
    return _as_number(_as_bits(mantissa, lanes) + exponent, lanes)


def log(x: Expr, lanes: int) -> Expr:
    """The natural logarithm: -infinity of 0, NaN of negative numbers."""
    x, shift = bind(x), constant(_MANTISSA_BITS, lanes, "int32")
    small = x < constant(_SMALLEST_NORMAL, lanes)  # not bound: TVM cannot analyse a name of a vector of bool
    normal = tirx.Select(small, x * constant(2.0**_MANTISSA_BITS, lanes), x)
    bits = bind(_as_bits(normal, lanes) - constant(_ROOT_HALF_BITS, lanes, "int32"))
    exponent = bind(bits >> shift)
    f = bind(
        _as_number(bits - (exponent << shift) + constant(_ROOT_HALF_BITS, lanes, "int32"), lanes) - constant(1.0, lanes)
    )
    extra = tirx.Select(small, constant(-float(_MANTISSA_BITS), lanes), constant(0.0, lanes))
    whole = bind(tirx.Cast(_dtype("float32", lanes), exponent) + extra)
    square = bind(f * f)
    tail = square * (f * horner(_LOG, f, lanes) - constant(0.5, lanes)) + whole * constant(_LN_2[1], lanes)
    finite = whole * constant(_LN_2[0], lanes) + (f + tail)
    positive = tirx.Select(x < constant(math.inf, lanes), finite, x)
    zero_or_nan = x - constant(math.inf, lanes)
    other = tirx.Select(x < constant(0.0, lanes), constant(math.nan, lanes), zero_or_nan)
    return tirx.Select(x > constant(0.0, lanes), positive, other)


def log1p_of_fraction(t: Expr, lanes: int) -> Expr:
    """log(1 + t) for t from 0 to 1, relative error 2e-7."""
    t = bind(t)
    return t * horner(_LOG1P, t, lanes)


def sigmoid(x: Expr, lanes: int) -> Expr:
    """1 / (1 + exp(-x))."""
    return constant(1.0, lanes) / one_and_exp(x, lanes)


def one_and_exp(x: Expr, lanes: int) -> Expr:
    """1 + exp(-x), as 1 + 2^n 2^f with an integer n and |f| <= 1 / 2: less exact than `exp`, since the 1 hides it."""
    rounder = constant(_ROUNDER, lanes)
    power = bind(clip(x * constant(-_LOG2_E, lanes), *_POWER_RANGE, lanes))
    shifted = _opaque(power + rounder, lanes)
    rest = bind(power - (shifted - rounder))
    mantissa = constant(1.0, lanes) + rest * horner(_EXP2, rest, lanes)
    return constant(1.0, lanes) + mantissa * _power_of_two(_rounded(shifted, lanes), lanes)


def tanh(x: Expr, lanes: int) -> Expr:
    """1 - 2 / (exp(2 x) + 1), but near 0, where that cancels, a polynomial."""
    x, one, two = bind(x), constant(1.0, lanes), constant(2.0, lanes)
    square = bind(x * x)
    small = x + x * square * horner(_TANH, square, lanes)
    large = one - two * sigmoid(constant(-2.0, lanes) * x, lanes)
    # Written so that NaN, which is not large, goes through the polynomial.
    return tirx.Select(square > constant(_TANH_SMALL**2, lanes), large, small)


def erfc(z: Expr, lanes: int) -> Expr:
    """1 - erf(z) for 0 <= z, as 2 to the power of a polynomial; exactly 0 beyond 10."""
    z = bind(clip(z, -math.inf, _ERFC_MOST, lanes))
    return exp2_decay(constant(0.0, lanes) - z * horner(_ERFC, z, lanes), lanes)


def erf(x: Expr, lanes: int) -> Expr:
    """The error function."""
    x = bind(x)
    size = bind(absolute(x, lanes))
    square = bind(x * x)
    small = x * horner(_ERF, square, lanes)
    large = bind(constant(1.0, lanes) - erfc(size, lanes))
    signed = tirx.Select(x < constant(0.0, lanes), constant(0.0, lanes) - large, large)
    return tirx.Select(size > constant(_ERF_SMALL, lanes), signed, small)


def absolute(x: Expr, lanes: int) -> Expr:
    """The number without its sign."""
    return _as_number(_as_bits(x, lanes) & constant(0x7FFFFFFF, lanes, "int32"), lanes)


def clip(x: Expr, low: float, high: float, lanes: int) -> Expr:
    """NaN stays NaN: of two operands that cannot be compared, `Max` and `Min` take the second."""
    if low > float("-inf"):
        x = tirx.Max(constant(low, lanes), x)
    return tirx.Min(constant(high, lanes), x) if high < float("inf") else x


def horner(coefficients: tuple[float, ...], x: Expr, lanes: int) -> Expr:
    """A polynomial, highest power first."""
    first, *others = (constant(number, lanes) for number in coefficients)
    return reduce(lambda total, number: total * x + number, others, first)


def _exp_parts(x: Expr, lanes: int) -> tuple[Expr, Expr]:
    """(q, n), n integers, with exp(x) = (1 + q) 2^n."""
    x, rounder = bind(x), constant(_ROUNDER, lanes)
    shifted = _opaque(x * constant(_LOG2_E, lanes) + rounder, lanes)
    whole = bind(shifted - rounder)
    rest = bind(x - whole * constant(_LN_2[0], lanes) - whole * constant(_LN_2[1], lanes))
    return bind(rest + rest * rest * horner(_EXP, rest, lanes)), bind(_rounded(shifted, lanes))


def _opaque(value: Expr, lanes: int) -> Expr:
    """The value, in a register of its own: TVM would simplify (a + b) - b."""
    return Register(lanes, value).value


def _rounded(shifted: Expr, lanes: int) -> Expr:
    """The integer n of a number n + _ROUNDER."""
    return _as_bits(shifted, lanes) - constant(_ROUNDER_BITS, lanes, "int32")


def _power_of_two(exponent: Expr, lanes: int) -> Expr:
    biased = exponent + constant(_EXPONENT_BIAS, lanes, "int32")
    return _as_number(biased << constant(_MANTISSA_BITS, lanes, "int32"), lanes)


def _as_bits(value: Expr, lanes: int) -> Expr:
    return tirx.reinterpret(_dtype("int32", lanes), value)


def _as_number(bits: Expr, lanes: int) -> Expr:
    return tirx.reinterpret(_dtype("float32", lanes), bits)


def _dtype(name: str, lanes: int) -> str:
    return name if lanes == 1 else f"{name}x{lanes}"
