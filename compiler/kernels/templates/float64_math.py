"""Elementary functions of vectors of float64, in TIR, as polynomials: no calls. Other floats may go through them, too.

Largest relative errors: 1e-15, but of pow 1e-15 (1 + |y log x|), and sin, cos and tan have 1e-16 absolute beside it. So
a float32 that goes through them is nearly always the one nearest to the true result. NaN stays.

Reductions of the argument are those of Cody and Waite 1980 and, of large angles, of Payne and Hanek 1983; series are
Taylor's unless something else is said.
"""

import math
from collections.abc import Callable, Sequence
from functools import cache, partial, reduce
from itertools import product

from tvm import tirx

from gangway.compiler.kernels.templates import builder as T
from gangway.compiler.kernels.templates.builder import Expr, Register

# log(2) and pi / 2 in parts, of which the first have so few bits that products with small integers are exact.
_LN_2 = (6.93147180369123816490e-01, 1.90821492927058770002e-10)
_HALF_PI = (1.57079632673412561417e00, 6.07710050630396597660e-11, 2.02226624871116645580e-21)
LARGE_ANGLE = 2.0**20  # up to it, products with the parts of pi / 2 are exact
_LEAST_EXPONENT, _CUT_BITS, _DIGITS = 19, 27, 6  # of the reduction of larger ones
_ROUNDER, _ROUNDER_BITS = 1.5 * 2.0**52, 0x4338000000000000  # as in `activate`, of float64
_MANTISSA_BITS, _EXPONENT_BIAS = 52, 1023
_EXP_RANGE = (-750.0, 710.0)  # beyond it, exp is zero or infinite
_SMALLEST_NORMAL = 2.0**-1022
_EXP = [1 / math.factorial(n) for n in range(13, -1, -1)]  # |x| <= log(2) / 2
_LOG = [2 / (2 * n + 1) for n in range(11, -1, -1)]  # log((1 + s) / (1 - s)) / s of s^2, s <= 3 - 2 sqrt(2)
_SIN = [(-1) ** n / math.factorial(2 * n + 1) for n in range(8, -1, -1)]  # sin(x) / x of x^2, |x| <= pi / 4
_COS = [(-1) ** n / math.factorial(2 * n) for n in range(8, -1, -1)]
_ATAN = [(-1) ** n / (2 * n + 1) for n in range(14, -1, -1)]  # atan(x) / x of x^2, |x| <= 2 - sqrt(3)
_SINH = [1 / math.factorial(2 * n + 1) for n in range(8, -1, -1)]  # sinh(x) / x of x^2, |x| <= 1
_ERF_NEAR, _ERF_LEVELS = 3.0, 16
# erf(x) exp(x^2) / x of x^2, |x| <= 3: 2 / sqrt(pi) times 2^n / (2n + 1)!! (Abramowitz and Stegun 1964, 7.1.6)
_ERF = [2 / math.sqrt(math.pi) * 2.0**n / math.prod(range(1, 2 * n + 2, 2)) for n in range(55, -1, -1)]
Function = Callable[[Expr, int], Expr]


def exp(x: Expr, lanes: int) -> Expr:
    """e to the power of x; two factors make the scale, since 2^1024 and 2^-1074 are no normal numbers."""
    x = _clip(x, *_EXP_RANGE, lanes)
    whole, exponent = _nearest(x, 1 / math.log(2), lanes)
    rest = T.keep(x - whole * _number(_LN_2[0], lanes) - whole * _number(_LN_2[1], lanes))
    half = T.keep(exponent >> T.constant(1, lanes, "int64"))
    scaled = _polynomial(_EXP, rest, lanes) * _power_of_two(half, lanes)
    return T.keep(scaled * _power_of_two(exponent - half, lanes))


