"""Convolution of 8-bit numbers, with sums in int32: see `instructions.py` and, for layouts, `int8_specs.py`.

A task computes a *band* of the output for some groups of four blocks of 16 channels. A band is some rows or, if
pixels of x and y lie one after the other without gaps, some pixels. Inputs are read where they lie: a pixel of 64
channels is a row of a tile of AMX. A tile has 16 outputs: of a row, or, without strides, consecutive places of x, so
that it may go on in the next row; what it computes between two rows is not stored. Register tiles have up to 6
outputs.

What reads the last outputs may go beyond the end of x: `int8.READ_BEHIND_BYTES` there must be readable. Weights are
packed [pair of blocks][plane][kh][kw][word][32 outputs], or [pair][kh][word][32 outputs] of an input of pixels.

Where x's scale is known at run time only, sums begin with what x's zero point adds to them. If weights have zero
points, too, each of them counts times the sum of the window of x, which is made once for all groups of a band.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import product
from typing import Any

import numpy as np

from gangway.artifact.format import TargetSpec
from gangway.compiler.kernels.int8_specs import BYTES_CHANNELS, FACTORS, PIXELS_CHANNELS, Int8ConvSpec
from gangway.compiler.kernels.specs import Array, KernelPlan, PackedWeights, RawWeights
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
from gangway.compiler.kernels.templates.builder import (
    Argument,
    Buffer,
    Expr,
    Register,
    at_most,
    bind,
    constant,
    either,
    kernel,
    lanes_at,
    prefetch,
    quotient,
    repeat,
    scratch,
    splat,
    store,
    tirx,
    when,
)
from gangway.compiler.kernels.templates.float32_math import activate
from gangway.compiler.kernels.templates.int8 import instructions as int8
from gangway.compiler.kernels.templates.int8.instructions import WORD_CHANNELS
from gangway.compiler.kernels.templates.matmul import unrolled
from gangway.compiler.kernels.templates.tiling import (
    Cut,
    Image,
    Tasks,
    UnsupportedSpecError,
    cut_line,
    cut_rows,
    each_tile,
    gangs_cost,
    knob,
    make_plan,
    one_band_tasks,
    spread,
)

LANES = 16
HALF_BLOCKS = 2  # of a row of weights
HALF_CHANNELS = HALF_BLOCKS * LANES
TILE_PIXELS = 6  # of a register tile: 24 sums, four vectors of weights, one of inputs
PREFETCHED_STEPS = 8  # rows of 16 words of weights of a group ahead: 16 KiB
PREFETCHED_WORDS = 1024
LEAST_STRIDE_FAR = 4  # whose tiles read more behind x than is readable
MOST_TILES = 16  # of a band: 64 KiB of sums
# What a core does in a microsecond, measured: products by tiles and by vectors, outputs made of sums.
_TILE_OPERATIONS_PER_US, _VECTOR_OPERATIONS_PER_US, _OUTPUTS_PER_US = 3_500_000, 420_000, 16_000
_MEMORY_BYTES_PER_US, _CACHED_BYTES_PER_US = 20_000, 60_000
_CACHED_BYTES = 1 << 20

Step = Callable[[Expr, Expr, int], None]
"""Of an offset in x, an offset in the weights, and how many words have weights."""


@dataclass(frozen=True)
class Work:
    """A convolution, cut into bands of `rows` rows; an image without gaps is one row, of which a band has `columns`."""

    spec: Int8ConvSpec
    target: TargetSpec
    rows: int
    columns: int

    @cached_property
    def size(self) -> tuple[int, int]:
        """Height and width of the output."""
        return self.spec.output_size

    @property
    def tiled(self) -> bool:
        """Whether tiles multiply; one pixel would use one row of them."""
        return int8.has_tiles(self.target) and math.prod(self.size) > 1

    @cached_property
    def is_line(self) -> bool:
        """Whether the image is one row."""
        return _is_line(self.spec)

    @cached_property
    def pixel_words(self) -> int:
        """Words of a pixel."""
        return 1 if self.spec.input_pixels else WORDS

    @cached_property
    def planes(self) -> int:
        """Planes of x."""
        return 1 if self.spec.input_pixels else -(-self.spec.in_channels // BYTES_CHANNELS)

    @cached_property
    def input(self) -> Image:
        """x, in words."""
        s = self.spec
        return Image(self.planes * self.pixel_words, s.height, s.width, s.input_halo, self.pixel_words)

    @cached_property
    def output(self) -> Image:
        """y, in bytes or float32."""
        lanes = BYTES_CHANNELS if self.spec.output_bytes else LANES
        return Image(self.spec.out_channels, *self.size, self.spec.output_halo, lanes)

    @cached_property
    def residual(self) -> Image:
        """What is added, in float32."""
        return Image(self.spec.out_channels, *self.size, self.spec.residual_halo, LANES)

    @cached_property
    def blocks(self) -> int:
        """Blocks of 16 output channels."""
        return -(-self.spec.out_channels // LANES)

    @cached_property
    def halves(self) -> int:
        """Pairs of blocks."""
        return -(-self.blocks // HALF_BLOCKS)

    @cached_property
    def groups(self) -> int:
        """Groups of two pairs, of which the last one may have one."""
        return -(-self.halves // 2)

    @cached_property
    def bands(self) -> int:
        """How many there are; the last one may overlap the one before it."""
        if self.is_line:
            return -(-math.prod(self.size) // self.columns)
        return -(-self.size[0] // self.rows)

    @cached_property
    def steps(self) -> int:
        """Rows of 16 words of the reduction."""
        rows, columns = self.spec.kernel
        return rows if self.spec.input_pixels else self.planes * rows * columns

    @property
    def half_words(self) -> int:
        """Words of the weights of a pair of blocks."""
        return self.steps * WORDS * HALF_CHANNELS

    @cached_property
    def wraps(self) -> bool:
        """Whether tiles go on in the next row."""
        if self.spec.stride != (1, 1):
            return False
        return self._wrapped() <= self.rows * -(-self.columns // TILE_ROWS)

    def _wrapped(self) -> int:
        return -(-((self.rows - 1) * (self.input.row // self.pixel_words) + self.columns) // TILE_ROWS)

    @cached_property
    def row_tiles(self) -> int:
        """Tiles of a row, unless they wrap around."""
        return -(-self.columns // TILE_ROWS)

    @cached_property
    def sum_columns(self) -> int:
        """Places of a row of sums."""
        return self.input.row // self.pixel_words if self.wraps else self.row_tiles * TILE_ROWS

    @cached_property
    def tiles(self) -> int:
        """Tiles of a band."""
        return self._wrapped() if self.wraps else self.rows * self.row_tiles

    @cached_property
    def cut(self) -> Cut:
        """A band in register tiles."""
        return cut_line(self.columns, TILE_PIXELS) if self.is_line else cut_rows(self.rows, self.columns, TILE_PIXELS)

    @cached_property
    def band_us(self) -> float:
        """Time of one band of one group."""
        pixels = self.rows * self.columns
        channels = self.halves * HALF_CHANNELS / self.groups
        finish = pixels * channels / _OUTPUTS_PER_US
        if self.tiled:
            operations = 2 * self.tiles * TILE_ROWS * channels * self.steps * BYTES_CHANNELS
            return operations / _TILE_OPERATIONS_PER_US + finish
        return 2 * pixels * channels * self.steps * BYTES_CHANNELS / _VECTOR_OPERATIONS_PER_US + finish

    def cost_us(self, tasks: Tasks) -> float:
        """Mean time of the layer over the gang sizes, in microseconds of one core."""
        weights = 4 * self.half_words * self.halves
        chunk = weights * tasks.groups_per_task / tasks.groups
        rate = _CACHED_BYTES_PER_US if chunk <= _CACHED_BYTES else _MEMORY_BYTES_PER_US
        read = 4 * self.input.elements / _CACHED_BYTES_PER_US * tasks.chunks
        total = self.bands * self.band_us * self.groups + weights / _MEMORY_BYTES_PER_US + read
        total += (tasks.parts - 1) * weights / rate
        return gangs_cost(tasks, total)


def _is_line(spec: Int8ConvSpec) -> bool:
    """Whether pixels of x and y lie one after the other without gaps and in the same order."""
    halos = spec.input_halo + spec.output_halo + spec.residual_halo
    return spec.kernel == (1, 1) and spec.stride == (1, 1) and not halos and not any(spec.pads)


def computes(spec: Int8ConvSpec, target: TargetSpec) -> bool:
    """Whether this template has a kernel for a convolution."""
    if not int8.has_words(target):
        return False
    if spec.input_pixels:
        return spec.in_channels <= PIXELS_CHANNELS and spec.kernel[1] <= WORDS and spec.dilation == (1, 1)
    return spec.stride[1] < LEAST_STRIDE_FAR


def works(spec: Int8ConvSpec, target: TargetSpec) -> list[Work]:
    """Every sensible height of bands, or length."""
    height, width = spec.output_size
    if _is_line(spec):
        pixels = height * width
        unit = 2 * TILE_ROWS if int8.has_tiles(target) else TILE_PIXELS
        found = [
            Work(spec, target, 1, size) for size in sorted({min(unit * n, pixels) for n in (1, 2, 3, 4, 6, 8, 16)})
        ]
    else:
        found = [Work(spec, target, rows, width) for rows in sorted({-(-height // n) for n in range(1, height + 1)})]
    return [work for work in found if not work.tiled or work.tiles <= MOST_TILES] or found[:1]


def candidates(spec: Int8ConvSpec, target: TargetSpec) -> Iterator[KernelPlan]:
    """The static choice, then all other sizes of bands and tasks; they share packed weights."""
    if not computes(spec, target):
        raise UnsupportedSpecError(f"convolution of 8-bit numbers: {spec}")
    priced = sorted(
        (
            (work.cost_us(tasks), _plan(work, tasks))
            for work in works(spec, target)
            for tasks in one_band_tasks(work.groups, work.bands)
        ),
        key=lambda item: item[0],
    )
    yield priced[0][1]
    yield from spread(priced[0], priced[1:])


def _plan(work: Work, tasks: Tasks) -> KernelPlan:
    knobs: dict[str, int | str] = {"rows": work.rows, "columns": work.columns, "groups": tasks.groups_per_task}
    kind = "tiles" if work.tiled else "vectors"
    text = f"conv int8 {kind} {work.rows}x{work.columns} pixels, {tasks.groups_per_task}x{2 * HALF_BLOCKS} blocks"
    weights = 8 * work.half_words * tasks.groups_per_task
    return make_plan(work.spec, knobs, tasks.count, text, weights, 8 if work.tiled else TILE_PIXELS * 2 * HALF_BLOCKS)


def pack(spec: Int8ConvSpec, target: TargetSpec, raw: RawWeights) -> PackedWeights:
    """Weights as words, bias, multiplier, padded with zeros, and y's zero point; or what dynamic ones have."""
    work = works(spec, target)[0]
    surplus = work.halves * HALF_CHANNELS - spec.out_channels
    weights = np.pad(raw["weights"], ((0, surplus), (0, 0), (0, 0), (0, 0)))
    words = _pixel_words(weights) if spec.input_pixels else _byte_words(work, weights)
    packed = np.ascontiguousarray(words).view(np.int32).reshape(-1)
    if not spec.dynamic:
        bias, multiplier = (np.pad(raw[name], (0, surplus)) for name in ("bias", "multiplier"))
        return packed, bias, multiplier, raw["zero"]
    numbers = {name: np.pad(raw[name], (0, surplus)) for name in ("scales", "bias", "zeros")}
    sums = weights.reshape(len(weights), -1).sum(1, np.int32)
    whole = [sums, *([numbers["zeros"], _ones(work)] if spec.weight_zeros else [])]
    return packed, np.concatenate(whole), np.concatenate([numbers["scales"], numbers["bias"]])


