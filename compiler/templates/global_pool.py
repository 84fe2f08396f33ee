"""Mean or maximum over all pixels of each channel."""

from collections.abc import Iterator
from functools import reduce
from typing import Any

from tvm import tirx

from gangway.artifact.format import TargetSpec
from gangway.compiler.specs import GlobalPoolSpec, KernelPlan
from gangway.compiler.templates.base import FLOAT_BYTES, Image, knob, make_plan
from gangway.compiler.templates.builder import (
    Argument,
    Buffer,
    Expr,
    Register,
    constant,
    kernel,
    lanes_at,
    repeat,
    store,
)
from gangway.compiler.templates.cost import plane_tasks
from gangway.compiler.templates.tiling import Tasks

SUMS = 8  # independent sums, to hide the latency of the additions


def candidates(spec: GlobalPoolSpec, target: TargetSpec) -> Iterator[KernelPlan]:
    """The only plan."""
    x = _image(spec, target)
    moved = x.elements * FLOAT_BYTES
    tasks = plane_tasks(x.blocks, 1, x.elements, moved, target)
    text = f"global pool {tasks.groups_per_task}"
    yield make_plan(spec, {"groups": tasks.groups_per_task}, tasks.count, text, int(moved * tasks.largest_share), SUMS)


def _image(spec: GlobalPoolSpec, target: TargetSpec) -> Image:
    return Image(spec.channels, spec.height, spec.width, spec.input_halo, target.lanes)


def emit(plan: KernelPlan, target: TargetSpec, symbol: str) -> Any:
    """The kernel. Arguments: x, y."""
    spec = plan.spec
    assert isinstance(spec, GlobalPoolSpec)
    image, lanes = _image(spec, target), target.lanes
    tasks = Tasks(image.blocks, 1, knob(plan, "groups"), 1, pixels_first=False)
    sums_count = min(SUMS, image.width)

    def combine(a: Expr, b: Expr) -> Expr:
        return a + b if spec.mode == "average" else tirx.Max(a, b)

    def task(number: Expr, buffers: tuple[Buffer, ...]) -> None:
        x, y = buffers

        def plane(block: Expr, _: Expr) -> None:
            start = 0.0 if spec.mode == "average" else float("-inf")
            sums = [Register(lanes, constant(start, lanes)) for _ in range(sums_count)]

            def pixels(base: Expr, count: int) -> None:
                for i in range(count):
                    sums[i].set(combine(sums[i].value, x[lanes_at(base + i * lanes, lanes)]))

            def line(row: Expr) -> None:
                base = block * image.plane + image.origin + row * image.row
                whole, rest = divmod(image.width, sums_count)
                repeat(whole, lambda i: pixels(base + i * (sums_count * lanes), sums_count))
                pixels(base + whole * sums_count * lanes, rest)

            repeat(image.height, line)
            total = reduce(combine, (s.value for s in sums))
            if spec.mode == "average":
                total = total * constant(1 / (image.height * image.width), lanes)
            store(y, block * lanes, total, lanes)

        tasks.each_group(number, plane)

    return kernel(symbol, [Argument("x", image.elements), Argument("y", image.blocks * lanes)], task)
