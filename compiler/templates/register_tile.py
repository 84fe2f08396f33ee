"""The inner loops of a convolution: one register tile computes some pixels x some channel blocks of the output.

Its sums stay in vector registers for the whole reduction: per input channel it loads one weight vector for each block
and broadcasts one number for each pixel. The scheme is that of Georganas et al., "Anatomy of High-Performance Deep
Learning Convolutions on SIMD Architectures" (SC 2018).
"""

from itertools import product

from gangway.compiler.templates.activate import activate
from gangway.compiler.templates.base import FLOAT_BYTES, Image
from gangway.compiler.templates.builder import (
    Buffer,
    Expr,
    Register,
    at_least,
    at_most,
    lanes_at,
    prefetch,
    quotient,
    repeat,
    splat,
    store,
)
from gangway.compiler.templates.geometry import UNROLLED_CHANNELS, Geometry
from gangway.compiler.templates.tiling import Band, Cut, each_tile

# Weights are read in order, often from memory. A page ahead, because the processor's own prefetching stops at its end.
PREFETCHED_ELEMENTS = 4096 // FLOAT_BYTES


class RegisterTiles:
    """Writes the tiles of one convolution."""

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

    def sums(self, group: Expr, blocks: int, row: Expr, column: Expr, rows: int, width: int) -> list[list[Register]]:
        """Compute a tile; return [pixel][channel block], without residual and activation."""
        lanes, first_block = self._lanes, group * self._g.group_blocks
        sums = [
            [Register(lanes, self._bias[lanes_at((first_block + j) * lanes, lanes)]) for j in range(blocks)]
            for _ in range(rows * width)
        ]
        inputs = self._inputs(row, column, rows, width)
        if self._g.spec.groups > 1:
            skipped = quotient(first_block, self._g.blocks_per_group) * self._g.plane_channels[0]
            inputs = [pixel + skipped * self._g.input.plane for pixel in inputs]
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
                value = value + self._residual[0][lanes_at(plane + residual[i], lanes)]
            value = activate(value, self._g.spec.activation, lanes)
            store(self._y, (first_block + j) * self._g.output.plane + output[i], value, lanes)

    def _kernel_rows(self, row: Expr, rows: int) -> tuple[Expr, Expr]:
        """First and end of the kernel's rows that meet the image in any of the tile's rows; the others meet zeros."""
        spec = self._g.spec
        top, _, bottom, _ = spec.pads
        first: Expr = 0
        end: Expr = spec.kernel[0]
        if top:
            above = top - (row + (rows - 1)) * spec.stride[0]
            first = quotient(at_least(above, 0) + (spec.dilation[0] - 1), spec.dilation[0])
        if bottom:
            below = spec.height + top - row * spec.stride[0]
            end = at_most(quotient(below + (spec.dilation[0] - 1), spec.dilation[0]), end)
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
        group_base = group * (self._g.group_blocks * lanes * self._g.reduction)
        down, across = spec.dilation[0] * image.row, spec.dilation[1] * image.lanes

        def step(plane: Expr, count: int, kh: Expr, kw: Expr, channel: Expr) -> None:
            index = plane * (kernel_rows * kernel_columns * image.lanes)
            index = index + (kh * kernel_columns + kw) * count + channel
            places = [group_base + index * width + j * lanes for j in range(blocks)]
            if self._g.pixels > 1:  # one pixel only: bound by loads already
                for place in places:
                    prefetch(self._weights, place + PREFETCHED_ELEMENTS)
            weights = [self._weights[lanes_at(place, lanes)] for place in places]
            offset = plane * image.plane + kh * down + kw * across + channel
            for i, pixel in enumerate(inputs):
                number = splat(self._x[pixel + offset], lanes)
                for j in range(blocks):
                    sums[i][j].add(number * weights[j])

        def channels(plane: Expr, count: int, kh: Expr, kw: Expr, taps: int) -> None:
            def some(index: Expr) -> None:
                for u in range(UNROLLED_CHANNELS):
                    step(plane, count, kh, kw, index * UNROLLED_CHANNELS + u)

            repeat(taps * count // UNROLLED_CHANNELS, some)

        def taps_of_row(plane: Expr, count: int, kh: Expr) -> None:
            if count == image.lanes and spec.dilation[1] == 1:  # all channels under a kernel's row lie side by side
                channels(plane, count, kh, 0, kernel_columns)
            else:
                repeat(kernel_columns, lambda kw: channels(plane, count, kh, kw, 1))

        def blocked_taps(plane: Expr, count: int) -> None:
            repeat(end_row - first_row, lambda kh: taps_of_row(plane, count, first_row + kh))

        def planar_taps(plane: Expr) -> None:
            # Neighbouring taps of a row share input pixels. Were they unrolled together, LLVM would keep those in
            # registers that it does not have; so the innermost loop is the one over kernel rows.
            repeat(kernel_columns, lambda kw: repeat(kernel_rows, lambda kh: step(plane, 1, kh, kw, 0)))

        if image.lanes == 1:
            repeat(image.blocks, planar_taps)
            return
        whole, rest = self._g.plane_channels
        if whole:
            repeat(whole, lambda plane: blocked_taps(plane, image.lanes))
        if rest:
            blocked_taps(whole, rest)
