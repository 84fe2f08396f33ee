"""Quantisation, and operators that work on 8-bit integers."""

from typing import Any

import numpy as np

from benchmarks.fuzz.differential.draft import Draft
from benchmarks.fuzz.differential.rules.images import image, window
from benchmarks.fuzz.differential.rules.registry import rule

_EIGHT = ("uint8", "int8")


def scale(draft: Draft, shape: list[int] | None = None) -> str:
    """A positive scale, or one for each channel."""
    value = draft.random.choice([0.5, 0.25, 1.0, 0.1, 0.02, 2.0, 0.0078125], shape or [])
    return draft.given(value, _constant(draft), "float32")


def zero(draft: Draft, dtype: str, shape: list[int] | None = None) -> str:
    """A zero point, or one for each channel."""
    if np.dtype(dtype).itemsize == 4:
        return draft.given(np.zeros(shape or [], dtype), _constant(draft))
    return draft.given(draft.numbers(shape or [], dtype, draft.pick("finite", "plain", "")), _constant(draft))


def _constant(draft: Draft) -> float:
    """The share of constants among scales and zero points: com.microsoft's operators make tables of them."""
    return 1 if draft.domain else 0.8


@rule("QuantizeLinear", "DequantizeLinear")
def rounded(draft: Draft) -> None:
    """With one scale, or one for each channel."""
    shape = draft.shape(1, 4)
    axis = draft.axis(len(shape))
    parameters = [shape[axis]] if draft.chance(0.35) and draft.opset >= 13 and shape[axis] else None
    attributes: dict[str, Any] = {"axis": axis} if parameters else {}
    kinds = ("uint8", "int8", "uint16", "int16", "int32")
    if draft.operator == "QuantizeLinear":
        parameter = "T2" if draft.opset < 23 else "T3"
        dtype = draft.type_of(parameter, *kinds[: 4 if draft.opset >= 21 else 2])
        x = draft.tensor(shape, "float32", draft.pick("", "finite", "plain"))
        factor = scale(draft, parameters)
        left_out = dtype == "uint8" and draft.chance(0.3)
        draft.finish(x, factor, *([] if left_out else [zero(draft, dtype, parameters)]), **attributes)
        return
    dtype = draft.type_of("T" if draft.opset < 19 else "T1", *kinds)
    x = draft.tensor(shape, dtype)
    factor = scale(draft, parameters)
    left_out = dtype == "int32" or draft.chance(0.2)
    draft.finish(x, factor, *([] if left_out else [zero(draft, dtype, parameters)]), **attributes)


@rule("DynamicQuantizeLinear")
def rounded_by_range(draft: Draft) -> None:
    """By a scale that the numbers themselves give."""
    draft.finish(draft.tensor(draft.shape(1), "float32", draft.pick("plain", "ties", "finite")), outputs=3)


@rule("QLinearMatMul")
def product(draft: Draft) -> None:
    """A product of quantised matrices."""
    a, b, result = draft.pick(*_EIGHT), draft.pick(*_EIGHT), draft.pick(*_EIGHT)
    if a == "int8":
        b = result = "int8"
    rows, inner, columns = (draft.whole(1, 8) for _ in range(3))
    x = draft.tensor([*draft.shape(0, 1, empty=0), rows, inner], a)
    ranges = [columns] if draft.chance(0.2) else None
    parts = [x, scale(draft), zero(draft, a)]
    parts += [draft.weight(draft.numbers([inner, columns], b)), scale(draft, ranges), zero(draft, b, ranges)]
    draft.finish(*parts, scale(draft), zero(draft, a if draft.opset < 21 else result))


