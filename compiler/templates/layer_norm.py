"""Layer normalisation of a blocked sequence: a few positions at a time are copied to local memory, where mean and
variance are found in two passes (so that nothing cancels) and the third reads from the L1 cache again.

In the sequence itself a position's blocks lie a plane apart, often a power of two: in a cache they would evict each
other.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from tvm import tirx

from gangway.artifact.format import TargetSpec
from gangway.compiler.specs import KernelPlan, LayerNormSpec, PackedWeights, RawWeights
from gangway.compiler.templates.base import FLOAT_BYTES, Image, UnsupportedSpecError, knob, make_plan
from gangway.compiler.templates.builder import (
    Argument,
    Buffer,
    Expr,
    Register,
    bind,
    constant,
    first_lanes,
    kernel,
    lane_sum,
    lanes_at,
    repeat,
    scratch,
    splat,
    store,
)
from gangway.compiler.templates.cost import plane_tasks
from gangway.compiler.templates.tiling import Band, Cut, Tasks, cut_line

POSITIONS = 4  # normalised together: independent sums hide the latency of additions
SCRATCH_BYTES = 1 << 17


def _image(spec: LayerNormSpec, target: TargetSpec) -> Image:
    return Image(spec.channels, 1, spec.positions, 0, target.lanes)


def _cut(spec: LayerNormSpec, target: TargetSpec) -> Cut:
    """The positions cut into bands; raises `UnsupportedSpecError` if one position does not fit into local memory."""
    most = SCRATCH_BYTES // (_image(spec, target).blocks * target.lanes * FLOAT_BYTES)
    if not most:
        raise UnsupportedSpecError(f"layer normalisation of {spec.channels} channels")
    return cut_line(spec.positions, min(most, POSITIONS))


def candidates(spec: LayerNormSpec, target: TargetSpec) -> Iterator[KernelPlan]:
    """The only plan. Raises `UnsupportedSpecError`."""
    image, cut = _image(spec, target), _cut(spec, target)
    moved = 2 * image.elements * FLOAT_BYTES
    tasks = plane_tasks(cut.bands, 1, spec.flops, moved, target)
    knobs: dict[str, int | str] = {"bands": tasks.groups_per_task}
    text = f"layer norm {tasks.groups_per_task}x{cut.row_pixels} positions"
    yield make_plan(spec, knobs, tasks.count, text, int(moved * tasks.largest_share), POSITIONS)


def pack(spec: LayerNormSpec, target: TargetSpec, raw: RawWeights) -> PackedWeights:
    """Scale and shift, padded with zeros."""
    surplus = (0, -spec.channels % target.lanes)
    return tuple(np.pad(raw[name].astype(np.float32).ravel(), surplus) for name in ("scale", "shift"))


def emit(plan: KernelPlan, target: TargetSpec, symbol: str) -> Any:
    """The kernel. Arguments: x, scale, shift, y."""
    spec = plan.spec
    assert isinstance(spec, LayerNormSpec)
    image, cut = _image(spec, target), _cut(spec, target)
    tasks = Tasks(cut.bands, 1, knob(plan, "bands"), 1, pixels_first=False)

    def task(number: Expr, buffers: tuple[Buffer, ...]) -> None:
        def positions(index: Expr, band: Band) -> None:
            _normalise(spec, image, buffers, index * cut.row_pixels, band.segments[0].width)

        tasks.each(number, lambda group, _: cut.each(group, 1, positions))

    vector = image.blocks * image.lanes
    arguments = [Argument("x", image.elements), Argument("scale", vector), Argument("shift", vector)]
    return kernel(symbol, [*arguments, Argument("y", image.elements)], task)


def _normalise(spec: LayerNormSpec, image: Image, buffers: tuple[Buffer, ...], first: Expr, count: int) -> None:
    """`count` positions from number `first`."""
    x, scale, shift, y = buffers
    lanes, whole = image.lanes, spec.channels // image.lanes
    local = scratch(image.blocks * count * lanes)

    def place(block: Expr, i: int) -> Expr:
        return (block * count + i) * lanes

    def far(block: Expr, i: int) -> Expr:
        return block * image.plane + (first + i) * lanes

    def kept(block: Expr, i: int) -> Expr:
        return local[lanes_at(place(block, i), lanes)]

    def summed(value: Callable[[Expr, int], Expr], term: Callable[[Expr], Expr]) -> list[Expr]:
        """Put `value(block, i)` into local memory, surplus channels as zeros; the means of `term(value)`."""
        sums = [Register(lanes, constant(0.0, lanes)) for _ in range(count)]

        def step(block: Expr, channels: int) -> None:
            for i in range(count):
                number = bind(first_lanes(value(block, i), channels, lanes))
                store(local, place(block, i), number, lanes)
                sums[i].add(term(number))

        if whole:
            repeat(whole, lambda block: step(block, lanes))
        if spec.channels % lanes:
            step(whole, spec.channels % lanes)
        return [bind(lane_sum(total, lanes) * constant(1.0 / spec.channels, 1)) for total in sums]

    def loaded(block: Expr, i: int) -> Expr:
        return x[lanes_at(far(block, i), lanes)]

    def centred(block: Expr, i: int) -> Expr:
        return kept(block, i) - splat(means[i], lanes)

    if spec.centred:
        means = summed(loaded, lambda number: number)
        variances = summed(centred, lambda number: number * number)
    else:
        variances = summed(loaded, lambda number: number * number)
    factors = [
        bind(splat(constant(1.0, 1) / tirx.sqrt(variance + constant(spec.epsilon, 1)), lanes)) for variance in variances
    ]

    def normalise(block: Expr) -> None:
        vector = lanes_at(block * lanes, lanes)
        for i in range(count):
            store(y, far(block, i), kept(block, i) * factors[i] * scale[vector] + shift[vector], lanes)

    repeat(image.blocks, normalise)
