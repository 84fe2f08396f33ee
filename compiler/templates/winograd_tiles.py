"""The three phases of a task of a Winograd convolution: inputs to points, products summed up, points to outputs.

Scratch memory, on the stack, T = tiles of a full task, L = lanes:
  transformed inputs   [point][input block][T][L]
  sums of products     [point][block of the group][T][L]
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product

from gangway.compiler.templates.activate import activate
from gangway.compiler.templates.base import Image
from gangway.compiler.templates.builder import (
    Buffer,
    Expr,
    Register,
    at_most,
    bind,
    constant,
    either,
    lanes_at,
    local,
    prefetch,
    quotient,
    remainder,
    repeat,
    splat,
    store,
    when,
)
from gangway.compiler.templates.geometry import UNROLLED_CHANNELS, Geometry
from gangway.compiler.templates.register_tile import PREFETCHED_ELEMENTS
from gangway.compiler.templates.winograd_scheme import Scheme

PADDING = 1  # vectors between the numbers of two points, which else would often lie in the same set of a cache
Multiply = Callable[[Expr, int], None]
"""Of the tiles from this one of the task on, so many: a register tile."""


@dataclass(frozen=True)
class Strides:
    """Numbers from a tensor of one row of the batch to that of the next."""

    x: Expr
    residual: Expr
    y: Expr


ONE_ROW = Strides(0, 0, 0)


@dataclass(frozen=True)
class Span:
    """The tiles of a task: `count`, at most `capacity`, from number `first` on. Rows of a batch follow each other.

    `each` calls its argument for every register tile.
    """

    first: Expr
    count: Expr
    capacity: int
    each: Callable[[Multiply], None]
    strides: Strides = ONE_ROW


@dataclass(frozen=True)
class _Place:
    """Row and column of a tile's outputs, how many of them a neighbour writes already, and the row of the batch."""

    row: Expr
    column: Expr
    done_rows: Expr
    done_columns: Expr
    of_batch: Expr


