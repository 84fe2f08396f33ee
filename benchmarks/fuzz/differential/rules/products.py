"""Matrix products, sums of products, and transforms."""

import numpy as np

from benchmarks.fuzz.differential.draft import Draft
from benchmarks.fuzz.differential.rules.registry import rule


@rule("MatMul")
def product(draft: Draft) -> None:
    """Of matrices in batches, or of vectors."""
    dtype = draft.type_of("T", "float32", "float32", "int32", "int64", "uint32", "float16")
    rows, inner, columns = (draft.whole(1, 9) for _ in range(3))
    batch = draft.shape(0, 2, empty=0)
    left, right = [*batch, rows, inner], [*draft.like(batch), inner, columns]
    if draft.chance(0.1):
        right = [inner]
    elif draft.chance(0.1):
        left = [inner]
    # Of halves, and of a vector, onnxruntime leaves an empty sum unwritten.
    if draft.chance(0.05) and dtype != "float16" and min(len(left), len(right)) > 1:
        left[-1] = right[-2 if len(right) > 1 else 0] = 0
    kind = "sums" if np.dtype(dtype).kind == "f" and draft.chance(0.4) else "plain"
    draft.sums()
    draft.finish(draft.tensor(left, dtype, kind), draft.weight(draft.numbers(right, dtype, kind)))


@rule("MatMulInteger")
def integer_product(draft: Draft) -> None:
    """Of 8-bit integers, with zero points."""
    a, b = draft.type_of("T1"), draft.type_of("T2")
    rows, inner, columns = (draft.whole(1, 9) for _ in range(3))
    x, y = draft.tensor([rows, inner], a), draft.weight(draft.numbers([inner, columns], b))
    zeros = []
    if draft.chance(0.6):
        zeros.append(draft.weight(draft.numbers([], a, "finite")))
        if draft.chance(0.6):
            zeros.append(draft.weight(draft.numbers(draft.pick([], [columns]), b, "finite")))
    draft.finish(x, y, *zeros)


@rule("Gemm")
def general_product(draft: Draft) -> None:
    """With factors, transpositions and an addend."""
    dtype = draft.type_of("T", "float32", "float32", "int32", "float16")
    rows, inner, columns = (draft.whole(1, 9) for _ in range(3))
    left, right = draft.pick(None, 0, 1), draft.pick(None, 0, 1)
    a = draft.tensor([inner, rows] if left else [rows, inner], dtype, "plain")
    b = draft.weight(draft.numbers([columns, inner] if right else [inner, columns], dtype, "plain"))
    shape = draft.pick([], [1], [columns], [rows, 1], [1, columns], [rows, columns])
    c = [draft.weight(draft.numbers(shape, dtype, "plain"))] if draft.opset < 11 or draft.chance(0.7) else []
    draft.sums()
    factors = {} if np.dtype(dtype).kind != "f" else {"alpha": draft.pick(None, 0.5), "beta": draft.pick(None, 2.0)}
    draft.finish(a, b, *c, transA=left, transB=right, **factors)


@rule("Einsum")
def summed(draft: Draft) -> None:
    """Products by a formula."""
    formula, *ranks = draft.pick(
        ("ij,jk->ik", "ij", "jk"),
        ("bij,bjk->bik", "bij", "bjk"),
        ("ij->ji", "ij"),
        ("ii->i", "ii"),
        ("ij->", "ij"),
        ("ij,ij->i", "ij", "ij"),
        ("i,j->ij", "i", "j"),
        ("bhid,bhjd->bhij", "bhid", "bhjd"),
        ("ij,jk", "ij", "jk"),
        ("...ij,...jk->...ik", "bij", "bjk"),
        ("ijk,k->ij", "ijk", "k"),
        ("ij,kj->ik", "ij", "kj"),
        ("ijk->kj", "ijk"),
        ("bqd,bkd->bqk", "bqd", "bkd"),
        (" i j , j k -> k i", "ij", "jk"),
    )
    sizes = {letter: draft.whole(1, 4) for letter in "ijkbhdqk"}
    dtype = draft.type_of("T", "float32", "float32", "int32", "int64")
    draft.sums()
    parts = [draft.tensor([sizes[letter] for letter in rank], dtype, "plain", 0.4) for rank in ranks]
    draft.finish(*parts, equation=formula)


@rule("Det")
def determinant(draft: Draft) -> None:
    """Of square matrices."""
    size = draft.whole(1, 3)
    draft.sums(1e-3, 1e-4)
    draft.finish(draft.tensor([*draft.shape(0, 1, empty=0), size, size], "float32", "plain"))


@rule("DFT")
def transformed(draft: Draft) -> None:
    """Frequencies of signals."""
    shape = [draft.whole(1, 2), draft.whole(2, 8), draft.pick(1, 2)]
    draft.sums(1e-3, 1e-4)
    x = draft.tensor(shape, "float32", "plain")
    if draft.opset < 20:
        draft.finish(x, axis=1, inverse=0, onesided=draft.pick(None, 0, 1) if shape[-1] == 1 else None)
        return
    onesided = draft.pick(None, 0, 1) if shape[-1] == 1 else None
    draft.finish(x, "", draft.given(np.int64(1), 1), onesided=onesided)


@rule("BlackmanWindow", "HannWindow", "HammingWindow")
def windowed(draft: Draft) -> None:
    """Weights of a window."""
    draft.sums(1e-3, 1e-4)
    draft.finish(draft.given(np.int64(draft.whole(1, 9))), periodic=draft.pick(None, 0, 1))


@rule("MelWeightMatrix")
def of_pitch(draft: Draft) -> None:
    """Weights of frequencies as ears have them."""
    numbers = [
        draft.given(draft.pick(4, 8), 0.8, "int64"),
        draft.given(16, 0.8, "int64"),
        draft.given(8000, 0.8, "int64"),
    ]
    draft.sums(1e-3, 1e-4)
    draft.finish(*numbers, draft.given(np.float32(20), 0.8), draft.given(np.float32(3500), 0.8))


@rule("STFT")
def framed(draft: Draft) -> None:
    """Frequencies of windows of a signal."""
    x = draft.tensor([draft.whole(1, 2), draft.whole(8, 16), 1], "float32", "plain")
    length = draft.pick(4, 8)
    step = draft.given(draft.whole(1, 4), 1, "int64")  # servers try models with zeros
    window = draft.given(draft.numbers([length], "float32", "plain"), 0.5) if draft.chance(0.6) else ""
    draft.sums(1e-3, 1e-4)
    draft.finish(x, step, window, "" if window else draft.given(length, 1, "int64"), onesided=draft.pick(None, 0, 1))
