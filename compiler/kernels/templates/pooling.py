"""Max and average pooling on blocked activations, over windows and over whole images.

For each tile, columns are reduced over the window's rows first and then combined, so that every input is loaded once.
Columns whose window reaches into the padding are single tiles at known places; rows are bounded at run time.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

from tvm import tirx

from gangway.artifact.format import TargetSpec
from gangway.compiler.kernels.extents import Extent, is_constant
from gangway.compiler.kernels.specs import DepthWindow, GlobalPoolSpec, KernelPlan, KernelSpec, PoolSpec, VolumePoolSpec
from gangway.compiler.kernels.templates import builder as T
from gangway.compiler.kernels.templates import tiling
from gangway.compiler.kernels.templates.bf16 import words as bf16
from gangway.compiler.kernels.templates.builder import Argument, Buffer, Expr, Register
from gangway.compiler.kernels.templates.tiling import FLOAT_BYTES, Image, Tasks, TileSegment, UnsupportedSpecError

TILE_PIXELS = 8
SUMS = 8  # independent sums, to hide the latency of the additions
_LOWEST = -3.4028234663852886e38  # as of onnxruntime, whose largest number of -inf alone it is


def candidates(spec: PoolSpec, target: TargetSpec) -> Iterator[KernelPlan]:
    """The only plan."""
    yield _plan(spec, spec, DepthWindow(1, 1), target)


def volume_candidates(spec: VolumePoolSpec, target: TargetSpec) -> Iterator[KernelPlan]:
    """The only plan."""
    yield _plan(spec, spec.pool, spec.depth, target)


def _plan(whole: KernelSpec, spec: PoolSpec, depth: DepthWindow, target: TargetSpec) -> KernelPlan:
    check_windows(spec, depth)
    x, y = _images(spec, target, depth)
    moved = (x.elements + y.elements) * FLOAT_BYTES
    flops = y.elements * spec.kernel[0] * spec.kernel[1] * depth.kernel
    return tiling.plane_plan(
        whole, f"{spec.mode} pool {TILE_PIXELS} pixels", (y.blocks, y.height), flops, moved, TILE_PIXELS, target
    )


def check_windows(spec: PoolSpec, depth: DepthWindow) -> None:
    """Raise UnsupportedSpecError if a window has nothing but padding."""
    front, _ = depth.pads
    last_slice = (depth.output - 1) * depth.stride - front
    if depth.dilation != 1 or front >= depth.kernel or last_slice >= depth.length or depth.output < 1:
        raise UnsupportedSpecError(f"pooling with a window that lies wholly in the padding: {spec}, {depth}")
    top, left, _, _ = spec.pads
    (rows, columns), size = spec.output_size, (spec.height, spec.width)
    last = ((rows - 1) * spec.stride[0] - top, (columns - 1) * spec.stride[1] - left)
    if (
        min(rows, columns) < 1
        or top >= spec.kernel[0]
        or left >= spec.kernel[1]
        or last[0] >= size[0]
        or last[1] >= size[1]
    ):
        raise UnsupportedSpecError(f"pooling with a window that lies wholly in the padding: {spec}")


def _images(spec: PoolSpec, target: TargetSpec, depth: DepthWindow) -> tuple[Image, Image]:
    rows, columns = spec.output_size
    return (
        Image(spec.channels, depth.length * spec.height, spec.width, spec.input_halo, target.lanes),
        Image(spec.channels, depth.output * rows, columns, spec.output_halo, target.lanes),
    )


@dataclass(frozen=True)
class PoolingAxis:
    """One axis of the pooling window."""

    size: int
    stride: int
    pad: int
    limit: int  # the input's length
    counted: int  # padding at the end that counts

    def inside(self, position: Expr) -> bool:
        """Whether the window at an output position lies wholly in the input."""
        start = position * self.stride - self.pad
        return bool(start >= 0 and start + self.size <= self.limit)

    def first(self, position: Expr) -> Expr:
        """The window's first tap that is not padding."""
        return T.at_least(self.pad - position * self.stride, 0)

    def end(self, position: Expr) -> Expr:
        """One past the window's last tap that is not padding."""
        return T.at_most(self.limit + self.pad - position * self.stride, self.size)

    def taps(self, position: Expr) -> range:
        """The window's taps that are not padding, at a known position."""
        start = position * self.stride - self.pad
        return range(int(max(-start, 0)), int(min(self.limit - start, self.size)))

    def padded(self, position: Expr) -> Expr:
        """Number of the window's taps, those in padding included that counts."""
        return T.at_most(self.limit + self.pad + self.counted - position * self.stride, self.size)