def log(x: Expr, lanes: int) -> Expr:
    """Natural logarithm: -inf of 0, NaN below it."""
    tiny = x < _number(_SMALLEST_NORMAL, lanes)
    bits = _as_bits(T.keep(tirx.Select(tiny, x * _number(2.0**54, lanes), x)), lanes)
    int64 = partial(T.constant, lanes=lanes, dtype="int64")
    mantissa = _from_bits(bits & int64((1 << 52) - 1) | int64(1023 << 52), lanes)
    large = mantissa > _number(math.sqrt(2), lanes)
    mantissa = T.keep(tirx.Select(large, mantissa * _number(0.5, lanes), mantissa))
    exponent = T.keep((bits >> int64(52)) - int64(1023))
    exponent = T.keep(tirx.Select(large, exponent + int64(1), exponent))
    exponent = T.keep(tirx.Select(tiny, exponent - int64(54), exponent))
    power = T.keep(tirx.Cast(T.vector_dtype("float64", lanes), exponent))
    s = T.keep((mantissa - _number(1.0, lanes)) / (mantissa + _number(1.0, lanes)))
    series = s * _polynomial(_LOG, T.keep(s * s), lanes)
    result = T.keep(power * _number(_LN_2[0], lanes) + (series + power * _number(_LN_2[1], lanes)))
    infinity = _number(math.inf, lanes)
    result = T.keep(tirx.Select(x < infinity, result, x))  # infinity and NaN
    result = T.keep(tirx.Select(x < _number(0.0, lanes), _number(math.nan, lanes), result))
    return T.keep(tirx.Select(tirx.EQ(x, _number(0.0, lanes)), -infinity, result))


def log1p(x: Expr, lanes: int) -> Expr:
    """log(1 + x), also where x disappears in the sum (Kahan's correction)."""
    one = _number(1.0, lanes)
    u = _opaque(one + x, lanes)
    d = T.keep(u - one)
    corrected = T.keep(log(u, lanes) * (x / tirx.Select(tirx.EQ(d, _number(0.0, lanes)), one, d)))
    exact = tirx.Or(tirx.EQ(d, _number(0.0, lanes)), u >= _number(math.inf, lanes))
    return T.keep(tirx.Select(exact, x, corrected))


def _sin_and_cos(x: Expr, lanes: int, large: bool) -> tuple[Expr, Expr]:
    whole, quadrant = _nearest(x, 2 / math.pi, lanes)
    rest = x
    for part in _HALF_PI:
        rest = T.keep(rest - whole * _number(part, lanes))
    if large:
        rest, quadrant = _reduced(x, rest, quadrant, lanes)
    square = T.keep(rest * rest)
    sine = T.keep(rest * _polynomial(_SIN, square, lanes))
    cosine = _polynomial(_COS, square, lanes)
    int64 = partial(T.constant, lanes=lanes, dtype="int64")
    swap = tirx.NE(quadrant & int64(1), int64(0))
    first, second = T.keep(tirx.Select(swap, cosine, sine)), T.keep(tirx.Select(swap, sine, cosine))
    down = tirx.NE(quadrant & int64(2), int64(0))
    left = tirx.NE((quadrant + int64(1)) & int64(2), int64(0))
    zero = _number(0.0, lanes)
    return T.keep(tirx.Select(down, zero - first, first)), T.keep(tirx.Select(left, zero - second, second))


def _reduced(x: Expr, near: Expr, quadrant: Expr, lanes: int) -> tuple[Expr, Expr]:
    """Angles modulo pi / 2, and how often that is in them, modulo 4; those of angles that are not large are given.

    An angle is multiplied by those digits of 2 / pi whose products are no multiples of 4 and not too small to matter.
    Which ones depends on its exponent. Angle and digits are cut so that all products are exact.
    """
    size, four, zero = T.keep(tirx.abs(x)), _number(4.0, lanes), _number(0.0, lanes)
    digits = [Register(lanes, zero, "float64") for _ in range(_DIGITS)]
    for exponent, numbers in _two_over_pi():
        for register, number in zip(digits, numbers, strict=True):
            register.set(tirx.Select(size >= _number(2.0**exponent, lanes), _number(number, lanes), register.value))
    upper = _from_bits(_as_bits(size, lanes) & T.constant(-1 << _CUT_BITS, lanes, "int64"), lanes)
    parts = [upper, _opaque(size - upper, lanes)]
    total, error = Register(lanes, zero, "float64"), Register(lanes, zero, "float64")
    for part, register in product(parts, digits):
        scaled = _opaque(part * register.value, lanes)
        summand = _opaque(scaled - four * T.floor(T.keep(scaled * _number(0.25, lanes)), "float64", lanes), lanes)
        before = T.keep(total.value)  # the sum and what its rounding loses (Knuth 1969)
        total.set(before + summand)
        added = _opaque(total.value - before, lanes)
        error.set(error.value + ((before - _opaque(total.value - added, lanes)) + (summand - added)))
    whole = T.floor(T.keep(total.value + _number(0.5, lanes)), "float64", lanes)
    rest = T.keep((_opaque(total.value - whole, lanes) + error.value) * _number(math.pi / 2, lanes))
    count = T.keep(tirx.Cast(T.vector_dtype("int64", lanes), tirx.Select(size < _number(math.inf, lanes), whole, zero)))
    large, negative = size > _number(LARGE_ANGLE, lanes), x < zero
    rest = T.keep(tirx.Select(size < _number(math.inf, lanes), rest, _number(math.nan, lanes)))
    count = T.keep(tirx.Select(negative, T.constant(0, lanes, "int64") - count, count))
    rest = T.keep(tirx.Select(large, T.keep(tirx.Select(negative, zero - rest, rest)), near))
    return rest, T.keep(tirx.Select(large, count, quadrant))


