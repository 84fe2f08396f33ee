"""What a convolution of 8-bit numbers is cut into, what that costs, and its weights in memory: see `convolution.py`.

Weights are packed [half][plane][kh][kw][word][outputs of a half], or [half][kh][word][outputs] of an input of pixels. A
*half* is two vectors of outputs. Words have four channels where the target multiplies bytes, else they are pairs.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from gangway.artifact.format import TargetSpec
from gangway.compiler.kernels.specs import (
    BYTES_CHANNELS,
    PIXELS_CHANNELS,
    Array,
    ConvSpec,
    KernelPlan,
    PackedWeights,
    RawWeights,
)
from gangway.compiler.kernels.templates import tiling
from gangway.compiler.kernels.templates.amx.tiles import TILE_ROWS, WORDS
from gangway.compiler.kernels.templates.bands import Bands
from gangway.compiler.kernels.templates.int8 import instructions as int8
from gangway.compiler.kernels.templates.int8.instructions import MOST_BESIDE, PAIR_CHANNELS, WORD_CHANNELS
from gangway.compiler.kernels.templates.tiling import BandCut, Image, Tasks, UnsupportedSpecError

HALF_BLOCKS = 2  # vectors of outputs of a row of weights
# Of a register tile: of 16 registers 12 are sums, two weights, one inputs, one products; or 10 are sums, and one ones.
TILE_PIXELS, FEWER_TILE_PIXELS = 6, 5
LEAST_STRIDE_FAR = 4  # whose tiles read more behind x than is readable
MOST_TILES = 16  # of a band: 64 KiB of sums
MOST_WIDENED_BYTES = 160 << 10  # of pairs of a band
# What a core does in a microsecond, measured: products by tiles and by vectors, outputs made of sums.
_TILE_OPERATIONS_PER_US, _OUTPUTS_PER_US = 3_500_000, 1_000
_VECTOR_OPERATIONS_PER_US = {  # by lanes; of AVX-512 beside what float32's estimates, which are lower, say
    ("vnni", 16): 420_000,
    ("words", 16): 240_000,
    ("pairs", 16): 150_000,
    ("words", 8): 176_000,
    ("pairs", 8): 136_000,
}
_MEMORY_BYTES_PER_US, _CACHED_BYTES_PER_US = 20_000, 60_000
_CACHED_BYTES = 1 << 20


@dataclass(frozen=True)
class Int8Work(Bands):
    """A convolution, cut into bands; unless pairs are multiplied or the image is one row, they have all columns."""

    @property
    def tiled(self) -> bool:
        """Whether tiles multiply; one pixel would use one row of them."""
        return int8.has_tiles(self.target) and math.prod(self.size) > 1

    @cached_property
    def paired(self) -> bool:
        """Whether pairs are multiplied: x is widened, a band at a time."""
        return _is_paired(self.spec, self.target)

    @property
    def lanes(self) -> int:
        """Of a vector."""
        return self.target.lanes

    @property
    def half_channels(self) -> int:
        """Output channels of a half."""
        return HALF_BLOCKS * self.lanes

    @property
    def group_halves(self) -> int:
        """Halves of a group, whose outputs are a pixel of bytes."""
        return BYTES_CHANNELS // self.half_channels

    @property
    def tile_halves(self) -> int:
        """Halves of a register tile."""
        return tiling.registers(self.target) // 16

    @property
    def tile_pixels(self) -> int:
        """Pixels of a register tile."""
        return FEWER_TILE_PIXELS if self.kind == "words" and self.tile_halves == 1 else TILE_PIXELS

    @property
    def word_channels(self) -> int:
        """Channels that are multiplied and added at once."""
        return PAIR_CHANNELS if self.paired else WORD_CHANNELS

    @cached_property
    def pixel_words(self) -> int:
        """Words of a pixel of x, of four channels."""
        return 1 if self.spec.input_layout == "pixels" else WORDS

    @cached_property
    def source_words(self) -> int:
        """Words of a pixel of what is multiplied."""
        return self.pixel_words * WORD_CHANNELS // self.word_channels

    @cached_property
    def planes(self) -> int:
        """Planes of x."""
        return 1 if self.spec.input_layout == "pixels" else -(-self.spec.in_channels // BYTES_CHANNELS)

    @cached_property
    def input(self) -> Image:
        """x, in words."""
        s = self.spec
        return Image(self.planes * self.pixel_words, s.height, s.width, s.input_halo, self.pixel_words)

    @cached_property
    def source(self) -> Image:
        """What is multiplied: x, or what of it a band sees, in pairs."""
        if not self.paired:
            return self.input
        (rows, columns), words = _seen(self.spec, self.rows, self.columns), self.source_words
        return Image(self.planes * words, rows, columns, 0, words)

    @cached_property
    def output(self) -> Image:
        """y, in bytes or float32."""
        lanes = BYTES_CHANNELS if self.spec.output_layout == "bytes" else self.lanes
        return Image(self.spec.out_channels, *self.spec.output_size, self.spec.output_halo, lanes)

    @cached_property
    def residual(self) -> Image:
        """What is added, in float32."""
        return Image(self.spec.out_channels, *self.spec.output_size, self.spec.residual_halo, self.lanes)

    @cached_property
    def blocks(self) -> int:
        """Vectors of output channels."""
        return -(-self.spec.out_channels // self.lanes)

    @cached_property
    def halves(self) -> int:
        """Pairs of blocks."""
        return -(-self.blocks // HALF_BLOCKS)

    @cached_property
    def groups(self) -> int:
        """Groups of halves, of which the last one may have fewer."""
        return -(-self.halves // self.group_halves)

    @cached_property
    def steps(self) -> int:
        """Rows of words of the reduction."""
        rows, columns = self.spec.kernel
        return rows if self.spec.input_layout == "pixels" else self.planes * rows * columns

    @cached_property
    def step_words(self) -> int:
        """Words of a step."""
        if self.spec.input_layout == "pixels" and self.paired:
            return self.source_words * self.spec.kernel[1]
        return BYTES_CHANNELS // self.word_channels

    @property
    def row_units(self) -> int:
        """Elements of the weights of a word and a half: words, or the bytes of pairs."""
        return self.half_channels * (PAIR_CHANNELS if self.paired else 1)

    @property
    def half_units(self) -> int:
        """Elements of the weights of a half."""
        return self.steps * self.step_words * self.row_units

    @property
    def half_bytes(self) -> int:
        """Bytes of the weights of a half."""
        return self.half_units * (1 if self.paired else WORD_CHANNELS)

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
    def cut(self) -> BandCut:
        """A band in register tiles."""
        return self.cut_into(self.tile_pixels)

    @cached_property
    def kind(self) -> str:
        """What multiplies."""
        if self.tiled:
            return "tiles"
        if int8.has_words(self.target):
            return "vnni"
        return "pairs" if self.paired else "words"

    @cached_property
    def band_us(self) -> float:
        """Time of one band of one group."""
        pixels = self.rows * self.columns
        channels = self.halves * self.half_channels / self.groups
        finish = pixels * channels / (_OUTPUTS_PER_US * self.lanes)
        if self.tiled:
            operations = 2 * self.tiles * TILE_ROWS * channels * self.steps * BYTES_CHANNELS
            return operations / _TILE_OPERATIONS_PER_US + finish
        products = pixels * channels * self.steps * self.step_words * self.word_channels
        return 2 * products / _VECTOR_OPERATIONS_PER_US[self.kind, self.lanes] + finish

    def cost_us(self, tasks: Tasks) -> float:
        """Mean time of the layer over the gang sizes, in microseconds of one core."""
        weights = self.half_bytes * self.halves
        chunk = weights * tasks.groups_per_task / tasks.groups
        rate = _CACHED_BYTES_PER_US if chunk <= _CACHED_BYTES else _MEMORY_BYTES_PER_US
        read = 4 * self.input.elements / _CACHED_BYTES_PER_US * tasks.chunks
        total = self.bands * self.band_us * self.groups + weights / _MEMORY_BYTES_PER_US + read
        total += (tasks.parts - 1) * weights / rate
        return tiling.gangs_cost(tasks, total)


def _is_paired(spec: ConvSpec, target: TargetSpec) -> bool:
    return not (spec.narrow or int8.has_words(target))


def _seen(spec: ConvSpec, rows: int, columns: int) -> tuple[int, int]:
    """Return how many rows and columns of x a band sees."""
    axes = zip((rows, columns), spec.stride, spec.kernel, spec.dilation, strict=True)
    height, width = ((count - 1) * step + (kernel - 1) * apart + 1 for count, step, kernel, apart in axes)
    return height, width


def _fits(spec: ConvSpec, rows: int, columns: int) -> bool:
    """Whether what a band sees may be widened."""
    planes = 1 if spec.input_layout == "pixels" else -(-spec.in_channels // BYTES_CHANNELS)
    channels = PIXELS_CHANNELS if spec.input_layout == "pixels" else planes * BYTES_CHANNELS
    return 2 * channels * math.prod(_seen(spec, rows, columns)) <= MOST_WIDENED_BYTES


def computes(spec: ConvSpec, target: TargetSpec) -> bool:
    """Whether the template has a kernel for a convolution."""
    if not int8.multiplies(target):
        return False
    if _is_paired(spec, target) and not _fits(spec, 1, 1):
        return False
    if spec.input_layout == "pixels":
        return spec.in_channels <= PIXELS_CHANNELS and spec.kernel[1] <= WORDS and spec.dilation == (1, 1)
    return spec.stride[1] < LEAST_STRIDE_FAR


def suited(spec: ConvSpec, weights: Array, target: TargetSpec) -> ConvSpec:
    """Return the spec with what a target without VNNI can make of the weights, int8 [out][in][kh][kw]."""
    if int8.has_words(target):
        return spec
    beside = np.pad(weights, ((0, 0), (0, weights.shape[1] % 2), (0, 0), (0, 0))).astype(np.int16)
    sums = (np.maximum(part[:, ::2], 0) + np.maximum(part[:, 1::2], 0) for part in (beside, -beside))
    return replace(spec, narrow=all(int(found.max(initial=0)) <= MOST_BESIDE for found in sums))


def works(spec: ConvSpec, target: TargetSpec) -> list[Int8Work]:
    """Every sensible height of bands, or length."""
    height, width = spec.output_size
    if tiling.is_line(spec):
        pixels = height * width
        unit = 2 * TILE_ROWS if int8.has_tiles(target) else Int8Work(spec, target, 1, 1).tile_pixels
        found = [
            Int8Work(spec, target, 1, size) for size in sorted({min(unit * n, pixels) for n in (1, 2, 3, 4, 6, 8, 16)})
        ]
    else:
        found = [
            Int8Work(spec, target, rows, width) for rows in sorted({-(-height // n) for n in range(1, height + 1)})
        ]
    if _is_paired(spec, target):
        parts = (-(-found[0].columns // n) for n in range(1, found[0].columns + 1))
        narrowest = Int8Work(spec, target, 1, next(columns for columns in parts if _fits(spec, 1, columns)))
        return [work for work in found if _fits(spec, work.rows, work.columns)] or [narrowest]
    return [work for work in found if not work.tiled or work.tiles <= MOST_TILES] or found[:1]


def least_us(spec: ConvSpec, target: TargetSpec) -> float:
    """Estimated time of a convolution that the template computes."""
    return min(
        work.cost_us(tasks) for work in works(spec, target) for tasks in tiling.one_band_tasks(work.groups, work.bands)
    )


def candidates(spec: ConvSpec, target: TargetSpec) -> Iterator[KernelPlan]:
    """The static choice, then all other sizes of bands and tasks; they share packed weights."""
    if not computes(spec, target):
        raise UnsupportedSpecError(f"convolution of 8-bit numbers: {spec}")
    yield from tiling.cheapest_first(
        (work.cost_us(tasks), _plan(work, tasks))
        for work in works(spec, target)
        for tasks in tiling.one_band_tasks(work.groups, work.bands)
    )


def _plan(work: Int8Work, tasks: Tasks) -> KernelPlan:
    kind = "vectors" if work.kind == "vnni" else work.kind
    weights = work.half_bytes * work.group_halves * tasks.groups_per_task
    sums = 8 if work.tiled else work.tile_pixels * work.tile_halves * HALF_BLOCKS
    return work.plan(tasks, f"int8 {kind}", HALF_BLOCKS * work.group_halves, weights, sums)


def pack(spec: ConvSpec, target: TargetSpec, raw: RawWeights) -> PackedWeights:
    """Weights, bias, multiplier, padded with zeros, and y's zero point; or what dynamic ones have."""
    work = works(spec, target)[0]
    surplus = work.halves * work.half_channels - spec.out_channels
    weights = np.pad(raw["weights"], ((0, surplus), (0, 0), (0, 0), (0, 0)))
    packed = np.ascontiguousarray((_of_pixels if spec.input_layout == "pixels" else _of_bytes)(work, weights)).reshape(
        -1
    )
    packed = packed if work.paired else packed.view(np.int32)
    if not spec.dynamic:
        bias, multiplier = (np.pad(raw[name], (0, surplus)) for name in ("bias", "multiplier"))
        return packed, bias, multiplier, raw["zero"]
    numbers = {name: np.pad(raw[name], (0, surplus)) for name in ("scales", "bias", "zeros")}
    sums = weights.reshape(len(weights), -1).sum(1, np.int32)
    whole = [sums, *([numbers["zeros"], _ones(work)] if spec.weight_zeros else [])]
    return packed, np.concatenate(whole), np.concatenate([numbers["scales"], numbers["bias"]])