@rule("QLinearConv")
def convolved(draft: Draft) -> None:
    """A convolution of quantised images."""
    kernel, attributes = window(draft, draft.pick(1, 2, 2))
    group = draft.pick(1, 1, 2)
    inputs, outputs = group * draft.whole(1, 3), group * draft.whole(1, 3)
    dtype = draft.pick(*_EIGHT)
    weights = "int8" if dtype == "int8" else draft.pick(*_EIGHT)
    x = draft.tensor([1, inputs, *image(draft, kernel, attributes)], dtype)
    ranges = [outputs] if draft.chance(0.3) else None
    w = draft.weight(draft.numbers([outputs, inputs // group, *kernel], weights))
    zeros = draft.weight(np.zeros(ranges or [], weights)) if ranges else zero(draft, weights)
    bias = [draft.weight(draft.numbers([outputs], "int32", "finite"))] if draft.chance(0.4) else []
    draft.finish(
        x,
        scale(draft),
        zero(draft, dtype),
        w,
        scale(draft, ranges),
        zeros,
        scale(draft),
        zero(draft, dtype),
        *bias,
        group=group,
        kernel_shape=draft.pick(None, kernel),
        **attributes,
    )


@rule("QLinearAdd", "QLinearMul", domain="ms")
def of_two(draft: Draft) -> None:
    """Two operands that are broadcast."""
    dtype, shape = draft.pick(*_EIGHT), draft.shape(1, empty=0)
    parts = [draft.tensor(shape, dtype), scale(draft), zero(draft, dtype)]
    parts += [draft.tensor(draft.like(shape), dtype, constant=0.4), scale(draft), zero(draft, dtype)]
    draft.finish(*parts, scale(draft), zero(draft, dtype))


@rule("QLinearSigmoid", "QLinearLeakyRelu", domain="ms")
def of_one(draft: Draft) -> None:
    """A function of each element."""
    dtype = draft.pick(*_EIGHT)
    alpha = draft.pick(None, 0.1) if draft.operator == "QLinearLeakyRelu" else None
    x = draft.tensor(draft.shape(1, empty=0), dtype)
    draft.finish(x, scale(draft), zero(draft, dtype), scale(draft), zero(draft, dtype), alpha=alpha)


@rule("QLinearSoftmax", domain="ms")
def softmax(draft: Draft) -> None:
    """A softmax of quantised numbers."""
    dtype, shape = draft.pick(*_EIGHT), draft.shape(1, 3, empty=0)
    x = draft.tensor(shape, dtype)
    out = draft.weight(np.float32(1 / 256)), draft.weight(np.array(0 if dtype == "uint8" else -128, dtype))
    draft.finish(x, scale(draft), zero(draft, dtype), *out, axis=len(shape) - 1, opset=13)


@rule("QLinearConcat", domain="ms")
def joined(draft: Draft) -> None:
    """Parts with scales of their own."""
    dtype, shape = draft.pick(*_EIGHT), draft.shape(1, 3, empty=0)
    axis = draft.axis(len(shape))
    parts = [draft.tensor(shape, dtype)]
    own = [scale(draft), zero(draft, dtype), *parts, scale(draft), zero(draft, dtype)]
    own += [draft.tensor(shape, dtype), scale(draft), zero(draft, dtype)]
    draft.finish(*own, axis=axis)


@rule("QLinearAveragePool", "QLinearGlobalAveragePool", domain="ms")
def pooled(draft: Draft) -> None:
    """Means of quantised pixels."""
    dtype = draft.pick(*_EIGHT)
    kernel, attributes = window(draft, 2, False)
    shape = [1, draft.whole(1, 3), *image(draft, kernel, attributes)]
    x = draft.tensor(shape, dtype)
    parts = [x, scale(draft), zero(draft, dtype), scale(draft), zero(draft, dtype)]
    if draft.operator == "QLinearGlobalAveragePool":
        draft.finish(*parts)
    else:
        draft.finish(*parts, kernel_shape=kernel, count_include_pad=draft.pick(None, 1), **attributes)


@rule("QLinearWhere", domain="ms")
def chosen(draft: Draft) -> None:
    """One operand or another."""
    dtype, shape = draft.pick(*_EIGHT), draft.shape(1, empty=0)
    condition = draft.tensor(shape, "bool")
    x = [draft.tensor(shape, dtype), scale(draft), zero(draft, dtype)]
    y = [draft.tensor(draft.like(shape), dtype), scale(draft), zero(draft, dtype)]
    draft.finish(condition, *x, *y, scale(draft), zero(draft, dtype))


@rule("MatMulIntegerToFloat", "DynamicQuantizeMatMul", domain="ms")
def to_floats(draft: Draft) -> None:
    """Products whose results are floats."""
    rows, inner, columns = (draft.whole(1, 8) for _ in range(3))
    b = draft.pick(*_EIGHT)
    draft.sums(1e-3, 1e-3)
    weights = draft.numbers([inner, columns], b)
    if draft.operator == "DynamicQuantizeMatMul":
        x = draft.tensor([rows, inner], "float32", "plain")
        draft.finish(x, draft.weight(weights), scale(draft), zero(draft, b))
        return
    a = draft.pick("uint8", "int8") if b == "int8" else "uint8"
    x = draft.tensor([rows, inner], a)
    draft.finish(x, draft.weight(weights), scale(draft), scale(draft), zero(draft, a), zero(draft, b))


@rule("QGemm", domain="ms")
def general_product(draft: Draft) -> None:
    """A product with an addend."""
    rows, inner, columns = (draft.whole(1, 8) for _ in range(3))
    dtype = draft.pick(*_EIGHT)
    b = "int8" if dtype == "int8" else draft.pick(*_EIGHT)
    x = draft.tensor([rows, inner], dtype)
    parts = [x, scale(draft), zero(draft, dtype), draft.weight(draft.numbers([inner, columns], b)), scale(draft)]
    parts += [zero(draft, b), draft.weight(draft.numbers([columns], "int32", "plain")) if draft.chance(0.5) else ""]
    draft.sums(1e-3, 1e-3)
    draft.finish(*parts, *([scale(draft), zero(draft, dtype)] if draft.chance(0.6) else []))


@rule("QLinearReduceMean", domain="ms")
def mean(draft: Draft) -> None:
    """Means over some axes."""
    dtype, shape = draft.pick(*_EIGHT), draft.shape(1, 3, empty=0)
    x = draft.tensor(shape, dtype)
    axes = sorted(draft.random.permutation(len(shape))[: draft.whole(1, len(shape))].tolist())
    draft.finish(
        x, scale(draft), zero(draft, dtype), scale(draft), zero(draft, dtype), axes=axes, keepdims=draft.pick(0, 1)
    )
