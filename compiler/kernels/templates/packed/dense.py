"""A dense layer whose weights are integers of 4 or 8 bits; activations, products and sums are float32.

A task computes some rows for a group of channel blocks. A few rows are bound by reading weights: these become float32
in registers, each for all rows of the only tile. More rows are bound by products. There the weights of a block of the
reduction become float32 in scratch memory, which stays in the L1 cache while tiles of rows use it in turns; outputs
hold partial sums between blocks, as those of the dense kernel of several rows in `convolution.py`.

Integers are packed [group][word][outputs of the group]: a word of 4 bits is eight inputs, the first one lowest. Of 8
bits each input is a row of its own. Scales and zero points are packed [group][block][outputs of the group].

A kernel of one row and one of several have the same code: a row is a position of the sequence, or a row of the batch.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np

from gangway.artifact.format import ALIGNMENT_BYTES, TargetSpec
from gangway.compiler.kernels.packed_specs import ZERO_POINTS, PackedDenseSpec, is_possible
from gangway.compiler.kernels.specs import Array, BatchPlan, KernelPlan, PackedWeights, RawWeights
from gangway.compiler.kernels.templates import builder as T
from gangway.compiler.kernels.templates import tiling
from gangway.compiler.kernels.templates.builder import Argument, Buffer, Expr, Register, tirx
from gangway.compiler.kernels.templates.convolution import CALL_FLOPS, MOST_ROWS, PREFETCHED_ELEMENTS
from gangway.compiler.kernels.templates.float32_math import activate
from gangway.compiler.kernels.templates.matmul import Sums, multiply_add
from gangway.compiler.kernels.templates.tiling import FLOAT_BYTES, Image, Traffic, UnsupportedSpecError

WORD = 8  # inputs of a word of 4 bits; of 8 bits so many rows are one step
GROUP_BLOCKS = 2  # channel blocks of a register tile
DIRECT_ROWS = 8  # most rows whose weights are made float32 in registers, in a kernel of any number of rows
CHUNK = 256  # inputs whose weights are made float32 at once: 32 KiB of two blocks of sixteen outputs
UNPACKING_FLOPS = 8  # making a weight float32 takes as long as so many operations


@dataclass(frozen=True)
class PackedGeometry:
    """The tensors of a layer in memory."""

    spec: PackedDenseSpec
    target: TargetSpec

    @cached_property
    def lanes(self) -> int:
        """Outputs of a channel block."""
        return self.target.lanes

    @cached_property
    def input(self) -> Image:
        """x."""
        return Image(self.spec.in_channels, 1, self.spec.positions, 0, self.lanes)

    @cached_property
    def output(self) -> Image:
        """y, and the tensor that is added."""
        return Image(self.spec.out_channels, 1, self.spec.positions, 0, self.lanes)

    @cached_property
    def group_blocks(self) -> int:
        """Channel blocks of a whole group."""
        return min(GROUP_BLOCKS, self.output.blocks)

    @cached_property
    def groups(self) -> int:
        """Groups of channel blocks."""
        return -(-self.output.blocks // self.group_blocks)

    @cached_property
    def words(self) -> int:
        """Rows of packed integers of a group."""
        return -(-self.spec.in_channels // WORD) if self.spec.bits == 4 else self.spec.in_channels

    @cached_property
    def piece(self) -> int:
        """Inputs of one scale that are computed together."""
        return min(self.spec.block, CHUNK)

    @cached_property
    def tile_rows(self) -> int:
        """Most rows of a register tile; other registers hold weights, their scales and zero points, a broadcast."""
        return (tiling.registers(self.target) - 4 * self.group_blocks) // self.group_blocks

    @cached_property
    def tiles(self) -> int:
        """Tiles of all positions."""
        return -(-self.spec.positions // self.tile_rows)

    @cached_property
    def traffic(self) -> Traffic:
        """Bytes moved at least once."""
        weights = self.output.blocks * self.lanes * (self.spec.in_channels * self.spec.bits // 8 + 4 * self.spec.blocks)
        return Traffic(weights, self.input.elements * FLOAT_BYTES, self.output.elements * FLOAT_BYTES)

    def arguments(self, rows: int = 1) -> list[Argument]:
        """What the kernel is given."""
        width = self.output.blocks * self.lanes
        scales = self.spec.blocks * width
        return [
            Argument("x", self.input.elements * rows),
            Argument("integers", self.words * width, "int32" if self.spec.bits == 4 else "int8"),
            Argument("scales", scales),
            *([Argument("zeros", scales, "int8")] if self.spec.zeros else []),
            Argument("bias", width),
            *([Argument("residual", self.output.elements * rows)] if self.spec.residual else []),
            Argument("y", self.output.elements * rows),
        ]


def candidates(spec: PackedDenseSpec, target: TargetSpec) -> Iterator[KernelPlan]:
    """The only plan. Raises `UnsupportedSpecError`."""
    if not is_possible(spec.in_channels, spec.block):
        raise UnsupportedSpecError(f"blocks of {spec.block} inputs with a scale")
    g = PackedGeometry(spec, target)
    few = g.tiles == 1
    found = (
        tiling.one_band_tasks(g.groups, 1)
        if few
        else [t for t in tiling.all_tasks(g.groups, g.tiles) if not t.pixels_first]
    )
    unpacking = UNPACKING_FLOPS * spec.in_channels * g.output.blocks * g.lanes
    tasks = min(found, key=lambda t: tiling.tasks_cost(t, spec.flops + unpacking * t.parts, g.traffic, target))
    knobs: dict[str, int | str] = {"groups": tasks.groups_per_task, "parts": tasks.parts}
    way = "registers" if few else "scratch"
    text = f"dense int{spec.bits} {way}, {tasks.groups_per_task}x{g.group_blocks} blocks, {tasks.parts} parts"
    moved = int((g.traffic.weights + g.traffic.input) * tasks.largest_share)
    yield tiling.make_plan(spec, knobs, tasks.count, text, moved, min(spec.positions, g.tile_rows) * g.group_blocks)


def emit(spec: PackedDenseSpec, plan: KernelPlan, target: TargetSpec, symbol: str) -> Any:
    """The kernel. Arguments: as `PackedDenseSpec` has them."""
    g, parts, size = PackedGeometry(spec, target), tiling.knob(plan, "parts"), tiling.knob(plan, "groups")
    rows = tiling.balanced_sizes([spec.positions], g.tile_rows)

    def task(number: Expr, buffers: tuple[Buffer, ...]) -> None:
        place = _Rows(g.lanes, g.input.plane, g.lanes, g.lanes, g.output.plane)
        writer = _Writer(g, buffers, place)
        part, first_group = T.remainder(number, parts), T.quotient(number, parts) * size

        def group(index: Expr, blocks: int) -> None:
            if g.tiles == 1:
                writer.direct(index, blocks, spec.positions)
                return
            first = T.bind(T.quotient(part * g.tiles, parts))
            count = T.bind(T.quotient((part + 1) * g.tiles, parts) - first)
            writer.unpacked(index, blocks, _Tiles(spec.positions, g.tiles, first, count, rows))

        T.repeat(
            T.at_most(size, g.groups - first_group),
            lambda i: T.with_blocks(first_group + i, g.output.blocks, g.group_blocks, group),
        )

    return T.kernel(symbol, g.arguments(), task)


def batch_plan(spec: PackedDenseSpec, target: TargetSpec) -> BatchPlan | None:
    """The kernel for several rows; None of a sequence."""
    if spec.positions > 1:
        return None
    g = PackedGeometry(spec, target)
    rows = min(MOST_ROWS, max(2 * g.tile_rows, CALL_FLOPS // (spec.flops // g.groups)))
    return BatchPlan(spec, rows, g.groups, f"dense int{spec.bits} {rows} rows")


def batch_emit(spec: PackedDenseSpec, plan: BatchPlan, target: TargetSpec, symbol: str) -> Any:
    """The kernel. Arguments: as `PackedDenseSpec` has them, and batch; see `artifact.format.BatchKernel`."""
    g, arguments = PackedGeometry(spec, target), PackedGeometry(spec, target).arguments(plan.rows)
    few = list(range(1, min(DIRECT_ROWS, g.tile_rows) + 1))
    sizes = tiling.balanced_sizes(range(few[-1] + 1, plan.rows + 1), g.tile_rows)

    def task(number: Expr, buffers: tuple[Buffer, ...]) -> None:
        *tensors, batch = buffers
        rows = T.bind(batch[0].astype("int32"))
        strides = [T.bind(T.quotient(batch[index + 1], FLOAT_BYTES)) for index in range(len(tensors))]
        added = strides[-2] if spec.residual else 0
        writer = _Writer(g, tuple(tensors), _Rows(strides[0], g.lanes, strides[-1], added, g.lanes))

        def group(index: Expr, blocks: int) -> None:
            def many() -> None:
                tiles = T.bind(T.quotient(rows + (g.tile_rows - 1), g.tile_rows))
                writer.unpacked(index, blocks, _Tiles(rows, tiles, 0, tiles, sizes))

            T.either(rows <= few[-1], lambda: T.choose(rows, few, lambda n: writer.direct(index, blocks, n)), many)

        T.with_blocks(number, g.output.blocks, g.group_blocks, group)

    return T.kernel(symbol, [*arguments, T.batch_argument(arguments)], task)


def pack(spec: PackedDenseSpec, target: TargetSpec, raw: RawWeights) -> PackedWeights:
    """Integers, scales, zero points and bias in the kernel's order, padded with zeros."""
    g = PackedGeometry(spec, target)
    integers = raw["integers"]
    if spec.bits == 4:
        halves = np.pad(integers, ((0, 0), (0, -integers.shape[1] % (WORD // 2))))
        integers = np.ascontiguousarray(halves).view("<u4").view(np.int32)
    scales = _in_groups(g, raw["scales"].astype(np.float32))
    zeros = (_in_groups(g, raw["zeros"].astype(np.int8)),) if spec.zeros else ()
    bias = np.pad(raw["bias"].astype(np.float32), (0, -spec.out_channels % g.lanes))
    return _in_groups(g, integers), scales, *zeros, bias


def _in_groups(g: PackedGeometry, values: Array) -> Array:
    """[outputs][n] -> [group][n][outputs of the group]."""
    width = g.group_blocks * g.lanes
    padded = np.pad(values, ((0, -len(values) % g.lanes), (0, 0)))
    return np.concatenate([padded[begin : begin + width].T.reshape(-1) for begin in range(0, len(padded), width)])


@dataclass(frozen=True)
class _Rows:
    """Distances in elements: of two rows of x, of two planes of x, of two rows of y and of the residual, of planes."""

    input_row: Expr
    input_plane: Expr
    output_row: Expr
    residual_row: Expr
    output_plane: Expr


@dataclass(frozen=True)
class _Tiles:
    """`count` of the `tiles` of so many rows, from tile `first` on; each has one of `sizes` rows."""

    rows: Expr
    tiles: Expr
    first: Expr
    count: Expr
    sizes: Sequence[int]


@dataclass(frozen=True)
class _Scales:
    """Scales of a block of the weights, and what is added to their products with integers, if anything."""

    factors: list[Expr]
    summands: list[Expr]


class _Writer:
    """Writes the code for groups of channel blocks."""

    def __init__(self, g: PackedGeometry, buffers: tuple[Buffer, ...], rows: _Rows) -> None:
        self._g, self._spec, self._lanes, self._at = g, g.spec, g.lanes, rows
        names = [argument.name for argument in g.arguments()]
        tensors = dict(zip(names, buffers, strict=True))
        self._x, self._integers, self._scales = (tensors[name] for name in ("x", "integers", "scales"))
        self._bias, self._y = tensors["bias"], tensors["y"]
        self._zeros, self._residual = tensors.get("zeros"), tensors.get("residual")

    def direct(self, group: Expr, blocks: int, rows: int) -> None:
        """So many rows at once, by weights that exist in registers only."""
        sums = self._start(group, blocks, rows)
        starts = [T.bind(i * self._at.input_row) for i in range(rows)]

        def words(first: Expr, count: int, scales: _Scales) -> None:
            place = self._input(first)

            def add(n: int, weights: list[Expr]) -> None:
                offset = place(n)
                multiply_add(sums, [self._x[start + offset] for start in starts], weights, self._lanes)

            self._each_weight(group, blocks, first, count, scales, add)

        self._pieces(group, blocks, 0, self._spec.in_channels, words)
        self._finish(group, sums, 0)

    def unpacked(self, group: Expr, blocks: int, tiles: _Tiles) -> None:
        """Tile after tile, by weights that a block of the reduction has in scratch memory."""
        width = blocks * self._lanes
        made = T.scratch(CHUNK * width)
        whole, rest = divmod(self._spec.in_channels, CHUNK)
        last = whole if rest else whole - 1

        def chunk(number: Expr, count: int) -> None:
            begin = number * CHUNK

            def words(first: Expr, length: int, scales: _Scales) -> None:
                def put(n: int, weights: list[Expr]) -> None:
                    for j, weight in enumerate(weights):
                        T.store(made, (first - begin + n) * width + j * self._lanes, weight, self._lanes)

                self._each_weight(group, blocks, first, length, scales, put)

            self._pieces(group, blocks, begin, count, words)
            T.repeat(tiles.count, lambda index: turn(number, count, tiles.first + index))

        def turn(number: Expr, count: int, index: Expr) -> None:
            first = T.bind(T.quotient(index * tiles.rows, tiles.tiles))
            size = T.bind(T.quotient((index + 1) * tiles.rows, tiles.tiles) - first)
            T.choose(size, tiles.sizes, lambda rows: tile(number, count, first, rows))

        def tile(number: Expr, count: int, first: Expr, rows: int) -> None:
            sums = self._start(group, blocks, rows)
            if last:
                T.when(number > 0, lambda: self._resume(group, sums, first))
            self._multiply(made, sums, first, number * CHUNK, count)
            T.either(number == last, lambda: self._finish(group, sums, first), lambda: self._keep(group, sums, first))

        if whole:
            T.repeat(whole, lambda number: chunk(number, CHUNK))
        if rest:
            chunk(whole, rest)

    def _multiply(self, made: Buffer, sums: Sums, first: Expr, begin: Expr, count: int) -> None:
        """Add the products of `count` inputs from number `begin`, a whole number of planes."""
        lanes, width = self._lanes, len(sums[0]) * self._lanes
        plane = T.bind(T.quotient(begin, lanes) * self._at.input_plane)
        starts = [T.bind((first + i) * self._at.input_row + plane) for i in range(len(sums))]

        def step(block: Expr, channel: Expr) -> None:
            place = (block * lanes + channel) * width
            weights = [made[T.lanes_at(place + j * lanes, lanes)] for j in range(len(sums[0]))]
            offset = block * self._at.input_plane + channel
            multiply_add(sums, [self._x[start + offset] for start in starts], weights, lanes)

        whole, rest = divmod(count, lanes)
        if whole:
            T.repeat(whole, lambda block: T.repeat(lanes, lambda channel: step(block, channel)))
        if rest:
            T.repeat(rest, lambda channel: step(whole, channel))

    def _pieces(
        self, group: Expr, blocks: int, begin: Expr, count: int, words: Callable[[Expr, int, _Scales], None]
    ) -> None:
        """`words(first input, how many, scales)` for up to WORD inputs at once of `count` from number `begin`."""
        size = self._g.piece

        def piece(first: Expr, length: int) -> None:
            scales = self._read_scales(group, blocks, T.quotient(first, self._spec.block))
            whole, rest = divmod(length, WORD)
            if whole:
                T.repeat(whole, lambda index: words(first + index * WORD, WORD, scales))
            if rest:
                words(first + whole * WORD, rest, scales)

        whole, rest = divmod(count, size)
        if whole:
            T.repeat(whole, lambda index: piece(begin + index * size, size))
        if rest:
            piece(begin + whole * size, rest)

    def _read_scales(self, group: Expr, blocks: int, block: Expr) -> _Scales:
        lanes = self._lanes
        base = group * (self._g.group_blocks * lanes * self._spec.blocks) + block * (blocks * lanes)
        places = [T.lanes_at(base + j * lanes, lanes) for j in range(blocks)]
        factors = [Register(lanes, self._scales[place]).value for place in places]
        if self._zeros is None:
            zero = ZERO_POINTS[self._spec.bits]
            return _Scales(factors, [T.keep(factor * T.constant(-zero, lanes)) for factor in factors if zero])
        zeros = [tirx.Cast(f"float32x{lanes}", self._zeros[place]) for place in places]
        pairs = zip(factors, zeros, strict=True)
        return _Scales(factors, [T.keep(T.constant(0.0, lanes) - factor * zero) for factor, zero in pairs])

    def _each_weight(
        self,
        group: Expr,
        blocks: int,
        first: Expr,
        count: int,
        scales: _Scales,
        body: Callable[[int, list[Expr]], None],
    ) -> None:
        """`body(n, weights)` for the weights of input `first` + n as float32, of each channel block."""
        lanes, width = self._lanes, blocks * self._lanes
        base = group * (self._g.group_blocks * lanes * self._g.words)
        nibbles = self._spec.bits == 4
        base = T.bind(base + (T.quotient(first, WORD) if nibbles else first) * width)
        size_bytes = width * (4 if nibbles else count)
        element_bytes = 4 if nibbles else 1
        for line in range(0, size_bytes, ALIGNMENT_BYTES):
            T.prefetch(self._integers, base + (PREFETCHED_ELEMENTS * FLOAT_BYTES + line) // element_bytes)
        kind = f"float32x{lanes}"
        places = [T.lanes_at(base + j * lanes, lanes) for j in range(blocks)]
        words = [T.keep(self._integers[place]) for place in places] if nibbles else []
        mask = T.constant(15, lanes, "int32")

        def integer(n: int, j: int) -> Expr:
            if nibbles:
                return tirx.Cast(kind, (words[j] >> T.constant(4 * n, lanes, "int32")) & mask)
            return tirx.Cast(kind, self._integers[T.lanes_at(base + n * width + j * lanes, lanes)])

        for n in range(count):
            weights = []
            for j in range(blocks):
                value = integer(n, j) * scales.factors[j]
                weights.append(T.keep(value + scales.summands[j] if scales.summands else value))
            body(n, weights)

    def _input(self, first: Expr) -> Callable[[int], Expr]:
        """Where input `first` + n of a row lies, `first` being a multiple of WORD."""
        lanes, plane = self._lanes, self._at.input_plane
        start = T.bind(T.quotient(first, lanes) * plane + T.remainder(first, lanes))
        return lambda n: start + (n // lanes) * plane + n % lanes

    def _start(self, group: Expr, blocks: int, rows: int) -> Sums:
        lanes, first = self._lanes, group * self._g.group_blocks
        bias = [self._bias[T.lanes_at((first + j) * lanes, lanes)] for j in range(blocks)]
        return [[Register(lanes, value) for value in bias] for _ in range(rows)]

    def _each(self, group: Expr, sums: Sums, first: Expr, row: Expr, body: Callable[[Register, Expr], None]) -> None:
        """`body(sum, where its vector lies)` in a tensor whose rows are `row` apart."""
        plane = self._at.output_plane
        for i, j in product(range(len(sums)), range(len(sums[0]))):
            body(sums[i][j], (first + i) * row + (group * self._g.group_blocks + j) * plane)

    def _resume(self, group: Expr, sums: Sums, first: Expr) -> None:
        lanes = self._lanes
        self._each(group, sums, first, self._at.output_row, lambda total, at: total.set(self._y[T.lanes_at(at, lanes)]))

    def _keep(self, group: Expr, sums: Sums, first: Expr) -> None:
        lanes = self._lanes
        self._each(group, sums, first, self._at.output_row, lambda total, at: T.store(self._y, at, total.value, lanes))

    def _finish(self, group: Expr, sums: Sums, first: Expr) -> None:
        lanes, residual = self._lanes, self._residual
        if residual is not None:
            self._each(
                group, sums, first, self._at.residual_row, lambda total, at: total.add(residual[T.lanes_at(at, lanes)])
            )

        def finish(total: Register, at: Expr) -> None:
            T.store(self._y, at, activate(total.value, self._spec.activation, lanes), lanes)

        self._each(group, sums, first, self._at.output_row, finish)
