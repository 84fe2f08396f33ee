"""Other operators of com.microsoft."""

from typing import Any

import numpy as np

from benchmarks.fuzz.differential.draft import Draft
from benchmarks.fuzz.differential.rules.images import image, window
from benchmarks.fuzz.differential.rules.registry import rule

_ACTIVATIONS: tuple[tuple[str, list[float] | None], ...] = (
    ("Relu", None),
    ("Tanh", None),
    ("Sigmoid", None),
    ("LeakyRelu", [0.2]),
    ("Clip", [-0.5, 0.5]),
    ("HardSigmoid", [0.3, 0.4]),
)


@rule("FusedConv", domain="ms")
def convolved(draft: Draft) -> None:
    """A convolution with its activation."""
    kernel, attributes = window(draft, 2)
    inputs, outputs = draft.whole(1, 3), draft.whole(1, 3)
    x = draft.tensor([1, inputs, *image(draft, kernel, attributes)], "float32", "plain")
    w = draft.weight(draft.numbers([outputs, inputs, *kernel], "float32", "plain"))
    bias = [draft.weight(draft.numbers([outputs], "float32", "plain"))] if draft.chance(0.6) else []
    name, parameters = draft.pick(*_ACTIVATIONS)
    draft.sums()
    draft.finish(x, w, *bias, kernel_shape=kernel, activation=name, activation_params=parameters, **attributes)


@rule("FusedGemm", domain="ms")
def product(draft: Draft) -> None:
    """A product with its activation."""
    rows, inner, columns = (draft.whole(1, 8) for _ in range(3))
    a, b = (
        draft.tensor([rows, inner], "float32", "plain"),
        draft.weight(draft.numbers([inner, columns], "float32", "plain")),
    )
    c = draft.weight(draft.numbers([columns], "float32", "plain"))
    draft.sums()
    draft.finish(
        a,
        b,
        c,
        activation=draft.pick("Relu", "LeakyRelu"),
        activation_alpha=draft.pick(None, 0.2),
        alpha=draft.pick(None, 0.5),
    )


@rule("FusedMatMul", "TransposeMatMul", "FusedMatMulActivation", domain="ms")
def transposed_product(draft: Draft) -> None:
    """A product of transposed matrices."""
    rows, inner, columns = (draft.whole(1, 8) for _ in range(3))
    left, right = draft.pick(None, 0, 1), draft.pick(None, 0, 1)
    batch = draft.shape(0, 1, empty=0)
    a = draft.tensor([*batch, *([inner, rows] if left else [rows, inner])], "float32", "plain")
    b = draft.weight(draft.numbers([*batch, *([columns, inner] if right else [inner, columns])], "float32", "plain"))
    draft.sums()
    draft.finish(
        a,
        b,
        transA=left,
        transB=right,
        alpha=draft.pick(None, 0.5, 0.0),
        activation=draft.pick("Relu", "Tanh") if draft.operator == "FusedMatMulActivation" else None,
    )


@rule("Gelu", "QuickGelu", domain="ms")
def gelu(draft: Draft) -> None:
    """One operand."""
    alpha = draft.pick(None, 1.0, 1.702) if draft.operator == "QuickGelu" else None
    draft.finish(draft.tensor(draft.shape(1), "float32"), alpha=alpha)


@rule("BiasGelu", "FastGelu", domain="ms")
def gelu_of_sum(draft: Draft) -> None:
    """With a bias for the last axis."""
    shape = draft.shape(1, empty=0)
    bias = [draft.weight(draft.numbers(shape[-1:], "float32", "plain"))]
    draft.finish(draft.tensor(shape, "float32"), *(bias if draft.operator == "BiasGelu" or draft.chance(0.6) else []))


@rule("SkipLayerNormalization", "SkipSimplifiedLayerNormalization", domain="ms")
def skipped(draft: Draft) -> None:
    """Of a sum."""
    shape = [draft.whole(1, 2), draft.whole(1, 3), draft.whole(1, 8)]
    parts = [draft.given(draft.numbers(shape, "float32", "plain")) for _ in range(2)]
    vectors = [draft.weight(draft.numbers(shape[-1:], "float32", "plain"))]
    if draft.operator == "SkipLayerNormalization":
        vectors.append(draft.weight(draft.numbers(shape[-1:], "float32", "plain")) if draft.chance(0.7) else "")
    if draft.chance(0.4):
        vectors.append(draft.weight(draft.numbers(shape[-1:], "float32", "plain")))
    draft.sums(1e-3, 1e-4)
    draft.finish(*parts, *vectors, epsilon=draft.pick(None, 1e-3))


