"""What the kernel of a fused attention must compute, as data; see `specs.py`."""

from dataclasses import dataclass
from typing import Literal

from gangway.artifact.format import Precision
from gangway.compiler.kernels.specs import KernelSpec, Layout


@dataclass(frozen=True)
class ScoreBias:
    """A plain float32 tensor added to attention scores: [windows or 1][heads or 1][queries or 1][keys].

    `scaled`: added before the scores are multiplied by `scale`, else after it.
    """

    per_head: bool
    per_query: bool
    scaled: bool = False
    per_window: bool = False


HeadStrides = tuple[int, ...]
"""Of a plain tensor: numbers from a window, a head, a position and a channel to the next. Of a blocked sequence:
channels from a head to the next; empty, if heads lie side by side.
"""
BLOCKED_HEADS: HeadStrides = ()
PLAIN_AXES = 4
EmptyRows = Literal["nan", "zero", "zero and nan"]


@dataclass(frozen=True)
class AttentionSpec(KernelSpec):
    """softmax(scale Q K^T + biases) V of every head and window; the scores of few queries exist at a time.

    Q, K, V and y are blocked sequences of heads x head_size channels (a head's channels side by side; those of V and y
    are `value_size`, if given), of `queries`, `keys`, `keys` and `queries` positions of each window, one window after
    the other. `strides` says which of them are plain instead, and where there are channels between heads. Heads of
    blocked tensors begin at multiples of MOST_LANES. Channels of a plain Q or y are neighbours. K and V have one head
    for `sharing` heads of Q.
    Arguments: q, k, v, one for each of `biases` (two at most), y.

    With `softcap` c, the scaled products s become c tanh(s / c) before biases are added. -inf and the lowest float hide
    a key. `empty_rows` says what a row of -inf only gives: NaN, as in ONNX, or 0; "zero and nan": a row with NaN, too.
    """

    flushes_subnormals = True

    heads: int
    head_size: int
    queries: int
    keys: int
    scale: float
    biases: tuple[ScoreBias, ...] = ()
    precision: Precision = "fp32"  # of products; with bf16, q, k and v are stored so
    output_layout: Layout = "blocked"
    windows: int = 1
    sharing: int = 1
    value_size: int = 0
    softcap: float = 0.0
    empty_rows: EmptyRows = "nan"
    strides: tuple[HeadStrides, ...] = (BLOCKED_HEADS,) * 4  # of q, k, v and y

    @property
    def value_channels(self) -> int:
        """Channels of a head of V and y."""
        return self.value_size or self.head_size

    def is_plain(self, index: int) -> bool:
        """Whether q, k, v or y, by number, is plain."""
        return len(self.strides[index]) == PLAIN_AXES

    @property
    def flops(self) -> int:
        """Arithmetic operations of one row, of both products."""
        products = self.windows * self.heads * self.queries * self.keys
        return 2 * products * (self.head_size + self.value_channels)
