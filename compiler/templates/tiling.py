"""How the pixels of an output are cut into register tiles, and the tiles into tasks."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

from gangway.compiler.specs import ConvSpec
from gangway.compiler.templates.base import balanced
from gangway.compiler.templates.builder import Expr, at_most, either, quotient, remainder, repeat


@dataclass(frozen=True)
class Segment:
    """`count` register tiles beside each other, each `width` pixels wide, the first at column `start`."""

    start: int
    count: int
    width: int


@dataclass(frozen=True)
class Band:
    """The unit of spatial work: `rows` whole rows of pixels, tiled by `segments`. A tile spans all rows of its band."""

    rows: int
    segments: tuple[Segment, ...]


@dataclass(frozen=True)
class Cut:
    """An image cut into `full_count` equal bands and possibly a smaller last one.

    `row_pixels` is the distance of two rows if the image is treated as one line of pixels, else 0.
    """

    full: Band
    full_count: int
    rest: Band | None
    row_pixels: int = 0

    @property
    def bands(self) -> int:
        """Number of bands."""
        return self.full_count + (self.rest is not None)

    @cached_property
    def tiles(self) -> tuple[tuple[int, int], ...]:
        """(pixels, how many) of all register tiles."""
        found = [(self.full.rows * s.width, s.count * self.full_count) for s in self.full.segments]
        if self.rest:
            found += [(self.rest.rows * s.width, s.count) for s in self.rest.segments]
        return tuple(found)

    def each(self, first: Expr, count: int, body: Callable[[Expr, Band], None]) -> None:
        """Emit `body(band number, band)` for up to `count` bands from number `first`."""
        rest = self.rest
        if rest is None:
            repeat(at_most(count, self.full_count - first), lambda i: body(first + i, self.full))
            return
        last = self.full_count
        repeat(
            at_most(count, last + 1 - first),
            lambda i: either(first + i < last, lambda: body(first + i, self.full), lambda: body(last, rest)),
        )


def segments(total: int, limit: int) -> tuple[Segment, ...]:
    """A line cut into equal tiles of at most `limit`."""
    return tuple(Segment(*run) for run in balanced(total, limit))


def each_tile(tiles: Sequence[Segment], body: Callable[[Expr, int], None]) -> None:
    """Emit `body(first column, width)` for every tile of a band."""
    for segment in tiles:
        repeat(segment.count, partial(_nth_tile, body, segment))


def _nth_tile(body: Callable[[Expr, int], None], segment: Segment, index: Expr) -> None:
    body(segment.start + index * segment.width, segment.width)


def cut_line(pixels: int, tile_pixels: int) -> Cut:
    """An image without halos is one line of pixels: bands are single tiles."""
    size = -(-pixels // -(-pixels // tile_pixels))
    rest = pixels % size
    tile = Band(1, (Segment(0, 1, size),))
    return Cut(tile, pixels // size, Band(1, (Segment(0, 1, rest),)) if rest else None, row_pixels=size)


def cut_rows(height: int, width: int, tile_pixels: int) -> Cut:
    """Whole rows: several to a tile where the image is narrow, several tiles to a row where it is wide."""
    rows = min(max(1, tile_pixels // width), height)
    tiles = segments(width, tile_pixels)
    rest = height % rows
    return Cut(Band(rows, tiles), height // rows, Band(rest, tiles) if rest else None)


def is_line(spec: ConvSpec) -> bool:
    """Whether input, residual and output pixels lie one after the other without gaps and in the same order."""
    halos = spec.input_halo + spec.output_halo + (spec.residual_halo if spec.residual else 0)
    return (
        spec.kernel == (1, 1) and spec.stride == (1, 1) and not halos and not any(spec.pads) and not spec.input_planar
    )


@dataclass(frozen=True)
class Tasks:
    """Tasks of a layer: `groups` x `bands` units of work, cut into chunks of groups and parts of bands.

    `pixels_first`: consecutive tasks work on the same pixels (else: with the same weights).
    """

    groups: int
    bands: int
    groups_per_task: int
    bands_per_task: int
    pixels_first: bool

    @property
    def chunks(self) -> int:
        """Number of chunks of groups."""
        return -(-self.groups // self.groups_per_task)

    @property
    def parts(self) -> int:
        """Number of parts of bands."""
        return -(-self.bands // self.bands_per_task)

    @property
    def count(self) -> int:
        """Number of tasks."""
        return self.chunks * self.parts

    @property
    def ordered(self) -> bool:
        """Whether these differ from the same tasks in the other order, or are those that stand for both."""
        return not self.pixels_first or min(self.chunks, self.parts) > 1

    @property
    def largest_share(self) -> float:
        """The largest task's share of the layer's work."""
        return self.groups_per_task * self.bands_per_task / (self.groups * self.bands)

    def each_group(self, task: Expr, body: Callable[[Expr, Expr], None]) -> None:
        """Emit `body(group, first band)` for every group of a task."""
        first_group, first_band = self.first(task)
        repeat(at_most(self.groups_per_task, self.groups - first_group), lambda i: body(first_group + i, first_band))

    def each(self, task: Expr, body: Callable[[Expr, Expr], None]) -> None:
        """Emit `body(group, band)` for every unit of a task."""

        def bands(group: Expr, first: Expr) -> None:
            repeat(at_most(self.bands_per_task, self.bands - first), lambda i: body(group, first + i))

        self.each_group(task, bands)

    def first(self, task: Expr) -> tuple[Expr, Expr]:
        """First group and first band of a task."""
        if self.pixels_first:
            chunk, part = remainder(task, self.chunks), quotient(task, self.chunks)
        else:
            chunk, part = quotient(task, self.parts), remainder(task, self.parts)
        return chunk * self.groups_per_task, part * self.bands_per_task


def all_tasks(groups: int, bands: int) -> Iterator[Tasks]:
    """Every sensible way to cut `groups` x `bands` units of work into tasks."""
    for groups_per_task in _part_sizes(groups):
        for bands_per_task in _part_sizes(bands):
            for pixels_first in (False, True):
                yield Tasks(groups, bands, groups_per_task, bands_per_task, pixels_first)


def _part_sizes(total: int) -> list[int]:
    return sorted({-(-total // parts) for parts in range(1, total + 1)})
