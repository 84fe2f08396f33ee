"""Scales that are found at run time: the range of a tensor, what ONNX makes of it, and the bytes that follow.

The range of each part of a tensor is a task. What is in surplus channels has no part in it.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

from gangway.artifact.format import TargetSpec
from gangway.compiler.kernels.int8_specs import FACTORS, Int8FactorsSpec, Int8QuantiseSpec, Int8RangeSpec
from gangway.compiler.kernels.specs import BYTES_CHANNELS, KernelPlan
from gangway.compiler.kernels.templates import builder as T
from gangway.compiler.kernels.templates.builder import Argument, Buffer, Expr, Register, tirx
from gangway.compiler.kernels.templates.int8 import instructions as int8
from gangway.compiler.kernels.templates.int8.images import haloed_line
from gangway.compiler.kernels.templates.tiling import Image, make_plan, plane_plan, planned_tasks

VECTORS = 4  # at once: their least and largest numbers are found apart
STEPS = 255.0  # between the ends of uint8


def range_candidates(spec: Int8RangeSpec, target: TargetSpec) -> Iterator[KernelPlan]:
    """The only plan."""
    moved = 4 * spec.channels * spec.height * spec.width
    yield make_plan(spec, {}, spec.parts, f"int8 range of {spec.parts} parts", moved // spec.parts, VECTORS)


def range_emit(spec: Int8RangeSpec, plan: KernelPlan, target: TargetSpec, symbol: str) -> Any:
    """The kernel. Arguments: x, y."""
    lanes = target.lanes
    image = Image(spec.channels, spec.height, spec.width, spec.input_halo, 1 if spec.plain else lanes)

    def task(number: Expr, buffers: tuple[Buffer, ...]) -> None:
        x, y = buffers
        if spec.plain:
            limits = _Limits(T.vector_lanes(VECTORS * lanes, spec.channels))
            size = -(-spec.channels // spec.parts)
            first = T.bind(number * size)
            limits.line(x, first, T.at_most(size, spec.channels - first), spec.channels)
        else:
            limits = _Limits(T.vector_lanes(VECTORS * lanes, spec.width * lanes))
            lines = image.blocks * spec.height
            size = -(-lines // spec.parts)
            first = T.bind(number * size)
            T.repeat(T.at_most(size, lines - first), lambda i: _blocked_line(limits, x, image, T.bind(first + i)))
        for index, value in enumerate(limits.found()):
            T.store(y, 2 * number + index, value, 1)

    elements = spec.channels if spec.plain else image.elements
    return T.kernel(symbol, [Argument("x", elements), Argument("y", 2 * spec.parts)], task, int8.functions(target))


def _blocked_line(limits: "_Limits", x: Buffer, image: Image, line: Expr) -> None:
    """A row of a plane."""
    plane, lanes = T.bind(T.quotient(line, image.height)), image.lanes
    begin = T.bind(plane * image.plane + image.origin + (line - plane * image.height) * image.row)
    rest, length = image.channels % lanes, image.width * lanes
    T.either(
        plane < image.blocks - 1 if rest else True,
        lambda: limits.line(x, begin, length, begin + length),
        lambda: limits.line(x, begin, length, begin + length, rest, lanes),
    )


class _Limits:
    """The least and the largest number so far, and 0, in each lane of a vector."""

    def __init__(self, lanes: int) -> None:
        self._lanes = lanes
        self._least, self._largest = (Register(lanes, T.constant(0.0, lanes)) for _ in range(2))

    def line(self, x: Buffer, first: Expr, length: Expr, end: Expr, channels: int = 0, block: int = 1) -> None:
        """Adjacent numbers, of which the last vectors may be read twice; `channels`: of each block, so many count."""
        lanes = self._lanes

        def some(index: Expr) -> None:
            value = x[T.lanes_at(T.at_most(first + index * lanes, end - lanes), lanes)]
            if channels:
                lane = tirx.Ramp(tirx.const(0, "int32"), tirx.const(1, "int32"), lanes)
                inside = (lane & T.constant(block - 1, lanes, "int32")) < T.constant(channels, lanes, "int32")
                value = tirx.Select(inside, value, T.constant(0.0, lanes))
            value = T.bind(value)
            self._least.set(tirx.Min(value, self._least.value))
            self._largest.set(tirx.Max(value, self._largest.value))

        T.repeat(T.quotient(length + (lanes - 1), lanes), some)

    def found(self) -> list[Expr]:
        """Both, of all lanes."""
        result = []
        for register, better in ((self._least, tirx.Min), (self._largest, tirx.Max)):
            lanes = self._lanes
            while lanes > 1:
                lanes //= 2
                register = Register(lanes, better(register.part(0, lanes), register.part(lanes, lanes)))  # noqa: PLW2901
            result.append(register.value)
        return result


def factors_candidates(spec: Int8FactorsSpec, target: TargetSpec) -> Iterator[KernelPlan]:
    """The only plan."""
    yield make_plan(spec, {}, 1, "int8 factors", 0, 1)


def factors_emit(spec: Int8FactorsSpec, plan: KernelPlan, target: TargetSpec, symbol: str) -> Any:
    """The kernel. Arguments: x, y."""
    zero, steps = tirx.const(0.0, "float32"), tirx.const(STEPS, "float32")

    def task(number: Expr, buffers: tuple[Buffer, ...]) -> None:
        x, y = buffers
        least, largest = (Register(1, zero) for _ in range(2))

        def part(index: Expr) -> None:
            least.set(tirx.Min(x[2 * index], least.value))
            largest.set(tirx.Max(x[2 * index + 1], largest.value))

        T.repeat(spec.parts, part)
        width = T.bind(largest.value - least.value)
        scale = Register(1, tirx.const(1.0, "float32"))
        T.when(width > zero, lambda: scale.set(width / steps))
        begin = tirx.Max(zero, tirx.Min(steps, zero - least.value / scale.value))
        point = T.bind(T.round_even(begin, "float32", 1))
        for index, value in enumerate((scale.value, zero - point, steps - point, point)):
            T.store(y, index, value, 1)

    return T.kernel(symbol, [Argument("x", 2 * spec.parts), Argument("y", FACTORS)], task)


def quantise_candidates(spec: Int8QuantiseSpec, target: TargetSpec) -> Iterator[KernelPlan]:
    """The only plan."""
    image = Image(spec.channels, spec.height + 2 * spec.output_halo, spec.width, spec.output_halo, BYTES_CHANNELS)
    moved = 5 * image.elements
    yield plane_plan(
        spec, "int8 quantise", (image.blocks, image.height), moved, moved, BYTES_CHANNELS // target.lanes, target
    )


def quantise_emit(spec: Int8QuantiseSpec, plan: KernelPlan, target: TargetSpec, symbol: str) -> Any:
    """The kernel. Arguments: x, factors, y."""
    lanes, blocks = target.lanes, BYTES_CHANNELS // target.lanes
    x_image = Image(spec.channels, spec.height, spec.width, spec.input_halo, lanes)
    image = Image(spec.channels, spec.height, spec.width, spec.output_halo, BYTES_CHANNELS)
    tasks = planned_tasks(plan, image.blocks, image.height + 2 * image.halo)
    whole, rest = divmod(x_image.blocks, blocks)

    def task(number: Expr, buffers: tuple[Buffer, ...]) -> None:
        x, factors, y = buffers
        scale, point = T.bind(T.splat(factors[0], lanes)), T.bind(tirx.Cast("int32", factors[3]))
        zeros = T.bind(int8.twice(point, lanes))
        border = T.bind(T.splat(tirx.Cast("uint8", point), BYTES_CHANNELS))

        def pixel(plane: Expr, row: Expr, count: int, column: Expr) -> None:
            at = x_image.origin + row * x_image.row + column * lanes + plane * (blocks * x_image.plane)
            found = [T.bind(x[T.lanes_at(at + block * x_image.plane, lanes)] / scale) for block in range(count)]
            place = plane * image.plane + image.origin + row * image.row + column * BYTES_CHANNELS
            int8.store_packed(y, place, found, zeros, lanes)

        def pixels(plane: Expr, row: Expr) -> None:
            T.either(
                plane < whole if rest else True,
                lambda: T.repeat(image.width, partial(pixel, plane, row, blocks)),
                lambda: T.repeat(image.width, partial(pixel, plane, row, rest)),
            )

        def fill(plane: Expr, row: Expr, first: int, count: int) -> None:
            at = T.bind(plane * image.plane + row * image.row + first * BYTES_CHANNELS)
            T.repeat(count, lambda i: T.store(y, at + i * BYTES_CHANNELS, border, BYTES_CHANNELS))

        tasks.each(number, partial(haloed_line, image, pixels, fill))

    arguments = [Argument("x", x_image.elements), Argument("factors", FACTORS), Argument("y", image.elements, "uint8")]
    return T.kernel(symbol, arguments, task, int8.functions(target))
