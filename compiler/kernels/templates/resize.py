"""Images made larger or smaller: each line of the result is a weighted sum of a few lines of the source.

Source lines are stretched to the new width once each, into a ring of as many lines as one line of the result needs;
then lines of the ring are added up, vector by vector. Tables say places and weights, so one kernel serves all modes.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from gangway.artifact.format import TargetSpec
from gangway.compiler.kernels.specs import KernelPlan, PackedWeights, RawWeights, ResizeSpec, first_needed
from gangway.compiler.kernels.templates import builder as T
from gangway.compiler.kernels.templates.builder import Argument, Buffer, Expr, Register
from gangway.compiler.kernels.templates.tiling import FLOAT_BYTES, Image, each_tile, plane_plan, planned_tasks, segments

RING_ELEMENTS = 4096  # 16 KiB: half of a first level cache
BAND_ROWS = 16  # a band stretches lines again that the one before it has had


def candidates(spec: ResizeSpec, target: TargetSpec) -> Iterator[KernelPlan]:
    """The only plan."""
    x, y = _images(spec, target)
    moved = (x.elements + y.elements) * FLOAT_BYTES
    kind = "plain" if spec.plain else "blocked"
    yield plane_plan(
        spec,
        f"resize {kind} {spec.taps[0]}x{spec.taps[1]}",
        (y.blocks, -(-y.height // BAND_ROWS)),
        spec.flops,
        moved,
        1,
        target,
    )


def _images(spec: ResizeSpec, target: TargetSpec) -> tuple[Image, Image]:
    lanes = 1 if spec.plain else target.lanes
    return (
        Image(spec.channels, spec.height, spec.width, spec.input_halo, lanes),
        Image(spec.channels, *spec.output_size, spec.output_halo, lanes),
    )


def pack(spec: ResizeSpec, target: TargetSpec, raw: RawWeights) -> PackedWeights:
    """Rows, then columns, whose places are numbers of elements; last, from which line of x on each row needs any."""
    lanes = 1 if spec.plain else target.lanes
    places = [raw["row_places"], raw["column_places"] * lanes, first_needed(raw["row_places"])]
    weights = [raw["row_weights"], raw["column_weights"]]
    return (
        np.concatenate([array.ravel() for array in places]).astype(np.int32),
        np.concatenate([array.ravel() for array in weights]).astype(np.float32),
    )


def emit(spec: ResizeSpec, plan: KernelPlan, target: TargetSpec, symbol: str) -> Any:
    """The kernel. Arguments: x, places, weights, y."""
    x_image, y_image = _images(spec, target)
    bands = -(-y_image.height // BAND_ROWS)
    tasks = planned_tasks(plan, y_image.blocks, bands)
    columns = segments(y_image.width, max(1, RING_ELEMENTS // (spec.window * y_image.lanes)))

    def task(number: Expr, buffers: tuple[Buffer, ...]) -> None:
        def plane(block: Expr, first_band: Expr) -> None:
            first = first_band * BAND_ROWS
            count = T.at_most(tasks.bands_per_task * BAND_ROWS, y_image.height - first)

            def strip(column: Expr, width: int) -> None:
                _Strip(spec, (x_image, y_image), target.lanes, buffers, block, column, width).rows(first, count)

            each_tile(columns, strip)

        tasks.each_group(number, plane)

    entries = y_image.height * spec.taps[0] + y_image.width * spec.taps[1]
    arguments = [
        Argument("x", x_image.elements),
        Argument("places", entries + y_image.height, "int32"),
        Argument("weights", entries),
        Argument("y", y_image.elements),
    ]
    return T.kernel(symbol, arguments, task)


class _Strip:
    """Writes some columns of a plane, line by line."""

    def __init__(
        self,
        spec: ResizeSpec,
        images: tuple[Image, Image],
        vector: int,
        buffers: tuple[Buffer, ...],
        block: Expr,
        column: Expr,
        width: int,
    ) -> None:
        self._spec, self._vector, self._width, self._column = spec, vector, width, column
        self._x, self._places, self._weights, self._y = buffers
        self._images = images
        x_image, y_image = images
        self._lanes = x_image.lanes
        self._source = T.bind(x_image.origin + block * x_image.plane)
        self._into = T.bind(y_image.origin + block * y_image.plane + column * self._lanes)
        self._line = width * self._lanes
        self._ring = T.scratch(spec.window * self._line)

    def rows(self, first: Expr, count: Expr) -> None:
        """Write `count` lines of y from line `first` on."""
        (taps, across), (height, width) = self._spec.taps, self._spec.output_size
        needed = height * taps + width * across
        ready = Register(1, 0, "int32")  # lines of x before this one are in the ring, or not needed any more

        def row(index: Expr) -> None:
            entry = T.bind((first + index) * taps)
            begin = Register(1, T.at_least(self._places[needed + first + index], ready.value), "int32")
            end = Register(1, self._places[entry + (taps - 1)] + 1, "int32")
            T.repeat(T.at_least(end.value - begin.value, 0), lambda step: self._stretch(begin.value + step))
            ready.set(T.at_least(end.value, ready.value))
            self._add_up(entry, self._into + (first + index) * self._images[1].row)

        T.repeat(count, row)

    def _slot(self, line: Expr) -> Expr:
        return T.remainder(line, self._spec.window) * self._line

    def _stretch(self, line: Expr) -> None:
        """Put a line of x into the ring, as wide as y."""
        (rows, taps), height = self._spec.taps, self._spec.output_size[0]
        source, slot = T.bind(self._source + line * self._images[0].row), T.bind(self._slot(line))
        first = T.bind(rows * height + self._column * taps)

        def pixel(index: Expr) -> None:
            entry = first + index * taps
            values = [self._x[T.lanes_at(source + self._places[entry + tap], self._lanes)] for tap in range(taps)]
            T.store(self._ring, slot + index * self._lanes, self._sum(values, entry, self._lanes), self._lanes)

        T.repeat(self._width, pixel)

    def _add_up(self, entry: Expr, into: Expr) -> None:
        """Write a line of y."""
        taps = self._spec.taps[0]
        slots = [T.bind(self._slot(self._places[entry + tap])) for tap in range(taps)]

        def some(first: Expr, lanes: int) -> None:
            values = [self._ring[T.lanes_at(slot + first, lanes)] for slot in slots]
            T.store(self._y, into + first, self._sum(values, entry, lanes), lanes)

        whole, rest = divmod(self._line, self._vector)
        if whole:
            T.repeat(whole, lambda index: some(index * self._vector, self._vector))
        for index in range(self._line - rest, self._line):
            some(index, 1)

    def _sum(self, values: list[Expr], entry: Expr, lanes: int) -> Expr:
        """The sum of values times the weights from an entry of the table on."""
        if len(values) == 1:
            return values[0]
        total: Expr = None
        for tap, value in enumerate(values):
            weight = self._weights[entry + tap]
            term = value * T.splat(weight, lanes)
            total = term if total is None else total + term
        return total
