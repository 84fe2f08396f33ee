"""Softmax of plain tensors, and layer normalisation of blocked sequences.

Softmax takes the maximum of a line, the sum of the exponentials and the quotients, or their logarithms. Along the last
axis vectors hold neighbours of one line, which are combined at the end; along another one they hold as many lines side
by side, which never meet.

Layer normalisation copies a few positions into local memory. In the sequence itself a position's blocks lie a plane
apart, often a power of two: in a cache they would evict each other.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm import tirx

from gangway.artifact.format import TargetSpec
from gangway.compiler.kernels.plain_specs import SoftmaxSpec
from gangway.compiler.kernels.specs import KernelPlan, LayerNormSpec, PackedWeights, RawWeights
from gangway.compiler.kernels.templates import builder as T
from gangway.compiler.kernels.templates import tiling
from gangway.compiler.kernels.templates.bf16 import words as bf16
from gangway.compiler.kernels.templates.builder import Argument, Buffer, Expr, Register
from gangway.compiler.kernels.templates.float32_math import exp, log
from gangway.compiler.kernels.templates.tiling import (
    FLOAT_BYTES,
    TASK_ELEMENTS,
    Band,
    BandCut,
    Image,
    Tasks,
    UnsupportedSpecError,
)

POSITIONS = 4  # normalised together: independent sums hide the latency of additions
SCRATCH_BYTES = 1 << 17
Body = Callable[[Expr, int], None]
Each = Callable[[Body], None]


def _widths(spec: SoftmaxSpec, target: TargetSpec) -> tuple[int, int]:
    """Pieces that the lines of one row are cut into, and the lines of each."""
    lines = 1 if spec.inner == 1 else target.lanes
    return -(-spec.inner // lines), lines


def softmax_candidates(spec: SoftmaxSpec, target: TargetSpec) -> Iterator[KernelPlan]:
    """The only plan."""
    pieces, lines = _widths(spec, target)
    total = spec.rows * pieces
    count = min(total, max(1, TASK_ELEMENTS // (spec.columns * lines)))
    moved = 2 * count * lines * spec.columns * FLOAT_BYTES
    name = "log softmax" if spec.logarithm else "softmax"
    yield tiling.make_plan(spec, {"pieces": count}, -(-total // count), f"{name} {count}x{lines} lines", moved, 1)


def softmax_emit(spec: SoftmaxSpec, plan: KernelPlan, target: TargetSpec, symbol: str) -> Any:
    """The kernel. Arguments: x, y."""
    (pieces, lines), count = _widths(spec, target), tiling.knob(plan, "pieces")

    def task(number: Expr, buffers: tuple[Buffer, ...]) -> None:
        first = number * count

        def piece(index: Expr) -> None:
            row, part = T.quotient(first + index, pieces), T.remainder(first + index, pieces)
            line = _Line(spec, target.lanes, buffers, row * (spec.columns * spec.inner) + part * lines)
            if lines == 1:
                line.along()
            else:
                whole, rest = divmod(spec.inner, lines)
                wide = part < whole if whole and rest else bool(whole)
                T.either(wide, lambda: line.across(0, lines), lambda: T.repeat(rest, lambda i: line.across(i, 1)))

        T.repeat(T.at_most(count, spec.rows * pieces - first), piece)

    size = spec.rows * spec.columns * spec.inner
    return T.kernel(symbol, [Argument("x", size), Argument("y", size)], task)


@dataclass(frozen=True)
class _Line:
    """Writes the code for the line, or the lines side by side, that begin at element `base`."""

    spec: SoftmaxSpec
    lanes: int
    buffers: tuple[Buffer, ...]
    base: Expr

    def across(self, first: Expr, width: int) -> None:
        """`width` lines from number `first`."""

        def each(body: Body) -> None:
            T.repeat(self.spec.columns, lambda column: body(column * self.spec.inner + first, width))

        most, total = Register(width, T.constant(float("-inf"), width)), Register(width, T.constant(0.0, width))
        each(lambda place, _: most.set(tirx.Max(most.value, self._x(place, width))))
        each(lambda place, _: total.add(self._exponential(place, width, most.value)))
        self._finish(each, lambda _: most.value, total, width)

    def along(self) -> None:
        """One line whose numbers lie side by side."""

        def each(body: Body) -> None:
            whole, rest = divmod(self.spec.columns, self.lanes)
            if whole:
                T.repeat(whole, lambda index: body(index * self.lanes, self.lanes))
            if rest:
                T.repeat(rest, lambda index: body(whole * self.lanes + index, 1))

        most = self._reduced(each, float("-inf"), tirx.Max, self._x)

        def top(width: int) -> Expr:
            return most.value if width == 1 else T.splat(most.value, width)

        total = self._reduced(
            each, 0.0, lambda a, b: a + b, lambda place, width: self._exponential(place, width, top(width))
        )
        self._finish(each, top, total, 1)

    def _x(self, place: Expr, width: int) -> Expr:
        return self.buffers[0][T.lanes_at(self.base + place, width)]

    def _exponential(self, place: Expr, width: int, most: Expr) -> Expr:
        """Of numbers less the maximum; in y, too, unless their logarithm is wanted."""
        value = exp(self._x(place, width) - most, width)
        if self.spec.logarithm:
            return value
        T.store(self.buffers[1], self.base + place, value, width)
        return self.buffers[1][T.lanes_at(self.base + place, width)]

    def _reduced(
        self, each: Each, start: float, combine: Callable[[Expr, Expr], Expr], value: Callable[[Expr, int], Expr]
    ) -> Register:
        """All numbers of a line combined into one."""
        wide, single = Register(self.lanes, T.constant(start, self.lanes)), Register(1, T.constant(start, 1))

        def step(place: Expr, width: int) -> None:
            total = wide if width > 1 else single
            total.set(combine(total.value, value(place, width)))

        each(step)
        T.repeat(self.lanes, lambda lane: single.set(combine(single.value, wide.lane(lane))))
        return single

    def _finish(self, each: Each, most: Callable[[int], Expr], total: Register, lines: int) -> None:
        """Results from the exponentials in y, or from x; `total` is one number for each of the lines."""
        logarithm, y = self.spec.logarithm, self.buffers[1]
        share = Register(lines, log(total.value, lines) if logarithm else T.constant(1.0, lines) / total.value)

        def result(place: Expr, width: int) -> None:
            factor = share.value if width == lines else T.splat(share.value, width)
            if logarithm:
                value = self._x(place, width) - most(width) - factor
            else:
                value = y[T.lanes_at(self.base + place, width)] * factor
            T.store(y, self.base + place, value, width)

        each(result)


def _image(spec: LayerNormSpec, target: TargetSpec) -> Image:
    return Image(spec.channels, 1, spec.positions, 0, target.lanes)


def _cut(spec: LayerNormSpec, target: TargetSpec) -> BandCut:
    """The positions cut into bands; raises `UnsupportedSpecError` if one position does not fit into local memory."""
    most = SCRATCH_BYTES // (_image(spec, target).blocks * target.lanes * FLOAT_BYTES)
    if not most:
        raise UnsupportedSpecError(f"layer normalisation of {spec.channels} channels")
    return tiling.cut_line(spec.positions, min(most, POSITIONS))


def layer_norm_candidates(spec: LayerNormSpec, target: TargetSpec) -> Iterator[KernelPlan]:
    """The only plan. Raises `UnsupportedSpecError`."""
    image, cut = _image(spec, target), _cut(spec, target)
    moved = 2 * image.elements * FLOAT_BYTES
    tasks = tiling.plane_tasks(cut.bands, 1, spec.flops, moved, target)
    knobs: dict[str, int | str] = {"bands": tasks.groups_per_task}
    text = f"layer norm {tasks.groups_per_task}x{cut.row_pixels} positions"
    yield tiling.make_plan(spec, knobs, tasks.count, text, int(moved * tasks.largest_share), POSITIONS)


def layer_norm_pack(spec: LayerNormSpec, target: TargetSpec, raw: RawWeights) -> PackedWeights:
    """Scale and shift, padded with zeros."""
    surplus = (0, -spec.channels % target.lanes)
    return tuple(np.pad(raw[name].astype(np.float32).ravel(), surplus) for name in ("scale", "shift"))


def layer_norm_emit(spec: LayerNormSpec, plan: KernelPlan, target: TargetSpec, symbol: str) -> Any:
    """The kernel. Arguments: x, scale, shift, y."""
    image, cut = _image(spec, target), _cut(spec, target)
    tasks = Tasks(cut.bands, 1, tiling.knob(plan, "bands"), 1, pixels_first=False)

    def task(number: Expr, buffers: tuple[Buffer, ...]) -> None:
        def positions(index: Expr, band: Band) -> None:
            _normalise(spec, image, buffers, cut.pixel(index, band), band.segments[0].width)

        tasks.each(number, lambda group, _: cut.each(group, 1, positions))

    vector = image.blocks * image.lanes
    arguments = [
        bf16.stored_argument("x", image.elements, spec.input_layout),
        Argument("scale", vector),
        Argument("shift", vector),
        bf16.stored_argument("y", image.elements, spec.output_layout),
    ]
    return T.kernel(symbol, arguments, task, bf16.functions(target) if spec.has("bf16") else "")


def _normalise(spec: LayerNormSpec, image: Image, buffers: tuple[Buffer, ...], first: Expr, count: int) -> None:
    """`count` positions from number `first`."""
    scale, shift = buffers[1:3]
    x = bf16.Blocked(buffers[0], image.plane, spec.input_layout)
    y = bf16.Blocked(buffers[3], image.plane, spec.output_layout)
    lanes, whole = image.lanes, spec.channels // image.lanes
    local = T.scratch(image.blocks * count * lanes)

    def place(block: Expr, i: int) -> Expr:
        return (block * count + i) * lanes

    def far(i: int) -> Expr:
        return (first + i) * lanes

    def kept(block: Expr, i: int) -> Expr:
        return local[T.lanes_at(place(block, i), lanes)]

    def summed(value: Callable[[Expr, int], Expr], term: Callable[[Expr], Expr]) -> list[Expr]:
        """Put `value(block, i)` into local memory, surplus channels as zeros; the means of `term(value)`."""
        sums = [Register(lanes, T.constant(0.0, lanes)) for _ in range(count)]

        def step(block: Expr, channels: int) -> None:
            for i in range(count):
                number = T.bind(T.first_lanes(value(block, i), channels, lanes))
                T.store(local, place(block, i), number, lanes)
                sums[i].add(term(number))

        if whole:
            T.repeat(whole, lambda block: step(block, lanes))
        if spec.channels % lanes:
            step(whole, spec.channels % lanes)
        return [T.bind(T.lane_sum(total, lanes) * T.constant(1.0 / spec.channels, 1)) for total in sums]

    def loaded(block: Expr, i: int) -> Expr:
        return x.load(block, far(i), lanes)

    def centred(block: Expr, i: int) -> Expr:
        return kept(block, i) - T.splat(means[i], lanes)

    if spec.centred:
        means = summed(loaded, lambda number: number)
        variances = summed(centred, lambda number: number * number)
    else:
        variances = summed(loaded, lambda number: number * number)
    factors = [
        T.bind(T.splat(T.constant(1.0, 1) / tirx.sqrt(variance + T.constant(spec.epsilon, 1)), lanes))
        for variance in variances
    ]

    def normalise(block: Expr) -> None:
        vector = T.lanes_at(block * lanes, lanes)
        for i in range(count):
            y.store(block, far(i), kept(block, i) * factors[i] * scale[vector] + shift[vector], lanes)

    T.repeat(image.blocks, normalise)
