"""A dense layer of several rows in one call, with products in bfloat16; weights are those of the kernel for one row.

A task is a group of channel blocks. Block by block of the reduction, it rounds the inputs of all rows to words, which
is little work beside reading the weights. Then tiles of AMX, or register tiles, add the products to sums in scratch
memory. A row of a tile of AMX is a row of the batch.
"""

import math
from functools import partial
from typing import Any

from gangway.artifact.format import TargetSpec
from gangway.compiler.kernels.specs import BatchPlan, ConvSpec
from gangway.compiler.kernels.templates import builder as T
from gangway.compiler.kernels.templates import convolution
from gangway.compiler.kernels.templates.amx.tiles import (
    TILE_ELEMENTS,
    TILE_ROWS,
    WORDS,
    begin_tiles,
    end_tiles,
    line_scratch,
    load_tiles,
    store_tiles,
)
from gangway.compiler.kernels.templates.bf16 import words as bf16
from gangway.compiler.kernels.templates.bf16.work import LANES, Bf16Work, works
from gangway.compiler.kernels.templates.builder import Buffer, Expr, Register
from gangway.compiler.kernels.templates.convolution import MOST_ROWS, BatchWriter
from gangway.compiler.kernels.templates.convolution import TILE_ROWS as REGISTER_ROWS
from gangway.compiler.kernels.templates.float32_math import activate
from gangway.compiler.kernels.templates.matmul import multiply_add
from gangway.compiler.kernels.templates.tiling import balanced_sizes

BLOCK_STEPS = 8  # rows of 16 words of a block of the reduction: 32 KiB of weights, 16 KiB of inputs


def batch_plan(spec: ConvSpec, target: TargetSpec) -> BatchPlan | None:
    """The kernel for several rows; None unless the inputs of an output lie one after the other, as the weights do."""
    plain = convolution.batch_plan(spec, target)
    if plain is None:
        return None
    tiles = bf16.has_tiles(target)
    rows = MOST_ROWS if tiles else plain.rows
    text = f"dense bf16 {rows} rows, {'tiles' if tiles else 'vectors'}"
    return BatchPlan(spec, rows, plain.tasks, text)


def batch_emit(spec: ConvSpec, plan: BatchPlan, target: TargetSpec, symbol: str) -> Any:
    """The kernel. Arguments: x, weights, bias, [residual,] y, batch; see `artifact.format.BatchKernel`."""
    work = works(spec, target)[0]
    g, rows = work.geometry, plan.rows
    arguments = g.arguments(work.weights, rows)

    def task(number: Expr, buffers: tuple[Buffer, ...]) -> None:
        writer = (_TileRows if bf16.has_tiles(target) else _VectorRows)(work, rows, buffers)
        T.with_blocks(number, g.output.blocks, g.group_blocks, writer.group)

    return T.kernel(symbol, [*arguments, T.batch_argument(arguments)], task, bf16.functions(target))


