"""Depthwise convolution on blocked activations: every channel has a kernel of its own.

A register tile is some pixels of one channel block. Each input vector is loaded once per kernel row and used by all
outputs that it touches. Weights are packed [block][kh][kw][lane].
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from gangway.artifact.format import TargetSpec
from gangway.compiler.specs import ConvSpec, KernelPlan, PackedWeights, RawWeights
from gangway.compiler.templates.activate import activate
from gangway.compiler.templates.base import FLOAT_BYTES, Image, UnsupportedSpecError, knob, make_plan, registers
from gangway.compiler.templates.builder import Argument, Buffer, Expr, Register, kernel, lanes_at, store
from gangway.compiler.templates.cost import plane_cost
from gangway.compiler.templates.geometry import check
from gangway.compiler.templates.spread import Priced, spread, tile_cuts, tile_price
from gangway.compiler.templates.tiling import Band, Cut, Tasks, all_tasks, cut_rows, each_tile


def _images(spec: ConvSpec, target: TargetSpec) -> tuple[Image, Image, Image]:
    """x, residual and y in memory."""
    size = spec.output_size
    return (
        Image(spec.in_channels, spec.height, spec.width, spec.input_halo, target.lanes),
        Image(spec.out_channels, *size, spec.residual_halo, target.lanes),
        Image(spec.out_channels, *size, spec.output_halo, target.lanes),
    )


def candidates(spec: ConvSpec, target: TargetSpec) -> Iterator[KernelPlan]:
    """The static choice, then all other tile sizes and sizes of tasks."""
    check(spec)
    if spec.out_channels != spec.in_channels or spec.input_planar:
        raise UnsupportedSpecError(f"depthwise convolution with a channel multiplier or planar input: {spec}")
    most = widest(spec, target)
    height, width = spec.output_size
    cuts = tile_cuts(most, partial(cut_rows, height, width))
    static = min(_priced(spec, target, most, cut_rows(height, width, most)), key=lambda item: item[0])
    yield static[1]
    yield from spread(static, (item for cut, size in cuts.items() for item in _priced(spec, target, size, cut)))


def widest(spec: ConvSpec, target: TargetSpec) -> int:
    """Most pixels a register tile should have."""
    return max(1, min(registers(target) - spec.kernel[1] - 2, 14))


def _priced(spec: ConvSpec, target: TargetSpec, tile_pixels: int, cut: Cut) -> Iterator[Priced]:
    """Every plan with register tiles of this size."""
    x, _, y = _images(spec, target)
    taps = spec.kernel[0] * spec.kernel[1]
    moved = (x.elements + y.elements) * FLOAT_BYTES
    pixels = max(size for size, _ in cut.tiles)
    price = tile_price(widest(spec, target), tile_pixels)
    for tasks in all_tasks(y.blocks, cut.bands):
        if tasks.pixels_first:
            continue  # no two tasks work with the same weights
        knobs: dict[str, int | str] = {
            "tile_pixels": tile_pixels,
            "groups": tasks.groups_per_task,
            "bands": tasks.bands_per_task,
        }
        text = f"depthwise {pixels} pixels {tasks.groups_per_task}x{tasks.bands_per_task}"
        cost = plane_cost(tasks, 2 * taps * y.blocks * y.lanes * y.height * y.width, moved, target)
        yield price * cost, make_plan(spec, knobs, tasks.count, text, int(moved * tasks.largest_share), pixels)


def pack(spec: ConvSpec, target: TargetSpec, raw: RawWeights) -> PackedWeights:
    """Weights and bias by channel blocks, padded with zeros."""
    lanes = target.lanes
    surplus = (0, -spec.out_channels % lanes)
    weights = np.pad(raw["weights"].astype(np.float32), (surplus, (0, 0), (0, 0), (0, 0)))
    blocked = weights.reshape(-1, lanes, *spec.kernel).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(blocked).ravel(), np.pad(raw["bias"].astype(np.float32), surplus)


def emit(plan: KernelPlan, target: TargetSpec, symbol: str) -> Any:
    """The kernel. Arguments: x, weights, bias, [residual,] y."""
    spec = plan.spec
    assert isinstance(spec, ConvSpec)
    lanes = target.lanes
    x_image, residual_image, y_image = _images(spec, target)
    cut = cut_rows(y_image.height, y_image.width, knob(plan, "tile_pixels"))
    tasks = Tasks(y_image.blocks, cut.bands, knob(plan, "groups"), knob(plan, "bands"), pixels_first=False)
    taps = spec.kernel[0] * spec.kernel[1]
    arguments = [
        Argument("x", x_image.elements),
        Argument("weights", y_image.blocks * taps * lanes),
        Argument("bias", y_image.blocks * lanes),
        *([Argument("residual", residual_image.elements)] if spec.residual else []),
        Argument("y", y_image.elements),
    ]

    def task(number: Expr, buffers: tuple[Buffer, ...]) -> None:
        x, weights, bias, *residual, y = buffers

        def tile(block: Expr, row: Expr, column: Expr, width: int) -> None:
            origin = x_image.origin - spec.pads[0] * x_image.row - spec.pads[1] * lanes + block * x_image.plane
            origin = origin + row * (spec.stride[0] * x_image.row) + column * (spec.stride[1] * lanes)

            def load(kh: int, skipped: int) -> Expr:
                return x[lanes_at(origin + kh * spec.dilation[0] * x_image.row + skipped * lanes, lanes)]

            for i, total in enumerate(sums(spec, lanes, weights, bias, block, width, load)):
                value = total.value
                if residual:
                    added = block * residual_image.plane + residual_image.origin + row * residual_image.row
                    value = value + residual[0][lanes_at(added + (column + i) * lanes, lanes)]
                out = block * y_image.plane + y_image.origin + row * y_image.row + (column + i) * lanes
                store(y, out, activate(value, spec.activation, lanes), lanes)

        def band(block: Expr, number: Expr, shape: Band) -> None:
            for row in range(shape.rows):
                each_tile(shape.segments, partial(tile, block, number * cut.full.rows + row))

        tasks.each_group(
            number, lambda block, first_band: cut.each(first_band, tasks.bands_per_task, partial(band, block))
        )

    return kernel(symbol, arguments, task)


def sums(
    spec: ConvSpec,
    lanes: int,
    weights: Buffer,
    bias: Buffer,
    block: Expr,
    width: int,
    load: Callable[[int, int], Expr],
) -> list[Register]:
    """Compute `width` outputs beside each other, without activation. `load(kh, column)`: an input vector under kernel
    row `kh`, so many columns from the first output's first tap.
    """
    totals = [Register(lanes, bias[lanes_at(block * lanes, lanes)]) for _ in range(width)]
    rows, columns = spec.kernel
    for kh in range(rows):
        taps_at = (block * (rows * columns) + kh * columns) * lanes
        line = [weights[lanes_at(taps_at + kw * lanes, lanes)] for kw in range(columns)]
        for i, kw in sorted(product(range(width), range(columns)), key=lambda pair: _column(spec, *pair)):
            totals[i].add(load(kh, _column(spec, i, kw)) * line[kw])
    return totals


def _column(spec: ConvSpec, pixel: int, kw: int) -> int:
    """The input column, from the tile's first, that tap `kw` of output `pixel` reads."""
    return pixel * spec.stride[1] + kw * spec.dilation[1]
