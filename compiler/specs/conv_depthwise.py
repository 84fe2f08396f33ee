"""Spec of a convolution and the depthwise one behind it, in one kernel."""

from dataclasses import dataclass, replace
from typing import Self

from gangway.compiler.specs.base import MOST_LANES, KernelSpec
from gangway.compiler.specs.images import ConvSpec


@dataclass(frozen=True)
class ConvDepthwiseSpec(KernelSpec):
    """`depthwise` of what `conv` computes, which nobody else reads and which is never whole in memory.

    Arguments: x, weights, bias, depthwise weights, depthwise bias, y; raw weights "weights", "bias",
    "depthwise_weights", "depthwise_bias". Neither has a residual; the window of `depthwise` is not dilated.
    """

    conv: ConvSpec
    depthwise: ConvSpec

    @property
    def flops(self) -> int:
        """Arithmetic operations of one row, as if each number between the two were computed once."""
        return self.conv.flops + self.depthwise.flops

    @property
    def kept_bytes(self) -> int:
        """Most bytes of the lines that a kernel keeps: those that a window sees, of two channel blocks."""
        columns = self.depthwise.width + self.depthwise.pads[1] + self.depthwise.pads[3]
        return 4 * 2 * MOST_LANES * self.depthwise.kernel[0] * columns

    @property
    def text(self) -> str:
        """Shape for people."""
        return f"{self.conv.text}, then {self.depthwise.text}"

    def with_halos(self, inputs: tuple[int, ...], output: int) -> Self:
        """The spec with its halos settled."""
        conv, depthwise = replace(self.conv, input_halo=inputs[0]), replace(self.depthwise, output_halo=output)
        return replace(self, conv=conv, depthwise=depthwise)
