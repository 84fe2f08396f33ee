"""Convolution with weights and products in bfloat16, sums in float32. Activations are float32 or stored in bfloat16.

A task computes some rows of the output, a *band*, for some groups of channel blocks. First it rounds the inputs of the
band to words (see `words.py`) in scratch memory, the *patch*: [plane of 32 channels][phase][row][column][16 words].
With a stride s, rows and columns s apart are a phase. So neighbouring outputs read neighbouring columns at every tap.

Then each register tile, or each tile of AMX, adds up all products. A tile of AMX has 16 consecutive positions of the
patch. It may wrap around to the next row; what it computes between two rows is not stored.

An input that is stored in bfloat16, 32 channels of a pixel side by side, is its own patch, unless a stride makes phases
of it. A last tile reads beyond the input's end, up to `READ_BEHIND_BYTES`.

A planar input of few channels becomes words of the channels of a pixel: [row][column][words]. A row of a tile has
several columns of the window. Those beyond the window have weights of zero, so they must be finite.

Weights are packed [group][plane][kh][kw][word][outputs of the group], for both instructions and any number of rows. A
tile of weights has rows that lie a group's outputs apart. The weights of some planes, a *panel*, are used for all tiles
of a band before the next ones: they stay in the first level cache, where the next panel is asked for meanwhile.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from gangway.artifact.format import TargetSpec
from gangway.compiler.kernels.specs import ConvSpec, KernelPlan, Layout, PackedWeights, RawWeights
from gangway.compiler.kernels.templates import builder as T
from gangway.compiler.kernels.templates import tiling
from gangway.compiler.kernels.templates.amx.tiles import (
    TILE_ELEMENTS,
    TILE_ROWS,
    WORDS,
    begin_tiles,
    end_tiles,
    line_scratch,
    load_tiles,
    store_tiles,
    zero_tiles,
)
from gangway.compiler.kernels.templates.bands import BandWriter, band_kernel
from gangway.compiler.kernels.templates.bf16 import words as bf16
from gangway.compiler.kernels.templates.bf16.words import PLANE_CHANNELS
from gangway.compiler.kernels.templates.bf16.work import LANES, Bf16Work, Taps, computes, reach, works
from gangway.compiler.kernels.templates.builder import Buffer, Expr, Register
from gangway.compiler.kernels.templates.convolution import check
from gangway.compiler.kernels.templates.float32_math import activate
from gangway.compiler.kernels.templates.matmul import multiply_add, unrolled
from gangway.compiler.kernels.templates.tiling import Image, Tasks, UnsupportedSpecError

PREFETCHED_WORDS = 1024  # a page ahead, as in the template for float32

Step = Callable[[Expr, Expr, int], None]
"""Of an offset in the patch, an offset in the weights, and how many words have weights."""


def candidates(spec: ConvSpec, target: TargetSpec) -> Iterator[KernelPlan]:
    """The static choice, then all other sizes of bands and tasks; they share packed weights."""
    check(spec)
    if not computes(spec, target):
        raise UnsupportedSpecError(f"convolution in bfloat16: {spec}")
    yield from tiling.cheapest_first(
        (work.cost_us(tasks), _plan(work, tasks))
        for work in works(spec, target)
        for tasks in tiling.one_band_tasks(work.geometry.groups, work.bands)
    )


def _plan(work: Bf16Work, tasks: Tasks) -> KernelPlan:
    blocks, kind = work.geometry.group_blocks, "bf16 tiles" if work.tiled else "bf16 vectors"
    weights = 4 * work.weight_words * tasks.groups_per_task // tasks.groups
    sums = 4 * blocks if work.tiled else work.geometry.tile_pixels * blocks
    return work.plan(tasks, kind, blocks, weights + 4 * work.patch_words, sums)


def pack(spec: ConvSpec, target: TargetSpec, raw: RawWeights) -> PackedWeights:
    """Weights as words and bias, padded with zeros."""
    work = works(spec, target)[0]
    packed = np.zeros((work.weight_words, 2), np.uint16)
    width, at = work.geometry.group_blocks * LANES, 0
    for begin in range(0, spec.out_channels, width):
        words = _words(work, bf16.rounded(raw["weights"][begin : begin + width]))
        outputs = -(-words.shape[-2] // LANES) * LANES
        end = at + math.prod(words.shape[:-2]) * outputs
        packed[at:end].reshape(*words.shape[:-2], outputs, 2)[..., : words.shape[-2], :] = words
        at = end
    bias = np.pad(raw["bias"].astype(np.float32), (0, -spec.out_channels % LANES))
    return packed.reshape(-1).view(np.int32), bias


def _words(work: Bf16Work, weights: np.ndarray[Any, np.dtype[np.uint16]]) -> np.ndarray[Any, np.dtype[np.uint16]]:
    """[outputs][channels][kh][kw] -> [..., word][outputs][2], as the kernel reads it."""
    outputs, channels, rows, columns = weights.shape
    if work.spec.input_planar:
        pixels = work.row_steps * WORDS // work.pixel_words
        shape = (0, 0), (0, 2 * work.pixel_words - channels), (0, 0), (0, pixels - columns)
        pairs = np.pad(weights, shape).reshape(outputs, work.pixel_words, 2, rows, pixels)
        return pairs.transpose(3, 4, 1, 0, 2).reshape(rows, work.row_steps, WORDS, outputs, 2)
    padded = np.pad(weights, ((0, 0), (0, -channels % PLANE_CHANNELS), (0, 0), (0, 0)))
    return padded.reshape(outputs, work.planes, WORDS, 2, rows, columns).transpose(1, 4, 5, 2, 0, 3)


def emit(spec: ConvSpec, plan: KernelPlan, target: TargetSpec, symbol: str) -> Any:
    """The kernel. Arguments: x, weights, bias, [residual,] y."""
    work = Bf16Work(spec, target, tiling.knob(plan, "rows"), tiling.knob(plan, "columns"))
    g = work.geometry
    writer = partial(Tiles if work.tiled else Vectors, work)
    return band_kernel(plan, symbol, (g.groups, work.bands), writer, g.arguments(work.weights), bf16.functions(target))


class Patch:
    """Writes the code that rounds the inputs of a band."""

    def __init__(self, work: Bf16Work, x: Buffer, first_row: Expr, first_column: Expr) -> None:
        self._work, self._x = work, x
        self._row, self._column = first_row, first_column
        spec, image = work.spec, work.input
        if not work.direct:
            self.words, self.begin = line_scratch(work.patch_words, "int32")
        else:
            self.words = x
            row, column = first_row - spec.pads[0], first_column - spec.pads[1]
            self.begin = T.bind(image.origin + row * image.row + column * WORDS)

    def fill(self) -> None:
        """All of it."""
        if self._work.direct:
            return
        if self._work.spec.input_planar:
            self._fill_planar()
            return
        if self._work.spec.input_layout == "bf16":
            T.repeat(self._work.planes, lambda plane: self._fill_plane(plane, both=True))
            return
        blocks = self._work.geometry.input.blocks
        T.repeat(blocks // 2, lambda plane: self._fill_plane(plane, both=True))
        if blocks % 2:
            self._fill_plane(blocks // 2, both=False)

    def _fill_plane(self, plane: Expr, both: bool) -> None:
        work, spec, image = self._work, self._work.spec, self._work.input
        blocks = 1 if spec.input_layout == "bf16" else 2
        origin = image.origin - spec.pads[0] * image.row - spec.pads[1] * LANES + plane * (blocks * image.plane)
        origin = origin + self._row * (spec.stride[0] * image.row) + self._column * (spec.stride[1] * LANES)
        down, across = work.taps
        step = spec.stride[1] * LANES
        for index, (a, b) in enumerate(product(down, across)):
            start = T.bind(origin + a.phase * image.row + b.phase * LANES)
            into = self.begin + plane * work.plane_words + index * (work.patch_rows * work.patch_columns * WORDS)
            rows, columns = work.rows + reach(a), work.columns + reach(b)

            def pixel(source: Expr, place: Expr) -> None:
                if spec.input_layout == "bf16":
                    T.store(self.words, place, self._x[T.lanes_at(source, WORDS)], WORDS)
                    return
                low = self._x[T.lanes_at(source, LANES)]
                high = self._x[T.lanes_at(source + image.plane, LANES)] if both else T.constant(0.0, LANES)
                T.store(self.words, place, bf16.pack_words(low, high), WORDS)

            def row(number: Expr, start: Expr = start, into: Expr = into, columns: int = columns) -> None:
                source = start + number * (spec.stride[0] * image.row)
                place = into + number * (work.patch_columns * WORDS)
                unrolled(columns, lambda c: pixel(source + c * step, place + c * WORDS))

            T.repeat(rows, row)

    def _fill_planar(self) -> None:
        work, spec, image = self._work, self._work.spec, self._work.geometry.input
        origin = image.origin - spec.pads[0] * image.row - spec.pads[1] + self._row * (spec.stride[0] * image.row)
        columns, count = work.patch_columns, work.pixel_words

        def plane(channel: int, place: Expr) -> Expr:
            if channel >= spec.in_channels:
                return T.constant(0.0, LANES)
            return self._x[T.lanes_at(channel * image.plane + place, LANES)]

        def some(row: Expr, index: Expr) -> None:
            column = T.bind(T.at_most(index * LANES, columns - LANES))
            source = T.bind(origin + row * image.row + column)
            for word in range(count):
                value = bf16.interleave_words(plane(2 * word, source), plane(2 * word + 1, source))
                T.store(self.words, self.begin + (row * columns + column) * count + word, value, LANES, count)

        T.repeat(work.patch_rows, lambda row: T.repeat(-(-columns // LANES), lambda index: some(row, index)))
        zero = T.constant(0, WORDS, "int32")
        behind = work.patch_words - work.plane_words
        for place in range(0, behind - WORDS + 1, WORDS):
            T.store(self.words, self.begin + work.plane_words + place, zero, WORDS)


class Bf16Writer(BandWriter):
    """Writes the code for a band."""

    def __init__(self, work: Bf16Work, buffers: Mapping[str, Buffer], band: Expr) -> None:
        super().__init__(work, buffers, band)
        self._work, self._g, self._bias = work, work.geometry, buffers["bias"]
        self.patch = Patch(work, buffers["x"], self._row, self._column)

    def begin(self) -> None:
        """What all groups of channel blocks need."""
        self.patch.fill()

    def group(self, group: Expr) -> None:
        """All outputs of a group of channel blocks."""
        T.with_blocks(group, self._g.output.blocks, self._g.group_blocks, self.blocks)

    def blocks(self, group: Expr, blocks: int) -> None:
        """The same of a group that has so many."""
        raise NotImplementedError

    def _weights_at(self, group: Expr) -> Expr:
        return T.bind(group * (self._g.group_blocks * LANES * self._work.reduction_words))

    def _store(self, values: list[Expr], first: Expr, row: Expr, column: Expr) -> None:
        """Outputs of a pixel from channel block `first` on, which have their biases; `row` and `column` of the band."""
        work, spec = self._work, self._work.spec

        def place(image: Image, layout: Layout, block: int) -> Expr:
            at = image.origin + (self._row + row) * image.row + (self._column + column) * LANES
            if layout == "bf16":
                return (T.quotient(first, 2) + block // 2) * image.plane + at + block % 2 * (WORDS // 2)
            return (first + block) * image.plane + at

        def finished(block: int, value: Expr) -> Expr:
            if spec.residual:
                added = place(work.residual, spec.residual_layout, block)
                if spec.residual_layout == "bf16":
                    value = value + bf16.unpack_words(self._buffers["residual"][T.lanes_at(added, WORDS // 2)])
                else:
                    value = value + self._buffers["residual"][T.lanes_at(added, LANES)]
            return activate(value, spec.activation, LANES)

        results = [finished(block, value) for block, value in enumerate(values)]
        stored = spec.output_layout == "bf16"
        for block in range(0, len(results), 1 + stored):
            at = place(work.output, spec.output_layout, block)
            value = bf16.pack_words(results[block], results[block + 1]) if stored else results[block]
            T.store(self._y, at, value, LANES)

    def _planar_steps(self, width: int, body: Step) -> None:
        """`body` for every row of 16 words of the reduction, of a planar input. `width`: outputs of the group."""
        work, (rows, columns) = self._work, self._work.spec.kernel
        last = columns * work.pixel_words - (work.row_steps - 1) * WORDS

        def line(kh: Expr) -> None:
            for step in range(work.row_steps):
                place = kh * work.row_words + step * WORDS
                body(
                    place,
                    (kh * work.row_steps + step) * (WORDS * width),
                    last if step == work.row_steps - 1 else WORDS,
                )

        T.repeat(rows, line)

    def _steps(self, plane: Expr, words: int, width: int, body: Step) -> None:
        """The same of a plane of a blocked input."""
        work, (rows, columns) = self._work, self._work.spec.kernel
        line = work.row_words
        for index, (a, b) in enumerate(product(*work.taps)):
            phase = plane * work.plane_words + index * (work.patch_rows * line)

            def tap(i: Expr, j: Expr, a: Taps = a, b: Taps = b, phase: Expr = phase) -> None:
                row, column = a.offset + i * a.offset_step, b.offset + j * b.offset_step
                number = (plane * rows + a.first + i * a.step) * columns + b.first + j * b.step
                body(phase + row * line + column * WORDS, number * (WORDS * width), words)

            T.repeat(a.number, lambda i, b=b, tap=tap: T.repeat(b.number, partial(tap, i)))  # type: ignore[misc]


class Vectors(Bf16Writer):
    """By register tiles, whose sums never leave their registers."""

    def blocks(self, group: Expr, blocks: int) -> None:
        """All outputs of a group of channel blocks."""
        self._work.cut.each_tile(0, self._work.cut.bands, partial(self._tile, group, blocks))

    def _tile(self, group: Expr, blocks: int, row: Expr, column: Expr, rows: int, width: int) -> None:
        work, first = self._work, group * self._g.group_blocks
        pixels = list(product(range(rows), range(width)))
        bias = [self._bias[T.lanes_at((first + j) * LANES, LANES)] for j in range(blocks)]
        sums = [[Register(LANES, value) for value in bias] for _ in pixels]
        planar = work.spec.input_planar
        down, across = work.spec.stride if planar else (1, 1)
        line, step = down * work.row_words, across * work.pixel_words
        base = T.bind(self.patch.begin + row * line + column * step)
        starts = [base + (r * line + c * step) for r, c in pixels]
        weights_at = self._weights_at(group)

        def word(place: Expr, weights: Expr) -> None:
            places = [weights_at + weights + j * LANES for j in range(blocks)]
            if self._g.pixels > 1:
                for where in places:
                    T.prefetch(self._weights, where + PREFETCHED_WORDS)
            vectors = [self._weights[T.lanes_at(where, LANES)] for where in places]
            numbers = [self.patch.words[start + place] for start in starts]
            multiply_add(sums, numbers, vectors, LANES, bf16.add_products)

        def reduce(place: Expr, weights: Expr, words: int) -> None:
            unrolled(words, lambda number: word(place + number, weights + number * (blocks * LANES)))

        whole, rest = divmod(work.spec.in_channels, PLANE_CHANNELS)
        if planar:
            self._planar_steps(blocks * LANES, reduce)
        else:
            if whole:
                T.repeat(whole, lambda plane: self._steps(plane, WORDS, blocks * LANES, reduce))
            if rest:
                self._steps(whole, -(-rest // 2), blocks * LANES, reduce)
        for (r, c), totals in zip(pixels, sums, strict=True):
            self._store([total.value for total in totals], first, row + r, column + c)


class Tiles(Bf16Writer):
    """By tiles of AMX, two of pixels and up to two of channel blocks at once."""

    def begin(self) -> None:
        """What all groups of channel blocks need."""
        self.patch.fill()
        begin_tiles(T.scratch(WORDS, "int32"))
        self.make_sums()

    def make_sums(self) -> None:
        """Scratch memory for the sums of a band."""
        sums = self._work.tiles * TILE_ELEMENTS * self._g.group_blocks
        self._sums, self._first_sum = line_scratch(sums, "float32")

    def end(self) -> None:
        """After all groups."""
        end_tiles()

    def blocks(self, group: Expr, blocks: int) -> None:
        """All outputs of a group of channel blocks."""
        work, weights_at = self._work, self._weights_at(group)
        planes = work.panel_planes
        whole, rest = divmod(work.planes, planes)

        def panel(index: Expr, count: int) -> None:
            first, pairs = index * planes, work.tiles // 2
            T.repeat(pairs, lambda pair: self._multiply(weights_at, (first, count), (pair, 2), blocks))
            if work.tiles % 2:
                self._multiply(weights_at, (first, count), (pairs, 1), blocks)

        if whole:
            T.repeat(whole, lambda index: panel(index, planes))
        if rest:
            panel(whole, rest)
        self._finish(group, blocks)

    def _tile_at(self, tile: Expr) -> Expr:
        """Where in the patch a tile begins."""
        work = self._work
        if not work.spec.input_planar:
            return self.patch.begin + tile * TILE_ELEMENTS
        in_row = work.sum_columns // TILE_ROWS
        row = T.quotient(tile, in_row)
        column = (tile - row * in_row) * (TILE_ROWS * work.spec.stride[1])
        return self.patch.begin + (row * (work.spec.stride[0] * work.patch_columns) + column) * work.pixel_words

    def _multiply(self, weights_at: Expr, planes: tuple[Expr, int], tiles: tuple[Expr, int], blocks: int) -> None:
        """Products of some planes, from the first on, for a pair of tiles or the last one."""
        work, (first, plane_count), (pair, count) = self._work, planes, tiles
        tile = T.bind(pair * 2)
        places = [T.bind(self._tile_at(tile + i)) for i in range(count)]
        step = work.pixel_words * (work.spec.stride[1] if work.spec.input_planar else 1)
        sums = [
            [self._first_sum + (j * work.tiles + tile + i) * TILE_ELEMENTS for j in range(blocks)] for i in range(count)
        ]
        T.either(
            first == 0 if work.planes > work.panel_planes else True,
            lambda: zero_tiles(count, blocks),
            lambda: load_tiles(self._sums, sums),
        )
        pairs = -(-work.tiles // 2)
        step_words = blocks * TILE_ELEMENTS
        lines = -(-step_words // LANES // pairs)  # of the next panel, asked for meanwhile
        ahead = T.bind(weights_at + work.panel_planes * (work.reduction_words // work.planes) * (blocks * LANES))
        ahead = ahead + pair * (lines * LANES)

        def add(place: Expr, weights: Expr, _: int) -> None:
            inputs = [at + place for at in places]
            vectors = [weights_at + weights + j * LANES for j in range(blocks)]
            for line in range(lines):
                T.prefetch(self._weights, ahead + weights + line * LANES, level=2)
            bf16.PRODUCT.add(self.patch.words, inputs, step, self._weights, vectors, blocks * LANES)

        if work.spec.input_planar:
            self._planar_steps(blocks * LANES, add)
        else:
            T.repeat(plane_count, lambda plane: self._steps(first + plane, WORDS, blocks * LANES, add))
        store_tiles(self._sums, sums)

    def _finish(self, group: Expr, blocks: int) -> None:
        """Bias, residual and activation."""
        work, first = self._work, group * self._g.group_blocks
        bias = [T.bind(self._bias[T.lanes_at((first + j) * LANES, LANES)]) for j in range(blocks)]

        def pixel(row: Expr, column: Expr) -> None:
            position = row * work.sum_columns + column
            places = [self._first_sum + (position + j * (work.tiles * TILE_ROWS)) * LANES for j in range(blocks)]
            values = [self._sums[T.lanes_at(place, LANES)] + bias[j] for j, place in enumerate(places)]
            self._store(values, first, row, column)

        T.repeat(work.rows, lambda row: unrolled(work.columns, partial(pixel, row)))
