"""The three phases of a task of a Winograd convolution: inputs to points, products summed up, points to outputs.

Scratch memory, on the stack, T = tiles of a full task, L = lanes:
  transformed inputs   [point][input block][T][L]
  sums of products     [point][block of the group][T][L]
"""

from functools import partial
from itertools import product

from .activate import activate
from .base import Image
from .builder import (
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
from .geometry import UNROLLED_CHANNELS, Geometry
from .register_tile import PREFETCHED_ELEMENTS
from .winograd_scheme import Scheme


class Writer:
    """Writes the code of one task: up to `count` bands of `band` tiles each, from band `first_band` on."""

    def __init__(
        self,
        geometry: Geometry,
        scheme: Scheme,
        grid: tuple[int, int],
        band: int,
        first_band: Expr,
        count: int,
        buffers: tuple[Buffer, ...],
    ):
        self._g, self._scheme, self._grid, self._band, self._count = geometry, scheme, grid, band, count
        self._x, self._weights, self._bias, *self._residual, self._y = buffers
        self._lanes, self._capacity = geometry.target.lanes, band * count
        self._first_band, self._first_tile = bind(first_band), bind(first_band * band)
        self._tiles = at_most(self._capacity, grid[0] * grid[1] - self._first_tile)
        points, lanes = scheme.products, self._lanes
        self._inputs = local(points * geometry.input.blocks * self._capacity * lanes)
        self._sums = local(points * geometry.group_blocks * self._capacity * lanes)

    def transform_inputs(self) -> None:
        """Fill the transformed inputs of all the task's tiles."""
        image, size, lanes = self._g.input, self._scheme.size, self._lanes
        top, left, _, _ = self._g.spec.pads
        origin = image.origin - top * image.row - left * image.lanes

        def tile(index: Expr) -> None:
            row, column, _, _ = self._place(index)
            base = bind(origin + row * image.row + column * image.lanes)

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

        repeat(self._tiles, tile)

    def group(self, group: Expr, blocks: int) -> None:
        """Compute all tiles of one group of channel blocks."""
        full, rest = divmod(self._grid[0] * self._grid[1], self._band)
        panel = self._g.input.blocks * self._lanes  # input channels
        base = group * (self._scheme.products * panel * self._g.group_blocks * self._lanes)

        def point(number: Expr) -> None:
            weights = bind(base + number * (panel * blocks * self._lanes))

            def band(index: Expr) -> None:
                either(
                    self._first_band + index < full if rest else True,
                    lambda: self._multiply(number, weights, index * self._band, self._band, blocks),
                    lambda: self._multiply(number, weights, index * self._band, rest, blocks),
                )

            repeat(at_most(self._count, full + (rest > 0) - self._first_band), band)

        repeat(self._scheme.products, point)
        for j in range(blocks):
            self._transform_outputs(group * self._g.group_blocks + j, j)

    def _input_index(self, point: Expr, plane: Expr, tile: Expr) -> Expr:
        return ((point * self._g.input.blocks + plane) * self._capacity + tile) * self._lanes

    def _sum_index(self, point: Expr, block: int, tile: Expr) -> Expr:
        return ((point * self._g.group_blocks + block) * self._capacity + tile) * self._lanes

    def _place(self, index: Expr) -> tuple[Expr, Expr, Expr, Expr]:
        """Row and column of the outputs of one of the task's tiles, and how many of them a neighbour writes already."""
        tile, outputs = self._first_tile + index, self._scheme.outputs
        height, width = self._g.spec.output_size
        down, across = bind(quotient(tile, self._grid[1])), bind(remainder(tile, self._grid[1]))
        row, column = (
            bind(at_most(place * outputs, size - outputs)) for place, size in ((down, height), (across, width))
        )
        return row, column, bind(down * outputs - row), bind(across * outputs - column)

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
            row, column, done_rows, done_columns = self._place(index)
            sums = [
                [bind(self._sums[lanes_at(self._sum_index(r * size + c, j, index), lanes)]) for c in range(size)]
                for r in range(size)
            ]
            across = [self._scheme.output_line(line, lanes) for line in sums]
            columns = [
                self._scheme.output_line([line[c] for line in across], lanes) for c in range(self._scheme.outputs)
            ]
            for r in range(self._scheme.outputs):
                self._store_row([line[r] + bias for line in columns], block, row, column, r, done_rows, done_columns)

        repeat(self._tiles, tile)

    def _store_row(
        self, values: list[Expr], block: Expr, row: Expr, column: Expr, r: int, done_rows: Expr, done_columns: Expr
    ) -> None:
        """Write those outputs of a tile's row that no other tile writes: tasks must not write the same memory."""
        lanes = self._lanes

        def put(c: int) -> None:
            value = values[c]
            if self._residual:
                at = self._pixel(self._g.residual, block, row + r, column + c)
                value = value + self._residual[0][lanes_at(at, lanes)]
            value = activate(value, self._g.spec.activation, lanes)
            store(self._y, self._pixel(self._g.output, block, row + r, column + c), value, lanes)

        def whole_row() -> None:
            for c in range(self._scheme.outputs):
                when(c >= done_columns, partial(put, c))

        when(r >= done_rows, whole_row)

    @staticmethod
    def _pixel(image: Image, block: Expr, row: Expr, column: Expr) -> Expr:
        return image.origin + block * image.plane + row * image.row + column * image.lanes
