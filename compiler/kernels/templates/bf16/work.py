"""How a convolution in bfloat16 is cut: its bands, their patches and tiles, and what each cut costs.

See `convolution.py` for the words.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

from gangway.artifact.format import TargetSpec
from gangway.compiler.kernels.specs import ConvSpec, Layout
from gangway.compiler.kernels.templates import tiling
from gangway.compiler.kernels.templates.amx.tiles import TILE_ELEMENTS, TILE_ROWS, WORDS
from gangway.compiler.kernels.templates.bands import Bands
from gangway.compiler.kernels.templates.bf16 import words as bf16
from gangway.compiler.kernels.templates.bf16.words import PLANE_CHANNELS
from gangway.compiler.kernels.templates.builder import Argument
from gangway.compiler.kernels.templates.convolution import ConvolutionGeometry
from gangway.compiler.kernels.templates.tiling import FLOAT_BYTES, BandCut, Image, Tasks
from gangway.compiler.kernels.templates.winograd import best_work
from gangway.compiler.kernels.templates.winograd import least_us as float32_us

LANES = 16
PATCH_BYTES = 512 << 10  # of a task, on the stack and in the second level cache
SUMS_BYTES = 64 << 10
PANEL_STEPS = 12  # rows of tiles of weights that stay in the first level cache for all pixels of a band: 24 KiB
MOST_PLANAR_CHANNELS = 8
WORTH = 0.9  # of the estimated time in float32, or less
WINOGRAD_WORTH = 0.78  # the same by vectors beside Winograd's algorithm, whose estimates are high
# Products of a core, measured: by tiles, by vectors, and by vectors of a single pixel.
TILE_FLOPS_PER_US, VECTOR_FLOPS_PER_US, PIXEL_FLOPS_PER_US = 2_900_000, 225_000, 210_000
ONE_BLOCK_PRICE = 1.25  # of products whose inputs are read for one channel block only
REGISTER_TILE_US = 0.04  # to begin a register tile and to store it


class Speeds(NamedTuple):
    """What a core does in a microsecond beside products, measured.

    Products by tiles wait for memory. Those by vectors take so much longer that most of it is read meanwhile.
    """

    vectors: int  # of 16 words, each made of 32 numbers
    memory_bytes: int
    weight_bytes: int  # from beyond the second level cache
    cached_bytes: int  # from it
    second_level_bytes: int  # that stay in it


_BESIDE_TILES = Speeds(700, 20_000, 20_000, 60_000, 1 << 20)  # Sapphire Rapids
_BESIDE_VECTORS = Speeds(900, 150_000, 60_000, 150_000, 3 << 18)  # Zen 4


class Taps(NamedTuple):
    """Taps of a kernel along one axis that read one phase: `number` of them from `first` on, `step` apart.

    The first one reads `offset` positions from an output's own on, each further one `offset_step` more.
    """

    phase: int
    first: int
    step: int
    number: int
    offset: int
    offset_step: int


def _taps(kernel: int, stride: int, dilation: int) -> tuple[Taps, ...]:
    """The taps along one axis, phase by phase."""
    found: dict[int, list[int]] = {}
    for tap in range(kernel):
        found.setdefault(tap * dilation % stride, []).append(tap)
    phases = []
    for phase, taps in found.items():
        offsets = [(tap * dilation - phase) // stride for tap in taps]
        several = len(taps) > 1
        step, offset_step = (taps[1] - taps[0], offsets[1] - offsets[0]) if several else (1, 0)
        phases.append(Taps(phase, taps[0], step, len(taps), offsets[0], offset_step))
    return tuple(phases)


def reach(taps: Taps) -> int:
    """How many positions behind an output's own the last tap reads."""
    return taps.offset + (taps.number - 1) * taps.offset_step


