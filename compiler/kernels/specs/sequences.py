"""Specs of the kernels of transformers.

A *sequence* is a tensor whose last axis are the channels: P positions (the product of all other axes of one row) of C
channels. Blocked, it is the blocked image of C channels and 1 x P pixels without a halo: [ceil(C/L)][P][L]. So a linear
layer over it is a 1x1 `ConvSpec`, residual and activation included. Surplus channels are finite.
"""

from dataclasses import dataclass
from typing import Literal

from gangway.compiler.kernels.specs.base import Check, KernelSpec


@dataclass(frozen=True)
class LayerNormSpec(KernelSpec):
    """(x - mean) / sqrt(variance + epsilon) * scale + shift over the channels of each position, blocked in and out.

    Arguments: x, scale, shift, y. Raw weights: "scale" [channels], "shift" [channels]. `centred` false: the mean is
    taken as 0 (RMS normalisation). y's surplus channels are zero.
    """

    channels: int
    positions: int
    epsilon: float
    centred: bool = True

    @property
    def flops(self) -> int:
        """Arithmetic operations of one row, roughly."""
        return 8 * self.channels * self.positions


@dataclass(frozen=True)
class ScoreBias:
    """A plain float32 tensor added to attention scores: [heads or 1][queries or 1][keys].

    `scaled`: added before the scores are multiplied by `scale`, else after it.
    """

    per_head: bool
    per_query: bool
    scaled: bool = False


@dataclass(frozen=True)
class AttentionSpec(KernelSpec):
    """softmax(scale Q K^T + biases) V of every head; the scores of few queries exist at a time.

    Q, K, V and y are blocked sequences of heads x head_size channels (a head's channels side by side), of `queries`,
    `keys`, `keys` and `queries` positions. `head_size` is a multiple of MOST_LANES. Arguments: q, k, v, one for each of
    `biases` (two at most), y. -inf and the lowest float hide a key; a row of -inf only gives NaN, as in ONNX.
    """

    heads: int
    head_size: int
    queries: int
    keys: int
    scale: float
    biases: tuple[ScoreBias, ...] = ()

    @property
    def flops(self) -> int:
        """Arithmetic operations of one row, of both products."""
        return 4 * self.heads * self.head_size * self.queries * self.keys


@dataclass(frozen=True)
class MatMulSpec(KernelSpec):
    """Products of plain float32 matrices: y[b] = scale A[b] B[b], y [batches][rows][columns] contiguous.

    Batch b of an operand begins at sum over `batch_shape` of index times batch stride (0 broadcasts); in it, element
    (i, j) lies at i strides[0] + j strides[1], in elements. Arguments: a, b, y.
    """

    batch_shape: tuple[int, ...]
    rows: int
    inner: int
    columns: int
    a_batch_strides: tuple[int, ...]
    b_batch_strides: tuple[int, ...]
    a_strides: tuple[int, int]
    b_strides: tuple[int, int]
    scale: float = 1.0

    @property
    def flops(self) -> int:
        """Arithmetic operations of one row."""
        total = 2 * self.rows * self.inner * self.columns
        for length in self.batch_shape:
            total *= length
        return total


@dataclass(frozen=True)
class GatherSpec(KernelSpec):
    """ONNX's Gather: data [outer][length][inner], indices [count] -> y [outer][count][inner]; negatives: from the end.

    `item_bytes` is that of one number (1, 2, 4, 8); nothing but moving is done. An index out of range is refused.
    Arguments: data, indices, y.
    """

    outer: int
    length: int
    inner: int
    count: int
    item_bytes: int
    index_dtype: Literal["int32", "int64"]

    @property
    def checks(self) -> tuple[Check, ...]:
        """Indices."""
        return ("index",)


@dataclass(frozen=True)
class SequencePackSpec(KernelSpec):
    """Plain float32 [positions][channels] to blocked, or back if `unpack`. Arguments: x, y. Surplus becomes zero.

    `position_stride`: numbers from one position of the plain tensor to the next, at least `channels`.
    """

    positions: int
    channels: int
    position_stride: int
    unpack: bool = False
