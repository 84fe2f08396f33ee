"""Depthwise convolutions on blocked activations, alone and together with the convolution before them.

A register tile is some pixels of one channel block. Each input vector is loaded once per kernel row and used by all
outputs that it touches. Weights are packed [block][kh][kw][lane].

A pair keeps what is between its convolutions in the cache. The first convolution of an inverted residual block makes
six times as many channels as it has, and the second one needs only the line and its neighbours of each, channel block
by channel block. So a task, which is some lines of some channel blocks, keeps the last few lines of the first
convolution in scratch memory on the stack: it computes as many new ones as the window moves down, in the place of the
oldest, then one line of the second. Otherwise 4.8 MB (96 channels of 112 x 112 pixels) would be written and read back,
which on a busy machine takes longer than their arithmetic.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import product
from typing import Any

import numpy as np
from tvm import tirx

from gangway.artifact.format import TargetSpec
from gangway.compiler.kernels.specs import ConvDepthwiseSpec, ConvSpec, KernelPlan, PackedWeights, RawWeights
from gangway.compiler.kernels.templates import builder as T
from gangway.compiler.kernels.templates import convolution, tiling
from gangway.compiler.kernels.templates.bf16 import words as bf16
from gangway.compiler.kernels.templates.builder import Argument, Buffer, Expr, Register
from gangway.compiler.kernels.templates.convolution import ConvolutionGeometry, RegisterTiles, check
from gangway.compiler.kernels.templates.float32_math import activate
from gangway.compiler.kernels.templates.tiling import (
    CLAIM_US,
    FLOAT_BYTES,
    PEAK_FLOPS_PER_US,
    Band,
    BandCut,
    Image,
    Priced,
    Tasks,
    UnsupportedSpecError,
)

# Of an operation in bfloat16 by tiles and by vectors, inputs rounded, of one by vectors of float32.
PRICE_OF_TILES, PRICE_OF_WORDS = 0.1, 0.6
_GANGS = (1, 2, 2, 4, 8)  # to be balanced for; every task computes some lines of its neighbour, so more are more work


def _images(spec: ConvSpec, target: TargetSpec) -> tuple[Image, Image, Image]:
    """x, residual and y in memory."""
    size = spec.output_size
    return (
        Image(spec.in_channels, spec.height, spec.width, spec.input_halo, target.lanes),
        Image(spec.out_channels, *size, spec.residual_halo, target.lanes),
        Image(spec.out_channels, *size, spec.output_halo, target.lanes),
    )


def candidates(spec: ConvSpec, target: TargetSpec) -> Iterator[KernelPlan]:
    """The static choice, then all other tile sizes and sizes of tasks."""
    check(spec)
    if spec.out_channels != spec.in_channels or spec.input_planar:
        raise UnsupportedSpecError(f"depthwise convolution with a channel multiplier or planar input: {spec}")
    most = widest(spec, target)
    height, width = spec.output_size
    cuts = tiling.tile_cuts(most, partial(tiling.cut_rows, height, width))
    static = min(_priced(spec, target, most, tiling.cut_rows(height, width, most)), key=lambda item: item[0])
    yield static[1]
    yield from tiling.spread(static, (item for cut, size in cuts.items() for item in _priced(spec, target, size, cut)))


def widest(spec: ConvSpec, target: TargetSpec) -> int:
    """Most pixels a register tile should have."""
    return max(1, min(tiling.registers(target) - spec.kernel[1] - 2, 14))


def _priced(spec: ConvSpec, target: TargetSpec, tile_pixels: int, cut: BandCut) -> Iterator[Priced]:
    """Every plan with register tiles of this size."""
    x, _, y = _images(spec, target)
    taps = spec.kernel[0] * spec.kernel[1]
    moved = (x.elements + y.elements) * FLOAT_BYTES
    pixels = max(size for size, _ in cut.tiles)
    price = tiling.tile_price(widest(spec, target), tile_pixels)
    for tasks in tiling.all_tasks(y.blocks, cut.bands):
        if tasks.pixels_first:
            continue  # no two tasks work with the same weights
        knobs: dict[str, int | str] = {
            "tile_pixels": tile_pixels,
            "groups": tasks.groups_per_task,
            "bands": tasks.bands_per_task,
        }
        text = f"depthwise {pixels} pixels {tasks.groups_per_task}x{tasks.bands_per_task}"
        cost = tiling.plane_cost(tasks, 2 * taps * y.blocks * y.lanes * y.height * y.width, moved, target)
        yield price * cost, tiling.make_plan(spec, knobs, tasks.count, text, int(moved * tasks.largest_share), pixels)


def pack(spec: ConvSpec, target: TargetSpec, raw: RawWeights) -> PackedWeights:
    """Weights and bias by channel blocks, padded with zeros."""
    lanes = target.lanes
    surplus = (0, -spec.out_channels % lanes)
    weights = np.pad(raw["weights"].astype(np.float32), (surplus, (0, 0), (0, 0), (0, 0)))
    blocked = weights.reshape(-1, lanes, *spec.kernel).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(blocked).ravel(), np.pad(raw["bias"].astype(np.float32), surplus)


def emit(spec: ConvSpec, plan: KernelPlan, target: TargetSpec, symbol: str) -> Any:
    """The kernel. Arguments: x, weights, bias, [residual,] y."""
    lanes = target.lanes
    x_image, residual_image, y_image = _images(spec, target)
    cut = tiling.cut_rows(y_image.height, y_image.width, tiling.knob(plan, "tile_pixels"))
    tasks = tiling.planned_tasks(plan, y_image.blocks, cut.bands)
    taps = spec.kernel[0] * spec.kernel[1]
    arguments = [
        Argument("x", x_image.elements),
        Argument("weights", y_image.blocks * taps * lanes),
        Argument("bias", y_image.blocks * lanes),
        *([Argument("residual", residual_image.elements)] if spec.residual else []),
        Argument("y", y_image.elements),
    ]

    def task(number: Expr, buffers: tuple[Buffer, ...]) -> None:
        x, weights, bias, *residual, y = buffers

        def tile(block: Expr, row: Expr, column: Expr, width: int) -> None:
            origin = x_image.origin - spec.pads[0] * x_image.row - spec.pads[1] * lanes + block * x_image.plane
            origin = origin + row * (spec.stride[0] * x_image.row) + column * (spec.stride[1] * lanes)

            def load(kh: int, skipped: int) -> Expr:
                return x[T.lanes_at(origin + kh * spec.dilation[0] * x_image.row + skipped * lanes, lanes)]

            for i, total in enumerate(sums(spec, lanes, weights, bias, block, width, load)):
                value = total.value
                if residual:
                    added = block * residual_image.plane + residual_image.origin + row * residual_image.row
                    value = value + residual[0][T.lanes_at(added + (column + i) * lanes, lanes)]
                out = block * y_image.plane + y_image.origin + row * y_image.row + (column + i) * lanes
                T.store(y, out, activate(value, spec.activation, lanes), lanes)

        def band(block: Expr, number: Expr, shape: Band) -> None:
            for row in range(shape.rows):
                tiling.each_tile(shape.segments, partial(tile, block, number * cut.full.rows + row))

        tasks.each_group(
            number, lambda block, first_band: cut.each(first_band, tasks.bands_per_task, partial(band, block))
        )

    return T.kernel(symbol, arguments, task)


def sums(
    spec: ConvSpec,
    lanes: int,
    weights: Buffer,
    bias: Buffer,
    block: Expr,
    width: int,
    load: Callable[[int, int], Expr],
) -> list[Register]:
    """Compute `width` outputs beside each other, without activation. `load(kh, column)`: an input vector under kernel
    row `kh`, so many columns from the first output's first tap.
    """
    totals = [Register(lanes, bias[T.lanes_at(block * lanes, lanes)]) for _ in range(width)]
    rows, columns = spec.kernel
    for kh in range(rows):
        taps_at = (block * (rows * columns) + kh * columns) * lanes
        line = [weights[T.lanes_at(taps_at + kw * lanes, lanes)] for kw in range(columns)]
        for i, kw in sorted(product(range(width), range(columns)), key=lambda pair: _column(spec, *pair)):
            totals[i].add(load(kh, _column(spec, i, kw)) * line[kw])
    return totals


def _column(spec: ConvSpec, pixel: int, kw: int) -> int:
    """The input column, from the tile's first, that tap `kw` of output `pixel` reads."""
    return pixel * spec.stride[1] + kw * spec.dilation[1]


