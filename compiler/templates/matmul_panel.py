"""One panel of a matrix product: packed, then multiplied by tiles of rows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from gangway.artifact.format import TargetSpec
from gangway.compiler.specs import MOST_LANES, MatMulSpec
from gangway.compiler.templates.builder import (
    Buffer,
    Expr,
    Register,
    constant,
    lanes_at,
    prefetch,
    quotient,
    remainder,
    repeat,
    scratch,
    store,
    strided,
)
from gangway.compiler.templates.product import Sums, multiply_add, unrolled, zero_sums
from gangway.compiler.templates.tiling import Band, Cut, each_tile, segments
from gangway.compiler.templates.transpose import transposed

INNER = 512  # most rows of a packed panel, which takes at most 128 KiB
# Rows this far apart, or multiples of it, meet in few sets of the L1 cache: a tile of them is copied first.
CONFLICT_ELEMENTS = 1024
MOST_CONFLICTING_ROWS = 4
LEAST_COPIED = 64


@dataclass(frozen=True)
class Matrix:
    """Where the numbers of batched matrices lie: strides in elements."""

    row: int
    column: int
    batch: tuple[int, ...]

    @property
    def transposed(self) -> "Matrix":
        """Rows and columns exchanged."""
        return Matrix(self.column, self.row, self.batch)

    def origin(self, number: Expr, batch_shape: Sequence[int]) -> Expr:
        """Where the matrix with a number begins."""
        origin: Expr = 0
        for length, stride in zip(reversed(batch_shape), reversed(self.batch), strict=True):
            origin = origin + remainder(number, length) * stride
            number = quotient(number, length)
        return origin

    def reach(self, shape: tuple[int, int], batch_shape: Sequence[int]) -> int:
        """Numbers from the first to the last, both included."""
        pairs = zip((*shape, *batch_shape), (self.row, self.column, *self.batch), strict=True)
        return 1 + sum((length - 1) * stride for length, stride in pairs)


class Panel:
    """Writes the code for `columns` columns of a product from column `first`.

    Lanes beyond `columns` repeat the last one; their results are not stored.
    """

    def __init__(
        self,
        spec: MatMulSpec,
        target: TargetSpec,
        matrices: tuple[Matrix, Matrix, Matrix],
        buffers: tuple[Buffer, ...],
        origins: Sequence[Expr],
        first: Expr,
        columns: int,
    ):
        self._spec, self._lanes, self._columns, self._first = spec, target.lanes, columns, first
        self._a_matrix, self._b_matrix, self._y_matrix = matrices
        self._a, self._b, self._y = buffers
        self._a_origin, self._b_origin, self._y_origin = origins
        self._vectors = -(-columns // target.lanes)
        self._width = self._vectors * target.lanes

    def write(self, cut: Cut, tile_vectors: int, first_band: Expr, bands: int) -> None:
        """All tiles, of `tile_vectors`, of up to `bands` bands of rows."""
        # One tile of rows uses the panel once: packing it would only cost, if it can be read in vectors.
        in_place = min(bands, cut.bands) == self._b_matrix.column == 1 and self._columns == self._width
        blocks = segments(self._spec.inner, self._spec.inner if in_place else INNER)
        vectors = range(self._vectors)
        groups = [vectors[j : j + tile_vectors] for j in vectors[::tile_vectors]]
        pieces = sum(block.count for block in blocks)

        def rows(inner: tuple[Expr, int], number: Expr, band: Band) -> None:
            self._tiles(number * cut.row_pixels, band.segments[0].width, inner, groups, pieces > 1)

        def clear(number: Expr, band: Band) -> None:
            self._clear(number * cut.row_pixels, band.segments[0].width)

        def block(first: Expr, count: int) -> None:
            if not in_place:
                self._pack(first, count)
            cut.each(first_band, bands, partial(rows, (first, count)))

        self._panel = None if in_place else scratch(max(block.width for block in blocks) * self._width)
        if pieces > 1:
            cut.each(
                first_band, bands, lambda number, band: self._clear(number * cut.row_pixels, band.segments[0].width)
            )
        each_tile(blocks, block)

    def _b_at(self, inner: Expr, column: Expr) -> Expr:
        """Where a number of B lies."""
        return self._b_origin + inner * self._b_matrix.row + (self._first + column) * self._b_matrix.column

    def _put(self, inner: Expr, vector: int, value: Expr) -> None:
        """Into the panel, times `scale`."""
        scaled = value * constant(self._spec.scale, self._lanes) if self._spec.scale != 1 else value
        store(self._panel, inner * self._width + vector * self._lanes, scaled, self._lanes)

    def _pack(self, first: Expr, count: int) -> None:
        """`count` rows of B from number `first`."""
        lanes, whole = self._lanes, count // self._lanes
        if self._b_matrix.row == 1 and self._b_matrix.column != 1 and whole:
            repeat(whole, lambda i: self._pack_square(first, i * lanes))
            if count % lanes:
                repeat(count % lanes, lambda i: self._pack_row(first, whole * lanes + i))
        else:
            repeat(count, lambda i: self._pack_row(first, i))

    def _pack_row(self, first: Expr, inner: Expr) -> None:
        lanes = self._lanes
        for j in range(self._vectors):
            if self._b_matrix.column == 1 and (j + 1) * lanes <= self._columns:
                self._put(inner, j, self._b[lanes_at(self._b_at(first + inner, j * lanes), lanes)])
                continue
            numbers = Register(lanes, constant(0.0, lanes))
            for i in range(lanes):
                numbers.set_lane(i, self._b[self._b_at(first + inner, min(j * lanes + i, self._columns - 1))])
            self._put(inner, j, numbers.value)

    def _pack_square(self, first: Expr, inner: Expr) -> None:
        """As many rows as a vector has lanes, of a matrix whose columns are contiguous."""
        lanes = self._lanes
        for j in range(self._vectors):
            columns = [min(j * lanes + i, self._columns - 1) for i in range(lanes)]
            loaded = [self._b[lanes_at(self._b_at(first + inner, column), lanes)] for column in columns]
            for i, row in enumerate(transposed(loaded)):
                self._put(inner + i, j, row)

    def _tiles(self, row: Expr, count: int, inner: tuple[Expr, int], groups: Sequence[range], accumulate: bool) -> None:
        """`count` rows from number `row`, over some of the inner axis: a tile for each group of vectors."""
        first, length = inner
        numbers, row_step = self._a, self._a_matrix.row
        base = self._a_origin + row * row_step + first * self._a_matrix.column
        if self._conflicts(count, length):
            numbers, row_step = self._copied(base, count, length)
            base = 0

        def column(k: Expr) -> list[Expr]:
            return [numbers[base + i * row_step + k * self._a_matrix.column] for i in range(count)]

        for group in groups:
            self._tile(row, count, length, column, group, accumulate)

    def _tile(
        self,
        row: Expr,
        count: int,
        length: int,
        column: Callable[[Expr], list[Expr]],
        group: range,
        accumulate: bool,
    ) -> None:
        lanes = self._lanes
        sums = zero_sums(count, len(group), lanes)
        if accumulate:
            self._load(sums, row, group)
        unrolled(length, lambda k: multiply_add(sums, column(k), [self._vector(k, j) for j in group], lanes))
        for i, totals in enumerate(sums):
            for j, total in zip(group, totals, strict=True):
                if self._panel is None and self._spec.scale != 1:
                    total.set(total.value * constant(self._spec.scale, lanes))
                self._store(row + i, j, total)

    def _conflicts(self, count: int, length: int) -> bool:
        """Whether a tile of rows is worth copying: whole vectors of it can be, and are used by two vectors or more."""
        matrix = self._a_matrix
        aligned = matrix.column == 1 and matrix.row % CONFLICT_ELEMENTS == 0 and length >= LEAST_COPIED
        return aligned and count > MOST_CONFLICTING_ROWS and self._vectors > 2

    def _copied(self, base: Expr, count: int, length: int) -> tuple[Buffer, int]:
        """A copy of a tile of rows, and how far apart they are there. The next tile is asked for meanwhile."""
        lanes, step = self._lanes, length + MOST_LANES
        copy = scratch(count * step)
        whole, rest = divmod(length, lanes)
        for i in range(count):
            source = base + i * self._a_matrix.row
            repeat(whole, partial(self._copy, copy, i * step, source, lanes, lanes))
            ahead = source + count * self._a_matrix.row
            repeat(whole, partial(self._ask, ahead))
            if rest:
                last = whole * lanes
                repeat(rest, partial(self._copy, copy, i * step + last, source + last, 1, 1))
        return copy, step

    def _ask(self, ahead: Expr, index: Expr) -> None:
        prefetch(self._a, ahead + index * self._lanes)

    def _copy(self, copy: Buffer, into: int, source: Expr, step: int, lanes: int, index: Expr) -> None:
        store(copy, into + index * step, self._a[lanes_at(source + index * step, lanes)], lanes)

    def _vector(self, k: Expr, j: int) -> Expr:
        if self._panel is None:
            return self._b[lanes_at(self._b_at(k, j * self._lanes), self._lanes)]
        return self._panel[lanes_at(k * self._width + j * self._lanes, self._lanes)]

    def _y_at(self, row: Expr, column: int) -> Expr:
        return self._y_origin + row * self._y_matrix.row + (self._first + column) * self._y_matrix.column

    def _used(self, j: int) -> int:
        """Lanes of a vector that hold columns."""
        return min(self._lanes, self._columns - j * self._lanes)

    def _clear(self, row: Expr, count: int) -> None:
        zero = Register(self._lanes, constant(0.0, self._lanes))
        for i in range(count):
            for j in range(self._vectors):
                self._store(row + i, j, zero)

    def _load(self, sums: Sums, row: Expr, group: range) -> None:
        """What is in y already."""
        step = self._y_matrix.column
        for i, totals in enumerate(sums):
            for j, total in zip(group, totals, strict=True):
                place = self._y_at(row + i, j * self._lanes)
                if self._used(j) == self._lanes:
                    total.set(self._y[strided(place, step, self._lanes)])
                else:
                    for lane in range(self._used(j)):
                        total.set_lane(lane, self._y[place + lane * step])

    def _store(self, row: Expr, j: int, total: Register) -> None:
        step, place = self._y_matrix.column, self._y_at(row, j * self._lanes)
        if self._used(j) == self._lanes:
            store(self._y, place, total.value, self._lanes, step)
        else:
            for lane in range(self._used(j)):
                store(self._y, place + lane * step, total.lane(lane), 1)
