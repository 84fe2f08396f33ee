"""Direct convolution on blocked activations, bias, residual and activation fused. A dense layer is the 1 x 1 case.

One register tile computes some pixels x some channel blocks of the output. Weights are packed
[group][input plane][kh][kw][input channel][output channels of the group]; the last group may have fewer blocks, the
last plane fewer channels (a multiple of four) than the others.

A dense layer has a second kernel, for several rows in one call: a matrix of rows times the matrix of weights. One row
alone is bound by reading its weights. There each vector of weights is used for all rows of a register tile. More rows
than a tile has take turns over a block of the weights that stays in the L2 cache, where the next block arrives
meanwhile: the blocking of Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication" (TOMS 2008), with
rows in place of packed panels. Weights are packed as for one row; outputs hold partial sums between blocks.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product
from typing import Any

import numpy as np

from gangway.artifact.format import TargetSpec
from gangway.compiler.kernels.specs import (
    MOST_LANES,
    NONE,
    Array,
    BatchPlan,
    ConvSpec,
    KernelPlan,
    PackedWeights,
    RawWeights,
)
from gangway.compiler.kernels.templates import builder as T
from gangway.compiler.kernels.templates import tiling
from gangway.compiler.kernels.templates.bf16.words import stored_argument
from gangway.compiler.kernels.templates.builder import Argument, Buffer, Expr, Register
from gangway.compiler.kernels.templates.float32_math import activate
from gangway.compiler.kernels.templates.tiling import (
    FLOAT_BYTES,
    BandCut,
    Image,
    Priced,
    Tasks,
    Traffic,
    UnsupportedSpecError,
)

UNROLLED_CHANNELS = 4  # input channels per iteration of the innermost loop
VECTOR_BLOCKS = 4  # channel blocks of a tile when there is one pixel only (matrix times vector)
# Weights are read in order, often from memory. A page ahead, because the processor's own prefetching stops at its end.
PREFETCHED_ELEMENTS = 4096 // FLOAT_BYTES

MOST_ROWS = 32  # of one call
CALL_FLOPS = 40_000_000  # of one task, about: half a millisecond, since a task cannot be interrupted
TILE_ROWS = 6  # most rows of a register tile; each number of rows is code of its own
BLOCK_CHANNELS = 256  # of a block of weights: 64 KiB for four blocks of sixteen outputs


@dataclass(frozen=True)
class ConvolutionGeometry:
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
        return min((tiling.registers(self.target) - self.group_blocks - spare) // self.group_blocks, 28)

    @cached_property
    def plane_channels(self) -> tuple[int, int]:
        """Whole input planes, and the channels that are summed up of the last, partial one."""
        whole, rest = divmod(self.spec.in_channels // self.spec.groups, self.input.lanes)
        return whole, -(-rest // UNROLLED_CHANNELS) * UNROLLED_CHANNELS

    def planes_of(self, group: Expr) -> tuple[Expr, Expr]:
        """First and end of the input planes whose weights are not all zero for a group of channel blocks.

        Only for weights in blocks on the diagonal, of which all planes count as whole ones.
        """
        spec, width = self.spec, self.group_blocks * self.target.lanes
        outputs, inputs = spec.out_channels // spec.diagonal_blocks, spec.in_channels // spec.diagonal_blocks
        last = T.at_most((group + 1) * width, spec.out_channels) - 1
        end = (T.quotient(last, outputs) + 1) * inputs
        return T.quotient(T.quotient(group * width, outputs) * inputs, self.input.lanes), T.quotient(
            end + (self.input.lanes - 1), self.input.lanes
        )

    @cached_property
    def _planes_used(self) -> list[int]:
        """By group of channel blocks."""
        spans = [self.planes_of(group) for group in range(self.groups)]
        return [int(end) - int(first) for first, end in spans]

    @cached_property
    def reduction(self) -> int:
        """Products summed up for one output, at most."""
        whole, rest = (max(self._planes_used), 0) if self.spec.diagonal_blocks > 1 else self.plane_channels
        return (whole * self.input.lanes + rest) * self.spec.kernel[0] * self.spec.kernel[1]

    @cached_property
    def flops(self) -> int:
        """Floating point operations, surplus output channels included."""
        flops = 2 * self.pixels * self.output.blocks * self.output.lanes * self.reduction
        if self.spec.diagonal_blocks > 1:
            return flops * sum(self._planes_used) // (max(self._planes_used) * self.groups)
        return flops

    @cached_property
    def traffic(self) -> Traffic:
        """Bytes moved at least once."""
        weights = self.output.blocks * self.output.lanes * self.reduction
        return Traffic(weights * FLOAT_BYTES, self.input.elements * FLOAT_BYTES, self.output.elements * FLOAT_BYTES)

    def arguments(self, weights: Argument, rows: int = 1) -> list[Argument]:
        """What a kernel is given: x, weights, bias, [residual,] y, of so many rows."""
        spec, bias = self.spec, Argument("bias", self.output.blocks * self.target.lanes)
        given = [stored_argument("x", self.input.elements * rows, spec.input_layout), weights, bias]
        if spec.residual:
            given.append(stored_argument("residual", self.residual.elements * rows, spec.residual_layout))
        return [*given, stored_argument("y", self.output.elements * rows, spec.output_layout)]

    @property
    def weights(self) -> Argument:
        """Weights of float32."""
        return Argument("weights", self.output.blocks * self.target.lanes * self.reduction)

    def cut(self, tile_pixels: int) -> BandCut:
        """The output cut into register tiles of at most `tile_pixels`."""
        if tiling.is_line(self.spec):
            return tiling.cut_line(self.pixels, tile_pixels)
        return tiling.cut_rows(self.output.height, self.output.width, tile_pixels)


def candidates(spec: ConvSpec, target: TargetSpec) -> Iterator[KernelPlan]:
    """The static choice, then all other tile sizes, sizes of tasks and orders; they share packed weights."""
    check(spec)
    yield from geometry_candidates(ConvolutionGeometry(spec, target))


def direct_us(spec: ConvSpec, target: TargetSpec) -> float:
    """Estimated time of the static choice."""
    geometry = ConvolutionGeometry(spec, target)
    return min(price for price, _ in _priced(geometry, geometry.tile_pixels, geometry.cut(geometry.tile_pixels)))


def geometry_candidates(geometry: ConvolutionGeometry) -> Iterator[KernelPlan]:
    """The plans of a convolution."""
    widest = geometry.tile_pixels
    static = min(_priced(geometry, widest, geometry.cut(widest)), key=lambda item: item[0])
    yield static[1]
    cuts = tiling.tile_cuts(widest, geometry.cut)
    yield from tiling.spread(static, (item for cut, size in cuts.items() for item in _priced(geometry, size, cut)))


def _priced(geometry: ConvolutionGeometry, tile_pixels: int, cut: BandCut) -> Iterator[Priced]:
    """Every plan with register tiles of this size."""
    price = tiling.tile_price(geometry.tile_pixels, tile_pixels)
    for tasks in tiling.all_tasks(geometry.groups, cut.bands):
        if tasks.ordered:
            cost = tiling.tasks_cost(tasks, geometry.flops, geometry.traffic, geometry.target)
            yield price * cost, _plan(geometry, tile_pixels, cut, tasks)


def _plan(geometry: ConvolutionGeometry, tile_pixels: int, cut: BandCut, tasks: Tasks) -> KernelPlan:
    pixels = max(size for size, _ in cut.tiles)
    blocks = geometry.group_blocks
    weights = blocks * geometry.target.lanes * geometry.reduction * FLOAT_BYTES
    inputs = geometry.traffic.input * tasks.bands_per_task // tasks.bands
    order = "pixels" if tasks.pixels_first else "weights"
    text = f"conv {pixels}x{blocks} {tasks.groups_per_task}x{tasks.bands_per_task} {order} first"
    knobs = {"tile_pixels": tile_pixels, **tasks.knobs}
    return tiling.make_plan(geometry.spec, knobs, tasks.count, text, weights + inputs, pixels * blocks)


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
    return pack_for(ConvolutionGeometry(spec, target), raw)


def packing(spec: ConvSpec, target: TargetSpec) -> object:
    """What decides how weights are packed, beside the weights."""
    sizeless = replace(spec, height=0, width=0, input_halo=0, residual_halo=0, output_halo=0, residual=False)
    return replace(sizeless, activation=NONE), ConvolutionGeometry(spec, target).group_blocks


def pack_for(geometry: ConvolutionGeometry, raw: RawWeights) -> PackedWeights:
    """The same, of a geometry."""
    spec, target = geometry.spec, geometry.target
    if spec.diagonal_blocks > 1:
        return _pack_diagonal(geometry, raw)
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


def _pack_diagonal(geometry: ConvolutionGeometry, raw: RawWeights) -> PackedWeights:
    """The same, with the planes that each group of channel blocks has weights for."""
    spec, lanes = geometry.spec, geometry.input.lanes
    width = geometry.group_blocks * geometry.target.lanes
    packed = np.zeros(geometry.output.blocks * geometry.target.lanes * geometry.reduction, np.float32)
    surplus = -spec.in_channels % lanes
    for group, begin in enumerate(range(0, spec.out_channels, width)):
        first, end = (int(plane) for plane in geometry.planes_of(group))
        rows = np.pad(raw["weights"][begin : begin + width], ((0, 0), (0, surplus), (0, 0), (0, 0)))
        parts = rows[:, first * lanes : end * lanes].reshape(len(rows), end - first, lanes, *spec.kernel)
        _pack_planes(packed, group * width * geometry.reduction, parts, lanes, geometry.target.lanes)
    return packed, np.pad(raw["bias"].astype(np.float32), (0, -spec.out_channels % geometry.target.lanes))


def _pack_planes(packed: Array, at: int, weights: Array, channels: int, lanes: int) -> int:
    """Write one group's weights [out][plane][channel][kh][kw] from element `at` on, with room for `channels` of each
    plane and for whole blocks of outputs; return where they end.
    """
    outputs, planes, given, *kernel = weights.shape
    shape: tuple[int, ...] = (planes, *kernel, channels, -(-outputs // lanes) * lanes)
    end = at + math.prod(shape)
    packed[at:end].reshape(shape)[:, :, :, :given, :outputs] = weights.transpose(1, 3, 4, 2, 0)
    return end


def emit(spec: ConvSpec, plan: KernelPlan, target: TargetSpec, symbol: str) -> Any:
    """The kernel. Arguments: x, weights, bias, [residual,] y."""
    geometry = ConvolutionGeometry(spec, target)
    cut = geometry.cut(tiling.knob(plan, "tile_pixels"))
    tasks = tiling.planned_tasks(plan, geometry.groups, cut.bands)

    def task(number: Expr, buffers: tuple[Buffer, ...]) -> None:
        write_tiles(RegisterTiles(geometry, cut, buffers), geometry, tasks, number)

    return T.kernel(symbol, geometry.arguments(geometry.weights), task)


def write_tiles(writer: "RegisterTiles", geometry: ConvolutionGeometry, tasks: Tasks, number: Expr) -> None:
    """Emit one task."""

    def group(index: Expr, first_band: Expr) -> None:
        def bands(index: Expr, blocks: int) -> None:
            writer.bands(index, blocks, first_band, tasks.bands_per_task)

        T.with_blocks(index, geometry.output.blocks, geometry.group_blocks, bands)

    tasks.each_group(number, group)


def batch_plan(spec: ConvSpec, target: TargetSpec) -> BatchPlan | None:
    """The kernel for several rows; None unless the inputs of an output lie one after the other, as the weights do."""
    whole = spec.kernel == (spec.height, spec.width) and spec.dilation == (1, 1) and not any(spec.pads)
    side_by_side = not spec.input_planar and not spec.input_halo
    no_gaps = spec.height * spec.width == 1 or spec.in_channels % target.lanes == 0
    if spec.groups * spec.diagonal_blocks > 1 or not (whole and side_by_side and no_gaps):
        return None
    geometry = ConvolutionGeometry(spec, target)
    tile = _tile_rows(geometry)
    rows = min(MOST_ROWS, max(2 * tile, CALL_FLOPS // (geometry.flops // geometry.groups)))
    return BatchPlan(spec, rows, geometry.groups, f"dense {rows} rows, {tile}x{geometry.group_blocks}")


def _tile_rows(geometry: ConvolutionGeometry) -> int:
    return min(TILE_ROWS, geometry.tile_pixels)


def batch_emit(spec: ConvSpec, plan: BatchPlan, target: TargetSpec, symbol: str) -> Any:
    """The kernel. Arguments: x, weights, bias, [residual,] y, batch; see `artifact.format.BatchKernel`."""
    geometry = ConvolutionGeometry(spec, target)
    arguments = geometry.arguments(geometry.weights, plan.rows)

    def task(number: Expr, buffers: tuple[Buffer, ...]) -> None:
        tiles = _BatchTiles(geometry, plan.rows, buffers)
        T.with_blocks(number, geometry.output.blocks, geometry.group_blocks, tiles.group)

    return T.kernel(symbol, [*arguments, T.batch_argument(arguments)], task)


class RegisterTiles:
    """Writes the tiles of one convolution.

    Sums stay in vector registers for the whole reduction: per input channel a tile loads one weight vector for each
    block and broadcasts one number for each pixel. The scheme is that of Georganas et al., "Anatomy of High-Performance
    Deep Learning Convolutions on SIMD Architectures" (SC 2018).
    """

    def __init__(self, geometry: ConvolutionGeometry, cut: BandCut, buffers: tuple[Buffer, ...]):
        self._g, self._cut = geometry, cut
        self._x, self._weights, self._bias, *self._residual, self._y = buffers
        self._lanes = geometry.target.lanes
        self._skipped_products: Expr = 0  # of each output, before those whose weights are read

    def bands(self, group: Expr, blocks: int, first_band: Expr, count: int) -> None:
        """All tiles of up to `count` bands, for one group of channel blocks."""
        self._cut.each_tile(first_band, count, partial(self._tile, group, blocks))

    def _pixels(self, image: Image, row: Expr, column: Expr, rows: int, width: int) -> list[Expr]:
        """Where the tile's pixels lie in a plane of `image`."""
        base = image.origin + row * image.row + column * image.lanes
        return [base + r * image.row + c * image.lanes for r, c in product(range(rows), range(width))]

    def _inputs(self, row: Expr, column: Expr, rows: int, width: int) -> list[Expr]:
        """Where the input pixels under the first kernel tap lie."""
        spec, image = self._g.spec, self._g.input
        if self._cut.row_pixels:
            return self._pixels(image, row, column, rows, width)
        base = image.origin - spec.pads[0] * image.row - spec.pads[1] * image.lanes
        base = base + row * (spec.stride[0] * image.row) + column * (spec.stride[1] * image.lanes)
        down, across = spec.stride[0] * image.row, spec.stride[1] * image.lanes
        return [base + r * down + c * across for r, c in product(range(rows), range(width))]

    def sums(self, group: Expr, blocks: int, row: Expr, column: Expr, rows: int, width: int) -> list[list[Register]]:
        """Compute a tile; return [pixel][channel block], without residual and activation."""
        lanes, first_block = self._lanes, group * self._g.group_blocks
        sums = [
            [Register(lanes, self._bias[T.lanes_at((first_block + j) * lanes, lanes)]) for j in range(blocks)]
            for _ in range(rows * width)
        ]
        inputs = self._inputs(row, column, rows, width)
        if self._g.spec.groups > 1:
            skipped = T.quotient(first_block, self._g.blocks_per_group) * self._g.plane_channels[0]
            inputs = [pixel + skipped * self._g.input.plane for pixel in inputs]
        if self._g.spec.diagonal_blocks > 1:
            first, _ = self._g.planes_of(group)
            inputs = [pixel + first * self._g.input.plane for pixel in inputs]
        self._reduce(sums, group, blocks, inputs, self._kernel_rows(row, rows))
        return sums

    def _tile(self, group: Expr, blocks: int, row: Expr, column: Expr, rows: int, width: int) -> None:
        lanes, first_block = self._lanes, group * self._g.group_blocks
        sums = self.sums(group, blocks, row, column, rows, width)
        output = self._pixels(self._g.output, row, column, rows, width)
        residual = self._pixels(self._g.residual, row, column, rows, width)
        for j, i in product(range(blocks), range(rows * width)):
            value = sums[i][j].value
            if self._residual:
                plane = (first_block + j) * self._g.residual.plane
                value = value + self._residual[0][T.lanes_at(plane + residual[i], lanes)]
            value = activate(value, self._g.spec.activation, lanes)
            T.store(self._y, (first_block + j) * self._g.output.plane + output[i], value, lanes)

    def _kernel_rows(self, row: Expr, rows: int) -> tuple[Expr, Expr]:
        """First and end of the kernel's rows that meet the image in any of the tile's rows; the others meet zeros."""
        spec = self._g.spec
        top, _, bottom, _ = spec.pads
        first: Expr = 0
        end: Expr = spec.kernel[0]
        if top:
            above = top - (row + (rows - 1)) * spec.stride[0]
            first = T.quotient(T.at_least(above, 0) + (spec.dilation[0] - 1), spec.dilation[0])
        if bottom:
            below = spec.height + top - row * spec.stride[0]
            end = T.at_most(T.quotient(below + (spec.dilation[0] - 1), spec.dilation[0]), end)
        return first, end

    def _reduce(
        self,
        sums: list[list[Register]],
        group: Expr,
        blocks: int,
        inputs: list[Expr],
        kernel_rows_used: tuple[Expr, Expr],
    ) -> None:
        spec, image, lanes = self._g.spec, self._g.input, self._lanes
        first_row, end_row = kernel_rows_used
        (kernel_rows, kernel_columns), width = spec.kernel, blocks * lanes
        group_base = group * (self._g.group_blocks * lanes * self._g.reduction) + self._skipped_products * width
        down, across = spec.dilation[0] * image.row, spec.dilation[1] * image.lanes

        def step(plane: Expr, count: int, kh: Expr, kw: Expr, channel: Expr) -> None:
            index = plane * (kernel_rows * kernel_columns * image.lanes)
            index = index + (kh * kernel_columns + kw) * count + channel
            places = [group_base + index * width + j * lanes for j in range(blocks)]
            if self._g.pixels > 1:  # one pixel only: bound by loads already
                for place in places:
                    T.prefetch(self._weights, place + PREFETCHED_ELEMENTS)
            weights = [self._weights[T.lanes_at(place, lanes)] for place in places]
            offset = plane * image.plane + kh * down + kw * across + channel
            for i, pixel in enumerate(inputs):
                number = T.splat(self._x[pixel + offset], lanes)
                for j in range(blocks):
                    sums[i][j].add(number * weights[j])

        def channels(plane: Expr, count: int, kh: Expr, kw: Expr, taps: int) -> None:
            def some(index: Expr) -> None:
                for u in range(UNROLLED_CHANNELS):
                    step(plane, count, kh, kw, index * UNROLLED_CHANNELS + u)

            T.repeat(taps * count // UNROLLED_CHANNELS, some)

        def taps_of_row(plane: Expr, count: int, kh: Expr) -> None:
            if count == image.lanes and spec.dilation[1] == 1:  # all channels under a kernel's row lie side by side
                channels(plane, count, kh, 0, kernel_columns)
            else:
                T.repeat(kernel_columns, lambda kw: channels(plane, count, kh, kw, 1))

        def blocked_taps(plane: Expr, count: int) -> None:
            T.repeat(end_row - first_row, lambda kh: taps_of_row(plane, count, first_row + kh))

        def planar_taps(plane: Expr) -> None:
            # Neighbouring taps of a row share input pixels. Were they unrolled together, LLVM would keep those in
            # registers that it does not have; so the innermost loop is the one over kernel rows.
            T.repeat(kernel_columns, lambda kw: T.repeat(kernel_rows, lambda kh: step(plane, 1, kh, kw, 0)))

        if image.lanes == 1:
            T.repeat(image.blocks, planar_taps)
            return
        if spec.diagonal_blocks > 1:
            first, end = self._g.planes_of(group)
            T.repeat(end - first, lambda plane: blocked_taps(plane, image.lanes))
            return
        whole, rest = self._g.plane_channels
        if whole:
            T.repeat(whole, lambda plane: blocked_taps(plane, image.lanes))
        if rest:
            blocked_taps(whole, rest)


@dataclass(frozen=True)
class _BatchTile:
    """Some rows of a group of channel blocks."""

    group: Expr
    blocks: int
    first_row: Expr
    rows: int


class BatchWriter:
    """Writes the code for several rows, whose number and distances the last argument has."""

    def __init__(self, geometry: ConvolutionGeometry, most_rows: int, buffers: tuple[Buffer, ...]) -> None:
        *tensors, batch = buffers
        self._g, self._most_rows = geometry, most_rows
        self._x, self._weights, self._bias, *self._residual, self._y = tensors
        self._rows = T.bind(batch[0].astype("int32"))
        strides = [T.quotient(batch[index + 1], FLOAT_BYTES) for index in range(len(tensors))]
        self._x_stride, self._y_stride = T.bind(strides[0]), T.bind(strides[-1])
        self._residual_stride = T.bind(strides[3]) if self._residual else 0
        self._lanes = geometry.target.lanes


class _BatchTiles(BatchWriter):
    """Writes the register tiles of one task."""

    def group(self, group: Expr, blocks: int) -> None:
        """All rows of one group of channel blocks: every tile over a block of weights, then over the next one."""
        most = _tile_rows(self._g)
        tiles = T.bind(T.quotient(self._rows + (most - 1), most))
        last = -(-self._g.reduction // BLOCK_CHANNELS) - 1
        sizes = tiling.balanced_sizes(range(1, self._most_rows + 1), most)

        def turn(block: Expr, index: Expr) -> None:
            first = T.bind(T.quotient(index * self._rows, tiles))
            size = T.bind(T.quotient((index + 1) * self._rows, tiles) - first)
            T.choose(size, sizes, lambda rows: tile(block, index, _BatchTile(group, blocks, first, rows)))

        def tile(block: Expr, index: Expr, place: _BatchTile) -> None:
            sums = self._start(place)
            T.when(block > 0, lambda: self._resume(place, sums))
            self._reduce(place, sums, block, index)
            T.either(block == last, lambda: self._finish(place, sums), lambda: self._keep(place, sums))

        T.repeat(last + 1, lambda block: T.repeat(tiles, lambda index: turn(block, index)))

    def _start(self, tile: _BatchTile) -> list[list[Register]]:
        lanes = self._lanes
        first = tile.group * self._g.group_blocks
        return [
            [Register(lanes, self._bias[T.lanes_at((first + j) * lanes, lanes)]) for j in range(tile.blocks)]
            for _ in range(tile.rows)
        ]

    def _reduce(self, tile: _BatchTile, sums: list[list[Register]], block: Expr, turn: Expr) -> None:
        """Add the products of one block of input channels. Tile `turn` brings in the block 1 + turn further on."""
        lanes, width, start = self._lanes, tile.blocks * self._lanes, block * BLOCK_CHANNELS
        first = tile.group * (self._g.group_blocks * lanes * self._g.reduction) + start * width
        ahead = (turn + 1) * (BLOCK_CHANNELS * width)
        inputs = [T.bind((tile.first_row + i) * self._x_stride + start) for i in range(tile.rows)]

        def step(channel: Expr) -> None:
            places = [first + channel * width + j * lanes for j in range(tile.blocks)]
            for place in places:
                T.prefetch(self._weights, place + ahead, level=2)
            weights = [self._weights[T.lanes_at(place, lanes)] for place in places]
            for i, row in enumerate(inputs):
                number = T.splat(self._x[row + channel], lanes)
                for j in range(tile.blocks):
                    sums[i][j].add(number * weights[j])

        T.repeat(T.at_most(BLOCK_CHANNELS, self._g.reduction - start), step)

    def _each(self, tile: _BatchTile, body: Callable[[int, int, Expr], None]) -> None:
        """`body(row, block, index of the vector in y)` for every vector of a tile."""
        image = self._g.output
        plane = image.origin + tile.group * (self._g.group_blocks * image.plane)
        for i, j in product(range(tile.rows), range(tile.blocks)):
            body(i, j, (tile.first_row + i) * self._y_stride + (plane + j * image.plane))

    def _resume(self, tile: _BatchTile, sums: list[list[Register]]) -> None:
        self._each(tile, lambda i, j, place: sums[i][j].set(self._y[T.lanes_at(place, self._lanes)]))

    def _keep(self, tile: _BatchTile, sums: list[list[Register]]) -> None:
        self._each(tile, lambda i, j, place: T.store(self._y, place, sums[i][j].value, self._lanes))

    def _finish(self, tile: _BatchTile, sums: list[list[Register]]) -> None:
        image, lanes = self._g.residual, self._lanes

        def vector(i: int, j: int, place: Expr) -> None:
            value = sums[i][j].value
            if self._residual:
                plane = image.origin + (tile.group * self._g.group_blocks + j) * image.plane
                row = (tile.first_row + i) * self._residual_stride
                value = value + self._residual[0][T.lanes_at(row + plane, lanes)]
            T.store(self._y, place, activate(value, self._g.spec.activation, lanes), lanes)

        self._each(tile, vector)