@dataclass(frozen=True)
class Bf16Work(Bands):
    """A convolution, cut into bands; unless an image is one row, they have all columns."""

    @cached_property
    def geometry(self) -> ConvolutionGeometry:
        """Tensors and channel blocks, as in float32."""
        return ConvolutionGeometry(self.spec, self.target)

    @property
    def tiled(self) -> bool:
        """Whether tiles multiply; one pixel would use one row of them."""
        return bf16.has_tiles(self.target) and self.geometry.pixels > 1

    @cached_property
    def direct(self) -> bool:
        """Whether tiles and vectors read x itself."""
        return self.spec.input_layout == "bf16" and self.spec.stride == (1, 1)

    @cached_property
    def input(self) -> Image:
        """x."""
        return _stored(self.geometry.input, self.spec.input_layout)

    @cached_property
    def residual(self) -> Image:
        """What is added."""
        return _stored(self.geometry.residual, self.spec.residual_layout)

    @cached_property
    def output(self) -> Image:
        """y."""
        return _stored(self.geometry.output, self.spec.output_layout)

    @cached_property
    def taps(self) -> tuple[tuple[Taps, ...], tuple[Taps, ...]]:
        """Down and across, of a blocked input."""
        s = self.spec
        return _taps(s.kernel[0], s.stride[0], s.dilation[0]), _taps(s.kernel[1], s.stride[1], s.dilation[1])

    @cached_property
    def pixel_words(self) -> int:
        """Words of a pixel of a plane."""
        return _planar_words(self.spec.in_channels) if self.spec.input_planar else WORDS

    @cached_property
    def planes(self) -> int:
        """Planes of the patch."""
        return 1 if self.spec.input_planar else -(-self.spec.in_channels // PLANE_CHANNELS)

    @cached_property
    def patch_rows(self) -> int:
        """Rows of a phase."""
        if self.spec.input_planar:
            return (self.rows - 1) * self.spec.stride[0] + self.spec.kernel[0]
        return self.rows + max(reach(taps) for taps in self.taps[0])

    @cached_property
    def patch_columns(self) -> int:
        """Columns of a phase."""
        if self.spec.input_planar:
            return (self.columns - 1) * self.spec.stride[1] + self.spec.kernel[1]
        return self.columns + max(reach(taps) for taps in self.taps[1])

    @cached_property
    def phases(self) -> int:
        """Phases of a plane."""
        return 1 if self.spec.input_planar else len(self.taps[0]) * len(self.taps[1])

    @cached_property
    def plane_words(self) -> int:
        """Words of a plane of the patch."""
        if self.direct:
            return self.input.plane
        return self.phases * self.patch_rows * self.patch_columns * self.pixel_words

    @cached_property
    def row_words(self) -> int:
        """Words from one row of the patch to the next."""
        return self.input.row if self.direct else self.patch_columns * self.pixel_words

    @cached_property
    def patch_words(self) -> int:
        """Words of the patch, and of what the last tile reads behind it."""
        if self.direct:
            return 0
        behind = TILE_ROWS * self.pixel_words * (self.spec.stride[1] if self.spec.input_planar else 1) + WORDS
        return self.planes * self.plane_words + behind

    @cached_property
    def sum_columns(self) -> int:
        """Positions of a row of sums."""
        if self.spec.input_planar:
            return -(-self.columns // TILE_ROWS) * TILE_ROWS
        return self.row_words // WORDS

    @cached_property
    def tiles(self) -> int:
        """Tiles of 16 positions of a band."""
        return -(-((self.rows - 1) * self.sum_columns + self.columns) // TILE_ROWS)

    @cached_property
    def row_steps(self) -> int:
        """Rows of 16 words that a row of a planar kernel has."""
        return -(-self.spec.kernel[1] * self.pixel_words // WORDS)

    @cached_property
    def reduction_words(self) -> int:
        """Words of weights for one output."""
        rows, columns = self.spec.kernel
        return rows * self.row_steps * WORDS if self.spec.input_planar else self.planes * rows * columns * WORDS

    @cached_property
    def vector_words(self) -> int:
        """The same, of those that vectors multiply: of a last plane only words that have weights."""
        rows, columns = self.spec.kernel
        words = self.pixel_words if self.spec.input_planar else -(-self.spec.in_channels // 2)
        return rows * columns * words

    @cached_property
    def panel_planes(self) -> int:
        """Planes whose weights for a group of channel blocks stay in the first level cache together."""
        return max(1, PANEL_STEPS // math.prod(self.spec.kernel))

    @property
    def weight_words(self) -> int:
        """Words of all weights."""
        return self.geometry.output.blocks * LANES * self.reduction_words

    @property
    def weights(self) -> Argument:
        """All weights."""
        return Argument("weights", self.weight_words, "int32")

    @cached_property
    def cut(self) -> BandCut:
        """A band in register tiles."""
        return self.cut_into(self.geometry.tile_pixels)

    @cached_property
    def band_us(self) -> float:
        """Time of the products of one band, of one channel block."""
        if self.tiled:
            return 2 * TILE_ELEMENTS * 2 * self.tiles * self.reduction_words / TILE_FLOPS_PER_US
        if self.geometry.pixels == 1:  # which waits for its weights
            return 2 * LANES * 2 * self.reduction_words / PIXEL_FLOPS_PER_US
        blocks, widest = self.geometry.group_blocks, self.geometry.tile_pixels
        price = ONE_BLOCK_PRICE if blocks == 1 else 1.0
        product_us = price * 2 * LANES * 2 * self.vector_words / VECTOR_FLOPS_PER_US  # of a pixel
        return sum(
            count * (pixels * tiling.tile_price(widest, pixels) * product_us + REGISTER_TILE_US / blocks)
            for pixels, count in self.cut.tiles
        )

    @cached_property
    def speeds(self) -> Speeds:
        """Of what it does beside products; a single pixel waits for its weights."""
        waits = bf16.has_tiles(self.target) or self.geometry.pixels == 1
        return _BESIDE_TILES if waits else _BESIDE_VECTORS

    def cost_us(self, tasks: Tasks) -> float:
        """Mean time of the layer over the gang sizes, in microseconds of one core."""
        g, speeds = self.geometry, self.speeds
        chunk_weights = 4 * self.weight_words * tasks.groups_per_task / tasks.groups
        weights = 4 * self.weight_words / speeds.weight_bytes
        again = (tasks.parts - 1) * 4 * self.weight_words
        inputs, outputs = (FLOAT_BYTES * image.elements for image in (self.input, self.output))
        beside = 0.0 if speeds is _BESIDE_TILES else inputs / self.bands if self.direct else 4 * self.patch_words
        stays = chunk_weights + beside <= speeds.second_level_bytes
        weights += again / (speeds.cached_bytes if stays else speeds.weight_bytes)
        moved = outputs * (1 + self.spec.residual) / speeds.memory_bytes
        if self.direct:
            read = inputs / speeds.cached_bytes
        else:
            rounded = self.bands * self.planes * self.plane_words / self.pixel_words / speeds.vectors
            rate = speeds.cached_bytes if inputs <= speeds.second_level_bytes else speeds.memory_bytes
            read = max(rounded, inputs / rate) * tasks.chunks
        return tiling.gangs_cost(tasks, self.bands * self.band_us * g.output.blocks + weights + moved + read)


def _stored(image: Image, layout: Layout) -> Image:
    """A tensor in memory, in words if it is stored in bfloat16."""
    return replace(image, channels=image.channels // 2, lanes=WORDS) if layout == "bf16" else image


def can_store(channels: int) -> bool:
    """Whether a tensor of so many channels can be stored in bfloat16."""
    return channels % PLANE_CHANNELS == 0


def _planar_words(channels: int) -> int:
    """Words of a pixel: a power of two."""
    return 1 << max(0, -(-channels // 2) - 1).bit_length()


def computes(spec: ConvSpec, target: TargetSpec) -> bool:
    """Whether this template has a kernel for a convolution."""
    if spec.groups != 1 or spec.diagonal_blocks != 1 or not bf16.has_words(target):
        return False
    if not spec.input_planar:
        return bool(works(spec, target))
    columns = (spec.output_size[1] - 1) * spec.stride[1] + spec.kernel[1]
    small = spec.in_channels <= MOST_PLANAR_CHANNELS and spec.dilation == (1, 1)
    return small and columns >= LANES and bool(works(spec, target))


def is_faster(spec: ConvSpec, target: TargetSpec) -> bool:
    """Whether a convolution has a kernel in bfloat16 that is estimated to be faster than that in float32.

    A single pixel is bound by reading weights, which have half the bytes.
    """
    if not computes(spec, target):
        return False
    by_winograd = best_work(spec, target) and not bf16.has_tiles(target)
    worth = WINOGRAD_WORTH if by_winograd else WORTH
    return _least_us(spec, target) < worth * float32_us(spec, target) or ConvolutionGeometry(spec, target).pixels == 1


@lru_cache
def _least_us(spec: ConvSpec, target: TargetSpec) -> float:
    """Estimated time of the best plan."""
    return min(
        work.cost_us(tasks)
        for work in works(spec, target)
        for tasks in tiling.one_band_tasks(work.geometry.groups, work.bands)
    )


def works(spec: ConvSpec, target: TargetSpec) -> list[Bf16Work]:
    """Every sensible height of bands, or length, the largest first."""
    geometry = ConvolutionGeometry(spec, target)
    height, width = geometry.output.height, geometry.output.width
    found = []
    if tiling.is_line(spec):
        tiles = bf16.has_tiles(target)
        unit, pixels = 2 * TILE_ROWS if tiles else geometry.tile_pixels, geometry.pixels
        lengths = {min(unit * count, pixels) for count in (1, 2, 3, 4, 6, 8, 12)}
        if not tiles:  # equal ones, since what two bands share is computed twice
            lengths = {-(-pixels // -(-pixels // length)) for length in lengths}
        found = [Bf16Work(spec, target, 1, length) for length in lengths]
    else:
        rows = {-(-height // bands) for bands in range(1, height + 1)}
        found = [Bf16Work(spec, target, count, width) for count in rows]
    fitting = [
        work
        for work in found
        if 4 * work.patch_words <= PATCH_BYTES
        and (not work.tiled or work.tiles * TILE_ELEMENTS * FLOAT_BYTES * geometry.group_blocks <= SUMS_BYTES)
    ]
    return sorted(fitting, key=lambda work: -work.rows * work.columns)
