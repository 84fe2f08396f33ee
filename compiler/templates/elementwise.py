"""Elementwise operators on blocked images of any halos, of which they write the interior only."""

from collections.abc import Iterator
from typing import Any

from gangway.artifact.format import TargetSpec
from gangway.compiler.specs import BlockedElementwiseSpec, KernelPlan
from gangway.compiler.templates.activate import activate
from gangway.compiler.templates.base import FLOAT_BYTES, Image, knob, make_plan
from gangway.compiler.templates.builder import Argument, Buffer, Expr, kernel, lanes_at, repeat, store
from gangway.compiler.templates.cost import plane_tasks
from gangway.compiler.templates.tiling import Tasks

UNROLLED = 2  # vectors per iteration on blocked images


def _text(spec: BlockedElementwiseSpec) -> str:
    names = [name for name in (spec.operator, spec.activation.name) if name not in ("copy", "none")]
    return "+".join(names) or "copy"


def _compute(spec: BlockedElementwiseSpec, values: list[Expr], lanes: int) -> Expr:
    match spec.operator:
        case "add":
            value = values[0] + values[1]
        case "sub":
            value = values[0] - values[1]
        case "mul":
            value = values[0] * values[1]
        case "copy":
            value = values[0]
    return activate(value, spec.activation, lanes)


def candidates(spec: BlockedElementwiseSpec, target: TargetSpec) -> Iterator[KernelPlan]:
    """The only plan."""
    *inputs, y = _images(spec, target)
    moved = sum(image.elements for image in (*inputs, y)) * FLOAT_BYTES
    tasks = plane_tasks(y.blocks, y.height, y.elements, moved, target)
    knobs: dict[str, int | str] = {"groups": tasks.groups_per_task, "bands": tasks.bands_per_task}
    text = f"{_text(spec)} {tasks.groups_per_task}x{tasks.bands_per_task}"
    yield make_plan(spec, knobs, tasks.count, text, int(moved * tasks.largest_share), UNROLLED)


def _images(spec: BlockedElementwiseSpec, target: TargetSpec) -> list[Image]:
    """The inputs and y in memory."""
    lanes = target.lanes
    inputs = [
        Image(spec.channels, 1, 1, 0, lanes) if vector else Image(spec.channels, spec.height, spec.width, halo, lanes)
        for vector, halo in zip(spec.vectors, spec.input_halos, strict=True)
    ]
    return [*inputs, Image(spec.channels, spec.height, spec.width, spec.output_halo, lanes)]


def emit(plan: KernelPlan, target: TargetSpec, symbol: str) -> Any:
    """The kernel. Arguments: one or two inputs, y."""
    spec = plan.spec
    assert isinstance(spec, BlockedElementwiseSpec)
    lanes = target.lanes
    *x_images, y_image = _images(spec, target)
    tasks = Tasks(y_image.blocks, y_image.height, knob(plan, "groups"), knob(plan, "bands"), pixels_first=False)

    def task(number: Expr, buffers: tuple[Buffer, ...]) -> None:
        *inputs, y = buffers

        def line(block: Expr, row: Expr) -> None:
            def place(image: Image, column: Expr) -> Expr:
                return block * image.plane + image.origin + row * image.row + column * lanes

            def operand(index: int, column: Expr) -> Expr:
                base = block * lanes if spec.vectors[index] else place(x_images[index], column)
                return inputs[index][lanes_at(base, lanes)]

            def pixel(column: Expr) -> None:
                values = [operand(index, column) for index in range(len(inputs))]
                store(y, place(y_image, column), _compute(spec, values, lanes), lanes)

            def pixels(index: Expr) -> None:
                for u in range(UNROLLED):
                    pixel(index * UNROLLED + u)

            whole, rest = divmod(spec.width, UNROLLED)
            if whole:
                repeat(whole, pixels)
            for column in range(spec.width - rest, spec.width):
                pixel(column)

        tasks.each(number, line)

    names = ["a", "b"][: len(x_images)]
    arguments = [Argument(name, image.elements) for name, image in zip(names, x_images, strict=True)]
    return kernel(symbol, [*arguments, Argument("y", y_image.elements)], task)
