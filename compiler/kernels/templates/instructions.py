"""What each instruction of a `PointwiseSpec` computes, on vectors, in TIR.

`dtype` is the type of the sources; only cast, comparisons, is_nan and is_inf give another one than they take. Integer
overflow has no defined result, but does no harm.
"""

from collections.abc import Callable, Sequence
from typing import cast, get_args

import numpy as np
from tvm import tirx

from gangway.compiler.kernels.plain_specs import Instruction
from gangway.compiler.kernels.specs import Activation, ActivationName, Check
from gangway.compiler.kernels.templates import builder as T
from gangway.compiler.kernels.templates import float32_math, float64_math
from gangway.compiler.kernels.templates.builder import FLOATS, Expr, Register
from gangway.compiler.kernels.templates.float32_math import activate

Binary = Callable[[Expr, Expr], Expr]

_COMPARISONS: dict[str, Binary] = {
    "equal": tirx.EQ,
    "less": tirx.LT,
    "less_or_equal": tirx.LE,
    "greater": tirx.GT,
    "greater_or_equal": tirx.GE,
}
_ARITHMETIC: dict[str, Binary] = {"add": tirx.Add, "sub": tirx.Sub, "mul": tirx.Mul}
_LOGIC: dict[str, Binary] = {
    "and": tirx.bitwise_and,
    "min": tirx.bitwise_and,
    "or": tirx.bitwise_or,
    "max": tirx.bitwise_or,
    "xor": tirx.bitwise_xor,
}
_BITS: dict[str, Binary] = {
    "bit_and": tirx.bitwise_and,
    "bit_or": tirx.bitwise_or,
    "bit_xor": tirx.bitwise_xor,
}
_ROUNDINGS = {"floor": T.floor, "ceil": T.ceil, "round": T.round_even, "truncate": T.truncate}
_DOUBTFUL: dict[str, Callable[..., Expr]] = {
    "sin": float64_math.sin,
    "cos": float64_math.cos,
    "tan": float64_math.tan,
    "fmod": float64_math.modulo,
}
_FLOAT32_MATH = {"exp": float32_math.exp, "log": float32_math.log}


class Doubt:
    """How far numbers go beyond what the quick formula of an instruction suffices for.

    If they do, the work is done again, `careful`, which takes much longer.
    """

    def __init__(self, instruction: Instruction, lanes: int, has_fma: bool) -> None:
        self._lanes, self._kind = lanes, T.register_dtype(instruction.dtype)
        self._limit = 0.0 if instruction.operator == "fmod" else float64_math.LARGE_ANGLE
        self._most = 2.0**26 if self._kind == "float32" else 2.0**50 if has_fma else 1.0  # a quotient of `fmod`
        self._found = Register(lanes, T.constant(self._limit, lanes, self._kind), self._kind)

    def add(self, values: Sequence[Expr]) -> None:
        """Look at the sources of the instruction. NaN is passed over."""
        beyond = tirx.abs(values[0])
        if len(values) > 1:
            beyond = beyond - tirx.abs(values[1]) * T.constant(self._most, self._lanes, self._kind)
        self._found.set(tirx.Max(beyond, self._found.value))

    @property
    def is_justified(self) -> Expr:
        """Whether there has been such a number."""
        return T.lane_maximum(self._found, self._lanes, self._kind) > T.constant(self._limit, 1, self._kind)


def may_doubt(instruction: Instruction) -> bool:
    """Whether the quick formula of an instruction does not suffice for all numbers."""
    return instruction.operator in _DOUBTFUL and instruction.dtype in FLOATS


def evaluate(
    instruction: Instruction,
    values: list[Expr],
    dtype: str,
    lanes: int,
    careful: bool = False,
) -> Expr:
    """The result of an instruction, in registers; `values` are its sources, all of `dtype` but the first of `where`.

    `careful`: also of numbers that justify a `Doubt`.

    Raises KeyError for an operator that does not exist for this type.
    """
    name = instruction.operator
    if name == "constant":
        value = T.number(instruction.parameters[0], instruction.dtype, lanes)
        return value if instruction.parameters[0] else T.keep(value)  # TVM takes 0 times NaN for 0
    if name == "cast":
        return T.keep(T.convert(values[0], dtype, instruction.dtype, lanes))
    if name == "where":
        return T.keep(tirx.Select(T.holds(values[0], lanes), values[1], values[2]))
    if len(values) == 2 and values[0].same_as(values[1]):
        values = [values[0], T.keep(values[1])]  # TVM takes x - x for 0 and x for equal to itself, also if x is NaN
    if name in _COMPARISONS:
        return T.truth(_COMPARISONS[name](values[0], values[1]), lanes)
    if dtype == "bool":
        return T.keep(_logic(name, values, lanes))
    if name in ("is_nan", "is_inf"):
        return T.truth(_special(name, values[0], T.register_dtype(dtype), lanes), lanes)
    if dtype in FLOATS:
        return T.keep(_float(name, values, dtype, lanes, instruction.parameters, careful))
    return T.keep(_integer(name, values, dtype, lanes))