def _ones(work: Work) -> Array:
    """[plane][word][4], or of pixels [word][4]: 1 where there is a channel, and a column of the window."""
    spec = work.spec
    if not spec.input_pixels:
        return (np.arange(work.planes * BYTES_CHANNELS) < spec.in_channels).astype(np.int8).view(np.int32)
    words = np.zeros((WORDS, WORD_CHANNELS), np.int8)
    words[: spec.kernel[1], : spec.in_channels] = 1
    return words.view(np.int32).reshape(-1)


def _byte_words(work: Work, weights: Array) -> Array:
    """[outputs][channels][kh][kw] -> [pair of blocks][plane][kh][kw][word][32 outputs][4]."""
    rows, columns = work.spec.kernel
    padded = np.pad(weights, ((0, 0), (0, work.planes * BYTES_CHANNELS - weights.shape[1]), (0, 0), (0, 0)))
    parts = padded.reshape(work.halves, HALF_CHANNELS, work.planes, WORDS, WORD_CHANNELS, rows, columns)
    return parts.transpose(0, 2, 5, 6, 3, 1, 4)


def _pixel_words(weights: Array) -> Array:
    """[outputs][channels][kh][kw] -> [pair of blocks][kh][word][32 outputs][4]; a word is a column of the window."""
    outputs, channels, rows, columns = weights.shape
    padded = np.pad(weights, ((0, 0), (0, WORD_CHANNELS - channels), (0, 0), (0, WORDS - columns)))
    parts = padded.reshape(outputs // HALF_CHANNELS, HALF_CHANNELS, WORD_CHANNELS, rows, WORDS)
    return parts.transpose(0, 3, 4, 1, 2)


def emit(plan: KernelPlan, target: TargetSpec, symbol: str) -> Any:
    """The kernel. Arguments: as `Int8ConvSpec` has them."""
    spec = plan.spec
    assert isinstance(spec, Int8ConvSpec)
    work = Work(spec, target, knob(plan, "rows"), knob(plan, "columns"))
    tasks = Tasks(work.groups, work.bands, knob(plan, "groups"), 1, pixels_first=False)
    arguments = _arguments(work)

    def task(number: Expr, buffers: tuple[Buffer, ...]) -> None:
        chunk, band = tasks.first(number)
        named = {argument.name: buffer for argument, buffer in zip(arguments, buffers, strict=True)}
        writer = (_Tiles if work.tiled else _Vectors)(work, named, bind(band))
        writer.begin()
        first = bind(chunk)

        def group(index: Expr) -> None:
            either(
                index < work.groups - 1 if work.halves % 2 else True,
                lambda: writer.group(index, 2),
                lambda: writer.group(index, 1),
            )

        repeat(at_most(tasks.groups_per_task, work.groups - first), lambda i: group(bind(first + i)))
        writer.end()

    return kernel(symbol, arguments, task, int8.functions(target))


def _arguments(work: Work) -> list[Argument]:
    spec, outputs = work.spec, work.halves * HALF_CHANNELS
    inputs = [
        Argument("x", work.input.elements, "int32"),
        Argument("weights", work.half_words * work.halves, "int32"),
    ]
    y = Argument("y", work.output.elements, "uint8" if spec.output_bytes else "float32")
    if not spec.dynamic:
        return [*inputs, Argument("bias", outputs, "int32"), Argument("multiplier", outputs), Argument("zero", 1), y]
    integers = 2 * outputs + WORDS * work.planes if spec.weight_zeros else outputs
    inputs += [Argument("integers", integers, "int32"), Argument("numbers", 2 * outputs), Argument("factors", FACTORS)]
    return [*inputs, *([Argument("residual", work.residual.elements)] if spec.residual else []), y]


class _Band:
    """Writes the code for a band."""

    def __init__(self, work: Work, buffers: Mapping[str, Buffer], band: Expr) -> None:
        self._work, self._buffers = work, buffers
        self.x, self.weights, self._y = (buffers[name] for name in ("x", "weights", "y"))
        if work.spec.dynamic:
            factors = buffers["factors"]
            self._scale, self._zero = bind(splat(factors[0], LANES)), bind(tirx.Cast("int32", factors[3]))
        else:
            self._zeros = bind(int8.twice(tirx.Cast("int32", buffers["zero"][0])))
        height, width = work.size
        if work.is_line:
            self._row: Expr = 0
            self._column: Expr = bind(at_most(band * work.columns, height * width - work.columns))
        else:
            self._row, self._column = bind(at_most(band * work.rows, height - work.rows)), 0
        spec, image = work.spec, work.input
        row = self._row * spec.stride[0] - spec.pads[0]
        column = self._column * spec.stride[1] - spec.pads[1]
        self.origin = bind(image.origin + row * image.row + column * work.pixel_words)

    def begin(self) -> None:
        """What all groups need."""
        if self._work.spec.weight_zeros:
            self._windows = scratch(self._work.rows * self._work.columns, "int32")
            repeat(self._work.rows, lambda row: repeat(self._work.columns, partial(self._window, row)))

    def _window(self, row: Expr, column: Expr) -> None:
        """Keep the sum of what a pixel's window sees, less the zero point."""
        work, spec = self._work, self._work.spec
        (rows, columns), (down, across), image = spec.kernel, spec.dilation, work.input
        base = self.origin + row * (spec.stride[0] * image.row) + column * (spec.stride[1] * work.pixel_words)
        ones, base = self._buffers["integers"], bind(base)
        total, first = Register(LANES, constant(0, LANES, "int32"), "int32"), 2 * work.halves * HALF_CHANNELS

        def add(place: Expr, plane: Expr) -> None:
            part = self.x[lanes_at(base + place, WORDS)]
            total.set(int8.add_products(total.value, part, ones[lanes_at(first + plane * WORDS, WORDS)]))

        def tap(plane: Expr, i: Expr, j: Expr) -> None:
            add(plane * image.plane + i * (down * image.row) + j * (across * WORDS), plane)

        if spec.input_pixels:
            repeat(rows, lambda i: add(i * image.row, 0))
        else:
            repeat(work.planes, lambda p: repeat(rows, lambda i: repeat(columns, partial(tap, p, i))))
        numbers = spec.in_channels * rows * columns
        store(self._windows, row * work.columns + column, int8.total(total.value) - self._zero * numbers, 1)

    def starts(self, group: Expr, halves: int) -> list[Expr]:
        """What sums of the blocks of a group begin with."""
        if not self._work.spec.dynamic:
            return self.factors(self._buffers["bias"], group, halves)
        sums, zero = self.factors(self._buffers["integers"], group, halves), splat(self._zero, LANES)
        return [bind(constant(0, LANES, "int32") - total * zero) for total in sums]

    def last_factors(self, group: Expr, halves: int) -> list[list[Expr]]:
        """What each block's sums are multiplied by; of dynamic ones the bias, and zero points of weights, too."""
        if not self._work.spec.dynamic:
            return [[factor] for factor in self.factors(self._buffers["multiplier"], group, halves)]
        numbers, integers = self._buffers["numbers"], self._buffers["integers"]
        scales = [bind(scale * self._scale) for scale in self.factors(numbers, group, halves)]
        behind = self._work.halves * HALF_CHANNELS
        others = [self.factors(numbers, group, halves, behind)]
        if self._work.spec.weight_zeros:
            others.append(self.factors(integers, group, halves, behind))
        return [list(each) for each in zip(scales, *others, strict=True)]

    def end(self) -> None:
        """After all groups."""

    def group(self, group: Expr, halves: int) -> None:
        """All outputs of a group of one or two pairs of blocks."""
        raise NotImplementedError

    def reduce(self, weights_at: Expr, body: Step) -> None:
        """`body` for every row of 16 words of the reduction."""
        work, (rows, columns) = self._work, self._work.spec.kernel
        image, (down, across) = work.input, work.spec.dilation
        row_words = WORDS * HALF_CHANNELS
        if work.spec.input_pixels:
            repeat(rows, lambda i: body(i * image.row, weights_at + i * row_words, columns))
            return

        def plane(number: Expr, words: int) -> None:
            def tap(i: Expr, j: Expr) -> None:
                place = number * image.plane + i * (down * image.row) + j * (across * WORDS)
                body(place, weights_at + ((number * rows + i) * columns + j) * row_words, words)

            repeat(rows, lambda i: repeat(columns, partial(tap, i)))

        whole, rest = divmod(work.spec.in_channels, BYTES_CHANNELS)
        if work.tiled or not rest:
            repeat(work.planes, lambda number: plane(number, WORDS))
            return
        if whole:
            repeat(whole, lambda number: plane(number, WORDS))
        plane(whole, -(-rest // WORD_CHANNELS))

    def factors(self, numbers: Buffer, group: Expr, halves: int, begin: int = 0) -> list[Expr]:
        """Biases, multipliers and their kind of the blocks of a group; `begin`: where they are among others."""
        first = begin + group * (2 * HALF_CHANNELS)
        return [bind(numbers[lanes_at(first + j * LANES, LANES)]) for j in range(halves * HALF_BLOCKS)]

    def store(self, sums: list[Expr], factors: list[list[Expr]], group: Expr, row: Expr, column: Expr) -> None:
        """Outputs of a pixel of the band, of sums with what they begin with. `factors`: see `last_factors`."""
        spec, image = self._work.spec, self._work.output
        place = self._row + row, self._column + column
        if spec.dynamic:
            self._store_dynamic(sums, factors, group, row, column)
            return
        numbers = [tirx.Cast("float32x16", total) * factor for total, (factor,) in zip(sums, factors, strict=True)]
        if spec.output_bytes:
            four = [*numbers, *numbers][: 2 * HALF_BLOCKS]  # what is behind a single pair is surplus
            at = image.origin + place[0] * image.row + place[1] * image.lanes
            store(self._y, at + group * image.plane, int8.packed(four, self._zeros), BYTES_CHANNELS)
            return
        self._store_blocks(lambda block: numbers[block], len(numbers), group, place)

    def _store_dynamic(self, sums: list[Expr], factors: list[list[Expr]], group: Expr, row: Expr, column: Expr) -> None:
        work, spec, image = self._work, self._work.spec, self._work.residual
        place = self._row + row, self._column + column
        window = None
        if spec.weight_zeros:
            window = bind(splat(self._windows[row * work.columns + column], LANES))

        def number(block: int) -> Expr:
            total, (scale, bias, *zeros) = sums[block], factors[block]
            for zero in zeros:
                total = total - zero * window
            value = int8.scaled(tirx.Cast("float32x16", total), scale) + bias
            if spec.residual:
                at = image.origin + place[0] * image.row + place[1] * LANES
                at = at + (group * (2 * HALF_BLOCKS) + block) * image.plane
                value = value + self._buffers["residual"][lanes_at(at, LANES)]
            return value

        self._store_blocks(number, len(sums), group, place)

    def _store_blocks(self, number: Callable[[int], Expr], count: int, group: Expr, place: tuple[Expr, Expr]) -> None:
        """Numbers of float32, activated."""
        work, spec, image = self._work, self._work.spec, self._work.output
        at = image.origin + place[0] * image.row + place[1] * image.lanes

        def one(block: int) -> None:
            value = activate(number(block), spec.activation, LANES)
            store(self._y, at + (group * (2 * HALF_BLOCKS) + block) * image.plane, value, LANES)

        for block in range(count):
            inside = group * (2 * HALF_BLOCKS) + block < work.blocks
            when(inside if work.blocks % HALF_BLOCKS and block % HALF_BLOCKS else True, partial(one, block))


class _Vectors(_Band):
    """By register tiles, whose sums never leave their registers."""

    def group(self, group: Expr, halves: int) -> None:
        """All outputs of a group of one or two pairs of blocks."""
        cut = self._work.cut

        def band(number: Expr, shape: Any) -> None:
            row, start = (0, cut.pixel(number, shape)) if cut.row_pixels else (number * cut.full.rows, 0)
            each_tile(
                shape.segments, lambda column, width: self._tile(group, halves, row, start + column, shape.rows, width)
            )

        cut.each(0, cut.bands, band)

    def _tile(self, group: Expr, halves: int, row: Expr, column: Expr, rows: int, width: int) -> None:
        work, pixels = self._work, list(product(range(rows), range(width)))
        bias = self.starts(group, halves)
        sums = [[Register(LANES, value, "int32") for value in bias] for _ in pixels]
        down, across = work.spec.stride
        line, step = down * work.input.row, across * work.pixel_words
        base = bind(self.origin + row * line + column * step)

        def word(place: Expr, weights: Expr) -> None:
            places = [
                weights + half * work.half_words + j * LANES for half in range(halves) for j in range(HALF_BLOCKS)
            ]
            for where in places:
                prefetch(self.weights, where + PREFETCHED_WORDS)
            vectors = [bind(self.weights[lanes_at(where, LANES)]) for where in places]
            for (r, c), totals in zip(pixels, sums, strict=True):
                number = splat(self.x[base + (r * line + c * step) + place], LANES)
                for total, vector in zip(totals, vectors, strict=True):
                    total.set(int8.add_products(total.value, number, vector))

        def reduce(place: Expr, weights: Expr, words: int) -> None:
            unrolled(words, lambda number: word(place + number, weights + number * HALF_CHANNELS))

        self.reduce(bind(group * (2 * work.half_words)), reduce)
        factors = self.last_factors(group, halves)
        for (r, c), totals in zip(pixels, sums, strict=True):
            self.store([total.value for total in totals], factors, group, row + r, column + c)


class _Tiles(_Band):
    """By tiles of AMX, two of pixels and two of channel blocks at once."""

    def begin(self) -> None:
        """What all groups need."""
        super().begin()
        begin_tiles(scratch(WORDS, "int32"))
        if self._work.spec.dynamic:
            self._starts = scratch(HALF_CHANNELS, "int32")
        self._sums, self._first_sum = line_scratch(self._work.tiles * 2 * HALF_BLOCKS * TILE_ELEMENTS, "int32")

    def end(self) -> None:
        """After all groups."""
        end_tiles()

    def group(self, group: Expr, halves: int) -> None:
        """All outputs of a group of one or two pairs of blocks."""
        pairs = self._work.tiles // 2

        def half(index: Expr) -> None:
            number = bind(group * 2 + index)
            self._begin_half(number)
            if pairs:
                repeat(pairs, lambda pair: self._multiply(number, index, pair, 2))
            if self._work.tiles % 2:
                self._multiply(number, index, pairs, 1)

        repeat(halves, half)
        self._finish(group, halves)

    def _begin_half(self, number: Expr) -> None:
        """Lay down what the sums of a pair of blocks begin with."""
        self._first: tuple[Buffer, Expr] = (
            (self._starts, 0) if self._work.spec.dynamic else (self._buffers["bias"], number * HALF_CHANNELS)
        )
        if not self._work.spec.dynamic:
            return
        zero = splat(self._zero, LANES)
        for j in range(HALF_BLOCKS):
            sums = self._buffers["integers"][lanes_at(number * HALF_CHANNELS + j * LANES, LANES)]
            store(self._starts, j * LANES, constant(0, LANES, "int32") - sums * zero, LANES)

    def _tile_at(self, tile: Expr) -> Expr:
        """Where in x a tile begins."""
        work = self._work
        if work.wraps:
            return self.origin + tile * (TILE_ROWS * work.pixel_words)
        down, across = work.spec.stride
        row = quotient(tile, work.row_tiles)
        column = tile - row * work.row_tiles
        return self.origin + row * (down * work.input.row) + column * (TILE_ROWS * across * work.pixel_words)

    def _multiply(self, number: Expr, half: Expr, pair: Expr, count: int) -> None:
        """All products of a pair of tiles, or of the last one, and a pair of blocks: this one, of its group `half`."""
        work = self._work
        tile = bind(pair * 2)
        places = [bind(self._tile_at(tile + i)) for i in range(count)]
        step = work.pixel_words * work.spec.stride[1]
        lines = -(-2 * WORDS // -(-work.tiles // 2))  # of weights, asked for meanwhile
        ahead = PREFETCHED_STEPS * WORDS * HALF_CHANNELS + pair * (lines * LANES)
        start, first = self._first
        start_tiles(count, start, [first + j * LANES for j in range(HALF_BLOCKS)])

        def add(place: Expr, weights: Expr, _: int) -> None:
            at = bind(weights)
            for line in range(lines):
                prefetch(self.weights, at + ahead + line * LANES, level=2)
            vectors = [at + j * LANES for j in range(HALF_BLOCKS)]
            int8.PRODUCT.add(self.x, [where + place for where in places], step, self.weights, vectors, HALF_CHANNELS)

        self.reduce(bind(number * work.half_words), add)
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
        factors = self.last_factors(group, halves)

        def pixel(row: Expr, column: Expr) -> None:
            at = self._first_sum + (row * work.sum_columns + column) * LANES
            places = [at + j * (work.tiles * TILE_ELEMENTS) for j in range(halves * HALF_BLOCKS)]
            sums = [self._sums[lanes_at(place, LANES)] for place in places]
            self.store(sums, factors, group, row, column)

        repeat(work.rows, lambda row: unrolled(work.columns, partial(pixel, row)))
