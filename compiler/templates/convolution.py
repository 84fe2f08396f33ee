"""Direct convolution on blocked activations (groups = 1), bias, residual and activation fused. A dense layer is the 1 x
1 case.
"""

from collections.abc import Iterator
from typing import Any

from gangway.artifact.format import TargetSpec
from gangway.compiler.specs import ConvSpec, KernelPlan
from gangway.compiler.templates.base import FLOAT_BYTES, knob, make_plan
from gangway.compiler.templates.builder import Argument, Buffer, Expr, either, kernel
from gangway.compiler.templates.cost import tasks_cost
from gangway.compiler.templates.geometry import Geometry, check, pack
from gangway.compiler.templates.register_tile import RegisterTiles
from gangway.compiler.templates.spread import Priced, spread, tile_cuts, tile_price
from gangway.compiler.templates.tiling import Cut, Tasks, all_tasks

__all__ = ["candidates", "emit", "pack"]


def candidates(spec: ConvSpec, target: TargetSpec) -> Iterator[KernelPlan]:
    """The static choice, then all other tile sizes, sizes of tasks and orders; they share packed weights."""
    check(spec)
    geometry = Geometry(spec, target)
    widest = geometry.tile_pixels
    static = min(_priced(geometry, widest, geometry.cut(widest)), key=lambda item: item[0])
    yield static[1]
    cuts = tile_cuts(widest, geometry.cut)
    yield from spread(static, (item for cut, size in cuts.items() for item in _priced(geometry, size, cut)))


def _priced(geometry: Geometry, tile_pixels: int, cut: Cut) -> Iterator[Priced]:
    """Every plan with register tiles of this size."""
    price = tile_price(geometry.tile_pixels, tile_pixels)
    for tasks in all_tasks(geometry.groups, cut.bands):
        if tasks.ordered:
            cost = tasks_cost(tasks, geometry.flops, geometry.traffic, geometry.target)
            yield price * cost, _plan(geometry, tile_pixels, cut, tasks)


def _plan(geometry: Geometry, tile_pixels: int, cut: Cut, tasks: Tasks) -> KernelPlan:
    pixels = max(size for size, _ in cut.tiles)
    blocks = geometry.group_blocks
    weights = blocks * geometry.target.lanes * geometry.reduction * FLOAT_BYTES
    inputs = geometry.traffic.input * tasks.bands_per_task // tasks.bands
    order = "pixels" if tasks.pixels_first else "weights"
    knobs: dict[str, int | str] = {
        "tile_pixels": tile_pixels,
        "groups": tasks.groups_per_task,
        "bands": tasks.bands_per_task,
        "pixels_first": int(tasks.pixels_first),
    }
    text = f"conv {pixels}x{blocks} {tasks.groups_per_task}x{tasks.bands_per_task} {order} first"
    return make_plan(geometry.spec, knobs, tasks.count, text, weights + inputs, pixels * blocks)


def emit(plan: KernelPlan, target: TargetSpec, symbol: str) -> Any:
    """The kernel. Arguments: x, weights, bias, [residual,] y."""
    assert isinstance(plan.spec, ConvSpec)
    geometry = Geometry(plan.spec, target)
    cut = geometry.cut(knob(plan, "tile_pixels"))
    tasks = Tasks(
        geometry.groups, cut.bands, knob(plan, "groups"), knob(plan, "bands"), bool(knob(plan, "pixels_first"))
    )
    lanes = target.lanes
    arguments = [
        Argument("x", geometry.input.elements),
        Argument("weights", geometry.output.blocks * lanes * geometry.reduction),
        Argument("bias", geometry.output.blocks * lanes),
        *([Argument("residual", geometry.residual.elements)] if plan.spec.residual else []),
        Argument("y", geometry.output.elements),
    ]

    def task(number: Expr, buffers: tuple[Buffer, ...]) -> None:
        writer = RegisterTiles(geometry, cut, buffers)
        full, rest = divmod(geometry.output.blocks, geometry.group_blocks)

        def group(index: Expr, first_band: Expr) -> None:
            either(
                index < full if rest else True,
                lambda: writer.bands(index, geometry.group_blocks, first_band, tasks.bands_per_task),
                lambda: writer.bands(full, rest, first_band, tasks.bands_per_task),
            )

        tasks.each_group(number, group)

    return kernel(symbol, arguments, task)
