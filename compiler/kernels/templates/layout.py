"""Conversion between plain tensors, as a client sends them, and blocked or planar images and sequences.

Plain tensors are read and written exactly within their bounds, at any 4-byte alignment. Packing writes the interior of
its output and zeros into surplus channels, and leaves the halo alone. Squares of as many pixels as channels are
transposed in registers; images whose lines are shorter, and have no halo, are seen with longer ones.

In a sequence, plain [positions][channels], a vector of channels is adjacent on both sides, so whole vectors move; a few
positions at a time, so that reads and writes both run on.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from tvm import tirx

from gangway.artifact.format import TargetSpec
from gangway.compiler.kernels.specs import KernelPlan, PackSpec, SequencePackSpec, UnpackSpec
from gangway.compiler.kernels.templates import builder as T
from gangway.compiler.kernels.templates import tiling
from gangway.compiler.kernels.templates.builder import Argument, Buffer, Expr
from gangway.compiler.kernels.templates.tiling import FLOAT_BYTES, Band, BandCut, Image, Tasks

POSITIONS = 8  # moved together


def candidates(spec: PackSpec | UnpackSpec, target: TargetSpec) -> Iterator[KernelPlan]:
    """The only plan."""
    image = _image(_with_longer_lines(spec, target), target)
    moved = 2 * image.elements * FLOAT_BYTES
    kind = "unpack" if isinstance(spec, UnpackSpec) else "pack planar" if spec.layout == "planar" else "pack"
    yield tiling.plane_plan(spec, kind, (image.blocks, image.height), image.elements, moved, 1, target)


def _with_longer_lines(spec: PackSpec | UnpackSpec, target: TargetSpec) -> PackSpec | UnpackSpec:
    """Return a spec of the same memory whose lines have at least `lanes` pixels, if that is possible."""
    halo = spec.input_halo if isinstance(spec, UnpackSpec) else spec.output_halo
    if halo or spec.width >= target.lanes:
        return spec
    lines = (n for n in range(2, spec.height + 1) if spec.height % n == 0 and n * spec.width >= target.lanes)
    merged = next(lines, 1)
    return replace(spec, height=spec.height // merged, width=spec.width * merged)


def _image(spec: PackSpec | UnpackSpec, target: TargetSpec) -> Image:
    """The tensor that is not plain."""
    if isinstance(spec, UnpackSpec):
        return Image(spec.channels, spec.height, spec.width, spec.input_halo, target.lanes)
    return Image(
        spec.channels, spec.height, spec.width, spec.output_halo, 1 if spec.layout == "planar" else target.lanes
    )


def emit(spec: PackSpec | UnpackSpec, plan: KernelPlan, target: TargetSpec, symbol: str) -> Any:
    """The kernel. Arguments: x, y."""
    spec = _with_longer_lines(spec, target)
    image = _image(spec, target)
    tasks = tiling.planned_tasks(plan, image.blocks, image.height)

    def task(number: Expr, buffers: tuple[Buffer, ...]) -> None:
        def line(plane: Expr, row: Expr) -> None:
            if isinstance(spec, UnpackSpec):
                _unpack_line(spec, image, buffers, plane, row)
            elif spec.layout == "planar":
                _copy_line(image, buffers, plane, row, target.lanes)
            else:
                _pack_line(spec, image, buffers, plane, row)

        tasks.each(number, line)

    plain = spec.channels * spec.height * spec.width
    sizes = (image.elements, plain) if isinstance(spec, UnpackSpec) else (plain, image.elements)
    return T.kernel(symbol, [Argument("x", sizes[0]), Argument("y", sizes[1])], task)


def _copy_line(image: Image, buffers: tuple[Buffer, ...], plane: Expr, row: Expr, lanes: int) -> None:
    """One line of one channel, plain to planar."""
    x, y = buffers
    source = (plane * image.height + row) * image.width
    into = plane * image.plane + image.origin + row * image.row
    whole, rest = divmod(image.width, lanes)
    if whole:
        T.repeat(whole, lambda i: T.store(y, into + i * lanes, x[T.lanes_at(source + i * lanes, lanes)], lanes))
    after = whole * lanes
    T.one_by_one(rest, lambda i: T.store(y, into + after + i, x[source + after + i], 1))


def _pack_line(spec: PackSpec, image: Image, buffers: tuple[Buffer, ...], block: Expr, row: Expr) -> None:
    """One line of one channel block, plain to blocked: squares of as many channels as pixels, else pixel by pixel."""
    x, y = buffers
    lanes, step = image.lanes, spec.height * spec.width

    def square(column: Expr, channels: int) -> None:
        source = block * (lanes * step) + row * spec.width + column
        into = block * image.plane + image.origin + row * image.row + column * lanes
        rows = [x[T.lanes_at(source + lane * step, lanes)] for lane in range(channels)]
        rows += [T.constant(0.0, lanes)] * (lanes - channels)
        for i, pixel in enumerate(T.transposed(rows)):
            T.store(y, into + i * lanes, pixel, lanes)

    def pixel(column: Expr, channels: int) -> None:
        source = block * (lanes * step) + row * spec.width + column
        into = block * image.plane + image.origin + row * image.row + column * lanes
        if channels == lanes:
            T.store(y, into, x[T.strided(source, step, lanes)], lanes)
            return
        for lane in range(lanes):
            value = x[source + lane * step] if lane < channels else tirx.const(0.0, "float32")
            T.store(y, into + lane, value, 1)

    _each_square(image, block, square, pixel)


def _unpack_line(spec: UnpackSpec, image: Image, buffers: tuple[Buffer, ...], block: Expr, row: Expr) -> None:
    """One line of one channel block, blocked to plain: as `_pack_line`, or channels of a pixel stay together."""
    x, y = buffers
    lanes, step, pixel_step = image.lanes, spec.height * spec.width, 1
    if spec.channels_last:
        step, pixel_step = 1, spec.channels

    def square(column: Expr, channels: int) -> None:
        source = block * image.plane + image.origin + row * image.row + column * lanes
        into = block * (lanes * step) + row * spec.width + column
        rows = [x[T.lanes_at(source + i * lanes, lanes)] for i in range(lanes)]
        for lane, line in enumerate(T.transposed(rows)[:channels]):
            T.store(y, into + lane * step, line, lanes)

    def pixel(column: Expr, channels: int) -> None:
        source = block * image.plane + image.origin + row * image.row + column * lanes
        into = block * (lanes * step) + (row * spec.width + column) * pixel_step
        if channels == lanes:
            T.store(y, into, x[T.lanes_at(source, lanes)], lanes, step)
            return
        for lane in range(channels):
            T.store(y, into + lane * step, x[source + lane], 1)

    _each_square(image, block, pixel if spec.channels_last else square, pixel)


Place = Callable[[Expr, int], None]  # of a column and a number of channels


def _each_square(image: Image, block: Expr, square: Place, pixel: Place) -> None:
    """Call `square` for every `lanes` pixels of a line, the last of which may overlap, or `pixel` for each one.

    The last block may have fewer channels than the others.
    """
    whole, rest = divmod(image.channels, image.lanes)
    narrow = image.width < image.lanes or square is pixel

    def line(channels: int) -> None:
        if narrow:
            T.repeat(image.width, lambda column: pixel(column, channels))
            return
        last = image.width - image.lanes
        count = -(-image.width // image.lanes)
        T.repeat(count, lambda index: square(T.at_most(index * image.lanes, last), channels))

    _either_block(block, whole, rest, partial(line, image.lanes), partial(line, int(rest)))


def _either_block(block: Expr, whole: int, rest: int, full: Any, partial: Any) -> None:
    """`full` for the first `whole` blocks, `partial` for the one after them, if there is one."""
    if not rest:
        full()
    elif not whole:
        partial()
    else:
        T.either(block < whole, full, partial)


def _blocked(spec: SequencePackSpec, target: TargetSpec) -> Image:
    return Image(spec.channels, 1, spec.positions, 0, target.lanes)


def sequence_candidates(spec: SequencePackSpec, target: TargetSpec) -> Iterator[KernelPlan]:
    """The only plan."""
    image, cut = _blocked(spec, target), tiling.cut_line(spec.positions, POSITIONS)
    moved = 2 * image.elements * FLOAT_BYTES
    tasks = tiling.plane_tasks(cut.bands, image.blocks, 0, moved, target)
    knobs: dict[str, int | str] = {"bands": tasks.groups_per_task, "blocks": tasks.bands_per_task}
    text = f"{'unpack' if spec.unpack else 'pack'} {tasks.groups_per_task}x{tasks.bands_per_task}"
    yield tiling.make_plan(spec, knobs, tasks.count, text, int(moved * tasks.largest_share), POSITIONS)


def sequence_emit(spec: SequencePackSpec, plan: KernelPlan, target: TargetSpec, symbol: str) -> Any:
    """The kernel. Arguments: x, y."""
    image, cut = _blocked(spec, target), tiling.cut_line(spec.positions, POSITIONS)
    tasks = Tasks(cut.bands, image.blocks, tiling.knob(plan, "bands"), tiling.knob(plan, "blocks"), pixels_first=False)

    def task(number: Expr, buffers: tuple[Buffer, ...]) -> None:
        tasks.each(number, lambda group, block: _band(spec, image, cut, buffers, group, block))

    plain = (spec.positions - 1) * spec.position_stride + spec.channels
    sizes = (image.elements, plain) if spec.unpack else (plain, image.elements)
    return T.kernel(symbol, [Argument("x", sizes[0]), Argument("y", sizes[1])], task)


def _band(
    spec: SequencePackSpec, image: Image, cut: BandCut, buffers: tuple[Buffer, ...], number: Expr, block: Expr
) -> None:
    """One block of channels of the positions of one band."""
    whole, rest = divmod(spec.channels, image.lanes)

    def positions(index: Expr, band: Band) -> None:
        for i in range(band.segments[0].width):
            position = cut.pixel(index, band) + i
            places = (
                position * spec.position_stride + block * image.lanes,
                (block * image.plane) + position * image.lanes,
            )
            full = partial(_move_vector, spec, image.lanes, buffers, places)
            T.either(
                block < whole if rest else True, full, partial(_move_rest, spec, image.lanes, rest, buffers, places)
            )

    cut.each(number, 1, positions)


def _move_vector(spec: SequencePackSpec, lanes: int, buffers: tuple[Buffer, ...], places: tuple[Expr, Expr]) -> None:
    x, y = buffers
    source, into = places[::-1] if spec.unpack else places
    T.store(y, into, x[T.lanes_at(source, lanes)], lanes)


def _move_rest(
    spec: SequencePackSpec, lanes: int, count: int, buffers: tuple[Buffer, ...], places: tuple[Expr, Expr]
) -> None:
    """The channels of the last, partial block, one by one: nothing beyond the plain tensor is touched."""
    x, y = buffers
    source, into = places[::-1] if spec.unpack else places
    for lane in range(count):
        T.store(y, into + lane, x[source + lane], 1)
    for lane in range(count, 0 if spec.unpack else lanes):
        T.store(y, into + lane, T.constant(0.0, 1), 1)
