"""Direct convolution on blocked activations, register tiled (groups = 1). A dense layer is the 1 x 1 case.

A register tile is some pixels x some channel blocks of the output, held in vector registers for the whole reduction:
per input channel it loads one weight vector for each block and broadcasts one number for each pixel. The scheme is that
of Georganas et al., "Anatomy of High-Performance Deep Learning Convolutions on SIMD Architectures" (SC 2018). Bias,
residual and activation are fused.

Weights are packed [group][input block][kh][kw][input lane][blocks of the group x lanes]; the last group may hold fewer
blocks.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np
from gangway.artifact.format import TargetSpec

from ..specs import ConvSpec, KernelPlan, PackedWeights, RawWeights
from .base import FLOAT_BYTES, Image, UnsupportedSpecError, knob, make_plan, registers
from .builder import (
    Argument,
    Buffer,
    Expr,
    Register,
    activate,
    either,
    kernel,
    lanes_at,
    repeat,
    splat,
    store,
)
from .cost import Traffic, tasks_cost
from .tiling import Band, Cut, Tasks, all_tasks, cut_line, cut_rows, each_tile, is_line

UNROLLED_CHANNELS = 4  # input channels per iteration of the innermost loop
VECTOR_BLOCKS = 4  # channel blocks of a tile when there is one pixel only (matrix times vector)
VECTOR_CHAINS = 2  # and independent sums per block then, to hide the latency of the additions


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
        """Output channel blocks of a register tile; decides how weights are packed."""
        return min(VECTOR_BLOCKS if self.pixels == 1 else 2, self.output.blocks)

    @cached_property
    def groups(self) -> int:
        """Number of groups of channel blocks."""
        return -(-self.output.blocks // self.group_blocks)

    @cached_property
    def tile_pixels(self) -> int:
        """Most pixels a register tile can have: the rest holds weights, a broadcast and (without FMA) a product."""
        free = registers(self.target) - self.group_blocks - (2 if self.target.name == "baseline" else 1)
        return min(free // self.group_blocks, 28)

    @cached_property
    def reduction(self) -> int:
        """Products summed up for one output, surplus channels included."""
        return self.input.blocks * self.input.lanes * self.spec.kernel[0] * self.spec.kernel[1]

    @cached_property
    def flops(self) -> int:
        """Floating point operations, surplus channels included."""
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
    """Raise `UnsupportedSpecError` unless the input's halo covers all padding."""
    (out_height, out_width), (top, left, _, _) = spec.output_size, spec.pads
    if out_height < 1 or out_width < 1:
        raise UnsupportedSpecError(f"convolution with an empty output: {spec}")
    below = (out_height - 1) * spec.stride[0] + (spec.kernel[0] - 1) * spec.dilation[0] - top - (spec.height - 1)
    right = (out_width - 1) * spec.stride[1] + (spec.kernel[1] - 1) * spec.dilation[1] - left - (spec.width - 1)
    if max(top, left, below, right) > spec.input_halo:
        raise UnsupportedSpecError(f"convolution needs a halo of {max(top, left, below, right)}, has {spec.input_halo}")


