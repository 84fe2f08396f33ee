"""Max and average pooling of plain tensors: to pack what no convolution reads takes longer than the pooling itself.

The lines of a window become one, vector by vector, in local memory, between the padding of either side. Then each
result is found along that line.
"""

from collections.abc import Callable, Iterator
from typing import Any

from tvm import tirx

from gangway.artifact.format import TargetSpec
from gangway.compiler.kernels.plain_specs import PlainPoolSpec
from gangway.compiler.kernels.specs import KernelPlan
from gangway.compiler.kernels.templates import builder as T
from gangway.compiler.kernels.templates.builder import Argument, Buffer, Expr, Register
from gangway.compiler.kernels.templates.pooling import PoolingAxis, check_windows, windows
from gangway.compiler.kernels.templates.tiling import FLOAT_BYTES, UnsupportedSpecError, plane_plan, planned_tasks

UNROLLED = 4  # vectors of a line at a time
MOST_COLUMNS = 1 << 14  # of a line in local memory


def candidates(spec: PlainPoolSpec, target: TargetSpec) -> Iterator[KernelPlan]:
    """The only plan."""
    check_windows(spec.pool, spec.depth)
    if _line_elements(spec, target) > MOST_COLUMNS:
        raise UnsupportedSpecError(f"pooling of lines of {spec.pool.width} numbers")
    moved = (spec.input_elements + spec.output_elements) * FLOAT_BYTES
    yield plane_plan(
        spec, f"plain {spec.pool.mode} pool", (spec.pool.channels, spec.output_lines), spec.flops, moved, 1, target
    )


def _line_elements(spec: PlainPoolSpec, target: TargetSpec) -> int:
    """Numbers of a line with its padding, and those behind it that the last vectors read."""
    pool = spec.pool
    columns, (_, stride) = pool.output_size[1], pool.stride
    used = max(columns * stride + pool.kernel[1], pool.pads[1] + pool.width)
    return -(-(used + target.lanes * stride) // target.lanes) * target.lanes


def emit(spec: PlainPoolSpec, plan: KernelPlan, target: TargetSpec, symbol: str) -> Any:
    """The kernel. Arguments: x, y."""
    tasks = planned_tasks(plan, spec.pool.channels, spec.output_lines)

    def task(number: Expr, buffers: tuple[Buffer, ...]) -> None:
        lines = _Lines(spec, target, buffers)
        tasks.each(number, lines.write)

    return T.kernel(symbol, [Argument("x", spec.input_elements), Argument("y", spec.output_elements)], task)


class _Lines:
    """Writes lines of the result, one after the other, with the same local memory."""

    def __init__(self, spec: PlainPoolSpec, target: TargetSpec, buffers: tuple[Buffer, ...]) -> None:
        self._spec, self._pool, self._lanes = spec, spec.pool, target.lanes
        self._x, self._y = buffers
        self._slices, self._down, self._across = windows(spec.pool, spec.depth)
        self._start = float("-inf") if spec.pool.mode == "max" else 0.0
        self._line = T.scratch(_line_elements(spec, target))
        vectors, start = _line_elements(spec, target) // self._lanes, T.constant(self._start, self._lanes)
        T.repeat(vectors, lambda index: T.store(self._line, index * self._lanes, start, self._lanes))
        self._factors = T.scratch(spec.pool.output_size[1]) if spec.pool.mode == "average" else None
        if self._factors is not None:
            T.repeat(spec.pool.output_size[1], self._set_factor)

    def _set_factor(self, column: Expr) -> None:
        """One by the number of columns that a mean is of."""
        count = self._counted(self._across, column)
        T.store(self._factors, column, tirx.const(1.0, "float32") / tirx.Cast("float32", count), 1)

    def _counted(self, window: PoolingAxis, position: Expr) -> Expr:
        if self._pool.count_include_pad:
            return window.padded(position)
        return window.end(position) - window.first(position)

    def write(self, channel: Expr, number: Expr) -> None:
        """One line of one channel."""
        height, columns = self._pool.output_size
        place, row = T.bind(T.quotient(number, height)), T.bind(T.remainder(number, height))
        source = T.bind(channel * (self._spec.depth.length * self._pool.height * self._pool.width))
        first, end = T.bind(self._down.first(row)), T.bind(self._down.end(row))
        front, back = T.bind(self._slices.first(place)), T.bind(self._slices.end(place))
        begin = row * self._down.stride - self._down.pad + first
        begin = (place * self._slices.stride - self._slices.pad + front) * self._pool.height + begin
        base = T.bind(source + begin * self._pool.width)

        def reduce(columns: list[Expr], lanes: int) -> None:
            found = [Register(lanes, T.constant(self._start, lanes)) for _ in columns]

            def line(kd: Expr, kh: Expr) -> None:
                at = T.bind(base + (kd * self._pool.height + kh) * self._pool.width)
                for column, register in zip(columns, found, strict=True):
                    register.set(self._combined(register.value, self._x[T.lanes_at(at + column, lanes)]))

            T.repeat(back - front, lambda kd: T.repeat(end - first, lambda kh: line(kd, kh)))
            for column, register in zip(columns, found, strict=True):
                T.store(self._line, column + self._across.pad, register.value, lanes)

        _each_vector(self._pool.width, self._lanes, reduce)
        count = self._counted(self._down, row) * self._counted(self._slices, place)
        share = T.bind(tirx.const(1.0, "float32") / tirx.Cast("float32", count))
        into = T.bind((channel * self._spec.output_lines + number) * columns)

        def results(starts: list[Expr], lanes: int) -> None:
            for start in starts:
                value = self._along(start, lanes)
                if self._factors is not None:
                    factors = self._factors[T.lanes_at(start, lanes)]
                    value = value * (factors * T.splat(share, lanes))
                T.store(self._y, into + start, value, lanes)

        _each_vector(columns, self._lanes, results)

    def _along(self, column: Expr, lanes: int) -> Expr:
        """The maxima or sums of adjacent windows of the line."""
        taps = [self._taps(column * self._across.stride + tap, lanes) for tap in range(self._across.size)]
        value = taps[0]
        for other in taps[1:]:
            value = self._combined(value, other)
        return value

    def _taps(self, base: Expr, lanes: int) -> Expr:
        stride = self._across.stride
        if stride == 1 or lanes == 1:
            return self._line[T.lanes_at(base, lanes)]
        if stride == 2:
            halves = [self._line[T.lanes_at(base + part * lanes, lanes)] for part in range(2)]
            return tirx.Shuffle(halves, [tirx.const(2 * lane, "int32") for lane in range(lanes)])
        return self._line[T.strided(base, stride, lanes)]

    def _combined(self, a: Expr, b: Expr) -> Expr:
        return tirx.Max(a, b) if self._pool.mode == "max" else a + b


def _each_vector(total: int, most: int, body: Callable[[list[Expr], int], None]) -> None:
    """Emit `body(first numbers, lanes)` for vectors of a line, some at a time; the last one may overlap another."""
    lanes = T.vector_lanes(most, total)
    whole = total // lanes
    groups = whole // UNROLLED
    if groups:
        T.repeat(groups, lambda index: body([(index * UNROLLED + n) * lanes for n in range(UNROLLED)], lanes))
    starts: list[Expr] = [n * lanes for n in range(groups * UNROLLED, whole)]
    if total % lanes:
        starts.append(total - lanes)
    if starts:
        body(starts, lanes)
