"""Winograd convolutions for several rows in one call, with the weights of the kernel for one row.

The transformed weights are read once for each band of tiles, from beyond the second level cache. A small image has too
few tiles for bands as large as the registers allow: two of 8 instead of one of 14, with 14x14 outputs and AVX-512. Here
tiles of all rows follow each other and are cut into equal bands. A tile is computed as in the kernel for one row, so
results are the same, bit for bit.
"""

from functools import lru_cache
from typing import Any

from gangway.artifact.format import TargetSpec
from gangway.compiler.specs import BatchPlan, ConvSpec
from gangway.compiler.templates.base import FLOAT_BYTES, balanced_sizes
from gangway.compiler.templates.builder import Argument, Buffer, Expr, bind, choose, kernel, quotient, when
from gangway.compiler.templates.tiling import Tasks
from gangway.compiler.templates.winograd import SCRATCH_BYTES, Work, best_work
from gangway.compiler.templates.winograd_tiles import Multiply, Span, Strides, Writer

MOST_BANDS = 8  # of one call, in which the last one costs little if it is not full
TASK_US = 500.0  # of one task at most, about: nobody can stop it
WORTH = 0.75  # of a row's bands alone, or fewer: for each of them its weights are read


def plan(spec: ConvSpec, target: TargetSpec) -> BatchPlan | None:
    """The kernel for several rows; None where an image has tiles enough."""
    joined = _join(spec, target)
    if joined is None:
        return None
    work, tasks = joined
    m, tile = work.scheme.outputs, f"{work.band}x{work.geometry.group_blocks}"
    text = f"winograd {m}x{m} {work.rows} rows, {tile} {tasks.groups_per_task}x1"
    return BatchPlan(spec, work.rows, tasks.count, text)


@lru_cache
def _join(spec: ConvSpec, target: TargetSpec) -> tuple[Work, Tasks] | None:
    """Rows, and how they are cut into tasks, if that is worth it."""
    one = best_work(spec, target)
    if one is None:
        return None
    work = Work(one.geometry, one.scheme, max(1, MOST_BANDS * one.most_tiles // one.tiles))
    if work.bands > WORTH * work.rows * one.bands or work.scratch_bytes(1) > SCRATCH_BYTES:
        return None
    cuts = [tasks for tasks in work.cuts() if tasks.bands_per_task == 1 and tasks.pixels_first]
    return work, next((tasks for tasks in cuts if work.task_us(tasks) <= TASK_US), cuts[-1])


def emit(plan: BatchPlan, target: TargetSpec, symbol: str) -> Any:
    """The kernel. Arguments: x, weights, bias, [residual,] y, batch; see `artifact.format.BatchKernel`."""
    assert isinstance(plan.spec, ConvSpec)
    joined = _join(plan.spec, target)
    assert joined is not None  # it has been planned
    work, tasks = joined
    geometry, rows = work.geometry, work.rows
    arguments = [
        Argument("x", geometry.input.elements * rows),
        Argument("weights", work.weight_elements),
        Argument("bias", geometry.output.blocks * target.lanes),
        *([Argument("residual", geometry.residual.elements * rows)] if plan.spec.residual else []),
        Argument("y", geometry.output.elements * rows),
    ]
    tiles_of_one = work.tiles // rows
    sizes = balanced_sizes([tiles_of_one * number for number in range(1, rows + 1)], work.most_tiles)

    def task(number: Expr, buffers: tuple[Buffer, ...]) -> None:
        *tensors, batch = buffers
        strides = [bind(quotient(batch[index + 1], FLOAT_BYTES)) for index in range(len(tensors))]  # residual before y
        tiles = bind(batch[0].astype("int32") * tiles_of_one)
        bands = bind(quotient(tiles + (work.most_tiles - 1), work.most_tiles))
        _, part = tasks.first(number)
        band = bind(quotient(part * bands, work.bands))  # the bands that there are, evenly over the tasks

        def compute() -> None:
            first = bind(quotient(band * tiles, bands))
            count = bind(quotient((band + 1) * tiles, bands) - first)

            def each(multiply: Multiply) -> None:
                choose(count, sizes, lambda size: multiply(0, size))

            span = Span(first, count, sizes[-1], each, Strides(strides[0], strides[-2], strides[-1]))
            writer = Writer(geometry, work.scheme, work.grid, span, tuple(tensors))
            writer.transform_inputs()
            tasks.each_group(number, lambda group, _: writer.group(group))

        when(quotient((part + 1) * bands, work.bands) > band, compute)

    return kernel(symbol, [*arguments, Argument("batch", len(arguments) + 1, "int64")], task)
