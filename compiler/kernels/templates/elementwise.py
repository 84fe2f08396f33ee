"""Elementwise operators: programs over plain tensors, and single operators on blocked images.

A program takes any types and any broadcasting in one pass over memory. Axes that lie behind each other in all operands
are one. The innermost one is computed in vectors, the last of which overlaps the one before where the length is no
multiple: numbers are computed twice rather than one by one.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial, reduce
from typing import Any

import numpy as np
from tvm import tirx

from gangway.artifact.format import TargetSpec
from gangway.compiler.kernels.plain_specs import PointwiseSpec
from gangway.compiler.kernels.specs import (
    BlockedElementwiseSpec,
    ElementwiseOperator,
    KernelPlan,
    PackedWeights,
    RawWeights,
)
from gangway.compiler.kernels.templates import builder as T
from gangway.compiler.kernels.templates import tiling
from gangway.compiler.kernels.templates.builder import REFUSED, Argument, Buffer, Expr, Register
from gangway.compiler.kernels.templates.float32_math import activate, quantised
from gangway.compiler.kernels.templates.instructions import Doubt, evaluate, may_doubt, undivided
from gangway.compiler.kernels.templates.tiling import FLOAT_BYTES, TASK_ELEMENTS, Image, UnsupportedSpecError

LIMITS = 3  # numbers of a quantisation: scale, least, largest
Limits = tuple[Expr, Expr, Expr]
UNROLLED = 2  # vectors per iteration on blocked images


@dataclass(frozen=True)
class Loops:
    """The axes of a spec, merged: the outer ones, outermost first, and the innermost; strides of every operand."""

    spec: PointwiseSpec

    @cached_property
    def axes(self) -> list[tuple[int, tuple[int, ...]]]:
        """(length, strides of the operands), at least one."""
        axes: list[tuple[int, tuple[int, ...]]] = []
        for index, length in enumerate(self.spec.shape):
            steps = tuple(operand.strides[index] for operand in self.spec.operands)
            if length == 1:
                continue
            if axes and axes[-1][1] == tuple(length * step for step in steps):
                axes[-1] = (axes[-1][0] * length, steps)
            else:
                axes.append((length, steps))
        return axes or [(1, tuple(0 for _ in self.spec.operands))]

    @property
    def length(self) -> int:
        """Numbers of a line, the innermost axis."""
        return self.axes[-1][0]

    @property
    def lines(self) -> int:
        """How many lines there are."""
        return math.prod(length for length, _ in self.axes[:-1])

    @property
    def steps(self) -> tuple[int, ...]:
        """Each operand's stride along a line."""
        return self.axes[-1][1]

    def bases(self, line: Expr) -> list[Expr]:
        """Where in each operand a line begins."""
        bases: list[Expr] = [0 for _ in self.spec.operands]
        for length, steps in reversed(self.axes[:-1]):
            position, line = T.remainder(line, length), T.quotient(line, length)
            bases = [base + position * step if step else base for base, step in zip(bases, steps, strict=True)]
        return bases