def _logic(name: str, values: list[Expr], lanes: int) -> Expr:
    one = T.constant(1, lanes, "uint8")
    return tirx.bitwise_xor(values[0], one) if name == "not" else _LOGIC[name](values[0], values[1])


def _special(name: str, x: Expr, kind: str, lanes: int) -> Expr:
    return T.is_nan(x, kind, lanes) if name == "is_nan" else tirx.EQ(tirx.abs(x), T.constant(float("inf"), lanes, kind))


def _float(
    name: str, values: list[Expr], dtype: str, lanes: int, parameters: tuple[float | int, ...], careful: bool
) -> Expr:
    kind = T.register_dtype(dtype)
    x = values[0]
    zero = T.constant(0.0, lanes, kind)
    if name in _ARITHMETIC:
        return _ARITHMETIC[name](x, values[1])
    if name in _ROUNDINGS:
        return _ROUNDINGS[name](x, kind, lanes)
    match name:
        case "div":
            return tirx.Div(x, values[1])
        case "min" | "max":
            return _extreme(name, x, values[1], kind, lanes)
        case "neg":
            return tirx.Mul(x, T.constant(-1.0, lanes, kind))
        case "abs":
            return tirx.abs(x)
        case "sign":
            one = T.constant(1.0, lanes, kind)
            sign = tirx.Select(x < zero, T.constant(-1.0, lanes, kind), zero)
            return tirx.Select(x > zero, one, T.keep(tirx.Select(T.is_nan(x, kind, lanes), x, T.keep(sign))))
        case "sqrt":
            return tirx.sqrt(x)
    if kind == "float32" and name in _FLOAT32_MATH:
        return _FLOAT32_MATH[name](x, lanes)
    if kind == "float32" and name in get_args(ActivationName):
        return activate(x, Activation(cast(ActivationName, name), *parameters), lanes)
    return _in_double(name, values, kind, lanes, careful)


def _in_double(name: str, values: list[Expr], kind: str, lanes: int, careful: bool) -> Expr:
    wide = [T.keep(T.convert(value, kind, "float64", lanes)) for value in values]
    match name:
        case "pow":
            result = float64_math.power(wide[0], wide[1], lanes)
        case "fmod" | "sin" | "cos" | "tan":
            result = _DOUBTFUL[name](*wide, lanes, careful)
        case _:
            result = float64_math.UNARY[name](wide[0], lanes)
    return T.convert(result, "float64", kind, lanes)


def _extreme(name: str, a: Expr, b: Expr, kind: str, lanes: int) -> Expr:
    """Maximum or minimum; NaN if either is: of two numbers that cannot be compared, TVM's take the second."""
    found = tirx.Max(a, b) if name == "max" else tirx.Min(a, b)
    return tirx.Select(T.is_nan(a, kind, lanes), a, T.keep(found))


def _integer(name: str, values: list[Expr], dtype: str, lanes: int) -> Expr:
    x, signed = values[0], np.iinfo(dtype).min < 0
    if name in _ARITHMETIC:
        # A register hides from TVM what was computed: it would reckon with numbers that cannot overflow.
        return Register(lanes, _ARITHMETIC[name](x, values[1]), dtype).value
    if name in _BITS:
        return _BITS[name](x, values[1])
    if name in _ROUNDINGS:
        return x
    zero = T.constant(0, lanes, dtype)
    match name:
        case "div":
            return _quotient(x, values[1], dtype, lanes)
        case "mod" | "fmod":
            return _remainder(name, x, values[1], dtype, lanes)
        case "pow":
            return _power(x, values[1], dtype, lanes)
        case "min":
            return tirx.Min(x, values[1])
        case "max":
            return tirx.Max(x, values[1])
        case "neg":
            return tirx.Sub(zero, x)
        case "abs":
            return tirx.Select(x < zero, T.keep(tirx.Sub(zero, x)), x) if signed else x
        case "sign":
            below = T.constant(-1, lanes, dtype) if signed else zero
            return tirx.Select(x > zero, T.constant(1, lanes, dtype), T.keep(tirx.Select(x < zero, below, zero)))
        case "bit_not":
            return tirx.bitwise_not(x)
        case "shift_left" | "shift_right":
            return _shift(name, x, values[1], dtype, lanes)
    raise KeyError(f"{name} of {dtype}")