class _Rows(BatchWriter):
    """Writes the code for a group of channel blocks.

    Scratch memory: inputs [step][row][16 words], sums [channel block][row][16].
    """

    def __init__(self, work: Bf16Work, most_rows: int, buffers: tuple[Buffer, ...]) -> None:
        super().__init__(work.geometry, -(-most_rows // TILE_ROWS) * TILE_ROWS, buffers)
        self._work = work
        self._inputs, self._first_input = line_scratch(BLOCK_STEPS * self._most_rows * WORDS, "int32")
        sums = self._g.group_blocks * self._most_rows * LANES
        self._sums, self._first_sum = line_scratch(sums, "float32")
        self._steps = work.planes * math.prod(work.spec.kernel)

    def group(self, group: Expr, blocks: int) -> None:
        """All rows of one group of channel blocks."""
        weights_at = T.bind(group * (self._g.group_blocks * LANES * self._work.reduction_words))
        whole, rest = divmod(self._steps, BLOCK_STEPS)
        zero = T.constant(0.0, LANES)
        T.repeat(
            blocks * self._most_rows, lambda index: T.store(self._sums, self._first_sum + index * LANES, zero, LANES)
        )

        def block(index: Expr, count: int) -> None:
            first = T.bind(index * BLOCK_STEPS)
            self._round(first, count)
            self.add(weights_at + first * (WORDS * blocks * LANES), count, blocks)

        if whole:
            T.repeat(whole, lambda index: block(index, BLOCK_STEPS))
        if rest:
            block(whole, rest)
        self._finish(group, blocks)

    def add(self, weights_at: Expr, count: int, blocks: int) -> None:
        """Add the products of a block of the reduction, so many rows of words."""
        raise NotImplementedError

    def input_at(self, step: Expr, row: Expr) -> Expr:
        """Where the words of a row are."""
        return self._first_input + (step * self._most_rows + row) * WORDS

    def sum_at(self, block: int, row: Expr) -> Expr:
        """Where the sums of a row are."""
        return self._first_sum + (block * self._most_rows + row) * LANES

    def _round(self, first: Expr, count: int) -> None:
        image, taps = self._work.input, math.prod(self._work.spec.kernel)
        stored = self._work.spec.input_layout == "bf16"
        odd = not stored and image.blocks % 2

        def step(index: Expr) -> None:
            number = first + index
            plane = T.bind(T.quotient(number, taps))
            place = T.bind(plane * ((1 if stored else 2) * image.plane) + (number - plane * taps) * LANES)

            def row(number: Expr, both: bool) -> None:
                source = number * self._x_stride + place
                if stored:
                    T.store(self._inputs, self.input_at(index, number), self._x[T.lanes_at(source, WORDS)], WORDS)
                    return
                low = self._x[T.lanes_at(source, LANES)]
                high = self._x[T.lanes_at(source + image.plane, LANES)] if both else T.constant(0.0, LANES)
                T.store(self._inputs, self.input_at(index, number), bf16.pack_words(low, high), WORDS)

            T.either(
                plane < image.blocks // 2 if odd else True,
                lambda: T.repeat(self._rows, partial(row, both=True)),
                lambda: T.repeat(self._rows, partial(row, both=False)),
            )

        T.repeat(count, step)

    def _finish(self, group: Expr, blocks: int) -> None:
        image, added, first = self._g.output, self._g.residual, group * self._g.group_blocks
        bias = [T.bind(self._bias[T.lanes_at((first + j) * LANES, LANES)]) for j in range(blocks)]

        def row(number: Expr) -> None:
            for j in range(blocks):
                value = self._sums[T.lanes_at(self.sum_at(j, number), LANES)] + bias[j]
                if self._residual:
                    place = number * self._residual_stride + added.origin + (first + j) * added.plane
                    value = value + self._residual[0][T.lanes_at(place, LANES)]
                place = number * self._y_stride + image.origin + (first + j) * image.plane
                T.store(self._y, place, activate(value, self._work.spec.activation, LANES), LANES)

        T.repeat(self._rows, row)


class _TileRows(_Rows):
    """By tiles of AMX, two of rows and two of channel blocks at once."""

    def group(self, group: Expr, blocks: int) -> None:
        """All rows of one group of channel blocks."""
        begin_tiles(self._inputs)  # which has room, and is not in use yet
        super().group(group, blocks)
        end_tiles()

    def add(self, weights_at: Expr, count: int, blocks: int) -> None:
        """Add the products of a block of the reduction, so many rows of words."""
        for first in range(0, blocks, 2):
            columns = range(first, min(first + 2, blocks))
            T.either(
                self._rows > TILE_ROWS,
                partial(self._multiply, 2, columns, weights_at, count, blocks),
                partial(self._multiply, 1, columns, weights_at, count, blocks),
            )

    def _multiply(self, tiles: int, columns: range, weights_at: Expr, count: int, blocks: int) -> None:
        sums = [[self.sum_at(j, i * TILE_ROWS) for j in columns] for i in range(tiles)]
        load_tiles(self._sums, sums)

        def step(index: Expr) -> None:
            inputs = [self.input_at(index, i * TILE_ROWS) for i in range(tiles)]
            vectors = [weights_at + index * (blocks * TILE_ELEMENTS) + j * LANES for j in columns]
            for line in range(WORDS):  # of the next block: half by each of two pairs of columns
                ahead = weights_at + (BLOCK_STEPS + index) * (blocks * TILE_ELEMENTS) + line * (blocks * LANES)
                for j in columns:
                    T.prefetch(self._weights, ahead + j * LANES, level=2)
            bf16.PRODUCT.add(self._inputs, inputs, WORDS, self._weights, vectors, blocks * LANES)

        T.repeat(count, step)
        store_tiles(self._sums, sums)


class _VectorRows(_Rows):
    """By register tiles of some rows and all channel blocks."""

    def add(self, weights_at: Expr, count: int, blocks: int) -> None:
        """Add the products of a block of the reduction, so many rows of words."""
        most = min(REGISTER_ROWS, self._g.tile_pixels)
        tiles = T.bind(T.quotient(self._rows + (most - 1), most))
        sizes = balanced_sizes(range(1, self._most_rows + 1), most)

        def turn(index: Expr) -> None:
            first = T.bind(T.quotient(index * self._rows, tiles))
            size = T.bind(T.quotient((index + 1) * self._rows, tiles) - first)
            T.choose(size, sizes, lambda rows: self._multiply(first, rows, weights_at, count, blocks))

        T.repeat(T.at_most(tiles, self._most_rows), turn)

    def _multiply(self, first: Expr, rows: int, weights_at: Expr, count: int, blocks: int) -> None:
        places = [[self.sum_at(j, first + i) for j in range(blocks)] for i in range(rows)]
        sums = [[Register(LANES, self._sums[T.lanes_at(place, LANES)]) for place in line] for line in places]

        def step(index: Expr) -> None:
            inputs = [T.bind(self.input_at(index, first + i)) for i in range(rows)]

            def word(number: Expr) -> None:
                at = weights_at + (index * WORDS + number) * (blocks * LANES)
                for j in range(blocks):
                    T.prefetch(self._weights, at + BLOCK_STEPS * blocks * TILE_ELEMENTS + j * LANES, level=2)
                vectors = [self._weights[T.lanes_at(at + j * LANES, LANES)] for j in range(blocks)]
                numbers = [self._inputs[place + number] for place in inputs]
                multiply_add(sums, numbers, vectors, LANES, bf16.add_products)

            T.repeat(WORDS, word)

        T.repeat(count, step)
        for line, totals in zip(places, sums, strict=True):
            for place, total in zip(line, totals, strict=True):
                T.store(self._sums, place, total.value, LANES)
