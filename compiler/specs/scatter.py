"""Specs of the kernels that put numbers at, or take them from, places which other numbers say."""

import math
from dataclasses import dataclass
from typing import Literal

from gangway.compiler.specs.base import Check, KernelSpec

ScatterReduction = Literal["none", "add", "mul", "max", "min"]


@dataclass(frozen=True)
class Picked:
    """An axis of y whose place an index says: its length, its stride, and where that index lies among its like."""

    length: int
    stride: int
    step: int


@dataclass(frozen=True)
class ScatterSpec(KernelSpec):
    """y = data, then for every update u[i, j, ...] in order: y[place] = y[place] `reduction` u.

    Arguments: data, indices, updates, y; all plain.

    The place is i strides[0] + j strides[1] + ... and, for each of `picked`, stride times the index that lies at
    i index_strides[0] + ... + step. Negative indices count from the end; one out of range is refused.
    """

    dtype: str
    index_dtype: Literal["int32", "int64"]
    elements: int  # of data and y
    shape: tuple[int, ...]  # of updates
    strides: tuple[int, ...]
    index_strides: tuple[int, ...]
    picked: tuple[Picked, ...]
    reduction: ScatterReduction = "none"

    @property
    def checks(self) -> tuple[Check, ...]:
        """Indices."""
        return ("index",)

    @property
    def flops(self) -> int:
        """Updates."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class GatherPlacesSpec(KernelSpec):
    """ONNX's GatherElements and GatherND: y[i, j, ...] = data[place], the place as in `ScatterSpec`.

    `item_bytes` is that of one number (1, 2, 4, 8); nothing but moving is done. Arguments: data, indices, y; all plain.
    """

    item_bytes: int
    index_dtype: Literal["int32", "int64"]
    elements: int  # of data
    shape: tuple[int, ...]  # of y
    strides: tuple[int, ...]
    index_strides: tuple[int, ...]
    picked: tuple[Picked, ...]

    @property
    def checks(self) -> tuple[Check, ...]:
        """Indices."""
        return ("index",)
