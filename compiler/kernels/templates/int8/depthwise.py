"""Depthwise convolution of bytes. Products and sums are float32 numbers, which hold such integers exactly.

A task computes rows of planes of 64 channels. Register tiles are some pixels of a row and a vector of
channels. Weights are packed [plane][kh][kw][64].
"""

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from gangway.artifact.format import TargetSpec
from gangway.compiler.kernels.int8_specs import FACTORS
from gangway.compiler.kernels.specs import BYTES_CHANNELS, ConvSpec, KernelPlan, PackedWeights, RawWeights
from gangway.compiler.kernels.templates import builder as T
from gangway.compiler.kernels.templates.builder import Argument, Buffer, Expr, Register, tirx
from gangway.compiler.kernels.templates.float32_math import activate
from gangway.compiler.kernels.templates.int8 import instructions as int8
from gangway.compiler.kernels.templates.tiling import Image, each_tile, plane_plan, planned_tasks, segments

TILE_PIXELS = {16: 14, 8: 7}  # by lanes: of 32 registers or 16
MOST_SUM = 1 << 24


def computes(spec: ConvSpec, target: TargetSpec) -> bool:
    """Whether this template has a kernel for a convolution."""
    return int8.multiplies(target) and spec.dilation == (1, 1)


def _images(spec: ConvSpec, target: TargetSpec) -> tuple[Image, Image]:
    return (
        Image(spec.in_channels, spec.height, spec.width, spec.input_halo, BYTES_CHANNELS),
        Image(spec.in_channels, *spec.output_size, spec.output_halo, target.lanes if spec.dynamic else BYTES_CHANNELS),
    )


def candidates(spec: ConvSpec, target: TargetSpec) -> Iterator[KernelPlan]:
    """The only plan."""
    x, y = _images(spec, target)
    moved = x.elements + y.elements
    moved += 3 * y.elements if spec.dynamic else 0
    yield plane_plan(
        spec, "depthwise int8", (x.blocks, y.height), 2 * spec.flops, moved, TILE_PIXELS[target.lanes], target
    )


def pack(spec: ConvSpec, target: TargetSpec, raw: RawWeights) -> PackedWeights:
    """Weights, biases and multipliers of whole planes, and y's zero point; or what dynamic ones have."""
    surplus = -spec.in_channels % BYTES_CHANNELS
    weights = np.pad(raw["weights"].reshape(spec.in_channels, -1), ((0, surplus), (0, 0)))
    packed = weights.reshape(-1, BYTES_CHANNELS, math.prod(spec.kernel)).transpose(0, 2, 1)
    if spec.dynamic:
        scales, bias = (np.pad(raw[name], (0, surplus)) for name in ("scales", "bias"))
        return np.ascontiguousarray(packed), weights.sum(1, np.int32), scales, bias
    bias, multiplier = (np.pad(raw[name], (0, surplus)) for name in ("bias", "multiplier"))
    return np.ascontiguousarray(packed), bias, multiplier, raw["zero"]


def emit(spec: ConvSpec, plan: KernelPlan, target: TargetSpec, symbol: str) -> Any:
    """The kernel. Arguments: as `ConvSpec` has those of integers."""
    x_image, y_image = _images(spec, target)
    tasks = planned_tasks(plan, x_image.blocks, y_image.height)
    lanes, plane_blocks = target.lanes, BYTES_CHANNELS // target.lanes
    (rows, columns), (down, across) = spec.kernel, spec.stride
    tiles = segments(y_image.width, TILE_PIXELS[target.lanes])

    def task(number: Expr, buffers: tuple[Buffer, ...]) -> None:
        x, weights, sums, multiplier, *others, y = buffers
        factors = others[-1]  # of a dynamic one; else the zero point
        zero = T.bind(T.splat(tirx.Cast("int32", factors[3 if spec.dynamic else 0]), lanes))
        scale = T.bind(T.splat(factors[0], lanes))

        def finished(total: Expr, factor: Expr, where: Expr) -> Expr:
            if not spec.dynamic:
                return int8.bytes_of(total * factor, zero, lanes)
            return activate(int8.scaled(total, factor, lanes) + others[0][where], spec.activation, lanes)

        def tile(plane: Expr, row: Expr, block: Expr, column: Expr, width: int) -> None:
            channel = block * lanes
            where = T.lanes_at(plane * BYTES_CHANNELS + channel, lanes)
            first = T.constant(0, lanes, "int32") - sums[where] * zero if spec.dynamic else sums[where]
            added = T.bind(tirx.Cast(f"float32x{lanes}", first))
            factor = T.bind(multiplier[where] * scale if spec.dynamic else multiplier[where])
            totals = [Register(lanes, added) for _ in range(width)]
            base = T.bind(
                plane * x_image.plane + x_image.origin + channel + (row * down - spec.pads[0]) * x_image.row
                + (column * across - spec.pads[1]) * BYTES_CHANNELS
            )  # fmt: skip

            def window_row(i: Expr) -> None:
                at = T.bind((plane * rows + i) * (columns * BYTES_CHANNELS) + channel)
                taps = [T.bind(int8.floats_of(weights, at + j * BYTES_CHANNELS, lanes)) for j in range(columns)]
                for place in range((width - 1) * across + columns):
                    users = [
                        (pixel, place - pixel * across)
                        for pixel in range(width)
                        if 0 <= place - pixel * across < columns
                    ]
                    if not users:
                        continue
                    value = T.bind(int8.floats_of(x, base + i * x_image.row + place * BYTES_CHANNELS, lanes))
                    for pixel, tap in users:
                        totals[pixel].add(value * taps[tap])

            T.repeat(rows, window_row)
            out = y_image.origin + row * y_image.row + column * y_image.lanes
            blocked = (plane * plane_blocks + block) * y_image.plane
            out = out + (blocked if spec.dynamic else plane * y_image.plane + channel)
            for pixel, total in enumerate(totals):
                T.store(y, out + pixel * y_image.lanes, finished(total.value, factor, where), lanes)

        def line(plane: Expr, row: Expr) -> None:
            blocks = T.at_most(plane_blocks, y_image.blocks - plane * plane_blocks) if spec.dynamic else plane_blocks
            T.repeat(blocks, lambda block: each_tile(tiles, partial(tile, plane, row, block)))

        tasks.each(number, lambda plane, row: line(T.bind(plane), T.bind(row)))

    channels = x_image.blocks * BYTES_CHANNELS
    last = [Argument("bias", channels), Argument("factors", FACTORS)] if spec.dynamic else [Argument("zero", 1)]
    arguments = [
        Argument("x", x_image.elements, "uint8"),
        Argument("weights", channels * rows * columns, "int16" if spec.dynamic else "int8"),
        Argument("sums", channels, "int32"),
        Argument("multiplier", channels),
        *last,
        Argument("y", y_image.elements, "float32" if spec.dynamic else "uint8"),
    ]
    return T.kernel(symbol, arguments, task, int8.functions(target))
