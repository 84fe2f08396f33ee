"""Operators that compute each element by itself."""

import numpy as np

from benchmarks.fuzz.differential.draft import Draft, LeftOutError
from benchmarks.fuzz.differential.numbers import Array
from benchmarks.fuzz.differential.rules.registry import rule

TYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32"),
    "float64",
)
_CASTS = {
    "float32": 1,
    "uint8": 2,
    "int8": 3,
    "uint16": 4,
    "int16": 5,
    "int32": 6,
    "int64": 7,
    "object": 8,
    "bool": 9,
    "float16": 10,
    "float64": 11,
    "uint32": 12,
    "uint64": 13,
}


@rule(
    "Abs",
    "Acos",
    "Acosh",
    "Asin",
    "Asinh",
    "Atan",
    "Atanh",
    "Ceil",
    "Cos",
    "Cosh",
    "Erf",
    "Exp",
    "Floor",
    "HardSwish",
    "IsNaN",
    "Log",
    "Mish",
    "Neg",
    "Reciprocal",
    "Relu",
    "Round",
    "Sigmoid",
    "Sign",
    "Sin",
    "Sinh",
    "Softplus",
    "Softsign",
    "Sqrt",
    "Tan",
    "Tanh",
    "Not",
    "BitwiseNot",
    "Identity",
)
def unary(draft: Draft) -> None:
    """One operand, no attribute."""
    parameter = {"IsNaN": "T1", "Identity": "V"}.get(draft.operator, "T")
    if draft.operator == "Identity" and draft.opset < 14:
        parameter = "T"
    draft.finish(draft.tensor(draft.shape(), draft.type_of(parameter)))


@rule("IsInf")
def is_infinite(draft: Draft) -> None:
    """Infinities of either sign."""
    x = draft.tensor(draft.shape(), draft.type_of("T1"))
    draft.finish(x, detect_negative=draft.pick(None, 0, 1), detect_positive=draft.pick(None, 0, 1))


@rule("Elu", "Celu", "LeakyRelu", "ThresholdedRelu", "Selu", "HardSigmoid", "Shrink", "Swish", "Gelu")
def with_numbers(draft: Draft) -> None:
    """One operand, and attributes that are numbers."""
    names = {"Selu": ("alpha", "gamma"), "HardSigmoid": ("alpha", "beta"), "Shrink": ("bias", "lambd"), "Gelu": ()}.get(
        draft.operator, ("alpha",)
    )
    values = {name: draft.pick(None, 0.0, 0.5, 1.0, 2.0, -0.7) for name in names}
    if draft.operator == "Celu" and not values["alpha"]:
        values["alpha"] = 0.7  # it divides by it
    if draft.operator == "Gelu":
        values = {"approximate": draft.pick(None, "none", "tanh")}
    x = draft.tensor(draft.shape(), draft.type_of(*(["T"] if draft.operator != "Celu" else ["T", "float32"])))
    draft.finish(x, **values)


@rule(
    "Add",
    "Sub",
    "Mul",
    "And",
    "Or",
    "Xor",
    "Equal",
    "Greater",
    "GreaterOrEqual",
    "Less",
    "LessOrEqual",
    "BitwiseAnd",
    "BitwiseOr",
    "BitwiseXor",
    "PRelu",
    "Pow",
)
def binary(draft: Draft) -> None:
    """Two operands that are broadcast."""
    dtype = draft.type_of()
    shape = draft.shape()
    x, y = draft.numbers(shape, dtype), draft.numbers(draft.like(shape), dtype)
    if draft.operator == "Pow":
        if draft.opset >= 12:
            kind = draft.type_of("T1")
            y = draft.numbers(y.shape, kind, draft.pick("", "plain", "ties"))
        if draft.chance(0.3):
            y = np.full((), draft.pick(2, 3, 0, 1, 0.5 if y.dtype.kind == "f" else 4), y.dtype)
    elif draft.operator != "PRelu" and draft.chance(0.3):
        x, y = y, x
    if draft.operator == "Equal" and draft.chance(0.5) and x.shape == y.shape and x.size:
        y = np.where(draft.random.random(x.shape) < 0.5, x, y).astype(dtype)
    draft.finish(draft.given(x), draft.given(y, 0.4))