def pointwise_candidates(spec: PointwiseSpec, target: TargetSpec) -> Iterator[KernelPlan]:
    """The only plan: tasks of about equal cost, a multiple of four of them where there is work for that."""
    loops = Loops(spec)
    wanted = max(1, TASK_ELEMENTS * 4 // max(4, spec.cost))
    tasks = math.prod(spec.shape) // wanted
    tasks = tasks // 4 * 4 if tasks >= 4 else max(tasks, 1)
    parts = min(loops.length, -(-tasks // loops.lines))  # of one line
    part = -(-loops.length // parts)
    part = -(-part // target.lanes) * target.lanes if parts > 1 else part
    lines = -(-loops.lines // tasks)
    count = -(-loops.lines // lines) * -(-loops.length // part)
    items = [np.dtype(operand.dtype).itemsize for operand in spec.operands] + [np.dtype(_result(spec)).itemsize]
    text = "+".join(dict.fromkeys(item.operator for item in spec.program if item.operator != "constant"))
    knobs: dict[str, int | str] = {"lines": lines, "part": part}
    yield tiling.make_plan(spec, knobs, count, f"{text or 'copy'} {lines}x{part}", sum(items) * lines * part, 1)


def pack(spec: PointwiseSpec | BlockedElementwiseSpec, target: TargetSpec, raw: RawWeights) -> PackedWeights:
    """Limits of quantisations."""
    return (raw["limits"],)


def _limits(buffer: Buffer, index: int, lanes: int) -> Limits:
    """Vectors of scale, least and largest number of a quantisation."""
    scale, least, largest = (T.widen(buffer[index * LIMITS + k], lanes) for k in range(LIMITS))
    return scale, least, largest


def _result(spec: PointwiseSpec) -> str:
    """The type of y."""
    return spec.program[-1].dtype if spec.program else spec.operands[0].dtype


def pointwise_emit(spec: PointwiseSpec, plan: KernelPlan, target: TargetSpec, symbol: str) -> Any:
    """The kernel. Arguments: operands, y."""
    loops, lines, part = Loops(spec), tiling.knob(plan, "lines"), tiling.knob(plan, "part")
    parts = -(-loops.length // part)
    lanes = T.vector_lanes(target.lanes, loops.length)
    has_fma = "fma" in target.features
    vectors = -(-part // lanes)

    def task(index: Expr, buffers: tuple[Buffer, ...]) -> None:
        marks = [Register(lanes, T.constant(0, lanes, dtype), dtype) for dtype in _checked_dtypes(spec)]
        *inputs, y = buffers[:-1] if marks else buffers
        limits = inputs.pop(1) if spec.limits else None
        quantisations = [_limits(limits, number, lanes) for number in range(spec.limits)]
        first_line, begin = T.quotient(index, parts) * lines, T.remainder(index, parts) * part
        doubts = [Doubt(item, lanes, has_fma) for item in spec.program if may_doubt(item)]

        def line(offset: Expr, careful: bool = False) -> None:
            bases = loops.bases(first_line + offset)
            hoisted = [
                _operand(spec, n, inputs[n], bases[n], 0, 1) if step == 0 else None
                for n, step in enumerate(loops.steps)
            ]
            values = [None if value is None else T.widen(value, lanes) for value in hoisted]

            def vector(step: Expr) -> None:
                place = T.at_most(begin + step * lanes, loops.length - lanes)
                found = [
                    value if value is not None else _operand(spec, n, inputs[n], bases[n], place, lanes, loops.steps[n])
                    for n, value in enumerate(values)
                ]
                result = run(spec, found, lanes, marks, quantisations, () if careful else doubts, careful)
                target_place = (first_line + offset) * loops.length + place
                T.store(y, target_place, T.stored(result, _result(spec), lanes), lanes)

            T.repeat(T.at_most(vectors, T.quotient(loops.length - begin + lanes - 1, lanes)), vector)

        count = T.at_most(lines, loops.lines - first_line)
        T.repeat(count, line)
        if doubts:
            justified = reduce(tirx.Or, (doubt.is_justified for doubt in doubts))
            T.when(justified, lambda: T.repeat(count, partial(line, careful=True)))
        for check, mark in enumerate(marks, 1):
            _refuse_marked(mark, lanes, check, buffers[-1])

    sizes = [1 + sum((n - 1) * s[i] for n, s in loops.axes) for i in range(len(spec.operands))]
    arguments = [
        Argument(f"x{i}", size, T.memory_dtype(operand.dtype))
        for i, (size, operand) in enumerate(zip(sizes, spec.operands, strict=True))
    ]
    if spec.limits:
        arguments.insert(1, Argument("limits", LIMITS * spec.limits))
    arguments.append(Argument("y", math.prod(spec.shape), T.memory_dtype(_result(spec))))
    return T.kernel(symbol, [*arguments, *([REFUSED] if spec.checks else [])], task)


def _refuse_marked(mark: Register, lanes: int, check: int, refused: Buffer) -> None:
    T.repeat(lanes, lambda lane: T.when(mark.lane(lane) != 0, lambda: T.refuse(refused, check, 0)))


def _checked_dtypes(spec: PointwiseSpec) -> list[str]:
    """The element type of what each check looks at."""
    return [item.dtype for item in spec.program for _ in spec.checks_of(item)]


def _operand(
    spec: PointwiseSpec, index: int, buffer: Buffer, base: Expr, place: Expr, lanes: int, step: int = 0
) -> Expr:
    """Numbers of an operand, in registers."""
    if lanes == 1:
        read = buffer[base + place * step]
    elif step == 1:
        read = buffer[T.lanes_at(base + place, lanes)]
    else:
        read = buffer[T.strided(base + place * step, step, lanes)]
    return T.load(read, spec.operands[index].dtype, lanes)


def run(
    spec: PointwiseSpec,
    operands: list[Expr],
    lanes: int,
    marks: Sequence[Register] = (),
    quantisations: Sequence[Limits] = (),
    doubts: Sequence[Doubt] = (),
    careful: bool = False,
) -> Expr:
    """The last value of the program; each check sets lanes of its mark where it finds something.

    `quantisations`: scale and limits of each instruction "quantise". `careful`: see `Doubt`.

    Raises UnsupportedSpecError for an operator that is not there for its type.
    """
    values, dtypes = list(operands), [operand.dtype for operand in spec.operands]
    unused, unread, unsure = iter(marks), iter(quantisations), iter(doubts)
    for item in spec.program:
        dtype = dtypes[item.sources[-1]] if item.sources else item.dtype
        for check in spec.checks_of(item) if marks else ():
            x, y = (values[source] for source in item.sources)
            mark = next(unused)
            mark.set(mark.value | undivided(check, x, y, dtype, lanes))
        if item.operator == "quantise":
            values.append(T.keep(quantised(values[item.sources[0]], *next(unread), lanes)))
            dtypes.append(item.dtype)
            continue
        try:
            sources = [values[source] for source in item.sources]
            if doubts and may_doubt(item):
                next(unsure).add(sources)
            values.append(evaluate(item, sources, dtype, lanes, careful))
        except KeyError as error:
            raise UnsupportedSpecError(f"no operator {item.operator} of {dtype}") from error
        dtypes.append(item.dtype)
    return values[-1]


def _text(spec: BlockedElementwiseSpec) -> str:
    names = [name for name in (spec.operator, spec.activation.name) if name not in ("copy", "none")]
    return "+".join(names) or "copy"


def combined(operator: ElementwiseOperator, values: Sequence[Any]) -> Any:
    """What the operator makes of its operands: numbers, arrays or expressions."""
    match operator:
        case "add":
            return values[0] + values[1]
        case "sub":
            return values[0] - values[1]
        case "mul":
            return values[0] * values[1]
        case "div":
            return values[0] / values[1]
        case "copy":
            return values[0]


def blocked_candidates(spec: BlockedElementwiseSpec, target: TargetSpec) -> Iterator[KernelPlan]:
    """The only plan."""
    *inputs, y = _images(spec, target)
    moved = sum(image.elements for image in (*inputs, y)) * FLOAT_BYTES
    yield tiling.plane_plan(spec, _text(spec), (y.blocks, y.height), y.elements, moved, UNROLLED, target)


def _images(spec: BlockedElementwiseSpec, target: TargetSpec) -> list[Image]:
    """The inputs and y in memory."""
    lanes = target.lanes
    inputs = [
        Image(spec.channels, 1, 1, 0, lanes) if vector else Image(spec.channels, spec.height, spec.width, halo, lanes)
        for vector, halo in zip(spec.vectors, spec.input_halos, strict=True)
    ]
    return [*inputs, Image(spec.channels, spec.height, spec.width, spec.output_halo, lanes)]


def blocked_emit(spec: BlockedElementwiseSpec, plan: KernelPlan, target: TargetSpec, symbol: str) -> Any:
    """The kernel. Arguments: an input, limits if there are any, perhaps another input, y."""
    lanes, quantises = target.lanes, spec.activation.name == "quantise"
    *x_images, y_image = _images(spec, target)
    tasks = tiling.planned_tasks(plan, y_image.blocks, y_image.height)

    def task(number: Expr, buffers: tuple[Buffer, ...]) -> None:
        *inputs, y = buffers
        limits = _limits(inputs.pop(1), 0, lanes) if quantises else None

        def line(block: Expr, row: Expr) -> None:
            def place(image: Image, column: Expr) -> Expr:
                return block * image.plane + image.origin + row * image.row + column * lanes

            def operand(index: int, column: Expr) -> Expr:
                base = block * lanes if spec.vectors[index] else place(x_images[index], column)
                return inputs[index][T.lanes_at(base, lanes)]

            def pixel(column: Expr) -> None:
                value = combined(spec.operator, [operand(index, column) for index in range(len(inputs))])
                value = quantised(value, *limits, lanes) if limits else activate(value, spec.activation, lanes)
                T.store(y, place(y_image, column), value, lanes)

            def pixels(index: Expr) -> None:
                for u in range(UNROLLED):
                    pixel(index * UNROLLED + u)

            whole, rest = divmod(spec.width, UNROLLED)
            if whole:
                T.repeat(whole, pixels)
            T.one_by_one(rest, lambda i: pixel(whole * UNROLLED + i))

        tasks.each(number, line)

    names = ["a", "b"][: len(x_images)]
    arguments = [Argument(name, image.elements) for name, image in zip(names, x_images, strict=True)]
    if quantises:
        arguments.insert(1, Argument("limits", LIMITS))
    return T.kernel(symbol, [*arguments, Argument("y", y_image.elements)], task)
