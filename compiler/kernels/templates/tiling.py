"""How outputs are cut into register tiles, and tiles into tasks, what each cut costs, and the plans made of it.

No search, no measurement: a static cost model chooses, and its figures are those of a current server core.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

from gangway.artifact.format import TargetSpec
from gangway.compiler.kernels.extents import is_constant
from gangway.compiler.kernels.specs import ConvSpec, KernelPlan, KernelSpec
from gangway.compiler.kernels.templates.builder import Expr, at_most, either, is_one, quotient, remainder, repeat

FLOAT_BYTES = 4
TASK_ELEMENTS = 8192  # of a task that does little to each number
REUSE_BYTES = 1 << 19  # what stays in a core's L2 cache beside everything that passes through
L3_BYTES_PER_US = 40_000  # what one core streams from the shared cache or memory
CLAIM_US = 0.1  # an executor's rank claims a task
GANGS = (1, 2, 2, 3, 4, 8, 16)  # gang sizes to be balanced for; two ranks count double
PEAK_FLOPS_PER_US = {"avx512": 110_000, "avx2": 100_000, "baseline": 25_000}
MOST_PRICE = 3.0  # times the static choice's: what takes longer would not meet a layer's QoS
LAST_WIDTHS = 3  # that the last tile of a line may have whose length is read at run time
SMALL_TILE = 0.05  # a tile of half the pixels loads weights twice as often: so much more of a layer's time
Priced = tuple[float, KernelPlan]
"""A plan and its expected time, in any unit."""


class UnsupportedSpecError(ValueError):
    """No template computes this spec; the message says what is missing."""


def make_plan(
    spec: KernelSpec, knobs: dict[str, int | str], tasks: int, description: str, blocking_bytes: int, accumulators: int
) -> KernelPlan:
    """A plan with its knobs in canonical order."""
    ordered = tuple(sorted(knobs.items()))
    return KernelPlan(spec, ordered, tasks, description, blocking_bytes, tasks * accumulators)


def knob(plan: KernelPlan, name: str) -> int:
    """The value of an integer knob."""
    value = dict(plan.knobs)[name]
    return int(value) if isinstance(value, str) else value


def registers(target: TargetSpec) -> int:
    """Number of vector registers."""
    return 32 if target.name == "avx512" else 16


@dataclass(frozen=True)
class Image:
    """One row's activation in memory: planes of `lanes` interleaved channels (1: planar), each with a zero halo."""

    channels: int
    height: int
    width: int
    halo: int
    lanes: int

    @property
    def blocks(self) -> int:
        """Number of planes."""
        return -(-self.channels // self.lanes)

    @property
    def row(self) -> int:
        """Elements from one line of pixels to the next."""
        return (self.width + 2 * self.halo) * self.lanes

    @property
    def plane(self) -> int:
        """Elements from one plane to the next."""
        return (self.height + 2 * self.halo) * self.row

    @property
    def elements(self) -> int:
        """Elements of the whole tensor."""
        return self.blocks * self.plane

    @property
    def origin(self) -> int:
        """Element at which pixel (0, 0) of the first plane begins."""
        return self.halo * (self.row + self.lanes)


def balanced(total: int, limit: int) -> tuple[tuple[int, int, int], ...]:
    """`total` in equal parts of at most `limit`: up to two runs of (start, number of parts, size of each)."""
    parts = -(-total // limit)
    size, larger = divmod(total, parts)
    runs = [(0, larger, size + 1), (larger * (size + 1), parts - larger, size)]
    return tuple(run for run in runs if run[1])


def balanced_sizes(totals: Iterable[int], limit: int) -> list[int]:
    """Every size of a part when each total is cut into as few equal parts of at most `limit` as possible."""
    return sorted({size for total in totals for _, _, size in balanced(total, limit)})


@dataclass(frozen=True)
class TileSegment:
    """`count` register tiles beside each other, each `width` pixels wide, the first at column `start`.

    None begins behind column `last`, if that is given: then the last one overlaps the one before it.
    """

    start: int
    count: int
    width: int
    last: int | None = None

    def column(self, index: Expr) -> Expr:
        """The first column of a tile."""
        column = self.start + index * self.width
        return column if self.last is None else at_most(column, self.last)

    def moved(self, columns: int) -> "TileSegment":
        """The same tiles, so many columns further right."""
        last = None if self.last is None else self.last + columns
        return replace(self, start=self.start + columns, last=last)


@dataclass(frozen=True)
class Band:
    """The unit of spatial work: `rows` whole rows of pixels, tiled by `segments`. A tile spans all rows of its band."""

    rows: int
    segments: tuple[TileSegment, ...]


@dataclass(frozen=True)
class BandCut:
    """An image cut into `full_count` equal bands and possibly smaller ones after them: (how many, band).

    `row_pixels` is the distance of two bands if the image is treated as one line of pixels, else 0. If the length of
    the line is read at run time, it is `pixels`, and the last band overlaps the one before it.
    """

    full: Band
    full_count: int
    rests: tuple[tuple[int, Band], ...] = ()
    row_pixels: int = 0
    pixels: int | None = None

    @property
    def bands(self) -> int:
        """Number of bands."""
        return sum((count for count, _ in self.rests), self.full_count)

    def pixel(self, number: Expr, band: Band) -> Expr:
        """The first pixel of a band of a line."""
        pixel = number * self.row_pixels
        return pixel if self.pixels is None else at_most(pixel, self.pixels - band.segments[0].width)

    @cached_property
    def tiles(self) -> tuple[tuple[int, int], ...]:
        """(pixels, how many) of all register tiles."""
        kinds = ((self.full_count, self.full), *self.rests)
        return tuple((band.rows * s.width, s.count * count) for count, band in kinds for s in band.segments)

    def each(self, first: Expr, count: int, body: Callable[[Expr, Band], None]) -> None:
        """Emit `body(band number, band)` for up to `count` bands from number `first`."""

        def one_of(number: Expr, begin: int, kinds: Sequence[tuple[int, Band]]) -> None:
            (among, shape), *others = kinds
            if not others:
                body(begin if self.rests and is_one(among) else number, shape)
                return
            end = begin + among
            either(number < end, lambda: body(number, shape), lambda: one_of(number, end, others))

        kinds = ((self.full_count, self.full), *self.rests)
        repeat(at_most(count, self.bands - first), lambda i: one_of(first + i, 0, kinds))

    def each_tile(self, first: Expr, count: int, body: Callable[[Expr, Expr, int, int], None]) -> None:
        """Emit `body(row, column, rows, width)` for every register tile of up to `count` bands from number `first`."""

        def band(number: Expr, shape: Band) -> None:
            row, start = (0, self.pixel(number, shape)) if self.row_pixels else (number * self.full.rows, 0)
            each_tile(shape.segments, lambda column, width: body(row, start + column, shape.rows, width))

        self.each(first, count, band)


def segments(total: int, limit: int) -> tuple[TileSegment, ...]:
    """A line cut into tiles of at most `limit`: equal ones, or, of an extent, whole ones and a smaller one.

    The smaller one has one of a few widths and overlaps the tile before it, so that one kernel serves all lines of
    `limit` pixels or more. So each pixel may be computed twice, with the same result.
    """
    if is_constant(total):
        return tuple(TileSegment(*run) for run in balanced(total, limit))
    if total < limit:
        return (TileSegment(0, 1, int(total)),)
    return overlapping(total, sorted({-(-limit * part // LAST_WIDTHS) for part in range(1, LAST_WIDTHS + 1)}))


def overlapping(total: int, widths: Sequence[int]) -> tuple[TileSegment, ...]:
    """A line of an extent cut into tiles of the largest width, and at most one of another.

    `widths` grow; there are as many pixels as the largest or more.
    """
    limit = widths[-1]

    def is_above(width: int) -> int:
        """1 if more pixels are left than `width`, else 0."""
        return (total % limit + (limit - 1 - width)) // limit

    above = [is_above(width) for width in (0, *widths[:-1])]
    tiles = [TileSegment(0, total // limit + above[-1], limit, total - limit)]
    for width, wider, more in zip(widths[-2::-1], above[:0:-1], above[-2::-1], strict=True):
        tiles.append(TileSegment(total - width, more - wider, width, total - width))
    return tuple(tiles)


def blocks_of(total: int, limit: int) -> tuple[TileSegment, ...]:
    """The same, for loops: of an extent, the sizes are extents, too."""
    if is_constant(total):
        return segments(total, limit)
    if total <= limit:
        return (TileSegment(0, 1, total),)
    parts = -(-total // limit)
    size = -(-total // parts)
    larger = total - parts * (size - 1)
    return TileSegment(0, larger, size), TileSegment(larger * size, parts - larger, size - 1)


def parts_of(total: int, widths: tuple[int, int], may_overlap: bool = True) -> tuple[TileSegment, ...]:
    """A line cut into parts of the larger width and a partial one; of an extent, parts may overlap as in `segments`."""
    most = widths[1]
    if not is_constant(total) and may_overlap and total >= most:
        return overlapping(total, sorted(set(widths)))
    full, rest = divmod(total, most)
    whole, last = TileSegment(0, full, most), TileSegment(full * most, 1, rest)
    return (*[whole] * bool(full), *[last] * bool(rest))


def each_tile(tiles: Sequence[TileSegment], body: Callable[[Expr, int], None]) -> None:
    """Emit `body(first column, width)` for every tile of a band."""
    for segment in tiles:
        repeat(segment.count, partial(_nth_tile, body, segment))


def each_of(tiles: Sequence[TileSegment], number: Expr, body: Callable[[Expr, int], None], begin: int = 0) -> None:
    """Emit `body(first column, width)` for tile `number` of a band, counted through all segments."""
    segment, *others = tiles
    one = partial(_nth_tile, body, segment, 0 if is_one(segment.count) else number - begin)
    if not others:
        one()
        return
    end = begin + segment.count
    either(number < end, one, lambda: each_of(others, number, body, end))


def _nth_tile(body: Callable[[Expr, int], None], segment: TileSegment, index: Expr) -> None:
    body(segment.column(index), segment.width)


def cut_line(pixels: int, tile_pixels: int) -> BandCut:
    """An image without halos is one line of pixels: bands are single tiles. Of an extent, they are as many."""
    if not is_constant(pixels):
        first, *others = ((tile.count, _line(tile.width)) for tile in segments(pixels, tile_pixels))
        return BandCut(first[1], first[0], tuple(others), first[1].segments[0].width, pixels)
    size = -(-pixels // -(-pixels // tile_pixels))
    rest = pixels % size
    return BandCut(_line(size), pixels // size, ((1, _line(rest)),) if rest else (), row_pixels=size)


def _line(pixels: int) -> Band:
    """A band of a single tile."""
    return Band(1, (TileSegment(0, 1, pixels),))


def cut_rows(height: int, width: int, tile_pixels: int) -> BandCut:
    """Whole rows: several to a tile where the image is narrow, several tiles to a row where it is wide."""
    rows = min(max(1, tile_pixels // width), height)
    tiles = segments(width, tile_pixels)
    rest = height % rows
    return BandCut(Band(rows, tiles), height // rows, ((1, Band(rest, tiles)),) if rest else ())


def is_line(spec: ConvSpec) -> bool:
    """Whether input, residual and output pixels lie one after the other without gaps and in the same order."""
    halos = spec.input_halo + spec.output_halo + (spec.residual_halo if spec.residual else 0)
    gapless = not halos and not any(spec.pads) and not spec.input_planar
    return spec.kernel == (1, 1) and spec.stride == (1, 1) and gapless


@dataclass(frozen=True)
class Tasks:
    """Tasks of a layer: `groups` x `bands` units of work, cut into chunks of groups and parts of bands.

    `pixels_first`: consecutive tasks work on the same pixels (else: with the same weights).
    """

    groups: int
    bands: int
    groups_per_task: int
    bands_per_task: int
    pixels_first: int

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
    def knobs(self) -> dict[str, int | str]:
        """What a plan keeps of them."""
        sizes = {"groups": self.groups_per_task, "bands": self.bands_per_task}
        return {**sizes, "pixels_first": int(self.pixels_first)}

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
        if not is_constant(self.pixels_first):
            step = self.parts - self.pixels_first * (self.parts - 1)
            chunk = remainder(quotient(task, step), self.chunks)
            part = remainder(quotient(task, 1 + self.pixels_first * (self.chunks - 1)), self.parts)
        elif self.pixels_first:
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


def one_band_tasks(groups: int, bands: int) -> list[Tasks]:
    """The same of tasks that have one band."""
    return [Tasks(groups, bands, size, 1, pixels_first=False) for size in _part_sizes(groups)]


def _part_sizes(total: int) -> list[int]:
    return sorted({-(-total // parts) for parts in range(1, total + 1)})


@dataclass(frozen=True)
class Traffic:
    """Bytes a layer moves at least once."""

    weights: int
    input: int
    output: int


def layer_us(flops: int, traffic: Traffic, target: TargetSpec) -> float:
    """Time of the whole layer on one core, whichever of arithmetic and memory takes longer."""
    total = traffic.weights + traffic.input + traffic.output
    return max(flops / PEAK_FLOPS_PER_US[target.name], total / L3_BYTES_PER_US)


def _reread_bytes(tasks: Tasks, traffic: Traffic) -> float:
    """Bytes that come from beyond the L2 cache more than once, because what is reused does not fit there.

    A task computes all its pixels for one group of channels, then for the next. Between two uses of the same input, or
    of the same weights, whatever is touched in between passes through the cache.
    """
    part_input = traffic.input * tasks.bands_per_task / tasks.bands
    group_weights = traffic.weights / tasks.groups
    chunk_weights = group_weights * tasks.groups_per_task
    between_chunks = chunk_weights + (part_input if tasks.pixels_first else traffic.input)
    between_parts = part_input + (traffic.weights if tasks.pixels_first else chunk_weights)
    uses = tasks.groups if part_input + group_weights > REUSE_BYTES else tasks.chunks
    input_again = traffic.input * (uses - 1) if between_chunks > REUSE_BYTES else 0
    weights_again = traffic.weights * (tasks.parts - 1) if between_parts > REUSE_BYTES else 0
    return input_again + weights_again


def tasks_cost(tasks: Tasks, flops: int, traffic: Traffic, target: TargetSpec) -> float:
    """Mean time of the layer over the gang sizes, in microseconds of one core."""
    work = layer_us(flops, traffic, target) + _reread_bytes(tasks, traffic) / L3_BYTES_PER_US
    return gangs_cost(tasks, work)


def gangs_cost(tasks: Tasks, work_us: float) -> float:
    """Mean time of a layer over the gang sizes, in microseconds of one core, of which its tasks take `work_us`."""
    largest_us = work_us * tasks.largest_share
    total = 0.0
    for ranks in GANGS:
        rounds = -(-tasks.count // ranks)
        total += max(work_us / ranks, rounds * largest_us) * ranks + rounds * ranks * CLAIM_US
    return total / len(GANGS)


def plane_cost(tasks: Tasks, flops: int, moved_bytes: int, target: TargetSpec) -> float:
    """`tasks_cost` of a layer whose planes have nothing in common."""
    return tasks_cost(tasks, flops, Traffic(weights=0, input=0, output=moved_bytes), target)


def plane_tasks(planes: int, bands: int, flops: int, moved_bytes: int, target: TargetSpec) -> Tasks:
    """The best tasks of a layer whose planes have nothing in common."""
    return min(all_tasks(planes, bands), key=lambda tasks: plane_cost(tasks, flops, moved_bytes, target))


def plane_plan(
    spec: KernelSpec,
    text: str,
    cut: tuple[int, int],
    flops: int,
    moved_bytes: int,
    parallelism: int,
    target: TargetSpec,
) -> KernelPlan:
    """The plan of such a layer, which is `cut` into so many planes and bands; its knobs are "groups" and "bands"."""
    tasks = plane_tasks(*cut, flops, moved_bytes, target)
    sizes = tasks.groups_per_task, tasks.bands_per_task
    knobs: dict[str, int | str] = dict(zip(("groups", "bands"), sizes, strict=True))
    text = f"{text} {sizes[0]}x{sizes[1]}"
    return make_plan(spec, knobs, tasks.count, text, int(moved_bytes * tasks.largest_share), parallelism)


def planned_tasks(plan: KernelPlan, groups: int, bands: int) -> Tasks:
    """The tasks of a plan whose knobs are "groups" and "bands", and the order if there are two."""
    order = knob(plan, "pixels_first") if "pixels_first" in dict(plan.knobs) else 0
    return Tasks(groups, bands, knob(plan, "groups"), knob(plan, "bands"), order)


def tile_cuts(widest: int, cut: Callable[[int], BandCut]) -> dict[BandCut, int]:
    """Cuts worth trying, each with the size of its register tiles, in pixels: all that fits, 3/4, 1/2 and 1/4 of it."""
    sizes = [max(1, widest * quarters // 4) for quarters in (1, 2, 3, 4)]
    return {cut(size): size for size in sizes}  # of sizes that come to the same, the largest


def tile_price(widest: int, tile_pixels: int) -> float:
    """Expected time with tiles of `tile_pixels`, relative to that with the widest."""
    return 1 + SMALL_TILE * (widest / tile_pixels - 1)


def spread(static: Priced, others: Iterable[Priced]) -> Iterator[KernelPlan]:
    """Yield the plans of `others`, but for the static choice and those that are not expected to be of any use.

    In turns, the cheapest that is left and the one that is farthest from the static one and all before it in the plane
    of VELTAIR's trade-off, (log blocking bytes, log parallelism). So every beginning of the sequence has both what the
    cost model believes in and all of the trade-off.
    """
    least, first = static
    ranked = sorted(others, key=lambda item: item[0])
    left = [plan for price, plan in ranked if plan != first and price <= MOST_PRICE * least]
    distances = [_distance(first, plan) for plan in left]
    cheapest = True
    while left:
        index = 0 if cheapest else _largest(distances)
        cheapest = not cheapest
        plan = left.pop(index)
        distances.pop(index)
        yield plan
        distances = [min(known, _distance(plan, other)) for known, other in zip(distances, left, strict=True)]


def cheapest_first(priced: Iterable[Priced]) -> Iterator[KernelPlan]:
    """Yield the cheapest plan, then others as `spread` does."""
    static, *others = sorted(priced, key=lambda item: item[0])
    yield static[1]
    yield from spread(static, others)


def _largest(distances: Sequence[float]) -> int:
    return max(range(len(distances)), key=distances.__getitem__)  # of equals the first, which is the cheapest


def _distance(a: KernelPlan, b: KernelPlan) -> float:
    return math.hypot(
        math.log2(max(1, a.blocking_bytes) / max(1, b.blocking_bytes)), math.log2(a.parallelism / b.parallelism)
    )
