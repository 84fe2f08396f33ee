"""Conversion between plain tensors, as a client sends them, and blocked or planar images and sequences.

Plain tensors are read and written exactly within their bounds, at any 4-byte alignment. Packing writes the interior of
its output and zeros into surplus channels, and leaves the halo alone.

In a sequence, plain [positions][channels], a vector of channels is adjacent on both sides, so whole vectors move; a few
positions at a time, so that reads and writes both run on.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

from tvm import tirx

from gangway.artifact.format import TargetSpec
from gangway.compiler.kernels.specs import KernelPlan, PackSpec, SequencePackSpec, UnpackSpec
from gangway.compiler.kernels.templates.builder import (
    Argument,
    Buffer,
    Expr,
    constant,
    either,
    kernel,
    lanes_at,
    repeat,
    store,
    strided,
)
from gangway.compiler.kernels.templates.tiling import (
    FLOAT_BYTES,
    Band,
    Cut,
    Image,
    Tasks,
    cut_line,
    knob,
    make_plan,
    plane_tasks,
)

POSITIONS = 8  # moved together


def candidates(spec: PackSpec | UnpackSpec, target: TargetSpec) -> Iterator[KernelPlan]:
    """The only plan."""
    image = _image(spec, target)
    moved = 2 * image.elements * FLOAT_BYTES
    tasks = plane_tasks(image.blocks, image.height, image.elements, moved, target)
    kind = "unpack" if isinstance(spec, UnpackSpec) else "pack planar" if spec.planar else "pack"
    text = f"{kind} {tasks.groups_per_task}x{tasks.bands_per_task}"
    knobs: dict[str, int | str] = {"groups": tasks.groups_per_task, "bands": tasks.bands_per_task}
    yield make_plan(spec, knobs, tasks.count, text, int(moved * tasks.largest_share), 1)


def _image(spec: PackSpec | UnpackSpec, target: TargetSpec) -> Image:
    """The tensor that is not plain."""
    if isinstance(spec, UnpackSpec):
        return Image(spec.channels, spec.height, spec.width, spec.input_halo, target.lanes)
    return Image(spec.channels, spec.height, spec.width, spec.output_halo, 1 if spec.planar else target.lanes)


def emit(plan: KernelPlan, target: TargetSpec, symbol: str) -> Any:
    """The kernel. Arguments: x, y."""
    spec = plan.spec
    assert isinstance(spec, PackSpec | UnpackSpec)
    image = _image(spec, target)
    tasks = Tasks(image.blocks, image.height, knob(plan, "groups"), knob(plan, "bands"), pixels_first=False)

    def task(number: Expr, buffers: tuple[Buffer, ...]) -> None:
        def line(plane: Expr, row: Expr) -> None:
            if isinstance(spec, UnpackSpec):
                _unpack_line(spec, image, buffers, plane, row)
            elif spec.planar:
                _copy_line(image, buffers, plane, row, target.lanes)
            else:
                _pack_line(spec, image, buffers, plane, row)

        tasks.each(number, line)

    plain = spec.channels * spec.height * spec.width
    sizes = (image.elements, plain) if isinstance(spec, UnpackSpec) else (plain, image.elements)
    return kernel(symbol, [Argument("x", sizes[0]), Argument("y", sizes[1])], task)


def _copy_line(image: Image, buffers: tuple[Buffer, ...], plane: Expr, row: Expr, lanes: int) -> None:
    """One line of one channel, plain to planar."""
    x, y = buffers
    source = (plane * image.height + row) * image.width
    into = plane * image.plane + image.origin + row * image.row
    whole, rest = divmod(image.width, lanes)
    if whole:
        repeat(whole, lambda i: store(y, into + i * lanes, x[lanes_at(source + i * lanes, lanes)], lanes))
    for i in range(whole * lanes, whole * lanes + rest):
        store(y, into + i, x[source + i], 1)


def _pack_line(spec: PackSpec, image: Image, buffers: tuple[Buffer, ...], block: Expr, row: Expr) -> None:
    """One line of one channel block, plain to blocked: gathers the channels of each pixel."""
    x, y = buffers
    lanes, step = image.lanes, spec.height * spec.width
    whole, rest = divmod(spec.channels, lanes)

    def pixel(column: Expr) -> None:
        source = row * spec.width + column
        into = image.origin + row * image.row + column * lanes

        def full() -> None:
            gathered = x[strided(block * (lanes * step) + source, step, lanes)]
            store(y, block * image.plane + into, gathered, lanes)

        def partial() -> None:
            for lane in range(lanes):
                value = x[(whole * lanes + lane) * step + source] if lane < rest else tirx.const(0.0, "float32")
                store(y, whole * image.plane + into + lane, value, 1)

        _either_block(block, whole, rest, full, partial)

    repeat(spec.width, pixel)


def _unpack_line(spec: UnpackSpec, image: Image, buffers: tuple[Buffer, ...], block: Expr, row: Expr) -> None:
    """One line of one channel block, blocked to plain: scatters the channels of each pixel or keeps them together."""
    x, y = buffers
    lanes, step, pixel_step = image.lanes, spec.height * spec.width, 1
    if spec.channels_last:
        step, pixel_step = 1, spec.channels
    whole, rest = divmod(spec.channels, lanes)

    def pixel(column: Expr) -> None:
        source = image.origin + row * image.row + column * lanes
        into = (row * spec.width + column) * pixel_step

        def full() -> None:
            value = x[lanes_at(block * image.plane + source, lanes)]
            store(y, block * (lanes * step) + into, value, lanes, step)

        def partial() -> None:
            for lane in range(rest):
                store(y, (whole * lanes + lane) * step + into, x[whole * image.plane + source + lane], 1)

        _either_block(block, whole, rest, full, partial)

    repeat(spec.width, pixel)


def _either_block(block: Expr, whole: int, rest: int, full: Any, partial: Any) -> None:
    """`full` for the first `whole` blocks, `partial` for the one after them, if there is one."""
    if not rest:
        full()
    elif not whole:
        partial()
    else:
        either(block < whole, full, partial)


def _blocked(spec: SequencePackSpec, target: TargetSpec) -> Image:
    return Image(spec.channels, 1, spec.positions, 0, target.lanes)


def sequence_candidates(spec: SequencePackSpec, target: TargetSpec) -> Iterator[KernelPlan]:
    """The only plan."""
    image, cut = _blocked(spec, target), cut_line(spec.positions, POSITIONS)
    moved = 2 * image.elements * FLOAT_BYTES
    tasks = plane_tasks(cut.bands, image.blocks, 0, moved, target)
    knobs: dict[str, int | str] = {"bands": tasks.groups_per_task, "blocks": tasks.bands_per_task}
    text = f"{'unpack' if spec.unpack else 'pack'} {tasks.groups_per_task}x{tasks.bands_per_task}"
    yield make_plan(spec, knobs, tasks.count, text, int(moved * tasks.largest_share), POSITIONS)


def sequence_emit(plan: KernelPlan, target: TargetSpec, symbol: str) -> Any:
    """The kernel. Arguments: x, y."""
    spec = plan.spec
    assert isinstance(spec, SequencePackSpec)
    image, cut = _blocked(spec, target), cut_line(spec.positions, POSITIONS)
    tasks = Tasks(cut.bands, image.blocks, knob(plan, "bands"), knob(plan, "blocks"), pixels_first=False)

    def task(number: Expr, buffers: tuple[Buffer, ...]) -> None:
        tasks.each(number, lambda group, block: _band(spec, image, cut, buffers, group, block))

    plain = (spec.positions - 1) * spec.position_stride + spec.channels
    sizes = (image.elements, plain) if spec.unpack else (plain, image.elements)
    return kernel(symbol, [Argument("x", sizes[0]), Argument("y", sizes[1])], task)


def _band(
    spec: SequencePackSpec, image: Image, cut: Cut, buffers: tuple[Buffer, ...], number: Expr, block: Expr
) -> None:
    """One block of channels of the positions of one band."""
    whole, rest = divmod(spec.channels, image.lanes)

    def positions(index: Expr, band: Band) -> None:
        for i in range(band.segments[0].width):
            position = index * cut.row_pixels + i
            places = (
                position * spec.position_stride + block * image.lanes,
                (block * image.plane) + position * image.lanes,
            )
            full = partial(_move_vector, spec, image.lanes, buffers, places)
            either(block < whole if rest else True, full, partial(_move_rest, spec, image.lanes, rest, buffers, places))

    cut.each(number, 1, positions)


def _move_vector(spec: SequencePackSpec, lanes: int, buffers: tuple[Buffer, ...], places: tuple[Expr, Expr]) -> None:
    x, y = buffers
    source, into = places[::-1] if spec.unpack else places
    store(y, into, x[lanes_at(source, lanes)], lanes)


def _move_rest(
    spec: SequencePackSpec, lanes: int, count: int, buffers: tuple[Buffer, ...], places: tuple[Expr, Expr]
) -> None:
    """The channels of the last, partial block, one by one: nothing beyond the plain tensor is touched."""
    x, y = buffers
    source, into = places[::-1] if spec.unpack else places
    for lane in range(count):
        store(y, into + lane, x[source + lane], 1)
    for lane in range(count, 0 if spec.unpack else lanes):
        store(y, into + lane, constant(0.0, 1), 1)
