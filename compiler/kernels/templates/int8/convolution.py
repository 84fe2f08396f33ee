"""Convolution of 8-bit numbers, with sums in int32: see `instructions.py` and, for layouts, `specs.py`.

A task computes a *band* of the output for some groups of 64 channels. A band is some rows or, if pixels of x and y lie
one after the other without gaps, some pixels; `work.py` cuts them. Inputs are read where they lie: a pixel of 64
channels is a row of a tile of AMX. A tile has 16 outputs: of a row, or, without strides, consecutive places of x, so
that it may go on in the next row; what it computes between two rows is not stored. Register tiles have up to 6
outputs. Where pairs are multiplied, a task widens what its band sees first.

What reads the last outputs may go beyond the end of x: `int8.READ_BEHIND_BYTES` there must be readable.

Where x's scale is known at run time only, sums begin with what x's zero point adds to them. If weights have zero
points, too, each of them counts times the sum of the window of x, which is made once for all groups of a band.
"""

from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from typing import Any

from gangway.artifact.format import ALIGNMENT_BYTES, TargetSpec
from gangway.compiler.kernels.int8_specs import FACTORS
from gangway.compiler.kernels.specs import BYTES_CHANNELS, ConvSpec, KernelPlan
from gangway.compiler.kernels.templates import builder as T
from gangway.compiler.kernels.templates.amx.tiles import (
    TILE_ELEMENTS,
    TILE_ROWS,
    WORDS,
    begin_tiles,
    end_tiles,
    line_scratch,
    start_tiles,
    store_tiles,
)
from gangway.compiler.kernels.templates.bands import BandWriter, band_kernel
from gangway.compiler.kernels.templates.builder import Argument, Buffer, Expr, Register, tirx
from gangway.compiler.kernels.templates.float32_math import activate
from gangway.compiler.kernels.templates.int8 import instructions as int8
from gangway.compiler.kernels.templates.int8.instructions import WORD_CHANNELS
from gangway.compiler.kernels.templates.int8.work import HALF_BLOCKS, Int8Work
from gangway.compiler.kernels.templates.matmul import multiply_add, unrolled
from gangway.compiler.kernels.templates.tiling import knob

PREFETCHED_STEPS = 8  # rows of 16 words of weights of a group ahead: 16 KiB
PREFETCHED_BYTES = 4096

Step = Callable[[Expr, Expr, int], None]
"""Of an offset in the source, an offset in the weights, and how many words have weights."""


def emit(spec: ConvSpec, plan: KernelPlan, target: TargetSpec, symbol: str) -> Any:
    """The kernel. Arguments: as `ConvSpec` has those of integers."""
    work = Int8Work(spec, target, knob(plan, "rows"), knob(plan, "columns"))
    writer = partial(_Tiles if work.tiled else _Vectors, work)
    return band_kernel(plan, symbol, (work.groups, work.bands), writer, _arguments(work), int8.functions(target))


def _arguments(work: Int8Work) -> list[Argument]:
    spec, outputs = work.spec, work.halves * work.half_channels
    inputs = [
        Argument("x", work.input.elements, "int32"),
        Argument("weights", work.half_units * work.halves, "int8" if work.paired else "int32"),
    ]
    y = Argument("y", work.output.elements, "uint8" if spec.output_layout == "bytes" else "float32")
    if not spec.dynamic:
        return [*inputs, Argument("bias", outputs, "int32"), Argument("multiplier", outputs), Argument("zero", 1), y]
    integers = 2 * outputs + WORDS * work.planes if spec.weight_zeros else outputs
    inputs += [Argument("integers", integers, "int32"), Argument("numbers", 2 * outputs), Argument("factors", FACTORS)]
    return [*inputs, *([Argument("residual", work.residual.elements)] if spec.residual else []), y]


