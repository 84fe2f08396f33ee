"""In which precision a model's kernels multiply, as it is asked for, and what came of it."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

FP32: Final = "fp32"
BF16: Final = "bf16"
AUTO: Final = "auto"  # bf16 where the processor has instructions for it
DEADLINE: Final = "deadline"  # both: the scheduler takes bf16 for a request that would be late in fp32
PRECISIONS: Final = (FP32, BF16, AUTO, DEADLINE)
MIN_COSINE: Final = 0.999


@dataclass(frozen=True)
class WantedPrecision:
    """One of PRECISIONS, and how well answers must agree with those in fp32: the cosine, at least."""

    name: str = FP32
    min_cosine: float = MIN_COSINE

    @property
    def each(self) -> tuple["WantedPrecision", ...]:
        """The precisions that a model is compiled in: itself, or of `DEADLINE` fp32 and then bf16."""
        return (WantedPrecision(), replace(self, name=BF16)) if self.name == DEADLINE else (self,)

    def flags(self) -> Sequence[str]:
        """Return it as options of a compile job, none for what is the default."""
        return [] if self.name == FP32 else [f"--precision={self.name}", f"--min-cosine={self.min_cosine!r}"]


IN_FP32: Final = WantedPrecision()


@dataclass(frozen=True)
class Agreement:
    """How answers in a lower precision and in fp32 agree, over so many examples.

    `cosine`: the least of any output. `top1`: the share of rows, along the last axis, with the same largest element.
    """

    cosine: float
    top1: float
    examples: int

    def __str__(self) -> str:
        return f"cosine {self.cosine:.5f}, the same largest element in {self.top1:.1%} of rows"


@dataclass(frozen=True)
class ChosenPrecision:
    """What a model is compiled in. `kept`: names of layers that stay in fp32 for the sake of the agreement.

    `name` fp32: with all others in bf16 it agreed too little.
    """

    name: str
    agreement: Agreement
    kept: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.name == FP32:
            return f"answers in bf16 agree too little: {self.agreement}"
        return f"{self.agreement}" + (f"; layers that stay in fp32: {len(self.kept)}" if self.kept else "")


def add_precision(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Define the options of a `WantedPrecision`."""
    parser.add_argument("--precision", choices=PRECISIONS, default=FP32,
        help="of products in kernels; sums are float32 (%(default)s)")  # fmt: skip
    parser.add_argument("--min-cosine", type=float, default=MIN_COSINE, metavar="C",
        help="between answers in bf16 and in fp32, at least; else layers stay in fp32 (%(default)s)")  # fmt: skip
