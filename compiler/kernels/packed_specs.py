"""Specs of kernels whose weights stay integers in memory, while activations and sums are float32."""

from dataclasses import dataclass
from typing import Literal

from gangway.compiler.kernels.specs import NONE, Activation, KernelSpec

Bits = Literal[4, 8]
LEAST_BLOCK = 16
"""Inputs of a block: that many, or twice, four times, ... as many, have one scale; or all have."""
ZERO_POINTS: dict[Bits, int] = {4: 8, 8: 0}
"""What stands for 0 where there are no zero points: integers of 4 bits have no sign, those of 8 bits have one."""


@dataclass(frozen=True)
class PackedDenseSpec(KernelSpec):
    """A dense layer of integer weights + bias [+ residual] [+ activation] over a blocked sequence, or a vector.

    Arguments: x, integers, scales, [zeros,] bias, [residual,] y. A weight is (integer - zero point) scale. `block`
    inputs have one scale and zero point; if it is at least `in_channels`, all inputs of an output have.

    Raw weights: "integers" [out][in] (int8), or [out][ceil(in / 2)] (uint8, the lower half first) of 4 bits; "scales"
    (float32) and, with `zeros`, "zeros" (int8) [out][blocks]; "bias" [out].
    """

    flushes_subnormals = True

    in_channels: int
    positions: int
    out_channels: int
    bits: Bits
    block: int
    zeros: bool = False
    activation: Activation = NONE
    residual: bool = False

    @property
    def blocks(self) -> int:
        """Blocks of an output's weights, the last of which may have fewer inputs than the others."""
        return -(-self.in_channels // self.block)

    @property
    def flops(self) -> int:
        """Arithmetic operations of one row."""
        return 2 * self.in_channels * self.positions * self.out_channels

    @property
    def text(self) -> str:
        """Shape for people."""
        rows = "" if self.positions == 1 else f"{self.positions}x"
        block = "" if self.blocks == 1 else f"/{self.block}"
        return f"{rows}{self.in_channels} -> {self.out_channels} int{self.bits}{block}"


def is_possible(in_channels: int, block: int) -> bool:
    """Whether there is a kernel for blocks of so many inputs."""
    return block >= in_channels or (block >= LEAST_BLOCK and block & (block - 1) == 0)