def candidates(spec: ConvSpec, target: TargetSpec) -> Iterator[KernelPlan]:
    """The default plan, then alternatives of smaller tiles and coarser or finer tasks; all share packed weights."""
    check(spec)
    geometry = Geometry(spec, target)
    widest = geometry.tile_pixels
    sizes = list(dict.fromkeys(max(1, size) for size in (widest, widest // 2, widest // 4)))
    for tile_pixels in sizes:
        cut = geometry.cut(tile_pixels)
        ranked = sorted(
            all_tasks(geometry.groups, cut.bands),
            key=lambda tasks: tasks_cost(tasks, geometry.flops, geometry.traffic, target),
        )
        best = ranked[0]
        other = next((t for t in ranked if t.pixels_first != best.pixels_first and t.count > 1), None)
        finer = next((t for t in ranked if t.count >= 2 * best.count), None)
        for tasks in dict.fromkeys(t for t in (best, other, finer) if t):
            yield _plan(geometry, tile_pixels, cut, tasks)


def _plan(geometry: Geometry, tile_pixels: int, cut: Cut, tasks: Tasks) -> KernelPlan:
    pixels = max(size for size, _ in cut.tiles)
    blocks = geometry.group_blocks
    weights = blocks * geometry.target.lanes * geometry.reduction * FLOAT_BYTES
    inputs = geometry.traffic.input * tasks.bands_per_task // tasks.bands
    order = "pixels" if tasks.pixels_first else "weights"
    knobs: dict[str, int | str] = {
        "tile_pixels": tile_pixels,
        "groups": tasks.groups_per_task,
        "bands": tasks.bands_per_task,
        "pixels_first": int(tasks.pixels_first),
    }
    text = f"conv {pixels}x{blocks} {tasks.groups_per_task}x{tasks.bands_per_task} {order} first"
    return make_plan(geometry.spec, knobs, tasks.count, text, weights + inputs, pixels * blocks)


def pack(spec: ConvSpec, target: TargetSpec, raw: RawWeights) -> PackedWeights:
    """Weights by groups, and the bias, both padded with zeros to whole channel blocks."""
    geometry = Geometry(spec, target)
    lanes, blocks, inputs = target.lanes, geometry.output.blocks, geometry.input
    surplus = (0, blocks * lanes - spec.out_channels), (0, inputs.blocks * inputs.lanes - spec.in_channels)
    weights = np.pad(raw["weights"].astype(np.float32), (*surplus, (0, 0), (0, 0)))
    group_channels = geometry.group_blocks * lanes
    groups = [
        group.reshape(-1, inputs.blocks, inputs.lanes, *spec.kernel).transpose(1, 3, 4, 2, 0).ravel()
        for group in np.split(weights, range(group_channels, blocks * lanes, group_channels))
    ]
    return np.concatenate(groups), np.pad(raw["bias"].astype(np.float32), surplus[0])


def emit(plan: KernelPlan, target: TargetSpec, symbol: str) -> Any:
    """The kernel. Arguments: x, weights, bias, [residual,] y."""
    assert isinstance(plan.spec, ConvSpec)
    geometry = Geometry(plan.spec, target)
    cut = geometry.cut(knob(plan, "tile_pixels"))
    tasks = Tasks(
        geometry.groups, cut.bands, knob(plan, "groups"), knob(plan, "bands"), bool(knob(plan, "pixels_first"))
    )
    lanes = target.lanes
    arguments = [
        Argument("x", geometry.input.elements),
        Argument("weights", geometry.output.blocks * lanes * geometry.reduction),
        Argument("bias", geometry.output.blocks * lanes),
        *([Argument("residual", geometry.residual.elements)] if plan.spec.residual else []),
        Argument("y", geometry.output.elements),
    ]

    def task(number: Expr, buffers: tuple[Buffer, ...]) -> None:
        writer = _Tile(geometry, cut, buffers)
        full, rest = divmod(geometry.output.blocks, geometry.group_blocks)

        def group(index: Expr, first_band: Expr) -> None:
            either(
                index < full if rest else True,
                lambda: writer.bands(index, geometry.group_blocks, first_band, tasks.bands_per_task),
                lambda: writer.bands(full, rest, first_band, tasks.bands_per_task),
            )

        tasks.each_group(number, group)

    return kernel(symbol, arguments, task)


class _Tile:
    """Writes the code of register tiles."""

    def __init__(self, geometry: Geometry, cut: Cut, buffers: tuple[Buffer, ...]):
        self._g, self._cut = geometry, cut
        self._x, self._weights, self._bias, *self._residual, self._y = buffers
        self._lanes = geometry.target.lanes

    def bands(self, group: Expr, blocks: int, first_band: Expr, count: int) -> None:
        """All tiles of up to `count` bands, for one group of channel blocks."""

        def band(number: Expr, shape: Band) -> None:
            row = number * self._cut.full.rows
            each_tile(
                shape.segments,
                lambda column, width: self._tile(group, blocks, row, column, shape.rows, width),
            )

        self._cut.each(first_band, count, band)

    def _pixels(self, image: Image, row: Expr, column: Expr, rows: int, width: int) -> list[Expr]:
        """Where the tile's pixels lie in a plane of `image`."""
        pitch = self._cut.row_pixels * image.lanes or image.row
        base = image.origin + row * pitch + column * image.lanes
        return [base + r * pitch + c * image.lanes for r, c in product(range(rows), range(width))]

    def _inputs(self, row: Expr, column: Expr, rows: int, width: int) -> list[Expr]:
        """Where the input pixels under the first kernel tap lie."""
        spec, image = self._g.spec, self._g.input
        if self._cut.row_pixels:
            return self._pixels(image, row, column, rows, width)
        base = image.origin - spec.pads[0] * image.row - spec.pads[1] * image.lanes
        base = base + row * (spec.stride[0] * image.row) + column * (spec.stride[1] * image.lanes)
        down, across = spec.stride[0] * image.row, spec.stride[1] * image.lanes
        return [base + r * down + c * across for r, c in product(range(rows), range(width))]

    def _tile(self, group: Expr, blocks: int, row: Expr, column: Expr, rows: int, width: int) -> None:
        lanes, first_block = self._lanes, group * self._g.group_blocks
        chains = VECTOR_CHAINS if self._g.pixels == 1 else 1
        sums = [
            [
                [
                    Register(
                        lanes, self._bias[lanes_at((first_block + j) * lanes, lanes)] if not c else splat(0.0, lanes)
                    )
                    for c in range(chains)
                ]
                for j in range(blocks)
            ]
            for _ in range(rows * width)
        ]
        self._reduce(sums, group, blocks, self._inputs(row, column, rows, width))
        output = self._pixels(self._g.output, row, column, rows, width)
        residual = self._pixels(self._g.residual, row, column, rows, width)
        for j, i in product(range(blocks), range(rows * width)):
            value = sum((s.value for s in sums[i][j][1:]), sums[i][j][0].value)
            if self._residual:
                plane = (first_block + j) * self._g.residual.plane
                value = value + self._residual[0][lanes_at(plane + residual[i], lanes)]
            value = activate(value, self._g.spec.activation, lanes)
            store(self._y, (first_block + j) * self._g.output.plane + output[i], value, lanes)

    def _reduce(self, sums: list[list[list[Register]]], group: Expr, blocks: int, inputs: list[Expr]) -> None:
        spec, image, lanes = self._g.spec, self._g.input, self._lanes
        (kernel_rows, kernel_columns), width = spec.kernel, blocks * lanes
        group_base = group * (self._g.group_blocks * lanes * self._g.reduction)
        down, across = spec.dilation[0] * image.row, spec.dilation[1] * image.lanes

        def step(plane: Expr, kh: Expr, kw: Expr, channel: Expr, chain: int) -> None:
            index = ((plane * kernel_rows + kh) * kernel_columns + kw) * image.lanes + channel
            weights = [self._weights[lanes_at(group_base + index * width + j * lanes, lanes)] for j in range(blocks)]
            offset = plane * image.plane + kh * down + kw * across + channel
            for i, pixel in enumerate(inputs):
                number = splat(self._x[pixel + offset], lanes)
                for j in range(blocks):
                    sums[i][j][chain].add(number * weights[j])

        def channels(plane: Expr, kh: Expr, kw: Expr) -> None:
            def some(index: Expr) -> None:
                for u in range(UNROLLED_CHANNELS):
                    step(plane, kh, kw, index * UNROLLED_CHANNELS + u, u % len(sums[0][0]))

            repeat(image.lanes // UNROLLED_CHANNELS, some)

        def columns(plane: Expr, kh: Expr) -> None:
            if image.lanes > 1:
                repeat(kernel_columns, lambda kw: channels(plane, kh, kw))
                return
            for kw in range(kernel_columns):
                step(plane, kh, kw, 0, 0)

        repeat(image.blocks, lambda plane: repeat(kernel_rows, lambda kh: columns(plane, kh)))
