"""What every kernel spec can tell: the base of all specs, and what a template makes of one."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

import numpy.typing as npt

Array = npt.NDArray[Any]
MOST_LANES = 16  # of any target

PackedWeights = tuple[Array, ...]  # in argument order, ready for weights.bin
Check = Literal["index", "zero", "least"]
"""Which number a kernel refuses: an index out of range, a divisor of 0, the least integer divided by -1."""

RawWeights = Mapping[str, Array]  # by the names that the spec states, as ONNX has them


@dataclass(frozen=True)
class KernelSpec:
    """Base of all specs. Specs are frozen and hashable: equal specs share one kernel."""

    @property
    def flops(self) -> int:
        """Arithmetic operations of one row; a multiply-add counts as two. Moving numbers is none."""
        return 0

    @property
    def text(self) -> str:
        """Shape for people, "64x56x56 -> 256x56x56 k1 s1"; empty if the output's shape says it all."""
        return ""

    @property
    def checks(self) -> tuple[Check, ...]:
        """What the kernel refuses. If anything, it has an argument more: two int64, see `artifact.format.Layer`."""
        return ()

    def with_halos(self, inputs: tuple[int, ...], output: int) -> Self:
        """The spec with the halos that its activations turned out to have, inputs in the order of the arguments."""
        return self


@dataclass(frozen=True)
class KernelPlan:
    """A spec with the template's knobs chosen: what will be compiled and how the executor must call it.

    `knobs` are the template's own (register tile, task blocking, loop order), sorted by name. Equal plans share one.
    """

    spec: KernelSpec
    knobs: tuple[tuple[str, int | str], ...]
    tasks: int
    description: str
    blocking_bytes: int
    parallelism: int


@dataclass(frozen=True)
class BatchPlan:
    """A second kernel that all plans of a spec share: up to `rows` rows in one call, in `tasks` tasks together."""

    spec: KernelSpec
    rows: int
    tasks: int
    description: str
