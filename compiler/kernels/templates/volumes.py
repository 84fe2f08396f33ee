"""Convolutions of volumes, slice by slice: kernels of images whose sums run over the slices of a window, too."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np

from gangway.artifact.format import TargetSpec
from gangway.compiler.kernels.specs import (
    DepthWindow,
    KernelPlan,
    PackedWeights,
    RawWeights,
    VolumeConvSpec,
    VolumePadSpec,
)
from gangway.compiler.kernels.templates import builder as T
from gangway.compiler.kernels.templates import tiling
from gangway.compiler.kernels.templates.builder import Argument, Buffer, Expr
from gangway.compiler.kernels.templates.convolution import (
    ConvolutionGeometry,
    RegisterTiles,
    check,
    pack_for,
    write_tiles,
)
from gangway.compiler.kernels.templates.float32_math import activate
from gangway.compiler.kernels.templates.tiling import FLOAT_BYTES, BandCut, Image, Traffic


@dataclass(frozen=True)
class _Volume(ConvolutionGeometry):
    """The convolution of a slice, of a window of slices."""

    depth: DepthWindow

    @cached_property
    def slice_products(self) -> int:
        """Products summed up for one output, of one slice."""
        whole, rest = self.plane_channels
        return (whole * self.input.lanes + rest) * math.prod(self.spec.kernel)

    @cached_property
    def reduction(self) -> int:
        """Products summed up for one output."""
        return self.slice_products * self.depth.kernel

    @cached_property
    def input(self) -> Image:
        """x: slices below each other."""
        s = self.spec
        return Image(s.in_channels, self.depth.length * s.height, s.width, s.input_halo, self.target.lanes)

    @cached_property
    def whole_output(self) -> Image:
        """y: slices below each other."""
        height, width = self.spec.output_size
        return Image(
            self.spec.out_channels, self.depth.output * height, width, self.spec.output_halo, self.output.lanes
        )

    def cut(self, tile_pixels: int) -> BandCut:
        """Whole rows of a slice."""
        return tiling.cut_rows(*self.spec.output_size, tile_pixels)


def candidates(spec: VolumeConvSpec, target: TargetSpec) -> Iterator[KernelPlan]:
    """The only plan."""
    check(spec.conv)
    geometry = _Volume(spec.conv, target, spec.depth)
    cut, slices = geometry.cut(geometry.tile_pixels), spec.depth.output
    traffic = Traffic(
        geometry.output.blocks * target.lanes * geometry.reduction * FLOAT_BYTES,
        geometry.input.elements * FLOAT_BYTES,
        geometry.whole_output.elements * FLOAT_BYTES,
    )
    tasks = min(
        (tasks for tasks in tiling.all_tasks(geometry.groups, cut.bands * slices) if tasks.ordered),
        key=lambda tasks: tiling.tasks_cost(tasks, geometry.flops * slices, traffic, target),
    )
    pixels, order = max(size for size, _ in cut.tiles), "pixels" if tasks.pixels_first else "weights"
    shape = f"{pixels}x{geometry.group_blocks} {tasks.groups_per_task}x{tasks.bands_per_task}"
    blocking = traffic.weights // geometry.groups + traffic.input * tasks.bands_per_task // tasks.bands
    text = f"volume conv {shape} {order} first"
    yield tiling.make_plan(spec, tasks.knobs, tasks.count, text, blocking, pixels * geometry.group_blocks)


def pack(spec: VolumeConvSpec, target: TargetSpec, raw: RawWeights) -> PackedWeights:
    """As a convolution's of images: the weights of each group of outputs, slice after slice."""
    geometry, flat = _Volume(spec.conv, target, spec.depth), ConvolutionGeometry(spec.conv, target)
    found = [
        pack_for(flat, {"weights": raw["weights"][:, :, place], "bias": raw["bias"]})
        for place in range(spec.depth.kernel)
    ]
    size = geometry.group_blocks * target.lanes * geometry.slice_products
    parts = [weights[group * size : (group + 1) * size] for group in range(geometry.groups) for weights, _ in found]
    return np.concatenate(parts), found[0][1]


def emit(spec: VolumeConvSpec, plan: KernelPlan, target: TargetSpec, symbol: str) -> Any:
    """The kernel. Arguments: x, weights, bias, y."""
    geometry = _Volume(spec.conv, target, spec.depth)
    cut = geometry.cut(geometry.tile_pixels)
    tasks = tiling.planned_tasks(plan, geometry.groups, cut.bands * spec.depth.output)
    *others, _ = geometry.arguments(geometry.weights)

    def task(number: Expr, buffers: tuple[Buffer, ...]) -> None:
        write_tiles(_VolumeTiles(geometry, cut, buffers), geometry, tasks, number)

    return T.kernel(symbol, [*others, Argument("y", geometry.whole_output.elements)], task)


