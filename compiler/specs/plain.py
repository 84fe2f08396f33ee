"""Specs of kernels over plain tensors that move numbers or reduce axes."""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from gangway.compiler.specs.base import KernelSpec

SegmentKind = Literal["run", "table", "fill"]


@dataclass(frozen=True)
class Segment:
    """`length` adjacent numbers of a line of y: x at `source`, `source` + `step`, ... ("run"), x where the table says,
    from its entry `source` on ("table"), or a constant ("fill").
    """

    kind: SegmentKind
    length: int
    source: int = 0
    step: int = 0


@dataclass(frozen=True)
class RemapSpec(KernelSpec):
    """y[i, j, ..., k] = x[t0[i] + t1[j] + ... + what `line` says of k], or `fill` where a table says -1.

    Arguments: x, one int32 array with the tables t0, t1, ... of the axes `outer`, then those of the line; y. `reach`
    is how many numbers of x there are.
    """

    dtype: str  # numpy's name
    outer: tuple[int, ...]
    line: tuple[Segment, ...]
    reach: int
    table: int  # entries of all tables
    fill: float | int = 0

    @property
    def length(self) -> int:
        """Numbers of a line."""
        return sum(segment.length for segment in self.line)


Reduction = Literal["sum", "wrapping_sum", "prod", "max", "min", "argmax", "argmin", "last_argmax", "last_argmin"]
Before = Literal["none", "abs", "square", "exp"]
After = Literal["none", "mean", "sqrt", "log"]


@dataclass(frozen=True)
class ReduceSpec(KernelSpec):
    """Numbers of a contiguous x [shape], reduced over some axes. y has the others, contiguous. Arguments: x, y.

    `before` is applied to each number, `after` to each result. y is of x's type; argmax and argmin, over one axis, give
    int64: the first or the last of equal ones. Neighbouring axes of the same kind should be given as one.

    Sums and products of integers are computed in float64, and are the largest or least integer where they overflow;
    wrapping sums are exact, and wrap around. The place of an extreme is 0 if the first number is NaN, others are passed
    over. All that is onnxruntime's.
    """

    dtype: str
    shape: tuple[int, ...]
    reduced: tuple[bool, ...]
    operator: Reduction
    before: Before = "none"
    after: After = "none"

    @property
    def number(self) -> str:
        """The type that totals have."""
        return "float64" if self.operator in ("sum", "prod") and np.dtype(self.dtype).kind in "iu" else self.dtype

    @property
    def flops(self) -> int:
        """Arithmetic operations of one row, roughly."""
        return math.prod(self.shape) * (16 if self.before == "exp" else 1)