@cache
def _two_over_pi() -> list[tuple[int, list[float]]]:
    """For ascending exponents, from which on they count: digits of 2 / pi, `_CUT_BITS` - 1 bits in each part."""
    width, bits, found = _CUT_BITS - 1, 1400, []
    value = (2 << (2 * bits)) // _pi(bits)  # 2 / pi in units of 2^-bits
    for exponent in range(_LEAST_EXPONENT, 1024, _CUT_BITS):
        first = 54 - exponent  # the place of the first bit that counts: products with those before are multiples of 4
        kept, numbers = value % (1 << (bits + first)) if bits + first > 0 else 0, []
        for number in range(1, _DIGITS + 1):
            unit = bits + first - number * width
            piece = kept >> unit
            kept -= piece << unit
            numbers.append(math.ldexp(piece, first - number * width))
        found.append((exponent, numbers))
    return found


def _pi(bits: int) -> int:
    """Pi in units of 2^-bits, by Machin's formula."""
    unit = 1 << (bits + 32)

    def arctangent(divisor: int) -> int:
        total, term, n = 0, unit // divisor, 0
        while term:
            total += (-1) ** n * (term // (2 * n + 1))
            term, n = term // divisor**2, n + 1
        return total

    return 4 * (4 * arctangent(5) - arctangent(239)) >> 32


def sin(x: Expr, lanes: int, large: bool = False) -> Expr:
    """Sine, of radians; beyond `LARGE_ANGLE` only if they may be `large`."""
    return _sin_and_cos(x, lanes, large)[0]


def cos(x: Expr, lanes: int, large: bool = False) -> Expr:
    """Cosine, likewise."""
    return _sin_and_cos(x, lanes, large)[1]


def tan(x: Expr, lanes: int, large: bool = False) -> Expr:
    """Tangent, likewise."""
    sine, cosine = _sin_and_cos(x, lanes, large)
    return T.keep(sine / cosine)


def atan(x: Expr, lanes: int) -> Expr:
    """Arc tangent: of what is above 1 by its reciprocal, then rotated by 30 degrees."""
    one, root = _number(1.0, lanes), _number(math.sqrt(3), lanes)
    size = T.keep(tirx.abs(x))
    large = size > one
    t = T.keep(tirx.Select(large, one / size, size))
    rotated = t > _number(2 - math.sqrt(3), lanes)
    t = T.keep(tirx.Select(rotated, (t * root - one) / (t + root), t))
    angle = T.keep(t * _polynomial(_ATAN, T.keep(t * t), lanes))
    angle = T.keep(tirx.Select(rotated, angle + _number(math.pi / 6, lanes), angle))
    return _signed(x, T.keep(tirx.Select(large, _number(math.pi / 2, lanes) - angle, angle)), lanes)


def asin(x: Expr, lanes: int) -> Expr:
    """Arc sine; NaN outside of [-1, 1]."""
    one = _number(1.0, lanes)
    return atan(T.keep(x / tirx.sqrt((one - x) * (one + x))), lanes)


def acos(x: Expr, lanes: int) -> Expr:
    """Arc cosine; NaN outside of [-1, 1]."""
    one = _number(1.0, lanes)
    return T.keep(_number(2.0, lanes) * atan(T.keep(tirx.sqrt((one - x) / (one + x))), lanes))


def sinh(x: Expr, lanes: int) -> Expr:
    """Hyperbolic sine; near 0, where the difference of exponentials cancels, a series."""
    half = exp(T.keep(x * _number(0.5, lanes)), lanes)  # its square may overflow only where the result does
    large = T.keep(half * _number(0.5, lanes) * half - _number(0.5, lanes) / half / half)
    small = T.keep(x * _polynomial(_SINH, T.keep(x * x), lanes))
    return T.keep(tirx.Select(tirx.abs(x) <= _number(1.0, lanes), small, large))


def cosh(x: Expr, lanes: int) -> Expr:
    """Hyperbolic cosine."""
    half = exp(T.keep(tirx.abs(x) * _number(0.5, lanes)), lanes)
    return T.keep(half * _number(0.5, lanes) * half + _number(0.5, lanes) / half / half)


def tanh(x: Expr, lanes: int) -> Expr:
    """Hyperbolic tangent."""
    x = _clip(x, -20.0, 20.0, lanes)  # where it is 1
    return T.keep(sinh(x, lanes) / cosh(x, lanes))


def sigmoid(x: Expr, lanes: int) -> Expr:
    """1 / (1 + exp(-x))."""
    one = _number(1.0, lanes)
    return T.keep(one / (one + exp(T.keep(_number(0.0, lanes) - x), lanes)))


def asinh(x: Expr, lanes: int) -> Expr:
    """Inverse hyperbolic sine."""
    one, size = _number(1.0, lanes), T.keep(tirx.abs(x))
    square = T.keep(size * size)
    inside = log1p(T.keep(size + square / (one + tirx.sqrt(one + square))), lanes)
    beyond = log(size, lanes) + _number(math.log(2), lanes)  # where the square would overflow
    return _signed(x, T.keep(tirx.Select(size > _number(1e150, lanes), beyond, inside)), lanes)


def acosh(x: Expr, lanes: int) -> Expr:
    """Inverse hyperbolic cosine; NaN below 1."""
    t = T.keep(x - _number(1.0, lanes))
    inside = log1p(T.keep(t + tirx.sqrt(t * (t + _number(2.0, lanes)))), lanes)
    beyond = log(x, lanes) + _number(math.log(2), lanes)
    result = T.keep(tirx.Select(x > _number(1e150, lanes), beyond, inside))
    # The root of far negative numbers is as large as they are.
    return T.keep(tirx.Select(x < _number(1.0, lanes), _number(math.nan, lanes), result))


def atanh(x: Expr, lanes: int) -> Expr:
    """Inverse hyperbolic tangent; NaN outside of [-1, 1]."""
    one, two, size = _number(1.0, lanes), _number(2.0, lanes), T.keep(tirx.abs(x))
    return _signed(x, T.keep(_number(0.5, lanes) * log1p(T.keep(two * size / (one - size)), lanes)), lanes)


def power(x: Expr, y: Expr, lanes: int) -> Expr:
    """x to the power of y, with the special cases of C's pow."""
    zero, one = _number(0.0, lanes), _number(1.0, lanes)
    result = exp(T.keep(y * log(T.keep(tirx.abs(x)), lanes)), lanes)
    half = T.keep(y * _number(0.5, lanes))
    odd = tirx.And(tirx.EQ(T.truncate(y, "float64", lanes), y), tirx.NE(T.truncate(half, "float64", lanes), half))
    finite = tirx.abs(y) < _number(math.inf, lanes)
    odd = tirx.And(odd, finite)
    broken = tirx.And(tirx.And(tirx.NE(T.truncate(y, "float64", lanes), y), finite), x > _number(-math.inf, lanes))
    signed = T.keep(tirx.Select(odd, zero - result, result))
    signed = T.keep(tirx.Select(broken, _number(math.nan, lanes), signed))
    result = T.keep(tirx.Select(x < zero, signed, result))
    unit = tirx.Or(tirx.EQ(y, zero), tirx.EQ(x, one))
    unit = tirx.Or(unit, tirx.And(tirx.EQ(x, _number(-1.0, lanes)), tirx.abs(y) >= _number(math.inf, lanes)))
    return T.keep(tirx.Select(unit, one, result))


def modulo(x: Expr, y: Expr, lanes: int, large: bool = False) -> Expr:
    """C's fmod: x - n y for the integer n nearest to x / y towards zero. Exact if both were float32 and |n| < 2^26, or
    if n may be `large`.
    """
    zero, divisor, size = _number(0.0, lanes), T.keep(tirx.abs(y)), T.keep(tirx.abs(x))
    count = T.floor(T.keep(size / divisor), "float64", lanes)
    rest = _opaque(size - count * divisor, lanes)  # the quotient may have been rounded across an integer
    rest = T.keep(tirx.Select(rest < zero, rest + divisor, rest))
    rest = T.keep(tirx.Select(rest >= divisor, rest - divisor, rest))
    if large:
        rest = _divided_long(size, divisor, rest, lanes)
    whole = tirx.And(divisor >= _number(math.inf, lanes), size < divisor)
    return _signed(x, T.keep(tirx.Select(whole, size, rest)), lanes)


def _divided_long(size: Expr, divisor: Expr, short: Expr, lanes: int) -> Expr:
    """The rest of a division, bit by bit: no subtraction is rounded. What has no quotient is given."""
    zero, infinity = _number(0.0, lanes), _number(math.inf, lanes)
    finite = tirx.And(tirx.And(size < infinity, divisor > zero), divisor < infinity)
    ratio = T.keep(tirx.Select(finite, T.keep(size / divisor), zero))
    largest = tirx.Max(
        tirx.Min(T.lane_maximum(Register(lanes, ratio, "float64"), lanes, "float64"), _number(2.0**1023, 1)),
        _number(1.0, 1),
    )
    bits = tirx.reinterpret("int64", largest) >> tirx.const(_MANTISSA_BITS, "int64")
    steps = T.keep(tirx.Cast("int32", bits - tirx.const(_EXPONENT_BIAS - 2, "int64")))
    rest = Register(lanes, size, "float64")

    def step(index: Expr) -> None:
        power = tirx.Cast("int64", steps - 1 - index)
        half = power >> tirx.const(1, "int64")
        first, second = [T.splat(T.keep(_power_of_two(part, 1)), lanes) for part in (half, power - half)]
        shifted = T.keep(divisor * first * second)
        rest.set(tirx.Select(rest.value >= shifted, rest.value - shifted, rest.value))

    T.repeat(steps, step)
    return T.keep(tirx.Select(finite, rest.value, short))


def erf(x: Expr, lanes: int) -> Expr:
    """The error function: up to 3 exp(-x^2) times a series without cancellation, beyond that a continued fraction."""
    size = T.keep(tirx.abs(x))
    z = _clip(size, 0.0, 6.5, lanes)  # beyond, it is 1
    square = T.keep(z * z)
    bell = exp(T.keep(_number(0.0, lanes) - square), lanes)
    near = bell * z * _polynomial(_ERF, square, lanes)
    far = T.keep(tirx.Max(z, _number(_ERF_NEAR, lanes)))
    fraction = far
    for n in range(_ERF_LEVELS, 0, -1):
        fraction = T.keep(far + _number(n / 2, lanes) / fraction)
    tail = bell / (fraction * _number(math.sqrt(math.pi), lanes))
    result = T.keep(tirx.Select(z > _number(_ERF_NEAR, lanes), _number(1.0, lanes) - tail, near))
    return _signed(x, result, lanes)


def _polynomial(coefficients: Sequence[float], x: Expr, lanes: int) -> Expr:
    """Horner's scheme; the highest power comes first."""
    first, *others = (_number(value, lanes) for value in coefficients)
    return T.keep(reduce(lambda total, value: total * x + value, others, first))


def _nearest(x: Expr, scale: float, lanes: int) -> tuple[Expr, Expr]:
    """The integer next to `scale` x, which must be below 2^51, as float64 and as int64."""
    shifted = _opaque(x * _number(scale, lanes) + _number(_ROUNDER, lanes), lanes)
    whole = T.keep(shifted - _number(_ROUNDER, lanes))
    return whole, T.keep(_as_bits(shifted, lanes) - T.constant(_ROUNDER_BITS, lanes, "int64"))


def _clip(x: Expr, low: float, high: float, lanes: int) -> Expr:
    """NaN stays: of two numbers that cannot be compared, both take the second."""
    return T.keep(tirx.Min(_number(high, lanes), tirx.Max(_number(low, lanes), x)))


def _signed(x: Expr, magnitude: Expr, lanes: int) -> Expr:
    return T.keep(tirx.Select(x < _number(0.0, lanes), _number(0.0, lanes) - magnitude, magnitude))


def _power_of_two(exponent: Expr, lanes: int) -> Expr:
    biased = exponent + T.constant(_EXPONENT_BIAS, lanes, "int64")
    return _from_bits(biased << T.constant(_MANTISSA_BITS, lanes, "int64"), lanes)


def _as_bits(value: Expr, lanes: int) -> Expr:
    return T.keep(tirx.reinterpret(T.vector_dtype("int64", lanes), value))


def _from_bits(value: Expr, lanes: int) -> Expr:
    return T.keep(tirx.reinterpret(T.vector_dtype("float64", lanes), value))


def _opaque(value: Expr, lanes: int) -> Expr:
    return Register(lanes, value, "float64").value


def _number(value: float, lanes: int) -> Expr:
    return T.constant(value, lanes, "float64")


UNARY: dict[str, Function] = {
    "exp": exp,
    "log": log,
    "log1p": log1p,
    "asin": asin,
    "acos": acos,
    "atan": atan,
    "sinh": sinh,
    "cosh": cosh,
    "tanh": tanh,
    "asinh": asinh,
    "acosh": acosh,
    "atanh": atanh,
    "sigmoid": sigmoid,
    "erf": erf,
}