@dataclass(frozen=True)
class DepthwiseWork:
    """Both convolutions in memory. Lines are counted from the window's padding on."""

    spec: ConvDepthwiseSpec
    target: TargetSpec

    @cached_property
    def geometry(self) -> ConvolutionGeometry:
        """Of the first convolution."""
        return ConvolutionGeometry(self.spec.conv, self.target)

    @cached_property
    def output(self) -> Image:
        """y."""
        second = self.spec.depthwise
        return Image(second.out_channels, *second.output_size, second.output_halo, self.target.lanes)

    @cached_property
    def columns(self) -> int:
        """Of a line between the two, padding included."""
        second = self.spec.depthwise
        read = (self.output.width - 1) * second.stride[1] + second.kernel[1]
        return max(read, second.pads[1] + second.width)

    @property
    def scratch_elements(self) -> int:
        """Numbers in scratch memory."""
        lines = self.spec.depthwise.kernel[0]
        return lines * self.geometry.group_blocks * self.columns * self.target.lanes

    @property
    def first_price(self) -> float:
        """What an operation of the first convolution costs, of one of the second."""
        if self.spec.conv.precision == "fp32":
            return 1.0
        return PRICE_OF_TILES if bf16.has_tiles(self.target) else PRICE_OF_WORDS

    def cost_us(self, tasks: Tasks) -> float:
        """Mean time of the layer over the gang sizes, in microseconds of one core. Each task begins with lines that
        another one computes, too.
        """
        second, lines = self.spec.depthwise, tasks.bands_per_task
        per_line = self.first_price * self.geometry.flops / tasks.groups / self.spec.conv.output_size[0]
        first = per_line * (lines * second.stride[0] + second.kernel[0] - second.stride[0])
        flops = tasks.groups_per_task * (first + second.flops * lines / (tasks.groups * self.output.height))
        each = flops / PEAK_FLOPS_PER_US[self.target.name] + CLAIM_US
        return sum(-(-tasks.count // ranks) * ranks * each for ranks in _GANGS) / len(_GANGS)


def pair_candidates(spec: ConvDepthwiseSpec, target: TargetSpec) -> Iterator[KernelPlan]:
    """The static choice, then all other sizes of tasks; they share packed weights."""
    check(spec.conv)
    work = DepthwiseWork(spec, target)
    tasks = [one for one in tiling.all_tasks(work.geometry.groups, work.output.height) if not one.pixels_first]
    yield from tiling.cheapest_first((work.cost_us(one), _plan(work, one)) for one in tasks)


def _plan(work: DepthwiseWork, tasks: Tasks) -> KernelPlan:
    knobs: dict[str, int | str] = {"groups": tasks.groups_per_task, "lines": tasks.bands_per_task}
    tile = work.geometry.tile_pixels
    blocks = work.geometry.group_blocks
    text = f"conv {tile}x{blocks} and depthwise, {tasks.groups_per_task}x{tasks.bands_per_task} lines"
    return tiling.make_plan(work.spec, knobs, tasks.count, text, work.scratch_elements * FLOAT_BYTES, tile * blocks)


def pair_pack(spec: ConvDepthwiseSpec, target: TargetSpec, raw: RawWeights) -> PackedWeights:
    """Weights and bias of both, as each has them alone."""
    second = {"weights": raw["depthwise_weights"], "bias": raw["depthwise_bias"]}
    return (*convolution.pack(spec.conv, target, raw), *pack(spec.depthwise, target, second))


def pair_emit(spec: ConvDepthwiseSpec, plan: KernelPlan, target: TargetSpec, symbol: str) -> Any:
    """The kernel. Arguments: x, weights, bias, depthwise weights, depthwise bias, y."""
    first = DepthwiseWork(spec, target).geometry
    return pair_kernel(spec, plan, target, symbol, Lines, first.weights)


def pair_kernel(
    spec: ConvDepthwiseSpec,
    plan: KernelPlan,
    target: TargetSpec,
    symbol: str,
    lines: "type[Lines]",
    weights: Argument,
    functions: str = "",
) -> Any:
    """The kernel whose tasks `lines` writes, with these `weights` of the first convolution."""
    work = DepthwiseWork(spec, target)
    first, lanes = work.geometry, target.lanes
    tasks = Tasks(
        first.groups, work.output.height, tiling.knob(plan, "groups"), tiling.knob(plan, "lines"), pixels_first=False
    )
    kernel_size = spec.depthwise.kernel[0] * spec.depthwise.kernel[1]
    arguments = [
        bf16.stored_argument("x", first.input.elements, spec.conv.input_layout),
        weights,
        Argument("bias", first.output.blocks * lanes),
        Argument("depthwise_weights", first.output.blocks * lanes * kernel_size),
        Argument("depthwise_bias", first.output.blocks * lanes),
        bf16.stored_argument("y", work.output.elements, spec.depthwise.output_layout),
    ]

    def task(number: Expr, buffers: tuple[Buffer, ...]) -> None:
        scratch = T.local(work.scratch_elements)

        def group(index: Expr, first_line: Expr) -> None:
            def write(index: Expr, blocks: int) -> None:
                lines(work, buffers, scratch, index, blocks).write(first_line, tasks)

            T.with_blocks(index, first.output.blocks, first.group_blocks, write)

        tasks.each_group(number, group)

    return T.kernel(symbol, arguments, task, functions)


class Lines:
    """Writes the code for some lines of one group of channel blocks.

    Scratch memory, with lines and columns of the window's padding: [line % kernel lines][channel block][column][lane].
    """

    def __init__(
        self, work: DepthwiseWork, buffers: tuple[Buffer, ...], scratch: Buffer, group: Expr, blocks: int
    ) -> None:
        x, weights, bias, self._taps, self._shifts, y = buffers
        self._y = bf16.Blocked(y, work.output.plane, work.spec.depthwise.output_layout)
        self._work, self._scratch, self._group, self._blocks = work, scratch, group, blocks
        self._lanes = work.target.lanes
        self._first_block = group * work.geometry.group_blocks
        self._first = {"x": x, "weights": weights, "bias": bias, "y": y}
        cut = tiling.cut_rows(*work.spec.conv.output_size, work.geometry.tile_pixels)
        self._tiles = RegisterTiles(work.geometry, cut, (x, weights, bias, y))

    def write(self, first: Expr, tasks: Tasks) -> None:
        """The lines of y of a task, from line `first` on."""
        second = self._work.spec.depthwise
        step, before = second.stride[0], second.kernel[0] - second.stride[0]
        count = T.at_most(tasks.bands_per_task, self._work.output.height - first)
        self._clear_sides()

        def line(number: Expr) -> None:
            self._compute(first * step + number)
            done = T.bind(number + 1 - before)
            complete = done > 0 if step == 1 else tirx.all(done > 0, T.remainder(done, step) == 0)
            T.when(complete, lambda: self._convolve(T.bind(first + T.quotient(done, step) - 1)))

        T.repeat(count * step + before, line)

    def _place(self, line: Expr, block: int = 0) -> Expr:
        """Where a line of a block begins in scratch memory."""
        slot = T.remainder(line, self._work.spec.depthwise.kernel[0])
        return (slot * self._blocks + block) * (self._work.columns * self._lanes)

    def _clear_sides(self) -> None:
        """The columns of the window's padding, of all lines."""
        second, columns = self._work.spec.depthwise, self._work.columns
        sides = [*range(second.pads[1]), *range(second.pads[1] + second.width, columns)]

        def clear(line: Expr) -> None:
            for column in sides:
                self._clear(line * (columns * self._lanes) + column * self._lanes)

        if sides:
            T.repeat(second.kernel[0] * self._blocks, clear)

    def _clear(self, place: Expr) -> None:
        T.store(self._scratch, place, T.constant(0.0, self._lanes), self._lanes)

    def _compute(self, line: Expr) -> None:
        """Fill the place of a line: with what the first convolution has there, or with padding."""
        second, lines = self._work.spec.depthwise, T.bind(line)
        top, height = second.pads[0], second.height
        reach = (self._work.output.height - 1) * second.stride[0] + second.kernel[0]
        conditions = [lines >= top] * (top > 0) + [lines < top + height] * (reach > top + height)
        inside = tirx.all(*conditions) if conditions else True
        places = [T.bind(self._place(lines, j) + second.pads[1] * self._lanes) for j in range(self._blocks)]

        def clear() -> None:
            for place in places:
                T.repeat(second.width, lambda column, place=place: self._clear(place + column * self._lanes))  # type: ignore[misc]

        T.either(inside, lambda: self._convolve_first(lines - top, places), clear)

    def _convolve_first(self, row: Expr, places: list[Expr]) -> None:
        """Write a line of the first convolution to where each of its blocks has its place."""

        def tile(column: Expr, width: int) -> None:
            sums = self._tiles.sums(self._group, self._blocks, row, column, 1, width)
            for j, place in enumerate(places):
                for i in range(width):
                    value = activate(sums[i][j].value, self._work.spec.conv.activation, self._lanes)
                    T.store(self._scratch, place + (column + i) * self._lanes, value, self._lanes)

        tiling.each_tile(tiling.segments(self._work.spec.depthwise.width, self._work.geometry.tile_pixels), tile)

    def _convolve(self, line: Expr) -> None:
        """Write one line of y."""
        work, lanes = self._work, self._lanes
        spec, y = work.spec.depthwise, work.output
        for j in range(self._blocks):
            block = T.bind(self._first_block + j)
            lines = [T.bind(self._place(line * spec.stride[0] + kh, j)) for kh in range(spec.kernel[0])]

            def load(column: Expr, kh: int, skipped: int, lines: list[Expr] = lines) -> Expr:
                place = lines[kh] + column * (spec.stride[1] * lanes) + skipped * lanes
                return self._scratch[T.lanes_at(place, lanes)]

            def tile(column: Expr, width: int, block: Expr = block, load: Any = load) -> None:
                totals = sums(spec, lanes, self._taps, self._shifts, block, width, partial(load, column))
                out = y.origin + line * y.row + column * lanes
                for i, total in enumerate(totals):
                    self._y.store(block, out + i * lanes, activate(total.value, spec.activation, lanes), lanes)

            tiling.each_tile(tiling.segments(y.width, widest(spec, work.target)), tile)
