"""Images sampled at points that other numbers say, between four pixels each.

A task is some points of one image. Where their pixels lie, and how much each of them counts, is found once for all
channels.
"""

from collections.abc import Iterator
from functools import reduce
from operator import add
from typing import Any

from tvm import tirx

from gangway.artifact.format import TargetSpec
from gangway.compiler.kernels.plain_specs import GridSampleSpec
from gangway.compiler.kernels.specs import KernelPlan
from gangway.compiler.kernels.templates import builder as T
from gangway.compiler.kernels.templates.builder import Argument, Buffer, Expr
from gangway.compiler.kernels.templates.tiling import FLOAT_BYTES, TASK_ELEMENTS, knob, make_plan

_MOST_POINTS = 256  # of a task: what is found of them lies on the stack
_LIMIT = 2.0**63
_CORNERS = ((0, 0), (0, 1), (1, 0), (1, 1))  # lines and pixels further than the upper left one


def candidates(spec: GridSampleSpec, target: TargetSpec) -> Iterator[KernelPlan]:
    """The only plan."""
    points = min(spec.points, _MOST_POINTS, max(16, TASK_ELEMENTS // (4 * spec.channels)))
    tasks = spec.images * -(-spec.points // points)
    moved = FLOAT_BYTES * points * (2 + 5 * spec.channels)
    yield make_plan(spec, {"points": points}, tasks, f"{points} points, {spec.channels} channels", moved, 4)


def emit(spec: GridSampleSpec, plan: KernelPlan, target: TargetSpec, symbol: str) -> Any:
    """The kernel. Arguments: x, grid, y."""
    per_task, pixels = knob(plan, "points"), spec.height * spec.width
    parts, lanes = -(-spec.points // per_task), target.lanes

    def task(number: Expr, buffers: tuple[Buffer, ...]) -> None:
        x, grid, y = buffers
        image, begin = T.bind(T.quotient(number, parts)), T.bind(T.remainder(number, parts) * per_task)
        count = T.bind(T.constant(T.at_most(per_task, spec.points - begin), 1, "int32"))
        places, weights = T.scratch(4 * per_task, "int32"), T.scratch(4 * per_task)

        def point(index: Expr) -> None:
            at = T.bind((image * spec.points + begin + index) * 2)
            horizontal = T.keep(_place(spec, grid[at], spec.width))
            vertical = T.keep(_place(spec, grid[at + 1], spec.height))
            is_near = tirx.And(_is_near(horizontal, spec.width), _is_near(vertical, spec.height))
            zero, one, none = tirx.const(0.0, "float32"), tirx.const(1.0, "float32"), tirx.const(-1, "int32")
            is_near = T.keep(tirx.Select(is_near, tirx.const(1, "int32"), tirx.const(0, "int32")))
            column, line = (T.keep(tirx.Select(is_near > 0, place, zero)) for place in (horizontal, vertical))
            left, upper = (T.floor(place, "float32", 1) for place in (column, line))
            across, down = T.keep(column - left), T.keep(line - upper)
            first, top = (T.bind(tirx.Cast("int32", place)) for place in (left, upper))
            for corner, (lines, columns) in enumerate(_CORNERS):
                row, place = T.bind(top + lines), T.bind(first + columns)
                inside = tirx.And(tirx.And(row >= 0, row < spec.height), tirx.And(place >= 0, place < spec.width))
                inside = tirx.And(inside, is_near > 0)
                T.store(places, corner * per_task + index, tirx.Select(inside, row * spec.width + place, none), 1)
                share = (down if lines else one - down) * (across if columns else one - across)
                T.store(weights, corner * per_task + index, share, 1)

        def channel(index: Expr) -> None:
            source = T.bind((image * spec.channels + index) * pixels)
            into = T.bind((image * spec.channels + index) * spec.points + begin)

            def sample(first: Expr, lanes: int) -> None:
                terms: list[Expr] = []
                for corner in range(len(_CORNERS)):
                    at = T.lanes_at(corner * per_task + first, lanes)
                    place = T.keep(places[at])
                    pixel = T.keep(x[T.splat(source, lanes) + T.at_least(place, T.constant(0, lanes, "int32"))])
                    is_inside = place >= T.constant(0, lanes, "int32")
                    terms.append(T.keep(tirx.Select(is_inside, pixel, T.constant(0.0, lanes))) * weights[at])
                T.store(y, into + first, reduce(add, terms), lanes)

            whole = T.bind(T.quotient(count, lanes))
            T.repeat(whole, lambda step: sample(step * lanes, lanes))
            T.repeat(count - whole * lanes, lambda index: sample(whole * lanes + index, 1))

        T.repeat(count, point)
        T.repeat(spec.channels, channel)

    arguments = [
        Argument("x", spec.images * spec.channels * pixels),
        Argument("grid", spec.images * spec.points * 2),
        Argument("y", spec.images * spec.channels * spec.points),
    ]
    return T.kernel(symbol, arguments, task)


def _place(spec: GridSampleSpec, number: Expr, length: int) -> Expr:
    """A number from -1 to 1 as a place among pixels: between the middles, or the edges, of the first and last one.

    What has no integer of 64 bits, such as NaN, counts as -1, as it does in onnxruntime.
    """
    one, half = tirx.const(1.0, "float32"), tirx.const(0.5, "float32")
    number = T.keep(number)
    if spec.align_corners:
        place = T.keep((number + one) * half * tirx.const(float(length - 1), "float32"))
    else:
        place = T.keep(((number + one) * tirx.const(float(length), "float32") - one) * half)
    limit = tirx.const(_LIMIT, "float32")
    is_integer = tirx.And(place >= -limit, place < limit)
    return tirx.Select(is_integer, place, tirx.const(0.0 if spec.align_corners else -0.5, "float32"))


def _is_near(place: Expr, length: int) -> Expr:
    """Whether one of the two integers around a place is that of a pixel."""
    return tirx.And(place >= tirx.const(-1.0, "float32"), place < tirx.const(float(length), "float32"))
