"""Dense layers for several rows in one call: a matrix of rows times the matrix of weights.

One row alone is bound by reading its weights. Here each vector of weights is used for all rows of a register tile. More
rows than a tile has take turns over a block of the weights that stays in the L2 cache, where the next block arrives
meanwhile: the blocking of Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication" (TOMS 2008), with
rows in place of packed panels. Weights are packed as the kernel for one row wants them; outputs hold partial sums
between blocks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

from gangway.artifact.format import TargetSpec
from gangway.compiler.kernels.specs import BatchPlan, ConvSpec
from gangway.compiler.kernels.templates.builder import (
    Argument,
    Buffer,
    Expr,
    Register,
    at_most,
    bind,
    choose,
    either,
    kernel,
    lanes_at,
    prefetch,
    quotient,
    repeat,
    splat,
    store,
    when,
)
from gangway.compiler.kernels.templates.convolution import Geometry
from gangway.compiler.kernels.templates.float32_math import activate
from gangway.compiler.kernels.templates.tiling import FLOAT_BYTES, balanced_sizes

MOST_ROWS = 32  # of one call
CALL_FLOPS = 40_000_000  # of one task, about: half a millisecond, since a task cannot be interrupted
TILE_ROWS = 6  # most rows of a register tile; each number of rows is code of its own
BLOCK_CHANNELS = 256  # of a block of weights: 64 KiB for four blocks of sixteen outputs


def plan(spec: ConvSpec, target: TargetSpec) -> BatchPlan | None:
    """The kernel for several rows; None unless the inputs of an output lie one after the other, as the weights do."""
    whole = spec.kernel == (spec.height, spec.width) and spec.dilation == (1, 1) and not any(spec.pads)
    side_by_side = not spec.input_planar and not spec.input_halo
    no_gaps = spec.height * spec.width == 1 or spec.in_channels % target.lanes == 0
    if spec.groups > 1 or not (whole and side_by_side and no_gaps):
        return None
    geometry = Geometry(spec, target)
    tile = _tile_rows(geometry)
    rows = min(MOST_ROWS, max(2 * tile, CALL_FLOPS // (geometry.flops // geometry.groups)))
    return BatchPlan(spec, rows, geometry.groups, f"dense {rows} rows, {tile}x{geometry.group_blocks}")


def _tile_rows(geometry: Geometry) -> int:
    return min(TILE_ROWS, geometry.tile_pixels)


def emit(plan: BatchPlan, target: TargetSpec, symbol: str) -> Any:
    """The kernel. Arguments: x, weights, bias, [residual,] y, batch; see `artifact.format.BatchKernel`."""
    assert isinstance(plan.spec, ConvSpec)
    geometry = Geometry(plan.spec, target)
    lanes, rows = target.lanes, plan.rows
    arguments = [
        Argument("x", geometry.input.elements * rows),
        Argument("weights", geometry.output.blocks * lanes * geometry.reduction),
        Argument("bias", geometry.output.blocks * lanes),
        *([Argument("residual", geometry.residual.elements * rows)] if plan.spec.residual else []),
        Argument("y", geometry.output.elements * rows),
    ]
    full, rest = divmod(geometry.output.blocks, geometry.group_blocks)

    def task(number: Expr, buffers: tuple[Buffer, ...]) -> None:
        tiles = _Tiles(geometry, plan.rows, buffers)
        either(
            number < full if rest else True,
            lambda: tiles.group(number, geometry.group_blocks),
            lambda: tiles.group(full, rest),
        )

    return kernel(symbol, [*arguments, Argument("batch", len(arguments) + 1, "int64")], task)


@dataclass(frozen=True)
class _Tile:
    """Some rows of a group of channel blocks."""

    group: Expr
    blocks: int
    first_row: Expr
    rows: int


class _Tiles:
    """Writes the register tiles of one task."""

    def __init__(self, geometry: Geometry, most_rows: int, buffers: tuple[Buffer, ...]):
        *tensors, batch = buffers
        self._g, self._most_rows = geometry, most_rows
        self._x, self._weights, self._bias, *self._residual, self._y = tensors
        self._rows = bind(batch[0].astype("int32"))
        strides = [quotient(batch[index + 1], FLOAT_BYTES) for index in range(len(tensors))]
        self._x_stride, self._y_stride = bind(strides[0]), bind(strides[-1])
        self._residual_stride = bind(strides[3]) if self._residual else 0
        self._lanes = geometry.target.lanes

    def group(self, group: Expr, blocks: int) -> None:
        """All rows of one group of channel blocks: every tile over a block of weights, then over the next one."""
        most = _tile_rows(self._g)
        tiles = bind(quotient(self._rows + (most - 1), most))
        last = -(-self._g.reduction // BLOCK_CHANNELS) - 1
        sizes = balanced_sizes(range(1, self._most_rows + 1), most)

        def turn(block: Expr, index: Expr) -> None:
            first = bind(quotient(index * self._rows, tiles))
            size = bind(quotient((index + 1) * self._rows, tiles) - first)
            choose(size, sizes, lambda rows: tile(block, index, _Tile(group, blocks, first, rows)))

        def tile(block: Expr, index: Expr, place: _Tile) -> None:
            sums = self._start(place)
            when(block > 0, lambda: self._resume(place, sums))
            self._reduce(place, sums, block, index)
            either(block == last, lambda: self._finish(place, sums), lambda: self._keep(place, sums))

        repeat(last + 1, lambda block: repeat(tiles, lambda index: turn(block, index)))

    def _start(self, tile: _Tile) -> list[list[Register]]:
        lanes = self._lanes
        first = tile.group * self._g.group_blocks
        return [
            [Register(lanes, self._bias[lanes_at((first + j) * lanes, lanes)]) for j in range(tile.blocks)]
            for _ in range(tile.rows)
        ]

    def _reduce(self, tile: _Tile, sums: list[list[Register]], block: Expr, turn: Expr) -> None:
        """Add the products of one block of input channels. Tile `turn` brings in the block 1 + turn further on."""
        lanes, width, start = self._lanes, tile.blocks * self._lanes, block * BLOCK_CHANNELS
        first = tile.group * (self._g.group_blocks * lanes * self._g.reduction) + start * width
        ahead = (turn + 1) * (BLOCK_CHANNELS * width)
        inputs = [bind((tile.first_row + i) * self._x_stride + start) for i in range(tile.rows)]

        def step(channel: Expr) -> None:
            places = [first + channel * width + j * lanes for j in range(tile.blocks)]
            for place in places:
                prefetch(self._weights, place + ahead, level=2)
            weights = [self._weights[lanes_at(place, lanes)] for place in places]
            for i, row in enumerate(inputs):
                number = splat(self._x[row + channel], lanes)
                for j in range(tile.blocks):
                    sums[i][j].add(number * weights[j])

        repeat(at_most(BLOCK_CHANNELS, self._g.reduction - start), step)

    def _each(self, tile: _Tile, body: Callable[[int, int, Expr], None]) -> None:
        """`body(row, block, index of the vector in y)` for every vector of a tile."""
        image = self._g.output
        plane = image.origin + tile.group * (self._g.group_blocks * image.plane)
        for i, j in product(range(tile.rows), range(tile.blocks)):
            body(i, j, (tile.first_row + i) * self._y_stride + (plane + j * image.plane))

    def _resume(self, tile: _Tile, sums: list[list[Register]]) -> None:
        self._each(tile, lambda i, j, place: sums[i][j].set(self._y[lanes_at(place, self._lanes)]))

    def _keep(self, tile: _Tile, sums: list[list[Register]]) -> None:
        self._each(tile, lambda i, j, place: store(self._y, place, sums[i][j].value, self._lanes))

    def _finish(self, tile: _Tile, sums: list[list[Register]]) -> None:
        image, lanes = self._g.residual, self._lanes

        def vector(i: int, j: int, place: Expr) -> None:
            value = sums[i][j].value
            if self._residual:
                plane = image.origin + (tile.group * self._g.group_blocks + j) * image.plane
                row = (tile.first_row + i) * self._residual_stride
                value = value + self._residual[0][lanes_at(row + plane, lanes)]
            store(self._y, place, activate(value, self._g.spec.activation, lanes), lanes)

        self._each(tile, vector)