def windows(spec: PoolSpec, depth: DepthWindow) -> tuple[PoolingAxis, PoolingAxis, PoolingAxis]:
    """The three axes: slices, lines, columns."""
    down, across = (
        PoolingAxis(
            spec.kernel[axis], spec.stride[axis], spec.pads[axis], size, spec.pads[axis + 2] - spec.ceil_pads[axis]
        )
        for axis, size in enumerate((spec.height, spec.width))
    )
    return PoolingAxis(depth.kernel, depth.stride, depth.pads[0], depth.length, depth.pads[1]), down, across


def _segments(window: PoolingAxis, width: int) -> list[TileSegment]:
    """Columns as tiles: single ones at the borders, wider ones between."""
    first = min(-(-window.pad // window.stride), width)
    end = min(max(first, (window.limit + window.pad - window.size) // window.stride + 1), width)
    border = [*range(first), *(end + i for i in range(width - end))]
    inner = tiling.segments(end - first, TILE_PIXELS) if end > first else ()
    return [TileSegment(column, 1, 1) for column in border] + [tile.moved(first) for tile in inner]


def emit(spec: PoolSpec, plan: KernelPlan, target: TargetSpec, symbol: str) -> Any:
    """The kernel. Arguments: x, y."""
    return _emit(plan, spec, DepthWindow(1, 1), target, symbol)


def volume_emit(spec: VolumePoolSpec, plan: KernelPlan, target: TargetSpec, symbol: str) -> Any:
    """The kernel. Arguments: x, y."""
    return _emit(plan, spec.pool, spec.depth, target, symbol)


def _emit(plan: KernelPlan, spec: PoolSpec, depth: DepthWindow, target: TargetSpec, symbol: str) -> Any:
    lanes = target.lanes
    x_image, y_image = _images(spec, target, depth)
    slices, down, across = windows(spec, depth)
    height = spec.output_size[0]
    tasks = tiling.planned_tasks(plan, y_image.blocks, y_image.height)
    tiles = _segments(across, y_image.width)

    def combine(a: Expr, b: Expr) -> Expr:
        return tirx.Max(a, b) if spec.mode == "max" else a + b

    def task(number: Expr, buffers: tuple[Buffer, ...]) -> None:
        x = bf16.Blocked(buffers[0], x_image.plane, spec.input_layout)
        y = bf16.Blocked(buffers[1], y_image.plane, spec.output_layout)

        def tile(block: Expr, line_number: Expr, column: Expr, width: int) -> None:
            flat = depth == DepthWindow(1, 1)
            place, row = (
                (0, line_number) if flat else (T.quotient(line_number, height), T.remainder(line_number, height))
            )
            known = isinstance(column, int | Extent)  # of single ones at the borders
            taps = range(across.size) if not known or across.inside(column) else across.taps(column)
            needed = sorted({i * across.stride + tap for i in range(width) for tap in taps})
            start = T.constant(float("-inf") if spec.mode == "max" else 0.0, lanes)
            columns = {offset: Register(lanes, start) for offset in needed}
            first, end = down.first(row), down.end(row)

            def line(kh: Expr, skipped: Expr = 0) -> None:
                base = x_image.origin + (row * down.stride - down.pad + first + kh) * x_image.row
                base = base + skipped
                base = base + (column * across.stride - across.pad) * lanes
                for offset, register in columns.items():
                    register.set(combine(register.value, x.load(block, base + offset * lanes, lanes)))

            front, back = (0, 1) if flat else (slices.first(place), slices.end(place))

            def of_slice(kd: Expr) -> None:
                skipped = (place * slices.stride - slices.pad + front + kd) * (spec.height * x_image.row)
                T.repeat(end - first, lambda kh: line(kh, skipped))

            if flat:
                T.repeat(end - first, line)
            else:
                T.repeat(back - front, of_slice)
            for i in range(width):
                found = [columns[i * across.stride + tap].value for tap in taps]
                value = found[0]
                for other in found[1:]:
                    value = combine(value, other)
                if spec.mode == "average":
                    count = (end - first) * len(taps) * (back - front)
                    if spec.count_include_pad:  # only border columns, single and at known places, can reach the padding
                        count = down.padded(row) * (across.padded(column) if known else across.size)
                        count = count * (1 if flat else slices.padded(place))
                    value = value * T.splat(tirx.const(1.0, "float32") / tirx.Cast("float32", count), lanes)
                out = y_image.origin + line_number * y_image.row + (column + i) * lanes
                y.store(block, out, value, lanes)

        tasks.each(number, lambda block, row: tiling.each_tile(tiles, partial(tile, block, row)))

    arguments = [
        bf16.stored_argument("x", x_image.elements, spec.input_layout),
        bf16.stored_argument("y", y_image.elements, spec.output_layout),
    ]
    return T.kernel(symbol, arguments, task, bf16.functions(target) if spec.has("bf16") else "")


def global_candidates(spec: GlobalPoolSpec, target: TargetSpec) -> Iterator[KernelPlan]:
    """The only plan."""
    x = _image(spec, target)
    moved = x.elements * FLOAT_BYTES
    tasks = tiling.plane_tasks(x.blocks, 1, x.elements, moved, target)
    text = f"global pool {tasks.groups_per_task}"
    yield tiling.make_plan(
        spec, {"groups": tasks.groups_per_task}, tasks.count, text, int(moved * tasks.largest_share), SUMS
    )


def _image(spec: GlobalPoolSpec, target: TargetSpec) -> Image:
    return Image(spec.channels, spec.height, spec.width, spec.input_halo, target.lanes)


def global_emit(spec: GlobalPoolSpec, plan: KernelPlan, target: TargetSpec, symbol: str) -> Any:
    """The kernel. Arguments: x, y."""
    image, lanes = _image(spec, target), target.lanes
    tasks = Tasks(image.blocks, 1, tiling.knob(plan, "groups"), 1, pixels_first=False)
    sums_count = min(SUMS, image.width)

    def combine(a: Expr, b: Expr) -> Expr:
        return a + b if spec.mode == "average" else tirx.Max(a, b)

    def task(number: Expr, buffers: tuple[Buffer, ...]) -> None:
        x, y = bf16.Blocked(buffers[0], image.plane, spec.input_layout), buffers[1]

        def plane(block: Expr, _: Expr) -> None:
            start = 0.0 if spec.mode == "average" else _LOWEST
            sums = [Register(lanes, T.constant(start, lanes)) for _ in range(sums_count)]

            def pixels(base: Expr, count: int) -> None:
                for i in range(count):
                    sums[i].set(combine(sums[i].value, x.load(block, base + i * lanes, lanes)))

            def line(row: Expr) -> None:
                base = image.origin + row * image.row
                whole, rest = divmod(image.width, sums_count)
                T.repeat(whole, lambda i: pixels(base + i * (sums_count * lanes), sums_count))
                after = base + whole * sums_count * lanes
                if is_constant(rest):
                    pixels(after, rest)
                else:
                    T.repeat(rest, lambda i: pixels(after + i * lanes, 1))

            T.repeat(image.height, line)
            total = reduce(combine, (s.value for s in sums))
            if spec.mode == "average":
                total = total * T.reciprocal(image.height * image.width, lanes)
            T.store(y, block * lanes, total, lanes)

        tasks.each_group(number, plane)

    arguments = [bf16.stored_argument("x", image.elements, spec.input_layout), Argument("y", image.blocks * lanes)]
    return T.kernel(symbol, arguments, task, bf16.functions(target) if spec.has("bf16") else "")