def _ones(work: Int8Work) -> Array:
    """[plane][word][4], or of pixels [word][4]: 1 where there is a channel, and a column of the window."""
    spec = work.spec
    if spec.input_layout != "pixels":
        return (np.arange(work.planes * BYTES_CHANNELS) < spec.in_channels).astype(np.int8).view(np.int32)
    words = np.zeros((WORDS, WORD_CHANNELS), np.int8)
    words[: spec.kernel[1], : spec.in_channels] = 1
    return words.view(np.int32).reshape(-1)


def _of_bytes(work: Int8Work, weights: Array) -> Array:
    """[outputs][channels][kh][kw] -> [half][plane][kh][kw][word][outputs of a half][channels of a word]."""
    rows, columns = work.spec.kernel
    padded = np.pad(weights, ((0, 0), (0, work.planes * BYTES_CHANNELS - weights.shape[1]), (0, 0), (0, 0)))
    parts = padded.reshape(
        work.halves, work.half_channels, work.planes, work.step_words, work.word_channels, rows, columns
    )
    return parts.transpose(0, 2, 5, 6, 3, 1, 4)


def _of_pixels(work: Int8Work, weights: Array) -> Array:
    """[outputs][channels][kh][kw] -> [half][kh][word][outputs of a half][channels of a word].

    A column of the window has one word, or two pairs.
    """
    _, channels, rows, columns = weights.shape
    surplus = work.step_words // work.source_words - columns
    padded = np.pad(weights, ((0, 0), (0, WORD_CHANNELS - channels), (0, 0), (0, surplus)))
    parts = padded.reshape(
        work.halves, work.half_channels, work.source_words, work.word_channels, rows, columns + surplus
    )
    return parts.transpose(0, 4, 5, 2, 1, 3)
