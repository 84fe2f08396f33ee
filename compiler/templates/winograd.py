"""3x3 convolutions of stride 1 by Winograd's algorithm: the arguments of the direct template, 2.25 or 4 times fewer
products. Which convolutions, and how they are cut into tasks, is decided by estimated time.

A task takes some tiles and some channel blocks through all three phases, so that nothing but inputs, weights and
outputs leaves its core's cache (see `winograd_tiles.py`). Weights are packed [group][point][input channel][output
channels of the group], `points` times larger than those of the direct form over 9.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from gangway.artifact.format import TargetSpec
from gangway.compiler.specs import ConvSpec, KernelPlan, PackedWeights, RawWeights
from gangway.compiler.templates.base import FLOAT_BYTES, knob, make_plan
from gangway.compiler.templates.builder import Argument, Buffer, Expr, at_most, bind, either, kernel, repeat
from gangway.compiler.templates.cost import CLAIM_US, PEAK_FLOPS_PER_US, layer_us
from gangway.compiler.templates.geometry import Geometry, check
from gangway.compiler.templates.spread import spread
from gangway.compiler.templates.tiling import Tasks, all_tasks
from gangway.compiler.templates.winograd_scheme import Scheme
from gangway.compiler.templates.winograd_tiles import Multiply, Span, Writer

SCRATCH_BYTES = 640 << 10  # of a task, on the stack and in the second level cache
MOST_WEIGHT_BYTES = 40 << 20
CACHED_BYTES = 800 << 10  # weights and scratch memory that stay in the second level cache
WORTH = 0.8  # of the direct form's estimated time, or less
# Vectors that a core transforms in a microsecond; measured, loads and stores included.
_VECTORS_PER_US = 420.0
_CACHED_BYTES_PER_US, _STREAMED_BYTES_PER_US = 160_000, 28_000  # weights from the second level cache, and from beyond
_DISPLACED_BYTES_PER_US = 60_000  # what larger weights cost the others who share the last cache, and so count as time
_UNHIDDEN = 0.3  # share of the time for weights that arithmetic does not hide
_GANGS = (1, 2, 2, 4, 8)  # to be balanced for; every task transforms its inputs itself, so more tasks are more work


@dataclass(frozen=True)
class Work:
    """A convolution cut into Winograd's tiles. A *band* is as many tiles as one register tile takes.

    Tiles of several rows of a batch follow each other, so that a band may have some of one row and some of the next.
    """

    geometry: Geometry
    scheme: Scheme
    rows: int = 1

    @cached_property
    def grid(self) -> tuple[int, int]:
        """Tiles of a row's output, down and across; the last ones overlap their neighbours rather than the edge."""
        height, width = self.geometry.spec.output_size
        return -(-height // self.scheme.outputs), -(-width // self.scheme.outputs)

    @cached_property
    def tiles(self) -> int:
        """Number of tiles."""
        return self.rows * self.grid[0] * self.grid[1]

    @cached_property
    def band(self) -> int:
        """Tiles of a full band."""
        return -(-self.tiles // -(-self.tiles // self.most_tiles))

    @property
    def most_tiles(self) -> int:
        """Tiles that a band could have."""
        return min(self.geometry.tile_pixels, 14)

    @cached_property
    def bands(self) -> int:
        """Number of bands; the last one may have fewer tiles."""
        return -(-self.tiles // self.band)

    @cached_property
    def weight_elements(self) -> int:
        """Packed weights."""
        g = self.geometry
        return self.scheme.products * g.input.blocks * g.output.blocks * g.target.lanes**2

    def scratch_bytes(self, bands: int) -> int:
        """Transformed inputs and sums of products of a task."""
        blocks = self.geometry.input.blocks + self.geometry.group_blocks
        return bands * self.band * self.scheme.products * blocks * self.geometry.target.lanes * FLOAT_BYTES

    def task_us(self, tasks: Tasks) -> float:
        """Estimated time of a full task on one core."""
        g, lanes = self.geometry, self.geometry.target.lanes
        tiles, blocks = tasks.bands_per_task * self.band, tasks.groups_per_task * g.group_blocks
        products = tiles * self.scheme.products * g.input.blocks * lanes * blocks * lanes
        weights = self.weight_elements / tasks.groups * tasks.groups_per_task * FLOAT_BYTES
        cached = self.weight_elements * FLOAT_BYTES + self.scratch_bytes(1) <= CACHED_BYTES
        streamed = weights / (_CACHED_BYTES_PER_US if cached else _STREAMED_BYTES_PER_US)
        arithmetic = 2 * products / PEAK_FLOPS_PER_US[g.target.name]
        inputs = tiles * self.scheme.products * g.input.blocks / _VECTORS_PER_US
        outputs = tiles * self.scheme.products * blocks / _VECTORS_PER_US
        return max(arithmetic + _UNHIDDEN * streamed, streamed) + inputs + outputs

    def cost_us(self, tasks: Tasks) -> float:
        """Mean time of the layer, for all rows, over the gang sizes, in microseconds of one core."""
        each = self.task_us(tasks) + CLAIM_US
        displaced = self.weight_elements * FLOAT_BYTES / _DISPLACED_BYTES_PER_US
        return displaced + sum(-(-tasks.count // ranks) * ranks * each for ranks in _GANGS) / len(_GANGS)

    def cuts(self) -> list[Tasks]:
        """Ways to cut it into tasks that fit into the scratch memory, the best first."""
        fitting = [
            tasks
            for tasks in all_tasks(self.geometry.groups, self.bands)
            if tasks.bands_per_task == 1 or self.scratch_bytes(tasks.bands_per_task) <= SCRATCH_BYTES
        ]
        return sorted(fitting, key=self.cost_us)


@lru_cache
def best_work(spec: ConvSpec, target: TargetSpec) -> Work | None:
    """The better of the two schemes, if either is estimated to be faster than the direct form."""
    if (spec.kernel, spec.stride, spec.dilation, spec.groups) != ((3, 3), (1, 1), (1, 1), 1) or spec.input_planar:
        return None
    geometry = Geometry(spec, target)
    works = [
        work
        for work in (Work(geometry, Scheme(outputs)) for outputs in (4, 2) if min(spec.output_size) >= outputs)
        if work.weight_elements * FLOAT_BYTES <= MOST_WEIGHT_BYTES and work.scratch_bytes(1) <= SCRATCH_BYTES
    ]
    if not works or min(spec.in_channels, spec.out_channels) < target.lanes:
        return None
    cost, best = min(((work.cost_us(work.cuts()[0]), work) for work in works), key=lambda pair: pair[0])
    return best if cost < WORTH * layer_us(geometry.flops, geometry.traffic, target) else None


def candidates(spec: ConvSpec, target: TargetSpec) -> Iterator[KernelPlan]:
    """The static choice, then all other sizes and orders of tasks. They share packed weights."""
    check(spec)
    work = best_work(spec, target)
    assert work is not None  # the registry has asked
    ranked = work.cuts()
    static = work.cost_us(ranked[0]), _plan(work, ranked[0])
    yield static[1]
    yield from spread(static, ((work.cost_us(tasks), _plan(work, tasks)) for tasks in ranked if tasks.ordered))


def _plan(work: Work, tasks: Tasks) -> KernelPlan:
    knobs: dict[str, int | str] = {
        "outputs": work.scheme.outputs,
        "groups": tasks.groups_per_task,
        "bands": tasks.bands_per_task,
        "pixels_first": int(tasks.pixels_first),
    }
    m, blocks = work.scheme.outputs, work.geometry.group_blocks
    text = f"winograd {m}x{m} {work.band}x{blocks} {tasks.groups_per_task}x{tasks.bands_per_task}"
    weights = work.weight_elements // work.geometry.groups * FLOAT_BYTES
    size = work.scratch_bytes(tasks.bands_per_task) + weights
    return make_plan(work.geometry.spec, knobs, tasks.count, text, size, work.band * blocks)


def pack(spec: ConvSpec, target: TargetSpec, raw: RawWeights) -> PackedWeights:
    """Transformed weights and bias in the kernel's order, padded with zeros."""
    work = best_work(spec, target)
    assert work is not None
    g, lanes = work.geometry, target.lanes
    width = g.group_blocks * lanes
    packed = np.zeros(work.weight_elements, np.float32)
    at = 0
    for begin in range(0, spec.out_channels, width):
        group = raw["weights"][begin : begin + width]
        shape = (*[work.scheme.size] * 2, g.input.blocks * lanes, -(-len(group) // lanes) * lanes)
        end = at + math.prod(shape)
        points = work.scheme.weights(group).transpose(2, 3, 1, 0)
        packed[at:end].reshape(shape)[:, :, : spec.in_channels, : len(group)] = points
        at = end
    return packed, np.pad(raw["bias"].astype(np.float32), (0, -spec.out_channels % lanes))


def emit(plan: KernelPlan, target: TargetSpec, symbol: str) -> Any:
    """The kernel. Arguments: x, weights, bias, [residual,] y."""
    assert isinstance(plan.spec, ConvSpec)
    geometry = Geometry(plan.spec, target)
    work = Work(geometry, Scheme(knob(plan, "outputs")))
    tasks = Tasks(
        geometry.groups, work.bands, knob(plan, "groups"), knob(plan, "bands"), bool(knob(plan, "pixels_first"))
    )
    arguments = [
        Argument("x", geometry.input.elements),
        Argument("weights", work.weight_elements),
        Argument("bias", geometry.output.blocks * target.lanes),
        *([Argument("residual", geometry.residual.elements)] if plan.spec.residual else []),
        Argument("y", geometry.output.elements),
    ]

    def task(number: Expr, buffers: tuple[Buffer, ...]) -> None:
        _, first_band = tasks.first(number)
        writer = Writer(geometry, work.scheme, work.grid, _span(work, bind(first_band), tasks.bands_per_task), buffers)
        writer.transform_inputs()
        tasks.each_group(number, lambda group, _: writer.group(group))

    return kernel(symbol, arguments, task)


def _span(work: Work, first_band: Expr, count: int) -> Span:
    """Up to `count` bands; the last one of the image may have fewer tiles."""
    full, rest = divmod(work.tiles, work.band)

    def each(multiply: Multiply) -> None:
        def band(index: Expr) -> None:
            either(
                first_band + index < full if rest else True,
                lambda: multiply(index * work.band, work.band),
                lambda: multiply(index * work.band, rest),
            )

        repeat(at_most(count, work.bands - first_band), band)

    first, capacity = bind(first_band * work.band), count * work.band
    return Span(first, at_most(capacity, work.tiles - first), capacity, each)