@rule("Div", "Mod")
def divided(draft: Draft) -> None:
    """A quotient or a remainder. The least integer by -1 has none, and some machines stop there."""
    fmod = draft.pick(None, 0, 1) if draft.operator == "Mod" else None
    dtype = draft.type_of()
    if draft.operator == "Mod" and np.dtype(dtype).kind == "f":
        fmod = 1
    shape = draft.shape()
    x, y = draft.numbers(shape, dtype), draft.numbers(draft.like(shape), dtype)
    if y.dtype.kind in "iu":
        y = np.where(y == 0, 3, y).astype(dtype)
        if y.dtype.kind == "i":
            x = np.where(x == np.iinfo(dtype).min, np.iinfo(dtype).min + 1, x).astype(dtype)
    draft.finish(draft.given(x), draft.given(y, 0.4), fmod=fmod)


@rule("BitShift")
def shifted(draft: Draft) -> None:
    """Shifts by less than a number has bits; by more has no meaning in C."""
    dtype = draft.type_of()
    shape = draft.shape()
    bits = np.iinfo(dtype).bits
    by = draft.random.integers(0, bits, draft.like(shape)).astype(dtype)
    draft.finish(draft.tensor(shape, dtype), draft.given(by, 0.4), direction=draft.pick("LEFT", "RIGHT"))


@rule("Max", "Min", "Mean", "Sum")
def several(draft: Draft) -> None:
    """Any number of operands."""
    dtype, shape = draft.type_of(), draft.shape()
    first = draft.tensor(shape, dtype)
    others = [shape if draft.opset < 8 else draft.like(shape) for _ in range(draft.whole(0, 3))]
    draft.finish(first, *(draft.tensor(other, dtype, constant=0.3) for other in others))


@rule("Clip")
def clipped(draft: Draft) -> None:
    """Between bounds, one of which may be left out, or above the other."""
    dtype, shape = draft.type_of(), draft.shape()
    x = draft.tensor(shape, dtype)
    low, high = sorted(draft.random.integers(0, 5, 2).tolist())
    if draft.opset < 11:
        draft.finish(x, min=draft.pick(None, float(low)), max=draft.pick(None, float(high), -1.0))
        return
    bounds = ["" if draft.chance(0.25) else draft.weight(np.array(value, dtype)) for value in (low, high)]
    draft.finish(x, *bounds)


@rule("Where")
def chosen(draft: Draft) -> None:
    """One operand or another."""
    dtype, shape = draft.type_of(), draft.shape()
    condition = draft.tensor(draft.like(shape), "bool")
    draft.finish(
        condition, draft.tensor(shape, dtype, constant=0.2), draft.tensor(draft.like(shape), dtype, constant=0.3)
    )


@rule("Cast")
def converted(draft: Draft) -> None:
    """From one type to another; out of range only integers, whose bits are cut, and floats to floats."""
    source, target = draft.type_of("T1"), draft.type_of("T2")
    value = draft.numbers(draft.shape(), source)
    if source == "object" or target == "object":
        raise LeftOutError("texts of numbers")
    draft.finish(draft.given(_convertible(draft, value, target)), to=_CASTS[target])


def _convertible(draft: Draft, value: Array, target: str) -> Array:
    """Numbers of which a conversion has a meaning in C, mostly; the others differ from machine to machine."""
    if value.dtype.kind != "f" or np.dtype(target).kind not in "iu" or draft.chance(0.3):
        return value
    limits = np.iinfo(target)
    least, most = max(limits.min, -(2**30)), min(limits.max, 2**30)
    wide = np.nan_to_num(value.astype("f8"), nan=0, posinf=1, neginf=0)
    return np.asarray(np.clip(wide, least, most), value.dtype)


@rule("CastLike")
def converted_like(draft: Draft) -> None:
    """The same, as another tensor is."""
    source, target = draft.type_of("T1", *TYPES), draft.type_of("T2", *TYPES)
    value = _convertible(draft, draft.numbers(draft.shape(), source), target)
    draft.finish(draft.given(value), draft.tensor([1], target, constant=0.5))


@rule("Dropout")
def dropped(draft: Draft) -> None:
    """Nothing is, when a model is served."""
    x = draft.tensor(draft.shape(), draft.type_of())
    outputs = draft.pick(1, 1, 2)
    if draft.opset < 12:
        draft.finish(x, outputs=outputs, ratio=draft.pick(None, 0.3))
        return
    draft.finish(x, *([draft.weight(np.float32(0.4))] if draft.chance(0.3) else []), outputs=outputs)
