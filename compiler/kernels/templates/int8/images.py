"""Tensors of bytes between convolutions: elementwise operators, pooling, packing, halos. See `specs.py`.

Vectors are some channels of a pixel, which are converted to float32 (or int32, for means) and back.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from gangway.artifact.format import TargetSpec
from gangway.compiler.kernels.int8_specs import Int8HaloSpec, Int8TableSpec
from gangway.compiler.kernels.specs import (
    BYTES_CHANNELS,
    PIXELS_CHANNELS,
    BlockedElementwiseSpec,
    GlobalPoolSpec,
    KernelPlan,
    Layout,
    PackedWeights,
    PackSpec,
    PoolSpec,
    RawWeights,
)
from gangway.compiler.kernels.templates import builder as T
from gangway.compiler.kernels.templates.builder import Argument, Buffer, Expr, Register, tirx
from gangway.compiler.kernels.templates.elementwise import combined
from gangway.compiler.kernels.templates.float32_math import activate
from gangway.compiler.kernels.templates.int8 import instructions as int8
from gangway.compiler.kernels.templates.tiling import Image, make_plan, plane_plan, planned_tasks

WORDS = 16  # of a pixel of bytes
UNROLLED = 2
MOST_STEPS = 1e9


def _bytes_image(channels: int, height: int, width: int, halo: int) -> Image:
    return Image(channels, height, width, halo, BYTES_CHANNELS)


def _planned(spec: Any, name: str, image: Image, moved_bytes: int, target: TargetSpec) -> KernelPlan:
    """The only plan: of rows of planes of this image."""
    return plane_plan(spec, name, (image.blocks, image.height), moved_bytes, moved_bytes, UNROLLED, target)


def factors_pack(spec: Any, target: TargetSpec, raw: RawWeights) -> PackedWeights:
    """What the kernel reads of scales and zero points."""
    return (raw["factors"],)


def haloed_line(
    image: Image,
    inside: Callable[[Expr, Expr], None],
    fill: Callable[[Expr, Expr, int, int], None],
    plane: Expr,
    row: Expr,
) -> None:
    """A row of a plane, counted with the halo: `inside(plane, row)`, and `fill(plane, row, column, columns)` of it."""
    plane, row, halo = T.bind(plane), T.bind(row), image.halo
    if not halo:
        inside(plane, row)
        return

    def line() -> None:
        inside(plane, row - halo)
        fill(plane, row, 0, halo)
        fill(plane, row, halo + image.width, halo)

    condition = tirx.And(row >= halo, row < halo + image.height)
    T.either(condition, line, lambda: fill(plane, row, 0, image.width + 2 * halo))


def elementwise_candidates(spec: BlockedElementwiseSpec, target: TargetSpec) -> Iterator[KernelPlan]:
    """The only plan."""
    image = _bytes_image(spec.channels, spec.height, spec.width, 0)
    sizes = [1 if layout == "bytes" else 4 for layout in (*spec.input_layouts, spec.output_layout)]
    yield _planned(spec, f"int8 {spec.operator} {spec.activation.name}", image, image.elements * sum(sizes), target)


def elementwise_emit(spec: BlockedElementwiseSpec, plan: KernelPlan, target: TargetSpec, symbol: str) -> Any:
    """The kernel. Arguments: a, factors, [b,] y."""
    lanes, blocks = target.lanes, BYTES_CHANNELS // target.lanes
    images = [
        _operand_image(spec, layout, vector, halo, lanes)
        for layout, vector, halo in zip(spec.input_layouts, spec.vectors, spec.input_halos, strict=True)
    ]
    result = _operand_image(spec, spec.output_layout, False, spec.output_halo, lanes)
    whole = _bytes_image(spec.channels, spec.height, spec.width, 0)
    tasks, count = planned_tasks(plan, whole.blocks, whole.height), len(images)
    floats = spec.has("blocked")
    rest = -(-(spec.channels % BYTES_CHANNELS) // lanes) % blocks if floats else 0

    def task(number: Expr, buffers: tuple[Buffer, ...]) -> None:
        a, factors, *others, y = buffers
        inputs = [a, *others]
        scales = [[T.bind(T.splat(factors[2 * i + k], lanes)) for k in range(2)] for i in range(count)]
        inverse = T.bind(T.splat(factors[2 * count], lanes))
        zeros = T.bind(int8.twice(tirx.Cast("int32", factors[2 * count + 1]), lanes))

        def place(image: Image, plane: Expr, block: int, row: Expr, column: Expr) -> Expr:
            at = image.origin + row * image.row + column * image.lanes
            if image.lanes == BYTES_CHANNELS:
                return plane * image.plane + at + block * lanes
            return (plane * blocks + block) * image.plane + at

        def operand(index: int, plane: Expr, block: int, row: Expr, column: Expr) -> Expr:
            if spec.vectors[index]:
                return inputs[index][T.lanes_at((plane * blocks + block) * lanes, lanes)]
            at = place(images[index], plane, block, row, column)
            if spec.input_layouts[index] == "blocked":
                return inputs[index][T.lanes_at(at, lanes)]
            scale, shift = scales[index]
            scaled = int8.floats_of(inputs[index], at, lanes) * scale
            return scaled if spec.in_steps and index else scaled + shift

        def line(plane: Expr, row: Expr) -> None:
            def pixel(column: Expr, inside: int) -> None:
                results = []
                for block in range(inside):
                    values = [operand(index, plane, block, row, column) for index in range(count)]
                    value = activate(combined(spec.operator, values), spec.activation, lanes)
                    results.append(T.bind(value if spec.in_steps else _limited(value * inverse, lanes)))
                if spec.output_layout == "bytes":  # what is behind the last channels is surplus
                    int8.store_packed(y, place(result, plane, 0, row, column), results, zeros, lanes)
                    return
                for block, value in enumerate(results):
                    T.store(y, place(result, plane, block, row, column), value, lanes)

            T.either(
                plane < spec.channels // BYTES_CHANNELS if rest else True,
                lambda: T.repeat(spec.width, lambda column: pixel(column, blocks)),
                lambda: T.repeat(spec.width, lambda column: pixel(column, rest)),
            )

        tasks.each(number, lambda plane, row: line(T.bind(plane), T.bind(row)))

    def argument(name: str, image: Image, layout: Layout) -> Argument:
        return Argument(name, image.elements, "uint8" if layout == "bytes" else "float32")

    named = [argument(*each) for each in zip("ab", images, spec.input_layouts, strict=False)]
    arguments = [named[0], Argument("factors", 2 * count + 2), *named[1:], argument("y", result, spec.output_layout)]
    return T.kernel(symbol, arguments, task, int8.functions(target))


def _limited(steps: Expr, lanes: int) -> Expr:
    """Numbers that conversion to integers takes for large ones if they are; NaN stays."""
    most = T.constant(MOST_STEPS, lanes)
    return tirx.Select(steps > most, most, steps)


def _operand_image(spec: BlockedElementwiseSpec, layout: Layout, vector: bool, halo: int, lanes: int) -> Image:
    lanes = BYTES_CHANNELS if layout == "bytes" else lanes
    return (
        Image(spec.channels, 1, 1, 0, lanes) if vector else Image(spec.channels, spec.height, spec.width, halo, lanes)
    )


def pool_candidates(spec: PoolSpec, target: TargetSpec) -> Iterator[KernelPlan]:
    """The only plan."""
    image = _bytes_image(spec.channels, *spec.output_size, 0)
    moved = image.elements * (spec.kernel[0] * spec.kernel[1] + 1)
    yield _planned(spec, "int8 max pool", image, moved, target)


def pool_emit(spec: PoolSpec, plan: KernelPlan, target: TargetSpec, symbol: str) -> Any:
    """The kernel. Arguments: x, y."""
    x_image = _bytes_image(spec.channels, spec.height, spec.width, spec.input_halo)
    y_image = _bytes_image(spec.channels, *spec.output_size, spec.output_halo)
    tasks = planned_tasks(plan, y_image.blocks, y_image.height)

    def clipped(place: Expr, axis: int, length: int) -> tuple[Expr, Expr]:
        begin = place * spec.stride[axis] - spec.pads[axis]
        first = T.bind(T.at_least(begin, 0))
        return first, T.bind(T.at_most(begin + spec.kernel[axis], length) - first)

    def task(number: Expr, buffers: tuple[Buffer, ...]) -> None:
        x, y = buffers

        def line(plane: Expr, row: Expr) -> None:
            top, rows = clipped(row, 0, spec.height)

            def pixel(column: Expr) -> None:
                left, columns = clipped(column, 1, spec.width)
                largest = Register(BYTES_CHANNELS, T.constant(0, BYTES_CHANNELS, "uint8"), "uint8")
                base = T.bind(plane * x_image.plane + x_image.origin + top * x_image.row + left * BYTES_CHANNELS)

                def one(i: Expr, j: Expr) -> None:
                    at = base + i * x_image.row + j * BYTES_CHANNELS
                    largest.set(tirx.Max(largest.value, x[T.lanes_at(at, BYTES_CHANNELS)]))

                T.repeat(rows, lambda i: T.repeat(columns, partial(one, i)))
                at = plane * y_image.plane + y_image.origin + row * y_image.row + column * BYTES_CHANNELS
                T.store(y, at, largest.value, BYTES_CHANNELS)

            T.repeat(y_image.width, pixel)

        tasks.each(number, lambda plane, row: line(T.bind(plane), T.bind(row)))

    arguments = [Argument("x", x_image.elements, "uint8"), Argument("y", y_image.elements, "uint8")]
    return T.kernel(symbol, arguments, task)


def global_candidates(spec: GlobalPoolSpec, target: TargetSpec) -> Iterator[KernelPlan]:
    """The only plan."""
    image = _bytes_image(spec.channels, 1, 1, 0)
    yield _planned(spec, "int8 global average", image, image.elements * spec.height * spec.width, target)


def global_emit(spec: GlobalPoolSpec, plan: KernelPlan, target: TargetSpec, symbol: str) -> Any:
    """The kernel. Arguments: x, factors, y."""
    image = _bytes_image(spec.channels, spec.height, spec.width, spec.input_halo)
    lanes, plane_blocks = target.lanes, BYTES_CHANNELS // target.lanes
    blocks = -(-spec.channels // lanes)
    tasks = planned_tasks(plan, -(-spec.channels // BYTES_CHANNELS), 1)

    def task(number: Expr, buffers: tuple[Buffer, ...]) -> None:
        x, factors, y = buffers
        scale, shift = (T.bind(T.splat(factors[index], lanes)) for index in range(2))

        def plane(number: Expr, count: int) -> None:
            sums = [Register(lanes, T.constant(0, lanes, "int32"), "int32") for _ in range(count)]

            def pixel(row: Expr, column: Expr) -> None:
                at = number * image.plane + image.origin + row * image.row + column * BYTES_CHANNELS
                for block, total in enumerate(sums):
                    total.add(tirx.Cast(f"int32x{lanes}", x[T.lanes_at(at + block * lanes, lanes)]))

            T.repeat(spec.height, lambda row: T.repeat(spec.width, partial(pixel, row)))
            for block, total in enumerate(sums):
                value = tirx.Cast(f"float32x{lanes}", total.value) * scale + shift
                T.store(y, (number * plane_blocks + block) * lanes, value, lanes)

        whole, rest = divmod(blocks, plane_blocks)

        def one(number: Expr) -> None:
            if not rest:
                plane(number, plane_blocks)
            elif not whole:
                plane(number, rest)
            else:
                T.either(number < whole, lambda: plane(number, plane_blocks), lambda: plane(number, rest))

        tasks.each(number, lambda number, _: one(T.bind(number)))

    arguments = [Argument("x", image.elements, "uint8"), Argument("factors", 2), Argument("y", blocks * lanes)]
    return T.kernel(symbol, arguments, task)


def _pack_image(spec: PackSpec) -> Image:
    """y, in words."""
    pixels = spec.layout == "pixels"
    words = 1 if pixels else WORDS
    channels = words * (1 if pixels else -(-spec.channels // BYTES_CHANNELS))
    return Image(channels, spec.height, spec.width, spec.output_halo, words)


def _padded_rows(image: Image) -> Image:
    return Image(image.channels, image.height + 2 * image.halo, image.width, 0, image.lanes)


def pack_candidates(spec: PackSpec, target: TargetSpec) -> Iterator[KernelPlan]:
    """The only plan."""
    image = _padded_rows(_pack_image(spec))
    yield _planned(spec, "int8 pack", image, 4 * spec.channels * spec.height * spec.width + 4 * image.elements, target)


def pack_emit(spec: PackSpec, plan: KernelPlan, target: TargetSpec, symbol: str) -> Any:
    """The kernel. Arguments: x, factors, y."""
    image, pixels = _pack_image(spec), spec.layout == "pixels"
    vector = spec.height == spec.width == 1 and not spec.output_halo and not pixels
    tasks = planned_tasks(plan, image.blocks, image.height + 2 * image.halo)
    lanes = target.lanes if spec.width >= target.lanes else 1

    def quantised_words(value: Expr, factors: Buffer, count: int) -> Expr:
        """Numbers as integers from 0 to 255; NaN becomes the least."""
        scale, least, largest, zero = (T.splat(factors[i], count) if count > 1 else factors[i] for i in range(4))
        limited = tirx.Min(tirx.Max(value / scale, least), largest)
        kind = "int32" if count == 1 else f"int32x{count}"
        return tirx.Cast(kind, T.round_even(limited, "float32", count) + zero)

    def task(number: Expr, buffers: tuple[Buffer, ...]) -> None:
        x, factors, y = buffers
        zero = T.bind(tirx.Cast("int32", factors[3]) * tirx.const(0x01010101, "int32"))

        def words(plane: Expr, row: Expr, column: Expr, word: int) -> None:
            total = None
            for index in range(PIXELS_CHANNELS):
                channel = (0 if pixels else plane * WORDS) * PIXELS_CHANNELS + word * PIXELS_CHANNELS + index
                known = pixels or spec.channels % BYTES_CHANNELS == 0
                if pixels and word * PIXELS_CHANNELS + index >= spec.channels:
                    continue
                inside = channel if known else T.at_most(channel, spec.channels - 1)  # surplus is any number
                at = (inside * spec.height + row) * spec.width + column
                part = quantised_words(x[T.lanes_at(at, lanes)], factors, lanes)
                part = part << T.constant(8 * index, lanes, "int32")
                total = part if total is None else total | part
            place = plane * image.plane + image.origin + row * image.row + column * image.lanes + word
            T.store(y, place, total, lanes, image.lanes)

        def interior(plane: Expr, row: Expr) -> None:
            def some(index: Expr) -> None:
                column = T.bind(T.at_most(index * lanes, spec.width - lanes))
                for word in range(image.lanes):
                    words(plane, row, column, word)

            T.repeat(-(-spec.width // lanes), some)

        def fill(plane: Expr, row: Expr, first: int, count: int) -> None:
            at = plane * image.plane + row * image.row + first * image.lanes
            T.repeat(count * image.lanes, lambda i: T.store(y, at + i, zero, 1))

        tasks.each(number, partial(haloed_line, image, interior, fill))

    def vector_task(number: Expr, buffers: tuple[Buffer, ...]) -> None:
        x, factors, y = buffers

        def plane(index: Expr, _: Expr) -> None:
            count = T.at_most(BYTES_CHANNELS, spec.channels - index * BYTES_CHANNELS)

            def some(at: Expr, count: int) -> None:
                kind = "uint8" if count == 1 else f"uint8x{count}"
                value = tirx.Cast(kind, quantised_words(x[T.lanes_at(at, count)], factors, count))
                T.store(y, at, value, count)

            first = index * BYTES_CHANNELS
            T.repeat(count // target.lanes, lambda i: some(first + i * target.lanes, target.lanes))
            if spec.channels % target.lanes:
                T.repeat(count % target.lanes, lambda i: some(first + count // target.lanes * target.lanes + i, 1))

        tasks.each(number, lambda index, row: plane(T.bind(index), row))

    result = Argument("y", image.elements * (4 if vector else 1), "uint8" if vector else "int32")
    arguments = [Argument("x", spec.channels * spec.height * spec.width), Argument("factors", 4), result]
    return T.kernel(symbol, arguments, vector_task if vector else task)


def table_candidates(spec: Int8TableSpec, target: TargetSpec) -> Iterator[KernelPlan]:
    """The only plan."""
    image = _bytes_image(spec.channels, spec.height, spec.width, 0)
    yield _planned(spec, "int8 table", image, 2 * image.elements, target)


def table_pack(spec: Int8TableSpec, target: TargetSpec, raw: RawWeights) -> PackedWeights:
    """The table."""
    return (raw["table"],)


def table_emit(spec: Int8TableSpec, plan: KernelPlan, target: TargetSpec, symbol: str) -> Any:
    """The kernel. Arguments: x, table, y."""
    x_image = _bytes_image(spec.channels, spec.height, spec.width, spec.input_halo)
    y_image = _bytes_image(spec.channels, spec.height, spec.width, spec.output_halo)
    tasks = planned_tasks(plan, y_image.blocks, y_image.height)

    def task(number: Expr, buffers: tuple[Buffer, ...]) -> None:
        x, table, y = buffers
        parts = [T.bind(table[T.lanes_at(part * BYTES_CHANNELS, BYTES_CHANNELS)]) for part in range(4)]

        def line(plane: Expr, row: Expr) -> None:
            source = T.bind(plane * x_image.plane + x_image.origin + row * x_image.row)
            place = T.bind(plane * y_image.plane + y_image.origin + row * y_image.row)

            def pixel(column: Expr) -> None:
                numbers = x[T.lanes_at(source + column * BYTES_CHANNELS, BYTES_CHANNELS)]
                T.store(y, place + column * BYTES_CHANNELS, int8.looked_up(numbers, parts), BYTES_CHANNELS)

            def one(index: Expr) -> None:
                T.store(y, place + index, table[tirx.Cast("int32", x[source + index])], 1)

            T.either(
                int8.has_permutation(target),
                lambda: T.repeat(spec.width, pixel),
                lambda: T.repeat(spec.width * BYTES_CHANNELS, one),
            )

        tasks.each(number, lambda plane, row: line(T.bind(plane), T.bind(row)))

    arguments = [
        Argument("x", x_image.elements, "uint8"),
        Argument("table", 256, "uint8"),
        Argument("y", y_image.elements, "uint8"),
    ]
    return T.kernel(symbol, arguments, task, int8.functions(target))


def halo_candidates(spec: Int8HaloSpec, target: TargetSpec) -> Iterator[KernelPlan]:
    """The only plan."""
    planes = -(-spec.channels // BYTES_CHANNELS)
    yield make_plan(spec, {}, planes, "int8 halo", BYTES_CHANNELS, 1)


def halo_pack(spec: Int8HaloSpec, target: TargetSpec, raw: RawWeights) -> PackedWeights:
    """The zero point."""
    return (raw["zero"],)


def halo_emit(spec: Int8HaloSpec, plan: KernelPlan, target: TargetSpec, symbol: str) -> Any:
    """The kernel. Arguments: y, zero."""
    image = _bytes_image(spec.channels, spec.height, spec.width, spec.output_halo)
    padded, halo = image.width + 2 * image.halo, image.halo

    def task(number: Expr, buffers: tuple[Buffer, ...]) -> None:
        y, zeros = buffers
        zero = T.bind(T.splat(zeros[0], BYTES_CHANNELS))

        def pixels(first: Expr, count: int) -> None:
            at = T.bind(number * image.plane + first * BYTES_CHANNELS)
            T.repeat(count, lambda i: T.store(y, at + i * BYTES_CHANNELS, zero, BYTES_CHANNELS))

        pixels(0, halo * padded + halo)
        T.repeat(image.height - 1, lambda row: pixels((halo + row) * padded + halo + image.width, 2 * halo))
        pixels((halo + image.height - 1) * padded + halo + image.width, halo + halo * padded)

    return T.kernel(symbol, [Argument("y", image.elements, "uint8"), Argument("zero", 1, "uint8")], task)