def undivided(check: Check, x: Expr, y: Expr, dtype: str, lanes: int) -> Expr:
    """1 where x / y is what the check is for, else 0."""
    one, zero = T.constant(1, lanes, dtype), T.constant(0, lanes, dtype)
    if check == "zero":
        return T.keep(tirx.Select(tirx.EQ(y, zero), one, zero))
    least, minus = T.constant(np.iinfo(dtype).min, lanes, dtype), T.constant(-1, lanes, dtype)
    return T.keep(tirx.Select(tirx.And(tirx.EQ(x, least), tirx.EQ(y, minus)), one, zero))


def _quotient(x: Expr, y: Expr, dtype: str, lanes: int) -> Expr:
    """x / y towards zero. What a processor traps on is computed otherwise: x / 0 is 0, x / -1 is -x."""
    zero, one = T.constant(0, lanes, dtype), T.constant(1, lanes, dtype)
    nothing = tirx.EQ(y, zero)
    if np.iinfo(dtype).min == 0:
        return tirx.Select(nothing, zero, _divided(x, tirx.Select(nothing, one, y), dtype, lanes))
    minus = tirx.EQ(y, T.constant(-1, lanes, dtype))
    safe = T.keep(tirx.Select(tirx.Or(nothing, minus), one, y))
    result = tirx.Select(minus, T.keep(tirx.Sub(zero, x)), _divided(x, safe, dtype, lanes))
    return tirx.Select(nothing, zero, T.keep(result))


def _divided(x: Expr, y: Expr, dtype: str, lanes: int) -> Expr:
    """Through registers: TVM must not reason about the quotient."""
    return Register(lanes, tirx.truncdiv(Register(lanes, x, dtype).value, Register(lanes, y, dtype).value), dtype).value


def _remainder(name: str, x: Expr, y: Expr, dtype: str, lanes: int) -> Expr:
    """The rest of the division towards zero (fmod), or, with y's sign, of that towards -infinity. x mod 0 is x."""
    rest = T.keep(tirx.Sub(x, tirx.Mul(_quotient(x, y, dtype, lanes), y)))
    if name == "fmod" or np.iinfo(dtype).min == 0:
        return rest
    zero = T.constant(0, lanes, dtype)
    other = tirx.And(tirx.NE(rest, zero), T.keep(tirx.bitwise_xor(rest, y)) < zero)  # signs differ
    return tirx.Select(other, T.keep(tirx.Add(rest, y)), rest)


def _power(x: Expr, y: Expr, dtype: str, lanes: int) -> Expr:
    """By repeated squaring in float64, whose products are exact as far as they are in range, and cut as by a cast.

    A negative exponent gives 0, but of 0 what infinity is cut to, and of 1 and -1.
    """
    one, zero = T.constant(1, lanes, dtype), T.constant(0, lanes, dtype)
    # From 2^6 on all but 0, 1 and -1 overflow, of which only the exponent's lowest bit matters.
    limit = T.constant(62, lanes, dtype)
    count = T.keep(tirx.abs(y) if np.iinfo(dtype).min < 0 else y)
    count = T.keep(tirx.Select(count > limit, T.keep(limit + (count & one)), count))
    result = Register(lanes, T.constant(1.0, lanes, "float64"), "float64")
    base = Register(lanes, T.convert(x, dtype, "float64", lanes), "float64")
    for bit in range(6):
        taken = tirx.NE(count & T.constant(1 << bit, lanes, dtype), zero)
        result.set(tirx.Select(taken, result.value * base.value, result.value))
        base.set(base.value * base.value)
    cut = T.convert(result.value, "float64", dtype, lanes)
    if np.iinfo(dtype).min == 0:
        return cut
    unit = tirx.Or(tirx.EQ(x, one), tirx.EQ(x, T.constant(-1, lanes, dtype)))
    infinite = T.convert(T.constant(float("inf"), lanes, "float64"), "float64", dtype, lanes)
    inverse = T.keep(tirx.Select(tirx.EQ(x, zero), infinite, zero))
    return tirx.Select(tirx.Or(y >= zero, unit), cut, inverse)


def _shift(name: str, x: Expr, y: Expr, dtype: str, lanes: int) -> Expr:
    """By as many bits as there are, by more, or by fewer than none, everything is shifted out; what comes in is 0 or,
    from the left of a negative number, 1.
    """
    bits, zero = np.iinfo(dtype).bits, T.constant(0, lanes, dtype)
    inside = tirx.And(y >= zero, y < T.constant(bits, lanes, dtype))
    count = T.keep(tirx.Select(inside, y, zero))
    moved = T.keep(x << count if name == "shift_left" else x >> count)
    if name == "shift_left" or np.iinfo(dtype).min == 0:
        return tirx.Select(inside, moved, zero)
    emptied = T.keep(tirx.Select(x < zero, T.constant(-1, lanes, dtype), zero))
    return tirx.Select(inside, moved, emptied)
