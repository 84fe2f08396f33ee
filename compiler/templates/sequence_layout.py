"""Between plain sequences, [positions][channels], and blocked ones. A vector of channels is adjacent in both, so whole
vectors move; a few positions at a time, so that reads and writes both run on.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

from gangway.artifact.format import TargetSpec
from gangway.compiler.specs import KernelPlan, SequencePackSpec
from gangway.compiler.templates.base import FLOAT_BYTES, Image, knob, make_plan
from gangway.compiler.templates.builder import Argument, Buffer, Expr, constant, either, kernel, lanes_at, store
from gangway.compiler.templates.cost import plane_tasks
from gangway.compiler.templates.tiling import Band, Cut, Tasks, cut_line

POSITIONS = 8  # moved together


def _blocked(spec: SequencePackSpec, target: TargetSpec) -> Image:
    return Image(spec.channels, 1, spec.positions, 0, target.lanes)


def candidates(spec: SequencePackSpec, target: TargetSpec) -> Iterator[KernelPlan]:
    """The only plan."""
    image, cut = _blocked(spec, target), cut_line(spec.positions, POSITIONS)
    moved = 2 * image.elements * FLOAT_BYTES
    tasks = plane_tasks(cut.bands, image.blocks, 0, moved, target)
    knobs: dict[str, int | str] = {"bands": tasks.groups_per_task, "blocks": tasks.bands_per_task}
    text = f"{'unpack' if spec.unpack else 'pack'} {tasks.groups_per_task}x{tasks.bands_per_task}"
    yield make_plan(spec, knobs, tasks.count, text, int(moved * tasks.largest_share), POSITIONS)


def emit(plan: KernelPlan, target: TargetSpec, symbol: str) -> Any:
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
