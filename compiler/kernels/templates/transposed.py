"""Transposed convolution: all phases as one convolution, whose pixels are written apart from each other.

Phases are further output channels of a convolution that moves by single pixels (Shi et al. 2016). Where a register tile
is stored depends on its phase, so nothing is moved afterwards. Phases whose window lies one pixel further read there.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np

from gangway.artifact.format import TargetSpec
from gangway.compiler.kernels.specs import ConvSpec, ConvTransposeSpec, KernelPlan, PackedWeights, RawWeights
from gangway.compiler.kernels.templates import tiling
from gangway.compiler.kernels.templates.builder import Argument, Buffer, Expr, bind, kernel, quotient, remainder, store
from gangway.compiler.kernels.templates.convolution import (
    ConvolutionGeometry,
    RegisterTiles,
    geometry_candidates,
    pack_for,
    write_tiles,
)
from gangway.compiler.kernels.templates.float32_math import activate
from gangway.compiler.kernels.templates.tiling import BandCut, Image, UnsupportedSpecError


@dataclass(frozen=True)
class _Phases(ConvolutionGeometry):
    """The convolution that computes all phases; `blocks` of channels each."""

    blocks: int
    moved: bool  # phases read at different places

    @cached_property
    def group_blocks(self) -> int:
        """Blocks of a register tile, all of which read the same pixels."""
        most = min(2, self.output.blocks)
        return most if not self.moved or self.blocks % most == 0 else 1

    def cut(self, tile_pixels: int) -> BandCut:
        """Whole rows: no line of the output is contiguous."""
        return tiling.cut_rows(self.output.height, self.output.width, tile_pixels)


def _phases(spec: ConvTransposeSpec, target: TargetSpec) -> _Phases:
    blocks = -(-spec.out_channels // target.lanes)
    channels = spec.stride[0] * spec.stride[1] * blocks * target.lanes
    (top, left, _, _), (rows, columns) = spec.pads, spec.grid
    # As many rows at the bottom as the first phase sees; the others' are further below, in the halo.
    ends = rows - 1 + spec.taps[0] - top - spec.height, columns - 1 + spec.taps[1] - left - spec.width
    conv = ConvSpec(
        spec.in_channels,
        spec.height,
        spec.width,
        channels,
        spec.taps,
        pads=(top, left, *ends),
        activation=spec.activation,
        input_halo=spec.input_halo,
    )
    return _Phases(conv, target, blocks, any(first != last for first, last in spec.shifts))


def candidates(spec: ConvTransposeSpec, target: TargetSpec) -> Iterator[KernelPlan]:
    """The plans of the convolution. Raises `UnsupportedSpecError` if the halo is too small."""
    if max(spec.pads) > spec.input_halo or min(spec.pads[:2]) < 0:
        raise UnsupportedSpecError(f"transposed convolution needs padding of {spec.pads}, has {spec.input_halo}")
    for plan in geometry_candidates(_phases(spec, target)):
        yield replace(plan, spec=spec, description=f"transposed {plan.description}")


def pack(spec: ConvTransposeSpec, target: TargetSpec, raw: RawWeights) -> PackedWeights:
    """Weights of all phases as a convolution's, and as many biases."""
    surplus = -spec.out_channels % target.lanes
    weights = np.pad(raw["weights"], ((0, 0), (0, 0), (0, surplus), (0, 0), (0, 0), (0, 0)))
    bias = np.tile(np.pad(raw["bias"], (0, surplus)), spec.stride[0] * spec.stride[1])
    return pack_for(_phases(spec, target), {"weights": weights.reshape(-1, spec.in_channels, *spec.taps), "bias": bias})


def emit(spec: ConvTransposeSpec, plan: KernelPlan, target: TargetSpec, symbol: str) -> Any:
    """The kernel. Arguments: x, weights, bias, y."""
    geometry = _phases(spec, target)
    cut = geometry.cut(tiling.knob(plan, "tile_pixels"))
    tasks = tiling.planned_tasks(plan, geometry.groups, cut.bands)
    image = Image(spec.out_channels, *spec.output_size, spec.output_halo, target.lanes)
    *others, _ = geometry.arguments(geometry.weights)

    def task(number: Expr, buffers: tuple[Buffer, ...]) -> None:
        write_tiles(_PhaseTiles(spec, geometry, image, cut, buffers), geometry, tasks, number)

    return kernel(symbol, [*others, Argument("y", image.elements)], task)


class _PhaseTiles(RegisterTiles):
    """Writes the tiles of all phases."""

    def __init__(
        self, spec: ConvTransposeSpec, geometry: _Phases, image: Image, cut: BandCut, buffers: tuple[Buffer, ...]
    ) -> None:
        super().__init__(geometry, cut, buffers)
        self._spec, self._image, self._blocks = spec, image, geometry.blocks
        self._moved = geometry.moved
        self._down: Expr = 0
        self._across: Expr = 0

    def bands(self, group: Expr, blocks: int, first_band: Expr, count: int) -> None:
        """All tiles of up to `count` bands, for one group of channel blocks."""
        if self._moved:
            phase = self._phase(group * self._g.group_blocks)
            self._down, self._across = (
                bind(quotient(place + begin, stride) - shift[0])
                for place, begin, stride, shift in zip(
                    phase, self._spec.begins, self._spec.stride, self._spec.shifts, strict=True
                )
            )
        super().bands(group, blocks, first_band, count)

    def _phase(self, block: Expr) -> tuple[Expr, Expr]:
        """Row and column of the phase that has a block of channels."""
        phase, across = quotient(block, self._blocks), self._spec.stride[1]
        return quotient(phase, across), remainder(phase, across)

    def _inputs(self, row: Expr, column: Expr, rows: int, width: int) -> list[Expr]:
        return super()._inputs(row + self._down, column + self._across, rows, width)

    def _kernel_rows(self, row: Expr, rows: int) -> tuple[Expr, Expr]:
        return super()._kernel_rows(row + self._down, rows)

    def _tile(self, group: Expr, blocks: int, row: Expr, column: Expr, rows: int, width: int) -> None:
        sums = self.sums(group, blocks, row, column, rows, width)
        image, (down, across) = self._image, self._spec.stride
        for j in range(blocks):
            block = bind(group * self._g.group_blocks + j)
            first, second = self._phase(block)
            base = image.origin + remainder(block, self._blocks) * image.plane
            base = bind(base + (row * down + first) * image.row + (column * across + second) * image.lanes)
            for i, (r, c) in enumerate(product(range(rows), range(width))):
                value = activate(sums[i][j].value, self._spec.activation, self._lanes)
                store(self._y, base + r * down * image.row + c * across * image.lanes, value, self._lanes)
