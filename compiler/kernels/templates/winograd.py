"""3x3 convolutions of stride 1 by Winograd's algorithm, with 2.25 or 4 times fewer products than the direct form.

Arguments are those of the direct template. Which convolutions take this form, and how they are cut into tasks, is
decided by estimated time.

A task takes some tiles and some channel blocks through all three phases (inputs to points, products summed up, points
to outputs), so that nothing but inputs, weights and outputs leaves its core's cache. Weights are packed
[group][point][input channel][output channels of the group], `points` times larger than those of the direct form over 9.

Several rows in one call have the weights of the kernel for one row. The transformed weights are read once for each band
of tiles, from beyond the second level cache. A small image has too few tiles for bands as large as the registers allow:
two of 8 instead of one of 14, with 14x14 outputs and AVX-512. So tiles of all rows follow each other and are cut into
equal bands. A tile is computed as in the kernel for one row, so results are the same, bit for bit.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import product
from math import sqrt
from typing import Any

import numpy as np

from gangway.artifact.format import TargetSpec
from gangway.compiler.kernels.specs import Array, BatchPlan, ConvSpec, KernelPlan, PackedWeights, RawWeights
from gangway.compiler.kernels.templates import builder as T
from gangway.compiler.kernels.templates import tiling
from gangway.compiler.kernels.templates.builder import Argument, Buffer, Expr, Register
from gangway.compiler.kernels.templates.convolution import (
    PREFETCHED_ELEMENTS,
    UNROLLED_CHANNELS,
    ConvolutionGeometry,
    check,
    direct_us,
)
from gangway.compiler.kernels.templates.float32_math import activate
from gangway.compiler.kernels.templates.tiling import CLAIM_US, FLOAT_BYTES, PEAK_FLOPS_PER_US, Image, Tasks

PADDING = 1  # vectors between the numbers of two points, which else would often lie in the same set of a cache
SCRATCH_BYTES = 640 << 10  # of a task, on the stack and in the second level cache
MOST_WEIGHT_BYTES = 40 << 20
CACHED_BYTES = 800 << 10  # weights and scratch memory that stay in the second level cache
WORTH = 0.8  # of the direct form's estimated time, or less
# Vectors that a core transforms in a microsecond; measured, loads and stores included.
_VECTORS_PER_US = 420.0
_CACHED_BYTES_PER_US, _STREAMED_BYTES_PER_US = 160_000, 28_000  # weights from the second level cache, and from beyond
_DISPLACED_BYTES_PER_US = 60_000  # what larger weights cost other users of the last cache; counted as time
_UNHIDDEN = 0.3  # share of the time for weights that arithmetic does not hide
_GANGS = (1, 2, 2, 4, 8)  # to be balanced for; every task transforms its inputs itself, so more tasks are more work
MOST_BANDS = 8  # of one call, in which the last one costs little if it is not full
TASK_US = 500.0  # of one task at most, about: a task cannot be interrupted
BATCH_WORTH = 0.75  # of a row's bands alone, or fewer: for each of them its weights are read
Multiply = Callable[[Expr, int], None]
"""Of the tiles from this one of the task on, so many: a register tile."""
_SMALL, _LARGE = 1 / sqrt(2.0), sqrt(2.0)  # the points of F(4, 3)


@dataclass(frozen=True)
class Scheme:
    """F(m x m, 3 x 3), m = 2 or 4: a tile of m x m outputs depends on `size` x `size` inputs.

    Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks" (CVPR 2016): m x m outputs take (m + 2)^2
    products instead of 9 m^2. The polynomial of F(4, 3) is taken at 0, infinity, and +-1/sqrt(2), +-sqrt(2) instead of
    the usual +-1, +-2: measured on sums of 2304 products, the largest error falls to 0.4 of theirs, 2.7e-6 of a typical
    output (about five times that of the direct sum), and the transforms get simpler, since the product of the squares
    is 1.
    """

    outputs: int

    @property
    def size(self) -> int:
        """Inputs, and products, along one dimension."""
        return self.outputs + 2

    @property
    def products(self) -> int:
        """Products of a tile, per pair of channels."""
        return self.size * self.size

    def weights(self, kernels: Array) -> Array:
        """[..., 3, 3] -> [..., size, size], in double precision."""
        matrix = _weights_4() if self.outputs == 4 else _weights_2()
        return np.asarray(matrix @ kernels.astype(np.float64) @ matrix.T)

    def input_line(self, d: Sequence[Expr], lanes: int) -> list[Expr]:
        """`size` vectors of inputs -> `size` vectors, one for each point."""
        if self.outputs == 2:
            return [T.bind(value) for value in (d[0] - d[2], d[1] + d[2], d[2] - d[1], d[3] - d[1])]

        def times(value: float, x: Expr) -> Expr:
            return T.constant(value, lanes) * x

        def pair(point: float, other: float) -> list[Expr]:
            even = T.bind(d[4] - times(other * other, d[2]))
            odd = T.bind(d[3] - times(other * other, d[1]))
            return [T.bind(even + times(point, odd)), T.bind(even - times(point, odd))]

        first = T.bind(d[0] + d[4] - times(2.5, d[2]))
        last = T.bind(d[1] + d[5] - times(2.5, d[3]))
        return [first, *pair(_SMALL, _LARGE), *pair(_LARGE, _SMALL), last]

    def output_line(self, m: Sequence[Expr], lanes: int) -> list[Expr]:
        """`size` vectors of sums of products -> `outputs` vectors."""
        p, q = T.bind(m[1] + m[2]), T.bind(m[1] - m[2])
        if self.outputs == 2:
            return [T.bind(m[0] + p), T.bind(q + m[3])]
        u, v = T.bind(m[3] + m[4]), T.bind(m[3] - m[4])

        def mixed(power: int, a: Expr, b: Expr) -> Expr:
            return T.constant(_SMALL**power, lanes) * a + T.constant(_LARGE**power, lanes) * b

        return [T.bind(m[0] + p + u), T.bind(mixed(1, q, v)), T.bind(mixed(2, p, u)), T.bind(mixed(3, q, v) + m[5])]


def _weights_2() -> Array:
    return np.array([[1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]])


def _weights_4() -> Array:
    """Rows (1, p, p^2) over the product of p's distances to the other finite points."""
    rows = [[1.0, 0.0, 0.0]]
    for point, other in ((_SMALL, _LARGE), (_LARGE, _SMALL)):
        scale = 2 * point**2 * (point**2 - other**2)
        rows += [[1 / scale, sign * point / scale, point**2 / scale] for sign in (1, -1)]
    return np.array([*rows, [0.0, 0.0, 1.0]])


