"""A convolution's tensors in memory, its packed weights, and how many pixels and channels fit into the registers.

Weights are packed [group][input plane][kh][kw][input channel][output channels of the group]; the last group may have
fewer blocks, the last plane fewer channels (a multiple of four) than the others.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from gangway.artifact.format import TargetSpec
from gangway.compiler.specs import MOST_LANES, Array, ConvSpec, PackedWeights, RawWeights
from gangway.compiler.templates.base import FLOAT_BYTES, Image, UnsupportedSpecError, registers
from gangway.compiler.templates.cost import Traffic
from gangway.compiler.templates.tiling import Cut, cut_line, cut_rows, is_line

UNROLLED_CHANNELS = 4  # input channels per iteration of the innermost loop
VECTOR_BLOCKS = 4  # channel blocks of a tile when there is one pixel only (matrix times vector)


@dataclass(frozen=True)
class Geometry:
    """A convolution's tensors in memory, and the channel blocks of one register tile."""

    spec: ConvSpec
    target: TargetSpec

    @cached_property
    def input(self) -> Image:
        """x."""
        s = self.spec
        return Image(s.in_channels, s.height, s.width, s.input_halo, 1 if s.input_planar else self.target.lanes)

    @cached_property
    def output(self) -> Image:
        """y."""
        return Image(self.spec.out_channels, *self.spec.output_size, self.spec.output_halo, self.target.lanes)

    @cached_property
    def residual(self) -> Image:
        """The tensor that is added."""
        return Image(self.spec.out_channels, *self.spec.output_size, self.spec.residual_halo, self.target.lanes)

    @cached_property
    def pixels(self) -> int:
        """Pixels of the output."""
        return self.output.height * self.output.width

    @cached_property
    def group_blocks(self) -> int:
        """Output channel blocks of a register tile; decides how weights are packed. All read the same inputs."""
        most = min(VECTOR_BLOCKS if self.pixels == 1 else 2, self.output.blocks)
        if self.spec.groups == 1:
            return most
        return next(blocks for blocks in range(most, 0, -1) if self.blocks_per_group % blocks == 0)

    @cached_property
    def blocks_per_group(self) -> int:
        """Output channel blocks of one of the convolution's own groups."""
        return self.output.blocks // self.spec.groups

    @cached_property
    def groups(self) -> int:
        """Number of groups of channel blocks."""
        return -(-self.output.blocks // self.group_blocks)

    @cached_property
    def tile_pixels(self) -> int:
        """Most pixels a register tile can have.

        The others hold weights, a broadcast, without FMA a product, and, where LLVM unrolls kernel rows, the next
        broadcast: a spill within the loop would cost a fifth of the speed whenever the stack happens to be unaligned.
        """
        spare = 1 + (self.target.name == "baseline") + self.spec.input_planar
        return min((registers(self.target) - self.group_blocks - spare) // self.group_blocks, 28)

    @cached_property
    def plane_channels(self) -> tuple[int, int]:
        """Whole input planes, and the channels that are summed up of the last, partial one."""
        whole, rest = divmod(self.spec.in_channels // self.spec.groups, self.input.lanes)
        return whole, -(-rest // UNROLLED_CHANNELS) * UNROLLED_CHANNELS

    @cached_property
    def reduction(self) -> int:
        """Products summed up for one output."""
        whole, rest = self.plane_channels
        return (whole * self.input.lanes + rest) * self.spec.kernel[0] * self.spec.kernel[1]

    @cached_property
    def flops(self) -> int:
        """Floating point operations, surplus output channels included."""
        return 2 * self.pixels * self.output.blocks * self.output.lanes * self.reduction

    @cached_property
    def traffic(self) -> Traffic:
        """Bytes moved at least once."""
        weights = self.output.blocks * self.output.lanes * self.reduction
        return Traffic(weights * FLOAT_BYTES, self.input.elements * FLOAT_BYTES, self.output.elements * FLOAT_BYTES)

    def cut(self, tile_pixels: int) -> Cut:
        """The output cut into register tiles of at most `tile_pixels`."""
        if is_line(self.spec):
            return cut_line(self.pixels, tile_pixels)
        return cut_rows(self.output.height, self.output.width, tile_pixels)


def check(spec: ConvSpec) -> None:
    """Raise `UnsupportedSpecError` unless the input's halo covers all padding, and groups are whole blocks."""
    if spec.groups not in (1, spec.in_channels) and (
        spec.in_channels % (spec.groups * MOST_LANES) or spec.out_channels % (spec.groups * MOST_LANES)
    ):
        raise UnsupportedSpecError(f"convolution with {spec.groups} groups of {spec.in_channels} channels")
    (out_height, out_width), (top, left, _, _) = spec.output_size, spec.pads
    if out_height < 1 or out_width < 1:
        raise UnsupportedSpecError(f"convolution with an empty output: {spec}")
    below = (out_height - 1) * spec.stride[0] + (spec.kernel[0] - 1) * spec.dilation[0] - top - (spec.height - 1)
    right = (out_width - 1) * spec.stride[1] + (spec.kernel[1] - 1) * spec.dilation[1] - left - (spec.width - 1)
    if max(top, left, below, right) > spec.input_halo:
        raise UnsupportedSpecError(f"convolution needs a halo of {max(top, left, below, right)}, has {spec.input_halo}")


def pack(spec: ConvSpec, target: TargetSpec, raw: RawWeights) -> PackedWeights:
    """Weights and bias in the kernel's order, padded with zeros. Needs little memory beside the result."""
    geometry = Geometry(spec, target)
    planes, rest = geometry.plane_channels
    channels, width = planes * geometry.input.lanes, geometry.group_blocks * target.lanes
    packed = np.zeros(geometry.output.blocks * target.lanes * geometry.reduction, np.float32)
    at = 0
    for begin in range(0, spec.out_channels, width):
        group = raw["weights"][begin : begin + width]
        if planes:
            parts = group[:, :channels].reshape(len(group), planes, geometry.input.lanes, *spec.kernel)
            at = _pack_planes(packed, at, parts, geometry.input.lanes, target.lanes)
        if rest:
            at = _pack_planes(packed, at, group[:, None, channels:], rest, target.lanes)
    return packed, np.pad(raw["bias"].astype(np.float32), (0, -spec.out_channels % target.lanes))


def _pack_planes(packed: Array, at: int, weights: Array, channels: int, lanes: int) -> int:
    """Write one group's weights [out][plane][channel][kh][kw] from element `at` on, with room for `channels` of each
    plane and for whole blocks of outputs; return where they end.
    """
    outputs, planes, given, *kernel = weights.shape
    shape: tuple[int, ...] = (planes, *kernel, channels, -(-outputs // lanes) * lanes)
    end = at + math.prod(shape)
    packed[at:end].reshape(shape)[:, :, :, :given, :outputs] = weights.transpose(1, 3, 4, 2, 0)
    return end