@rule("EmbedLayerNormalization", domain="ms")
def embedded(draft: Draft) -> None:
    """Words, positions and segments."""
    batch, length, hidden = draft.whole(1, 2), draft.whole(1, 4), draft.whole(2, 8)
    words = draft.given(draft.random.integers(0, 6, [batch, length]), 0, "int32")
    segments = draft.given(draft.random.integers(0, 2, [batch, length]), 0, "int32")
    tables: list[Any] = [draft.weight(draft.numbers([rows, hidden], "float32", "plain")) for rows in (6, 5, 2)]
    ends = [draft.weight(draft.numbers([hidden], "float32", "plain")) for _ in range(2)]
    draft.sums(1e-3, 1e-4)
    draft.finish(words, segments, *tables, *ends, outputs=2)


@rule("MatMulNBits", domain="ms")
def packed(draft: Draft) -> None:
    """Weights of 4 bits, in blocks."""
    inner, columns, block = draft.pick(16, 32, 64), draft.whole(1, 5), draft.pick(16, 32)
    blocks = -(-inner // block)
    x = draft.tensor([draft.whole(1, 3), inner], "float32", "plain")
    codes = draft.given(draft.random.integers(0, 256, [columns, blocks, block // 2]), 1, "uint8")
    scales = draft.given(draft.random.random(columns * blocks), 1, "float32")
    zeros = (
        [draft.given(draft.random.integers(0, 256, columns * -(-blocks // 2)), 1, "uint8")] if draft.chance(0.5) else []
    )
    draft.sums(1e-3, 1e-3)
    draft.finish(
        x, codes, scales, *zeros, K=inner, N=columns, bits=4, block_size=block, accuracy_level=draft.pick(None, 1)
    )


@rule("NhwcMaxPool", domain="ms")
def pooled(draft: Draft) -> None:
    """Pixels whose channels come last."""
    kernel, attributes = window(draft, 2)
    height, width = image(draft, kernel, attributes)
    x = draft.tensor([1, height, width, draft.whole(1, 3)], draft.pick("uint8", "int8"))
    draft.finish(x, kernel_shape=kernel, **attributes)


@rule("DynamicQuantizeLSTM", domain="ms")
def recurrent(draft: Draft) -> None:
    """With weights of 8 bits."""
    steps, inputs, hidden = draft.whole(1, 3), draft.whole(1, 4), draft.whole(1, 4)
    x = draft.tensor([steps, 1, inputs], "float32", "unit")
    w, r = (draft.weight(draft.numbers([1, size, 4 * hidden], "int8", "finite")) for size in (inputs, hidden))
    bias = draft.weight(draft.numbers([1, 8 * hidden], "float32", "unit"))
    scales = [draft.weight(np.array([0.01], np.float32)) for _ in range(2)]
    zeros = [draft.weight(np.zeros(1, np.int8)) for _ in range(2)]
    draft.sums(1e-2, 1e-2)
    draft.finish(x, w, r, bias, "", "", "", "", scales[0], zeros[0], scales[1], zeros[1], hidden_size=hidden)


@rule("LayerNormalization", "SimplifiedLayerNormalization", domain="ms")
def normalised(draft: Draft) -> None:
    """Over the last axes."""
    shape = draft.shape(1, 3, empty=0)
    x = draft.tensor(shape, "float32", draft.pick("plain", "ties"))
    parts = [draft.weight(draft.numbers(shape[-1:], "float32", "plain"))]
    if draft.operator == "LayerNormalization" and draft.chance(0.6):
        parts.append(draft.weight(draft.numbers(shape[-1:], "float32", "plain")))
    draft.sums(1e-3, 1e-4)
    draft.finish(x, *parts, axis=-1, epsilon=draft.pick(None, 1e-2))