class _Band(BandWriter):
    """Writes the code for a band."""

    def __init__(self, work: Int8Work, buffers: Mapping[str, Buffer], band: Expr) -> None:
        self._work, self._lanes, self.x = work, work.lanes, buffers["x"]
        if work.spec.dynamic:
            factors = buffers["factors"]
            self._scale, self._zero = T.bind(T.splat(factors[0], self._lanes)), T.bind(tirx.Cast("int32", factors[3]))
        else:
            self._zeros = T.bind(int8.twice(tirx.Cast("int32", buffers["zero"][0]), self._lanes))
        super().__init__(work, buffers, band)
        spec, image = work.spec, work.input
        row = self._row * spec.stride[0] - spec.pads[0]
        column = self._column * spec.stride[1] - spec.pads[1]
        self.origin = T.bind(image.origin + row * image.row + column * work.pixel_words)

    def begin(self) -> None:
        """What all groups need."""
        if self._work.spec.weight_zeros:
            self._windows = T.scratch(self._work.rows * self._work.columns, "int32")
            T.repeat(self._work.rows, lambda row: T.repeat(self._work.columns, partial(self._window, row)))

    def _window(self, row: Expr, column: Expr) -> None:
        """Keep the sum of what a pixel's window sees, less the zero point."""
        work, spec, lanes = self._work, self._work.spec, self._lanes
        (rows, columns), (down, across), image = spec.kernel, spec.dilation, work.input
        base = self.origin + row * (spec.stride[0] * image.row) + column * (spec.stride[1] * work.pixel_words)
        ones, base = self._buffers["integers"], T.bind(base)
        total, first = Register(lanes, T.constant(0, lanes, "int32"), "int32"), 2 * work.halves * work.half_channels

        def add(place: Expr, plane: Expr) -> None:
            for word in range(0, WORDS, lanes):
                part = self.x[T.lanes_at(base + place + word, lanes)]
                one = ones[T.lanes_at(first + plane * WORDS + word, lanes)]
                total.set(int8.add_words(total.value, part, one, lanes))

        def tap(plane: Expr, i: Expr, j: Expr) -> None:
            add(plane * image.plane + i * (down * image.row) + j * (across * WORDS), plane)

        if spec.input_layout == "pixels":
            T.repeat(rows, lambda i: add(i * image.row, 0))
        else:
            T.repeat(work.planes, lambda p: T.repeat(rows, lambda i: T.repeat(columns, partial(tap, p, i))))
        numbers = spec.in_channels * rows * columns
        T.store(self._windows, row * work.columns + column, int8.total(total.value) - self._zero * numbers, 1)

    def starts(self, half: Expr, halves: int) -> list[Expr]:
        """What sums of the blocks of some halves begin with."""
        lanes = self._lanes
        if not self._work.spec.dynamic:
            return self.factors(self._buffers["bias"], half, halves)
        sums, zero = self.factors(self._buffers["integers"], half, halves), T.splat(self._zero, lanes)
        return [T.bind(T.constant(0, lanes, "int32") - total * zero) for total in sums]

    def last_factors(self, half: Expr, halves: int) -> list[list[Expr]]:
        """What each block's sums are multiplied by; of dynamic ones the bias, and zero points of weights, too."""
        if not self._work.spec.dynamic:
            return [[factor] for factor in self.factors(self._buffers["multiplier"], half, halves)]
        numbers, integers = self._buffers["numbers"], self._buffers["integers"]
        scales = [T.bind(scale * self._scale) for scale in self.factors(numbers, half, halves)]
        behind = self._work.halves * self._work.half_channels
        others = [self.factors(numbers, half, halves, behind)]
        if self._work.spec.weight_zeros:
            others.append(self.factors(integers, half, halves, behind))
        return [list(each) for each in zip(scales, *others, strict=True)]

    def group(self, group: Expr) -> None:
        """All outputs of a group."""
        group, work = T.bind(group), self._work
        rest = work.halves % work.group_halves
        T.either(
            group < work.groups - 1 if rest else True,
            lambda: self.halves(group, work.group_halves),
            lambda: self.halves(group, rest),
        )

    def halves(self, group: Expr, halves: int) -> None:
        """The same of a group of so many halves."""
        raise NotImplementedError

    def reduce(self, weights_at: Expr, body: Step) -> None:
        """`body` for every step of the reduction."""
        work, (rows, columns) = self._work, self._work.spec.kernel
        source, (down, across) = work.source, work.spec.dilation
        step_units = work.step_words * work.row_units
        if work.spec.input_layout == "pixels":
            words = columns * work.source_words
            T.repeat(rows, lambda i: body(i * source.row, weights_at + i * step_units, words))
            return

        def plane(number: Expr, words: int) -> None:
            def tap(i: Expr, j: Expr) -> None:
                place = number * source.plane + i * (down * source.row) + j * (across * work.source_words)
                body(place, weights_at + ((number * rows + i) * columns + j) * step_units, words)

            T.repeat(rows, lambda i: T.repeat(columns, partial(tap, i)))

        whole, rest = divmod(work.spec.in_channels, BYTES_CHANNELS)
        if work.tiled or not rest:
            T.repeat(work.planes, lambda number: plane(number, work.step_words))
            return
        if whole:
            T.repeat(whole, lambda number: plane(number, work.step_words))
        plane(whole, -(-rest // work.word_channels))

    def factors(self, numbers: Buffer, half: Expr, halves: int, begin: int = 0) -> list[Expr]:
        """Biases, multipliers and their kind of the blocks of some halves; `begin`: where they are among others."""
        first, lanes = begin + half * self._work.half_channels, self._lanes
        return [T.bind(numbers[T.lanes_at(first + j * lanes, lanes)]) for j in range(halves * HALF_BLOCKS)]

    def store(self, sums: list[Expr], factors: list[list[Expr]], half: Expr, row: Expr, column: Expr) -> None:
        """Outputs of a pixel of the band, from a half on, of sums with what they begin with.

        `factors`: see `last_factors`.
        """
        spec, image, work = self._work.spec, self._work.output, self._work
        place = self._row + row, self._column + column
        if spec.dynamic:
            self._store_dynamic(sums, factors, half, row, column)
            return
        kind = f"float32x{self._lanes}"
        numbers = [tirx.Cast(kind, total) * factor for total, (factor,) in zip(sums, factors, strict=True)]
        if spec.output_layout == "bytes":
            at = image.origin + place[0] * image.row + place[1] * image.lanes
            at = at + T.quotient(half, work.group_halves) * image.plane
            at = at + T.remainder(half, work.group_halves) * work.half_channels
            int8.store_packed(self._y, at, numbers, self._zeros, self._lanes)
            return
        self._store_blocks(lambda block: numbers[block], len(numbers), half, place)

    def _store_dynamic(self, sums: list[Expr], factors: list[list[Expr]], half: Expr, row: Expr, column: Expr) -> None:
        work, spec, image, lanes = self._work, self._work.spec, self._work.residual, self._lanes
        place = self._row + row, self._column + column
        window = None
        if spec.weight_zeros:
            window = T.bind(T.splat(self._windows[row * work.columns + column], lanes))

        def number(block: int) -> Expr:
            total, (scale, bias, *zeros) = sums[block], factors[block]
            for zero in zeros:
                total = total - zero * window
            value = int8.scaled(tirx.Cast(f"float32x{lanes}", total), scale, lanes) + bias
            if spec.residual:
                at = image.origin + place[0] * image.row + place[1] * lanes
                at = at + (half * HALF_BLOCKS + block) * image.plane
                value = value + self._buffers["residual"][T.lanes_at(at, lanes)]
            return value

        self._store_blocks(number, len(sums), half, place)

    def _store_blocks(self, number: Callable[[int], Expr], count: int, half: Expr, place: tuple[Expr, Expr]) -> None:
        """Numbers of float32, activated."""
        work, spec, image, lanes = self._work, self._work.spec, self._work.output, self._lanes
        at = image.origin + place[0] * image.row + place[1] * image.lanes

        def one(block: int) -> None:
            value = activate(number(block), spec.activation, lanes)
            T.store(self._y, at + (half * HALF_BLOCKS + block) * image.plane, value, lanes)

        for block in range(count):
            inside = half * HALF_BLOCKS + block < work.blocks
            T.when(inside if work.blocks % HALF_BLOCKS and block % HALF_BLOCKS else True, partial(one, block))


class _Vectors(_Band):
    """By register tiles, whose sums never leave their registers."""

    def begin(self) -> None:
        """What all groups need."""
        super().begin()
        self._source, self._first = self.x, self.origin
        if self._work.paired:
            source = self._work.source
            self._source, self._first = T.scratch(source.elements + self._lanes, "int32"), 0
            T.repeat(self._work.planes, lambda plane: T.repeat(source.height, partial(self._widen, plane)))

    def _widen(self, plane: Expr, row: Expr) -> None:
        """Make pairs of what the band sees of a row of x; the last ones may be those of other pixels."""
        work, lanes = self._work, self._lanes
        x_at = T.bind(self.origin + plane * work.input.plane + row * work.input.row)
        at, words = T.bind(plane * work.source.plane + row * work.source.row), lanes // 2

        def some(index: Expr) -> None:
            pairs = int8.unsigned_pairs(self.x[T.lanes_at(x_at + index * words, words)], lanes)
            T.store(self._source, at + index * lanes, pairs, lanes)

        unrolled(-(-work.source.row // lanes), some)

    def halves(self, group: Expr, halves: int) -> None:
        """All outputs of a group of so many halves."""
        work = self._work
        count = min(halves, work.tile_halves)

        def some(part: Expr) -> None:
            half = T.bind(group * work.group_halves + part * count)
            work.cut.each_tile(0, work.cut.bands, partial(self._tile, half, count))

        T.repeat(halves // count, some)

    def _tile(self, half: Expr, halves: int, row: Expr, column: Expr, rows: int, width: int) -> None:
        work, lanes, pixels = self._work, self._lanes, list(product(range(rows), range(width)))
        bias = self.starts(half, halves)
        sums = [[Register(lanes, value, "int32") for value in bias] for _ in pixels]
        down, across = work.spec.stride
        line, step = down * work.source.row, across * work.source_words
        base = T.bind(self._first + row * line + column * step)
        starts = [base + (r * line + c * step) for r, c in pixels]
        units = work.row_units // HALF_BLOCKS  # of a vector
        unit_bytes = 1 if work.paired else WORD_CHANNELS
        ahead = PREFETCHED_BYTES // unit_bytes
        vectors_of_line = min(HALF_BLOCKS, ALIGNMENT_BYTES // (units * unit_bytes))
        add = int8.add_pairs if work.paired else int8.add_words

        def word(place: Expr, weights: Expr) -> None:
            places = [weights + i * work.half_units + j * units for i in range(halves) for j in range(HALF_BLOCKS)]
            for where in places[::vectors_of_line]:
                T.prefetch(self._weights, where + ahead)
            vectors = [self._weights[T.lanes_at(where, units)] for where in places]
            vectors = [int8.signed_pairs(vector, lanes) if work.paired else vector for vector in vectors]
            numbers = [self._source[start + place] for start in starts]
            multiply_add(sums, numbers, vectors, lanes, partial(add, lanes=lanes))

        def reduce(place: Expr, weights: Expr, words: int) -> None:
            unrolled(words, lambda number: word(place + number, weights + number * work.row_units))

        self.reduce(T.bind(half * work.half_units), reduce)
        factors = self.last_factors(half, halves)
        for (r, c), totals in zip(pixels, sums, strict=True):
            self.store([total.value for total in totals], factors, half, row + r, column + c)


class _Tiles(_Band):
    """By tiles of AMX, two of pixels and two of channel blocks at once."""

    def begin(self) -> None:
        """What all groups need."""
        super().begin()
        begin_tiles(T.scratch(WORDS, "int32"))
        if self._work.spec.dynamic:
            self._starts = T.scratch(self._work.half_channels, "int32")
        self._sums, self._first_sum = line_scratch(self._work.tiles * 2 * HALF_BLOCKS * TILE_ELEMENTS, "int32")

    def end(self) -> None:
        """After all groups."""
        end_tiles()

    def halves(self, group: Expr, halves: int) -> None:
        """All outputs of a group of so many halves."""
        pairs = self._work.tiles // 2

        def half(index: Expr) -> None:
            number = T.bind(group * self._work.group_halves + index)
            self._begin_half(number)
            if pairs:
                T.repeat(pairs, lambda pair: self._multiply(number, index, pair, 2))
            if self._work.tiles % 2:
                self._multiply(number, index, pairs, 1)

        T.repeat(halves, half)
        self._finish(group, halves)

    def _begin_half(self, number: Expr) -> None:
        """Lay down what the sums of a pair of blocks begin with."""
        self._first: tuple[Buffer, Expr] = (
            (self._starts, 0) if self._work.spec.dynamic else (self._buffers["bias"], number * self._work.half_channels)
        )
        if not self._work.spec.dynamic:
            return
        zero = T.splat(self._zero, WORDS)
        for j in range(HALF_BLOCKS):
            sums = self._buffers["integers"][T.lanes_at(number * self._work.half_channels + j * WORDS, WORDS)]
            T.store(self._starts, j * WORDS, T.constant(0, WORDS, "int32") - sums * zero, WORDS)

    def _tile_at(self, tile: Expr) -> Expr:
        """Where in x a tile begins."""
        work = self._work
        if work.wraps:
            return self.origin + tile * (TILE_ROWS * work.pixel_words)
        down, across = work.spec.stride
        row = T.quotient(tile, work.row_tiles)
        column = tile - row * work.row_tiles
        return self.origin + row * (down * work.input.row) + column * (TILE_ROWS * across * work.pixel_words)

    def _multiply(self, number: Expr, half: Expr, pair: Expr, count: int) -> None:
        """All products of a pair of tiles, or of the last one, and a pair of blocks: this one, of its group `half`."""
        work = self._work
        tile = T.bind(pair * 2)
        places = [T.bind(self._tile_at(tile + i)) for i in range(count)]
        step = work.pixel_words * work.spec.stride[1]
        lines = -(-2 * WORDS // -(-work.tiles // 2))  # of weights, asked for meanwhile
        ahead = PREFETCHED_STEPS * WORDS * work.row_units + pair * (lines * WORDS)
        start, first = self._first
        start_tiles(count, start, [first + j * WORDS for j in range(HALF_BLOCKS)])

        def add(place: Expr, weights: Expr, _: int) -> None:
            at = T.bind(weights)
            for line in range(lines):
                T.prefetch(self._weights, at + ahead + line * WORDS, level=2)
            vectors = [at + j * WORDS for j in range(HALF_BLOCKS)]
            int8.PRODUCT.add(self.x, [where + place for where in places], step, self._weights, vectors, work.row_units)

        self.reduce(T.bind(number * work.half_units), add)
        sums = [
            [
                self._first_sum + ((half * HALF_BLOCKS + j) * work.tiles + tile + i) * TILE_ELEMENTS
                for j in range(HALF_BLOCKS)
            ]
            for i in range(count)
        ]
        store_tiles(self._sums, sums)

    def _finish(self, group: Expr, halves: int) -> None:
        """What follows the sums."""
        work = self._work
        first = T.bind(group * work.group_halves)
        factors = self.last_factors(first, halves)

        def pixel(row: Expr, column: Expr) -> None:
            at = self._first_sum + (row * work.sum_columns + column) * WORDS
            places = [at + j * (work.tiles * TILE_ELEMENTS) for j in range(halves * HALF_BLOCKS)]
            sums = [self._sums[T.lanes_at(place, WORDS)] for place in places]
            self.store(sums, factors, first, row, column)

        T.repeat(work.rows, lambda row: unrolled(work.columns, partial(pixel, row)))