class Writer:
    """Writes the code of one task; `grid`: tiles of an image, down and across."""

    def __init__(
        self, geometry: Geometry, scheme: Scheme, grid: tuple[int, int], span: Span, buffers: tuple[Buffer, ...]
    ):
        self._g, self._scheme, self._grid, self._span = geometry, scheme, grid, span
        self._x, self._weights, self._bias, *self._residual, self._y = buffers
        self._lanes, self._capacity = geometry.target.lanes, span.capacity
        points, lanes = scheme.products, self._lanes
        self._input_pitch, self._sum_pitch = (
            blocks * self._capacity + PADDING for blocks in (geometry.input.blocks, geometry.group_blocks)
        )
        self._inputs = local(points * self._input_pitch * lanes)
        self._sums = local(points * self._sum_pitch * lanes)

    def transform_inputs(self) -> None:
        """Fill the transformed inputs of all the task's tiles."""
        image, size, lanes = self._g.input, self._scheme.size, self._lanes
        top, left, _, _ = self._g.spec.pads
        origin = image.origin - top * image.row - left * image.lanes

        def tile(index: Expr) -> None:
            place = self._place(index)
            base = bind(place.of_batch * self._span.strides.x + (origin + place.row * image.row) + place.column * lanes)

            def block(plane: Expr) -> None:
                start = bind(base + plane * image.plane)
                loaded = [
                    [bind(self._x[lanes_at(start + r * image.row + c * image.lanes, lanes)]) for c in range(size)]
                    for r in range(size)
                ]
                across = [self._scheme.input_line(line, lanes) for line in loaded]
                for c in range(size):
                    down = self._scheme.input_line([line[c] for line in across], lanes)
                    for r, value in enumerate(down):
                        store(self._inputs, self._input_index(r * size + c, plane, index), value, lanes)

            repeat(image.blocks, block)

        repeat(self._span.count, tile)

    def group(self, group: Expr) -> None:
        """Compute all tiles of one group of channel blocks; the last group may have fewer."""
        full, rest = divmod(self._g.output.blocks, self._g.group_blocks)
        either(
            group < full if rest else True,
            lambda: self._group(group, self._g.group_blocks),
            lambda: self._group(full, rest),
        )

    def _group(self, group: Expr, blocks: int) -> None:
        panel = self._g.input.blocks * self._lanes  # input channels
        base = group * (self._scheme.products * panel * self._g.group_blocks * self._lanes)

        def point(number: Expr) -> None:
            weights = bind(base + number * (panel * blocks * self._lanes))
            self._span.each(lambda first, tiles: self._multiply(number, weights, first, tiles, blocks))

        repeat(self._scheme.products, point)
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
            of_batch, number = bind(quotient(number, tiles)), bind(remainder(number, tiles))
        height, width = self._g.spec.output_size
        down, across = bind(quotient(number, self._grid[1])), bind(remainder(number, self._grid[1]))
        row, column = (
            bind(at_most(place * outputs, size - outputs)) for place, size in ((down, height), (across, width))
        )
        return _Place(row, column, bind(down * outputs - row), bind(across * outputs - column), of_batch)

    def _multiply(self, point: Expr, weights: Expr, first: Expr, tiles: int, blocks: int) -> None:
        """Sum up one point's products of `tiles` tiles: a register tile."""
        lanes = self._lanes
        sums = [[Register(lanes, constant(0.0, lanes)) for _ in range(blocks)] for _ in range(tiles)]
        base = bind(self._input_index(point, 0, first))

        def plane(number: Expr) -> None:
            def some(index: Expr) -> None:
                for u in range(UNROLLED_CHANNELS):
                    channel = index * UNROLLED_CHANNELS + u
                    at = weights + (number * lanes + channel) * (blocks * lanes)
                    for j in range(blocks):
                        prefetch(self._weights, at + j * lanes + PREFETCHED_ELEMENTS)
                    vectors = [self._weights[lanes_at(at + j * lanes, lanes)] for j in range(blocks)]
                    for i in range(tiles):
                        x = splat(self._inputs[base + (number * self._capacity + i) * lanes + channel], lanes)
                        for j in range(blocks):
                            sums[i][j].add(x * vectors[j])

            repeat(lanes // UNROLLED_CHANNELS, some)

        repeat(self._g.input.blocks, plane)
        for i, j in product(range(tiles), range(blocks)):
            store(self._sums, self._sum_index(point, j, first + i), sums[i][j].value, lanes)

    def _transform_outputs(self, block: Expr, j: int) -> None:
        """Write one channel block of all the task's tiles."""
        size, lanes = self._scheme.size, self._lanes
        bias = bind(self._bias[lanes_at(block * lanes, lanes)])

        def tile(index: Expr) -> None:
            place = self._place(index)
            sums = [
                [bind(self._sums[lanes_at(self._sum_index(r * size + c, j, index), lanes)]) for c in range(size)]
                for r in range(size)
            ]
            across = [self._scheme.output_line(line, lanes) for line in sums]
            columns = [
                self._scheme.output_line([line[c] for line in across], lanes) for c in range(self._scheme.outputs)
            ]
            for r in range(self._scheme.outputs):
                self._store_row([line[r] + bias for line in columns], block, place, r)

        repeat(self._span.count, tile)

    def _store_row(self, values: list[Expr], block: Expr, place: _Place, r: int) -> None:
        """Write those outputs of a tile's row that no other tile writes: tasks must not write the same memory."""
        lanes, strides = self._lanes, self._span.strides

        def pixel(image: Image, stride: Expr, c: int) -> Expr:
            plane = place.of_batch * stride + (image.origin + block * image.plane)
            return plane + (place.row + r) * image.row + (place.column + c) * lanes

        def put(c: int) -> None:
            value = values[c]
            if self._residual:
                value = value + self._residual[0][lanes_at(pixel(self._g.residual, strides.residual, c), lanes)]
            value = activate(value, self._g.spec.activation, lanes)
            store(self._y, pixel(self._g.output, strides.y, c), value, lanes)

        def whole_row() -> None:
            for c in range(self._scheme.outputs):
                when(c >= place.done_columns, partial(put, c))

        when(r >= place.done_rows, whole_row)