@dataclass(frozen=True)
class WinogradWork:
    """A convolution cut into Winograd's tiles. A *band* is as many tiles as one register tile takes.

    Tiles of several rows of a batch follow each other, so that a band may have some of one row and some of the next.
    """

    geometry: ConvolutionGeometry
    scheme: Scheme
    rows: int = 1

    @cached_property
    def grid(self) -> tuple[int, int]:
        """Tiles of a row's output, down and across; the last ones overlap their neighbours rather than the edge."""
        height, width = self.geometry.spec.output_size
        return -(-height // self.scheme.outputs), -(-width // self.scheme.outputs)

    @cached_property
    def tiles(self) -> int:
        """Number of tiles."""
        return self.rows * self.grid[0] * self.grid[1]

    @cached_property
    def band(self) -> int:
        """Tiles of a full band."""
        return -(-self.tiles // -(-self.tiles // self.most_tiles))

    @property
    def most_tiles(self) -> int:
        """Tiles that a band could have."""
        return min(self.geometry.tile_pixels, 14)

    @cached_property
    def bands(self) -> int:
        """Number of bands; the last one may have fewer tiles."""
        return -(-self.tiles // self.band)

    @cached_property
    def weight_elements(self) -> int:
        """Packed weights."""
        g = self.geometry
        return self.scheme.products * g.input.blocks * g.output.blocks * g.target.lanes**2

    def scratch_bytes(self, bands: int) -> int:
        """Transformed inputs and sums of products of a task."""
        blocks = self.geometry.input.blocks + self.geometry.group_blocks
        return bands * self.band * self.scheme.products * blocks * self.geometry.target.lanes * FLOAT_BYTES

    def task_us(self, tasks: Tasks) -> float:
        """Estimated time of a full task on one core."""
        g, lanes = self.geometry, self.geometry.target.lanes
        tiles, blocks = tasks.bands_per_task * self.band, tasks.groups_per_task * g.group_blocks
        products = tiles * self.scheme.products * g.input.blocks * lanes * blocks * lanes
        weights = self.weight_elements / tasks.groups * tasks.groups_per_task * FLOAT_BYTES
        cached = self.weight_elements * FLOAT_BYTES + self.scratch_bytes(1) <= CACHED_BYTES
        streamed = weights / (_CACHED_BYTES_PER_US if cached else _STREAMED_BYTES_PER_US)
        arithmetic = 2 * products / PEAK_FLOPS_PER_US[g.target.name]
        inputs = tiles * self.scheme.products * g.input.blocks / _VECTORS_PER_US
        outputs = tiles * self.scheme.products * blocks / _VECTORS_PER_US
        return max(arithmetic + _UNHIDDEN * streamed, streamed) + inputs + outputs

    def cost_us(self, tasks: Tasks) -> float:
        """Mean time of the layer, for all rows, over the gang sizes, in microseconds of one core."""
        each = self.task_us(tasks) + CLAIM_US
        displaced = self.weight_elements * FLOAT_BYTES / _DISPLACED_BYTES_PER_US
        return displaced + sum(-(-tasks.count // ranks) * ranks * each for ranks in _GANGS) / len(_GANGS)

    def cuts(self) -> list[Tasks]:
        """Ways to cut it into tasks that fit into the scratch memory, the best first."""
        fitting = [
            tasks
            for tasks in tiling.all_tasks(self.geometry.groups, self.bands)
            if tasks.bands_per_task == 1 or self.scratch_bytes(tasks.bands_per_task) <= SCRATCH_BYTES
        ]
        return sorted(fitting, key=self.cost_us)


@lru_cache
def best_work(spec: ConvSpec, target: TargetSpec) -> WinogradWork | None:
    """The better of the two schemes, if either is estimated to be faster than the direct form."""
    if (spec.kernel, spec.stride, spec.dilation, spec.groups) != ((3, 3), (1, 1), (1, 1), 1) or spec.input_planar:
        return None
    geometry = ConvolutionGeometry(spec, target)
    works = [
        work
        for work in (WinogradWork(geometry, Scheme(outputs)) for outputs in (4, 2) if min(spec.output_size) >= outputs)
        if work.weight_elements * FLOAT_BYTES <= MOST_WEIGHT_BYTES and work.scratch_bytes(1) <= SCRATCH_BYTES
    ]
    if not works or min(spec.in_channels, spec.out_channels) < target.lanes:
        return None
    cost, best = min(((work.cost_us(work.cuts()[0]), work) for work in works), key=lambda pair: pair[0])
    return best if cost < WORTH * tiling.layer_us(geometry.flops, geometry.traffic, target) else None


def least_us(spec: ConvSpec, target: TargetSpec) -> float:
    """Estimated time of a convolution in float32, by this algorithm or directly."""
    if work := best_work(spec, target):
        return work.cost_us(work.cuts()[0])
    return direct_us(spec, target)


def candidates(spec: ConvSpec, target: TargetSpec) -> Iterator[KernelPlan]:
    """The static choice, then all other sizes and orders of tasks. They share packed weights."""
    check(spec)
    work = best_work(spec, target)
    assert work is not None  # the registry has asked
    ranked = work.cuts()
    static = work.cost_us(ranked[0]), _plan(work, ranked[0])
    yield static[1]
    yield from tiling.spread(static, ((work.cost_us(tasks), _plan(work, tasks)) for tasks in ranked if tasks.ordered))


def _plan(work: WinogradWork, tasks: Tasks) -> KernelPlan:
    knobs = {"outputs": work.scheme.outputs, **tasks.knobs}
    m, blocks = work.scheme.outputs, work.geometry.group_blocks
    text = f"winograd {m}x{m} {work.band}x{blocks} {tasks.groups_per_task}x{tasks.bands_per_task}"
    weights = work.weight_elements // work.geometry.groups * FLOAT_BYTES
    size = work.scratch_bytes(tasks.bands_per_task) + weights
    return tiling.make_plan(work.geometry.spec, knobs, tasks.count, text, size, work.band * blocks)


def pack(spec: ConvSpec, target: TargetSpec, raw: RawWeights) -> PackedWeights:
    """Transformed weights and bias in the kernel's order, padded with zeros."""
    work = best_work(spec, target)
    assert work is not None
    g, lanes = work.geometry, target.lanes
    width = g.group_blocks * lanes
    packed = np.zeros(work.weight_elements, np.float32)
    at = 0
    for begin in range(0, spec.out_channels, width):
        group = raw["weights"][begin : begin + width]
        shape = (*[work.scheme.size] * 2, g.input.blocks * lanes, -(-len(group) // lanes) * lanes)
        end = at + math.prod(shape)
        points = work.scheme.weights(group).transpose(2, 3, 1, 0)
        packed[at:end].reshape(shape)[:, :, : spec.in_channels, : len(group)] = points
        at = end
    return packed, np.pad(raw["bias"].astype(np.float32), (0, -spec.out_channels % lanes))


def emit(spec: ConvSpec, plan: KernelPlan, target: TargetSpec, symbol: str) -> Any:
    """The kernel. Arguments: x, weights, bias, [residual,] y."""
    geometry = ConvolutionGeometry(spec, target)
    work = WinogradWork(geometry, Scheme(tiling.knob(plan, "outputs")))
    tasks = Tasks(
        geometry.groups,
        work.bands,
        tiling.knob(plan, "groups"),
        tiling.knob(plan, "bands"),
        bool(tiling.knob(plan, "pixels_first")),
    )
    arguments = [
        Argument("x", geometry.input.elements),
        Argument("weights", work.weight_elements),
        Argument("bias", geometry.output.blocks * target.lanes),
        *([Argument("residual", geometry.residual.elements)] if spec.residual else []),
        Argument("y", geometry.output.elements),
    ]

    def task(number: Expr, buffers: tuple[Buffer, ...]) -> None:
        _, first_band = tasks.first(number)
        writer = WinogradWriter(
            geometry, work.scheme, work.grid, _span(work, T.bind(first_band), tasks.bands_per_task), buffers
        )
        writer.transform_inputs()
        tasks.each_group(number, lambda group, _: writer.group(group))

    return T.kernel(symbol, arguments, task)


@dataclass(frozen=True)
class Strides:
    """Numbers from a tensor of one row of the batch to that of the next."""

    x: Expr
    residual: Expr
    y: Expr


ONE_ROW = Strides(0, 0, 0)


@dataclass(frozen=True)
class TileSpan:
    """The tiles of a task: `count`, at most `capacity`, from number `first` on. Rows of a batch follow each other.

    `each` calls its argument for every register tile.
    """

    first: Expr
    count: Expr
    capacity: int
    each: Callable[[Multiply], None]
    strides: Strides = ONE_ROW


def _span(work: WinogradWork, first_band: Expr, count: int) -> TileSpan:
    """Up to `count` bands; the last one of the image may have fewer tiles."""
    full, rest = divmod(work.tiles, work.band)

    def each(multiply: Multiply) -> None:
        def band(index: Expr) -> None:
            T.either(
                first_band + index < full if rest else True,
                lambda: multiply(index * work.band, work.band),
                lambda: multiply(index * work.band, rest),
            )

        T.repeat(T.at_most(count, work.bands - first_band), band)

    first, capacity = T.bind(first_band * work.band), count * work.band
    return TileSpan(first, T.at_most(capacity, work.tiles - first), capacity, each)


def batch_plan(spec: ConvSpec, target: TargetSpec) -> BatchPlan | None:
    """The kernel for several rows; None where an image has tiles enough."""
    joined = _join(spec, target)
    if joined is None:
        return None
    work, tasks = joined
    m, tile = work.scheme.outputs, f"{work.band}x{work.geometry.group_blocks}"
    text = f"winograd {m}x{m} {work.rows} rows, {tile} {tasks.groups_per_task}x1"
    return BatchPlan(spec, work.rows, tasks.count, text)


@lru_cache
def _join(spec: ConvSpec, target: TargetSpec) -> tuple[WinogradWork, Tasks] | None:
    """Rows, and how they are cut into tasks, if that is worth it."""
    one = best_work(spec, target)
    if one is None:
        return None
    work = WinogradWork(one.geometry, one.scheme, max(1, MOST_BANDS * one.most_tiles // one.tiles))
    if work.bands > BATCH_WORTH * work.rows * one.bands or work.scratch_bytes(1) > SCRATCH_BYTES:
        return None
    cuts = [tasks for tasks in work.cuts() if tasks.bands_per_task == 1 and tasks.pixels_first]
    return work, next((tasks for tasks in cuts if work.task_us(tasks) <= TASK_US), cuts[-1])


def batch_emit(spec: ConvSpec, plan: BatchPlan, target: TargetSpec, symbol: str) -> Any:
    """The kernel. Arguments: x, weights, bias, [residual,] y, batch; see `artifact.format.BatchKernel`."""
    joined = _join(spec, target)
    assert joined is not None  # it has been planned
    work, tasks = joined
    geometry, rows = work.geometry, work.rows
    arguments = geometry.arguments(Argument("weights", work.weight_elements), rows)
    tiles_of_one = work.tiles // rows
    sizes = tiling.balanced_sizes([tiles_of_one * number for number in range(1, rows + 1)], work.most_tiles)

    def task(number: Expr, buffers: tuple[Buffer, ...]) -> None:
        *tensors, batch = buffers
        strides = [
            T.bind(T.quotient(batch[index + 1], FLOAT_BYTES)) for index in range(len(tensors))
        ]  # residual before y
        tiles = T.bind(batch[0].astype("int32") * tiles_of_one)
        bands = T.bind(T.quotient(tiles + (work.most_tiles - 1), work.most_tiles))
        _, part = tasks.first(number)
        band = T.bind(T.quotient(part * bands, work.bands))  # the bands that there are, evenly over the tasks

        def compute() -> None:
            first = T.bind(T.quotient(band * tiles, bands))
            count = T.bind(T.quotient((band + 1) * tiles, bands) - first)

            def each(multiply: Multiply) -> None:
                T.choose(count, sizes, lambda size: multiply(0, size))

            span = TileSpan(first, count, sizes[-1], each, Strides(strides[0], strides[-2], strides[-1]))
            writer = WinogradWriter(geometry, work.scheme, work.grid, span, tuple(tensors))
            writer.transform_inputs()
            tasks.each_group(number, lambda group, _: writer.group(group))

        T.when(T.quotient((part + 1) * bands, work.bands) > band, compute)

    return T.kernel(symbol, [*arguments, T.batch_argument(arguments)], task)


@dataclass(frozen=True)
class _Place:
    """Row and column of a tile's outputs, how many of them a neighbour writes already, and the row of the batch."""

    row: Expr
    column: Expr
    done_rows: Expr
    done_columns: Expr
    of_batch: Expr


class WinogradWriter:
    """Writes the code of one task; `grid`: tiles of an image, down and across.

    Scratch memory, on the stack, T = tiles of a full task, L = lanes:
      transformed inputs   [point][input block][T][L]
      sums of products     [point][block of the group][T][L]
    """

    def __init__(
        self,
        geometry: ConvolutionGeometry,
        scheme: Scheme,
        grid: tuple[int, int],
        span: TileSpan,
        buffers: tuple[Buffer, ...],
    ):
        self._g, self._scheme, self._grid, self._span = geometry, scheme, grid, span
        self._x, self._weights, self._bias, *self._residual, self._y = buffers
        self._lanes, self._capacity = geometry.target.lanes, span.capacity
        points, lanes = scheme.products, self._lanes
        self._input_pitch, self._sum_pitch = (
            blocks * self._capacity + PADDING for blocks in (geometry.input.blocks, geometry.group_blocks)
        )
        self._inputs = T.local(points * self._input_pitch * lanes)
        self._sums = T.local(points * self._sum_pitch * lanes)

    def transform_inputs(self) -> None:
        """Fill the transformed inputs of all the task's tiles."""
        image, size, lanes = self._g.input, self._scheme.size, self._lanes
        top, left, _, _ = self._g.spec.pads
        origin = image.origin - top * image.row - left * image.lanes

        def tile(index: Expr) -> None:
            place = self._place(index)
            base = T.bind(
                place.of_batch * self._span.strides.x + (origin + place.row * image.row) + place.column * lanes
            )

            def block(plane: Expr) -> None:
                start = T.bind(base + plane * image.plane)
                loaded = [
                    [T.bind(self._x[T.lanes_at(start + r * image.row + c * image.lanes, lanes)]) for c in range(size)]
                    for r in range(size)
                ]
                across = [self._scheme.input_line(line, lanes) for line in loaded]
                for c in range(size):
                    down = self._scheme.input_line([line[c] for line in across], lanes)
                    for r, value in enumerate(down):
                        T.store(self._inputs, self._input_index(r * size + c, plane, index), value, lanes)

            T.repeat(image.blocks, block)

        T.repeat(self._span.count, tile)

    def group(self, group: Expr) -> None:
        """Compute all tiles of one group of channel blocks; the last group may have fewer."""
        T.with_blocks(group, self._g.output.blocks, self._g.group_blocks, self._group)

    def _group(self, group: Expr, blocks: int) -> None:
        panel = self._g.input.blocks * self._lanes  # input channels
        base = group * (self._scheme.products * panel * self._g.group_blocks * self._lanes)

        def point(number: Expr) -> None:
            weights = T.bind(base + number * (panel * blocks * self._lanes))
            self._span.each(lambda first, tiles: self._multiply(number, weights, first, tiles, blocks))

        T.repeat(self._scheme.products, point)
        for j in range(blocks):
            self._transform_outputs(group * self._g.group_blocks + j, j)

    def _input_index(self, point: Expr, plane: Expr, tile: Expr) -> Expr:
        return (point * self._input_pitch + plane * self._capacity + tile) * self._lanes

    def _sum_index(self, point: Expr, block: int, tile: Expr) -> Expr:
        return (point * self._sum_pitch + block * self._capacity + tile) * self._lanes

    def _place(self, index: Expr) -> _Place:
        """Where one of the task's tiles lies."""
        number, tiles, outputs = self._span.first + index, self._grid[0] * self._grid[1], self._scheme.outputs
        of_batch: Expr = 0
        if self._span.strides is not ONE_ROW:
            of_batch, number = T.bind(T.quotient(number, tiles)), T.bind(T.remainder(number, tiles))
        height, width = self._g.spec.output_size
        down, across = T.bind(T.quotient(number, self._grid[1])), T.bind(T.remainder(number, self._grid[1]))
        row, column = (
            T.bind(T.at_most(place * outputs, size - outputs)) for place, size in ((down, height), (across, width))
        )
        return _Place(row, column, T.bind(down * outputs - row), T.bind(across * outputs - column), of_batch)

    def _multiply(self, point: Expr, weights: Expr, first: Expr, tiles: int, blocks: int) -> None:
        """Sum up one point's products of `tiles` tiles: a register tile."""
        lanes = self._lanes
        sums = [[Register(lanes, T.constant(0.0, lanes)) for _ in range(blocks)] for _ in range(tiles)]
        base = T.bind(self._input_index(point, 0, first))

        def plane(number: Expr) -> None:
            def some(index: Expr) -> None:
                for u in range(UNROLLED_CHANNELS):
                    channel = index * UNROLLED_CHANNELS + u
                    at = weights + (number * lanes + channel) * (blocks * lanes)
                    for j in range(blocks):
                        T.prefetch(self._weights, at + j * lanes + PREFETCHED_ELEMENTS)
                    vectors = [self._weights[T.lanes_at(at + j * lanes, lanes)] for j in range(blocks)]
                    for i in range(tiles):
                        x = T.splat(self._inputs[base + (number * self._capacity + i) * lanes + channel], lanes)
                        for j in range(blocks):
                            sums[i][j].add(x * vectors[j])

            T.repeat(lanes // UNROLLED_CHANNELS, some)

        T.repeat(self._g.input.blocks, plane)
        for i, j in product(range(tiles), range(blocks)):
            T.store(self._sums, self._sum_index(point, j, first + i), sums[i][j].value, lanes)

    def _transform_outputs(self, block: Expr, j: int) -> None:
        """Write one channel block of all the task's tiles."""
        size, lanes = self._scheme.size, self._lanes
        bias = T.bind(self._bias[T.lanes_at(block * lanes, lanes)])

        def tile(index: Expr) -> None:
            place = self._place(index)
            sums = [
                [T.bind(self._sums[T.lanes_at(self._sum_index(r * size + c, j, index), lanes)]) for c in range(size)]
                for r in range(size)
            ]
            across = [self._scheme.output_line(line, lanes) for line in sums]
            columns = [
                self._scheme.output_line([line[c] for line in across], lanes) for c in range(self._scheme.outputs)
            ]
            for r in range(self._scheme.outputs):
                self._store_row([line[r] + bias for line in columns], block, place, r)

        T.repeat(self._span.count, tile)

    def _store_row(self, values: list[Expr], block: Expr, place: _Place, r: int) -> None:
        """Write those outputs of a tile's row that no other tile writes: tasks must not write the same memory."""
        lanes, strides = self._lanes, self._span.strides

        def pixel(image: Image, stride: Expr, c: int) -> Expr:
            plane = place.of_batch * stride + (image.origin + block * image.plane)
            return plane + (place.row + r) * image.row + (place.column + c) * lanes

        def put(c: int) -> None:
            value = values[c]
            if self._residual:
                value = value + self._residual[0][T.lanes_at(pixel(self._g.residual, strides.residual, c), lanes)]
            value = activate(value, self._g.spec.activation, lanes)
            T.store(self._y, pixel(self._g.output, strides.y, c), value, lanes)

        def whole_row() -> None:
            for c in range(self._scheme.outputs):
                T.when(c >= place.done_columns, partial(put, c))

        T.when(r >= place.done_rows, whole_row)