class _VolumeTiles(RegisterTiles):
    """Writes the tiles of all slices."""

    def __init__(self, geometry: _Volume, cut: BandCut, buffers: tuple[Buffer, ...]) -> None:
        super().__init__(geometry, cut, buffers)
        self._volume = geometry
        self._slice: Expr = 0

    def bands(self, group: Expr, blocks: int, first_band: Expr, count: int) -> None:
        """All tiles of up to `count` bands of all slices, for one group of channel blocks."""
        bands, total = self._cut.bands, self._cut.bands * self._volume.depth.output

        def band(index: Expr) -> None:
            self._slice = T.bind(T.quotient(first_band + index, bands))
            super(_VolumeTiles, self).bands(group, blocks, T.bind(T.remainder(first_band + index, bands)), 1)

        T.repeat(T.at_most(count, total - first_band), band)

    def _reduce(
        self,
        sums: list[list[Any]],
        group: Expr,
        blocks: int,
        inputs: list[Expr],
        kernel_rows_used: tuple[Expr, Expr],
    ) -> None:
        depth, pitch = self._volume.depth, self._g.spec.height * self._g.input.row
        start = T.bind(self._slice * depth.stride - depth.pads[0])
        first: Expr = 0
        end: Expr = depth.kernel
        if depth.pads[0]:
            first = T.bind(T.quotient(T.at_least(-start, 0) + (depth.dilation - 1), depth.dilation))
        if depth.pads[1]:
            end = T.at_most(T.quotient(depth.length - start + (depth.dilation - 1), depth.dilation), end)

        def one(index: Expr) -> None:
            place = T.bind(first + index)
            skipped = (start + place * depth.dilation) * pitch
            self._skipped_products = place * self._volume.slice_products
            moved = [pixel + skipped for pixel in inputs]
            super(_VolumeTiles, self)._reduce(sums, group, blocks, moved, kernel_rows_used)

        T.repeat(end - first, one)

    def _tile(self, group: Expr, blocks: int, row: Expr, column: Expr, rows: int, width: int) -> None:
        sums = self.sums(group, blocks, row, column, rows, width)
        image, height = self._volume.whole_output, self._g.output.height
        base = T.bind(image.origin + (self._slice * height + row) * image.row + column * image.lanes)
        for j in range(blocks):
            plane = (group * self._g.group_blocks + j) * image.plane
            for i, (r, c) in enumerate(product(range(rows), range(width))):
                value = activate(sums[i][j].value, self._g.spec.activation, self._lanes)
                T.store(self._y, base + plane + r * image.row + c * image.lanes, value, self._lanes)


def pad_candidates(spec: VolumePadSpec, target: TargetSpec) -> Iterator[KernelPlan]:
    """The only plan."""
    x, y = _pad_images(spec, target)
    moved = (x.elements + y.elements) * FLOAT_BYTES
    yield tiling.plane_plan(spec, "pad slices", (y.blocks, y.height), 0, moved, 1, target)


def _pad_images(spec: VolumePadSpec, target: TargetSpec) -> tuple[Image, Image]:
    height, width = spec.padded
    return (
        Image(spec.channels, spec.depth * spec.height, spec.width, spec.input_halo, target.lanes),
        Image(spec.channels, spec.depth * height, width, 0, target.lanes),
    )


def pad_emit(spec: VolumePadSpec, plan: KernelPlan, target: TargetSpec, symbol: str) -> Any:
    """The kernel. Arguments: x, y."""
    source, result = _pad_images(spec, target)
    tasks = tiling.planned_tasks(plan, result.blocks, result.height)
    height, lanes, (top, left, _, right) = spec.padded[0], target.lanes, spec.pads

    def task(number: Expr, buffers: tuple[Buffer, ...]) -> None:
        x, y = buffers

        def zeros(base: Expr, count: int) -> None:
            if count:
                T.repeat(count, lambda i: T.store(y, base + i * lanes, T.constant(0.0, lanes), lanes))

        def line(block: Expr, number: Expr) -> None:
            into = T.bind(block * result.plane + number * result.row)
            row = T.bind(T.remainder(number, height) - top)
            place = T.quotient(number, height) * spec.height + row

            def copied() -> None:
                begin = T.bind(block * source.plane + source.origin + place * source.row)
                zeros(into, left)
                after = into + left * lanes
                T.repeat(
                    spec.width, lambda i: T.store(y, after + i * lanes, x[T.lanes_at(begin + i * lanes, lanes)], lanes)
                )
                zeros(after + spec.width * lanes, right)

            inside = True if height == spec.height else (row >= 0) & (row < spec.height)
            T.either(inside, copied, lambda: zeros(into, result.width))

        tasks.each(number, line)

    return T.kernel(symbol, [Argument("x", source.elements), Argument("y", result.elements)], task)
