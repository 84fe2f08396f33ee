"""Products of matrices that are both computed at run time: panels, tiles, and rows times columns.

Columns are cut into panels a few vectors wide. A panel of B is packed into local memory once, then multiplied by tile
after tile of A's rows, whose numbers are read where they lie. If there are very few columns, y' = B' A' is computed.
Very few rows with columns that are contiguous need no panels.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from gangway.artifact.format import TargetSpec
from gangway.compiler.kernels.extents import is_constant
from gangway.compiler.kernels.plain_specs import MatMulSpec
from gangway.compiler.kernels.specs import MOST_LANES, KernelPlan
from gangway.compiler.kernels.templates import builder as T
from gangway.compiler.kernels.templates import tiling
from gangway.compiler.kernels.templates.builder import Argument, Buffer, Expr, Register
from gangway.compiler.kernels.templates.tiling import (
    FLOAT_BYTES,
    Band,
    BandCut,
    Priced,
    Tasks,
    TileSegment,
    Traffic,
    UnsupportedSpecError,
)

UNROLLED = 4
INNER = 512  # most rows of a packed panel, which takes at most 128 KiB
# Rows this far apart, or multiples of it, meet in few sets of the L1 cache: a tile of them is copied first.
CONFLICT_ELEMENTS = 1024
MOST_CONFLICTING_ROWS = 4
LEAST_COPIED = 64
PANEL_VECTORS = 4  # the wider, the less often A is read
TILE_VECTORS = 2
FEW_ROWS = 3  # for so few rows tiles as wide as panels: more sums hide the latency of multiply-adds
PACKING_OPERATIONS = 16  # moving a number into a panel takes as long as so many operations, at most
MOST_ELEMENTS = 1 << 31
Sums = list[list[Register]]
MultiplyAdd = Callable[[Expr, Expr, Expr], Expr]  # of a vector of sums, and two that are multiplied


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
            origin = origin + T.remainder(number, length) * stride
            number = T.quotient(number, length)
        return origin

    def reach(self, shape: tuple[int, int], batch_shape: Sequence[int]) -> int:
        """Numbers from the first to the last, both included."""
        pairs = zip((*shape, *batch_shape), (self.row, self.column, *self.batch), strict=True)
        return 1 + sum((length - 1) * stride for length, stride in pairs)


@dataclass(frozen=True)
class MatmulLayout:
    """How a product is computed: whether transposed, its panels, its tiles of rows."""

    spec: MatMulSpec
    target: TargetSpec

    @cached_property
    def swapped(self) -> bool:
        """Whether vectors run along A's rows."""
        return self.spec.columns < min(self.spec.rows, self.target.lanes)

    @cached_property
    def rows(self) -> int:
        """Rows of what is computed."""
        return self.spec.columns if self.swapped else self.spec.rows

    @cached_property
    def columns(self) -> int:
        """Columns of what is computed."""
        return self.spec.rows if self.swapped else self.spec.columns

    @cached_property
    def operands(self) -> tuple[Matrix, Matrix, Matrix]:
        """A, B and y of the spec."""
        spec, batch_strides, stride = self.spec, [], self.spec.rows * self.spec.columns
        for length in reversed(spec.batch_shape):
            batch_strides.append(stride)
            stride *= length
        a = Matrix(*spec.a_strides, spec.a_batch_strides)
        b = Matrix(*spec.b_strides, spec.b_batch_strides)
        return a, b, Matrix(spec.columns, 1, tuple(reversed(batch_strides)))

    @cached_property
    def matrices(self) -> tuple[Matrix, Matrix, Matrix]:
        """A, B and y of what is computed."""
        a, b, y = self.operands
        return (b.transposed, a.transposed, y.transposed) if self.swapped else (a, b, y)

    @cached_property
    def dots(self) -> bool:
        """Whether sums run along vectors: packing so much for so few rows would take most of the time."""
        a, b, _ = self.matrices
        contiguous = (a.column, b.row) == (1, 1) and b.column != 1
        return contiguous and self.rows <= FEW_ROWS and self.spec.inner >= 2 * self.target.lanes

    @cached_property
    def vectors(self) -> int:
        """Vectors of a whole panel."""
        return min(PANEL_VECTORS, -(-self.columns // self.target.lanes))

    @cached_property
    def tile_vectors(self) -> int:
        """Vectors of a register tile."""
        return min(self.vectors, PANEL_VECTORS if self.rows <= FEW_ROWS else TILE_VECTORS)

    @cached_property
    def width(self) -> int:
        """Columns of a whole panel."""
        return self.vectors * self.target.lanes

    @cached_property
    def panels(self) -> int:
        """Number of panels of one product, the partial one included."""
        return -(-self.columns // self.width)

    @cached_property
    def panel_tiles(self) -> tuple[TileSegment, ...]:
        """The columns as panels; they overlap where extents allow it."""
        half = -(-self.vectors // 2) * self.target.lanes
        return tiling.parts_of(self.columns, (half, self.width), may_overlap=self.spec.inner <= INNER)

    @cached_property
    def cut(self) -> BandCut:
        """Rows cut into tiles, which must not overlap if they are computed bit by bit."""
        rows = int(self.rows) if self.spec.inner > INNER else self.rows
        return tiling.cut_line(rows, most_numbers(self.target, self.tile_vectors))

    @cached_property
    def batches(self) -> int:
        """Number of products."""
        return math.prod(self.spec.batch_shape)

    @cached_property
    def elements(self) -> tuple[int, ...]:
        """Numbers behind each pointer of the kernel."""
        spec = self.spec
        shapes = (spec.rows, spec.inner), (spec.inner, spec.columns), (spec.rows, spec.columns)
        pairs = zip(self.operands, shapes, strict=True)
        return tuple(matrix.reach(shape, spec.batch_shape) for matrix, shape in pairs)


def candidates(spec: MatMulSpec, target: TargetSpec) -> Iterator[KernelPlan]:
    """The default plan, then other cuts into tasks. Raises `UnsupportedSpecError`."""
    layout = MatmulLayout(spec, target)
    if not spec.flops or max(layout.elements) >= MOST_ELEMENTS:
        raise UnsupportedSpecError(f"product of {spec.batch_shape} matrices {spec.rows}x{spec.inner}x{spec.columns}")
    yield from tiling.cheapest_first(_priced(layout))


def _priced(layout: MatmulLayout) -> Iterator[Priced]:
    """Every plan; each part of the rows packs all of B again."""
    spec = layout.spec
    b_numbers, a_numbers = (layout.batches * spec.inner * n for n in (layout.columns, layout.rows))
    traffic = Traffic(b_numbers * FLOAT_BYTES, a_numbers * FLOAT_BYTES, layout.elements[2] * FLOAT_BYTES)
    packing = 0 if layout.dots else layout.batches * spec.inner * layout.panels * layout.width * PACKING_OPERATIONS
    for tasks in tiling.all_tasks(layout.batches * layout.panels, layout.cut.bands):
        if tasks.ordered:
            cost = tiling.tasks_cost(tasks, spec.flops + packing * tasks.parts, traffic, layout.target)
            yield cost, _plan(layout, tasks, traffic)


def _plan(layout: MatmulLayout, tasks: Tasks, traffic: Traffic) -> KernelPlan:
    knobs: dict[str, int | str] = {
        "panels": tasks.groups_per_task,
        "bands": tasks.bands_per_task,
        "pixels_first": int(tasks.pixels_first),
    }
    kind = "dots" if layout.dots else "matmul"
    text = f"{kind} {layout.cut.row_pixels}x{layout.tile_vectors} {tasks.groups_per_task}x{tasks.bands_per_task}"
    moved = int((traffic.weights + traffic.input) * tasks.largest_share)
    return tiling.make_plan(layout.spec, knobs, tasks.count, text, moved, layout.cut.row_pixels * layout.tile_vectors)


def emit(spec: MatMulSpec, plan: KernelPlan, target: TargetSpec, symbol: str) -> Any:
    """The kernel. Arguments: a, b, y."""
    layout = MatmulLayout(spec, target)
    planes = layout.batches * layout.panels
    tasks = Tasks(
        planes,
        layout.cut.bands,
        tiling.knob(plan, "panels"),
        tiling.knob(plan, "bands"),
        tiling.knob(plan, "pixels_first"),
    )
    panels = layout.panel_tiles

    def task(number: Expr, buffers: tuple[Buffer, ...]) -> None:
        first, second, y = buffers
        operands = (second, first, y) if layout.swapped else buffers

        def panel(plane: Expr, first_band: Expr) -> None:
            batch, index = T.quotient(plane, layout.panels), T.remainder(plane, layout.panels)
            origins = [T.bind(matrix.origin(batch, spec.batch_shape)) for matrix in layout.matrices]

            def write(first: Expr, columns: int) -> None:
                if layout.dots:
                    Dots(spec, target, layout.matrices, operands, origins, layout.rows).write(first, columns)
                    return
                writer = Panel(spec, target, layout.matrices, operands, origins, first, columns)
                writer.write(layout.cut, layout.tile_vectors, first_band, tasks.bands_per_task)

            tiling.each_of(panels, index, write)

        tasks.each_group(number, panel)

    return T.kernel(symbol, [Argument(*pair) for pair in zip("aby", layout.elements, strict=True)], task)


class Panel:
    """Writes the code for `columns` columns of a product from column `first`.

    The panel is packed, then multiplied by tiles of rows. Lanes beyond `columns` repeat the last one; their results are
    not stored.
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

    def write(self, cut: BandCut, tile_vectors: int, first_band: Expr, bands: int) -> None:
        """All tiles, of `tile_vectors`, of up to `bands` bands of rows."""
        # One tile of rows uses the panel once: packing it would only cost, if it can be read in vectors.
        in_place = min(bands, cut.bands) == self._b_matrix.column == 1 and self._columns == self._width
        blocks = tiling.blocks_of(self._spec.inner, self._spec.inner if in_place else INNER)
        vectors = range(self._vectors)
        groups = [vectors[j : j + tile_vectors] for j in vectors[::tile_vectors]]
        pieces = sum(block.count for block in blocks)

        def rows(inner: tuple[Expr, int], number: Expr, band: Band) -> None:
            self._tiles(cut.pixel(number, band), band.segments[0].width, inner, groups, pieces > 1)

        def clear(number: Expr, band: Band) -> None:
            self._clear(cut.pixel(number, band), band.segments[0].width)

        def block(first: Expr, count: int) -> None:
            if not in_place:
                self._pack(first, count)
            cut.each(first_band, bands, partial(rows, (first, count)))

        longest = max(block.width for block in blocks)
        longest = longest if is_constant(longest) else INNER  # so that one kernel serves all
        self._panel = None if in_place else T.scratch(longest * self._width)
        if pieces > 1:
            cut.each(first_band, bands, clear)
        tiling.each_tile(blocks, block)

    def _b_at(self, inner: Expr, column: Expr) -> Expr:
        """Where a number of B lies."""
        return self._b_origin + inner * self._b_matrix.row + (self._first + column) * self._b_matrix.column

    def _put(self, inner: Expr, vector: int, value: Expr) -> None:
        """Into the panel, times `scale`."""
        scaled = value * T.constant(self._spec.scale, self._lanes) if self._spec.scale != 1 else value
        T.store(self._panel, inner * self._width + vector * self._lanes, scaled, self._lanes)

    def _pack(self, first: Expr, count: int) -> None:
        """`count` rows of B from number `first`."""
        lanes, whole = self._lanes, count // self._lanes
        if self._b_matrix.row == 1 and self._b_matrix.column != 1 and whole:
            T.repeat(whole, lambda i: self._pack_square(first, i * lanes))
            if not is_constant(count) or count % lanes:
                T.repeat(count % lanes, lambda i: self._pack_row(first, whole * lanes + i))
        else:
            T.repeat(count, lambda i: self._pack_row(first, i))

    def _pack_row(self, first: Expr, inner: Expr) -> None:
        lanes = self._lanes
        for j in range(self._vectors):
            if self._b_matrix.column == 1 and (j + 1) * lanes <= self._columns:
                self._put(inner, j, self._b[T.lanes_at(self._b_at(first + inner, j * lanes), lanes)])
                continue
            numbers = Register(lanes, T.constant(0.0, lanes))
            for i in range(lanes):
                numbers.set_lane(i, self._b[self._b_at(first + inner, T.at_most(j * lanes + i, self._columns - 1))])
            self._put(inner, j, numbers.value)

    def _pack_square(self, first: Expr, inner: Expr) -> None:
        """As many rows as a vector has lanes, of a matrix whose columns are contiguous."""
        lanes = self._lanes
        for j in range(self._vectors):
            columns = [T.at_most(j * lanes + i, self._columns - 1) for i in range(lanes)]
            loaded = [self._b[T.lanes_at(self._b_at(first + inner, column), lanes)] for column in columns]
            for i, row in enumerate(T.transposed(loaded)):
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
                    total.set(total.value * T.constant(self._spec.scale, lanes))
                self._store(row + i, j, total)

    def _conflicts(self, count: int, length: int) -> bool:
        """Whether a tile of rows is worth copying: whole vectors of it can be, and are used by two vectors or more."""
        matrix = self._a_matrix
        aligned = matrix.column == 1 and matrix.row % CONFLICT_ELEMENTS == 0 and length >= LEAST_COPIED
        return aligned and count > MOST_CONFLICTING_ROWS and self._vectors > 2

    def _copied(self, base: Expr, count: int, length: int) -> tuple[Buffer, int]:
        """A copy of a tile of rows, and how far apart they are there. The next tile is asked for meanwhile."""
        lanes, step = self._lanes, length + MOST_LANES
        copy = T.scratch(count * step)
        whole, rest = divmod(length, lanes)
        for i in range(count):
            source = base + i * self._a_matrix.row
            T.repeat(whole, partial(self._copy, copy, i * step, source, lanes, lanes))
            ahead = source + count * self._a_matrix.row
            T.repeat(whole, partial(self._ask, ahead))
            if rest:
                last = whole * lanes
                T.repeat(rest, partial(self._copy, copy, i * step + last, source + last, 1, 1))
        return copy, step

    def _ask(self, ahead: Expr, index: Expr) -> None:
        T.prefetch(self._a, ahead + index * self._lanes)

    def _copy(self, copy: Buffer, into: int, source: Expr, step: int, lanes: int, index: Expr) -> None:
        T.store(copy, into + index * step, self._a[T.lanes_at(source + index * step, lanes)], lanes)

    def _vector(self, k: Expr, j: int) -> Expr:
        if self._panel is None:
            return self._b[T.lanes_at(self._b_at(k, j * self._lanes), self._lanes)]
        return self._panel[T.lanes_at(k * self._width + j * self._lanes, self._lanes)]

    def _y_at(self, row: Expr, column: int) -> Expr:
        return self._y_origin + row * self._y_matrix.row + (self._first + column) * self._y_matrix.column

    def _used(self, j: int) -> int:
        """Lanes of a vector that hold columns."""
        return min(self._lanes, self._columns - j * self._lanes)

    def _clear(self, row: Expr, count: int) -> None:
        zero = Register(self._lanes, T.constant(0.0, self._lanes))
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
                    total.set(self._y[T.strided(place, step, self._lanes)])
                else:
                    part = Register(self._lanes, T.constant(0.0, self._lanes))
                    T.one_by_one(self._used(j), partial(self._load_lane, part, place))
                    total.set(part.value)

    def _store(self, row: Expr, j: int, total: Register) -> None:
        step, place = self._y_matrix.column, self._y_at(row, j * self._lanes)
        if self._used(j) == self._lanes:
            T.store(self._y, place, total.value, self._lanes, step)
        else:
            part = Register(self._lanes, total.value)  # lanes of a register that is read one by one are in memory
            T.one_by_one(self._used(j), lambda lane: T.store(self._y, place + lane * step, part.lane(lane), 1))

    def _load_lane(self, part: Register, place: Expr, lane: Expr) -> None:
        part.set_lane(lane, self._y[place + lane * self._y_matrix.column])


class Dots:
    """Writes the code for `columns` columns of a product from column `first`, and all of its rows, which are very few.

    Columns are contiguous: sums run along vectors, and nothing is packed.
    """

    def __init__(
        self,
        spec: MatMulSpec,
        target: TargetSpec,
        matrices: tuple[Matrix, Matrix, Matrix],
        buffers: tuple[Buffer, ...],
        origins: Sequence[Expr],
        rows: int,
    ):
        self._spec, self._lanes, self._rows = spec, target.lanes, rows
        self._a_matrix, self._b_matrix, self._y_matrix = matrices
        self._a, self._b, self._y = buffers
        self._a_origin, self._b_origin, self._y_origin = origins
        self._together = tiling.registers(target) // 4  # columns: with three rows their sums fill most registers

    def write(self, first: Expr, columns: int) -> None:
        """All tiles."""
        tiling.each_tile(tiling.segments(columns, self._together), partial(self._tile, first))

    def _tile(self, first: Expr, start: Expr, count: int) -> None:
        lanes, (whole, rest) = self._lanes, divmod(self._spec.inner, self._lanes)
        a_places = [self._a_origin + i * self._a_matrix.row for i in range(self._rows)]
        b_places = [self._b_origin + (first + start + j) * self._b_matrix.column for j in range(count)]
        wide = [[Register(lanes, T.constant(0.0, lanes)) for _ in b_places] for _ in a_places]
        single = [[Register(1, T.constant(0.0, 1)) for _ in b_places] for _ in a_places]

        def add(sums: list[list[Register]], k: Expr, width: int) -> None:
            columns = [self._b[T.lanes_at(place + k, width)] for place in b_places]
            for place, totals in zip(a_places, sums, strict=True):
                row = self._a[T.lanes_at(place + k, width)]
                for total, column in zip(totals, columns, strict=True):
                    total.add(row * column)

        unrolled(whole, lambda k: add(wide, k * lanes, lanes))
        if rest:
            T.repeat(rest, lambda k: add(single, whole * lanes + k, 1))
        for i, (totals, tails) in enumerate(zip(wide, single, strict=True)):
            for j, (total, tail) in enumerate(zip(totals, tails, strict=True)):
                place = self._y_origin + i * self._y_matrix.row + (first + start + j) * self._y_matrix.column
                value = T.lane_sum(total, lanes) + tail.value
                T.store(self._y, place, value * T.constant(self._spec.scale, 1), 1)


def most_numbers(target: TargetSpec, vectors: int) -> int:
    """Numbers of the largest tile with so many vectors; some registers hold operands, without FMA products, too."""
    spare = vectors + 1 + (target.name == "baseline")
    return (tiling.registers(target) - spare) // vectors


def zero_sums(numbers: int, vectors: int, lanes: int) -> Sums:
    """A tile of zeros."""
    return [[Register(lanes, T.constant(0.0, lanes)) for _ in range(vectors)] for _ in range(numbers)]


def multiply_add(
    sums: Sums,
    numbers: Sequence[Expr],
    vectors: Sequence[Expr],
    lanes: int,
    add: MultiplyAdd = lambda total, a, b: total + a * b,
) -> None:
    """Add every number times every vector, by an instruction for numbers of this kind."""
    vectors = [T.bind(vector) for vector in vectors]
    for row, number in zip(sums, numbers, strict=True):
        spread = T.splat(number, lanes)
        for total, vector in zip(row, vectors, strict=True):
            total.set(add(total.value, spread, vector))


def unrolled(count: int, body: Callable[[Expr], None]) -> None:
    """`body(i)` for i in [0, count), several in an iteration."""
    whole, rest = divmod(count, UNROLLED)

    def some(index: Expr) -> None:
        for u in range(UNROLLED):
            body(index * UNROLLED + u)

    if whole:
        T.repeat(whole, some)
    T.one_by_one(rest, lambda i: body(whole * UNROLLED + i))
