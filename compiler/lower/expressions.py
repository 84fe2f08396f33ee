"""Elementwise programs and index movements over plain tensors, while operators assemble them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from gangway.compiler.frontend.graph import Node, TensorType
from gangway.compiler.kernels.plain_specs import (
    Instruction,
    Operand,
    PointwiseSpec,
    RemapSpec,
    Segment,
    broadcast_strides,
    contiguous,
)
from gangway.compiler.kernels.specs import Array
from gangway.compiler.lower.layers import Movement, Program

# Movements whose source is known per axis: from index arrays to the tables and lines of a `RemapSpec`, or to no copy.
#
# A movement is given by one array for each axis of the result: which index of the same axis of the source each one
# shows, -1 where there is none.

_MOST_SEGMENTS = 8


@dataclass(frozen=True)
class Part(Movement):
    """The result lies in the source already: adjacent numbers from number `skipped` on."""

    skipped: int


def add_remap(program: Program, node: Node, name: str, indices: Sequence[Array], fill: float | int = 0) -> None:
    """Add the layer that moves tensor `name` as `indices` say, one array for each of its axes, or make it a view."""
    kind = program.type(name)
    offsets = [
        np.where(index < 0, -1, index * step).astype(np.int64)
        for index, step in zip(indices, contiguous(kind.shape), strict=True)
    ]
    axes = _merged(offsets)
    if len(axes) == 1 and (axes[0] >= 0).all() and (np.diff(axes[0]) == 1).all():
        skipped = int(axes[0][0])
        if len(axes[0]) == math.prod(kind.shape):
            program.views[node.outputs[0]] = name
        else:
            program.add(node, Part(skipped), (name,))
        return
    *outer, last = axes
    line, entries = _line(last, sum(len(axis) for axis in outer))
    table = np.concatenate([*outer, *entries, np.zeros(0, np.int64)]).astype(np.int32)
    tables = f"{node.outputs[0]}:table"
    program.constants[tables] = table if table.size else np.zeros(1, np.int32)
    lengths = tuple(len(axis) for axis in outer)
    spec = RemapSpec(kind.dtype, lengths, line, math.prod(kind.shape), table.size, fill)
    program.add(node, spec, (name, tables))


def _merged(offsets: list[Array]) -> list[Array]:
    """Drop axes of one number, and put together axes that are one run."""
    axes: list[Array] = []
    constant = 0
    for axis in offsets:
        if len(axis) == 1 and axis[0] >= 0:
            constant += int(axis[0])
            continue
        if axes and _continues(axes[-1], axis):
            axes[-1] = (axes[-1][:, None] + axis[None, :]).reshape(-1)
        else:
            axes.append(axis)
    if not axes:
        return [np.array([constant])]
    axes[-1] = np.where(axes[-1] < 0, -1, axes[-1] + constant)
    return axes


def _continues(outer: Array, inner: Array) -> bool:
    """Whether the inner axis is a run of steps, of which the outer one has the next where it ends."""
    if min(outer.min(), inner.min()) < 0 or inner[0] != 0:
        return False
    steps = np.unique(np.diff(inner))
    return len(steps) == 1 and bool((np.diff(outer) == steps[0] * len(inner)).all())


def _line(offsets: Array, begin: int) -> tuple[tuple[Segment, ...], list[Array]]:
    """The innermost axis as a few runs, or as a table, which begins at entry `begin`."""
    segments: list[Segment] = []
    start = 0
    while start < len(offsets) and len(segments) <= _MOST_SEGMENTS:
        length, step = _run(offsets, start)
        kind: Segment = (
            Segment("fill", length) if offsets[start] < 0 else Segment("run", length, int(offsets[start]), step)
        )
        segments.append(kind)
        start += length
    if start < len(offsets) or len(segments) > _MOST_SEGMENTS:
        return (Segment("table", len(offsets), begin),), [offsets]
    return tuple(segments), []


def _run(offsets: Array, start: int) -> tuple[int, int]:
    """How many numbers from `start` on go on as they begin, and in which step."""
    rest = offsets[start:]
    if rest[0] < 0:
        outside = rest >= 0
        return (int(outside.argmax()) if outside.any() else len(rest)), 0
    if len(rest) == 1 or rest[1] < 0:
        return 1, 1
    step = int(rest[1] - rest[0])
    broken = (np.diff(rest) != step) | (rest[1:] < 0)
    return (int(broken.argmax()) + 1 if broken.any() else len(rest)), step


@dataclass(frozen=True)
class Value:
    """A result of an expression, or an operand: its number in the program and its type."""

    index: int
    dtype: str


@dataclass
class Expression:
    """Grows into a `PointwiseSpec`. Operands come first; constants of one number are part of the program."""

    shape: tuple[int, ...]
    names: list[str] = field(default_factory=list)  # of the operands
    operands: list[Operand] = field(default_factory=list)
    program: list[Instruction] = field(default_factory=list)

    def operand(self, name: str, kind: TensorType) -> Value:
        """Add a tensor. Raises ValueError if it cannot be broadcast to the shape of the result."""
        assert not self.program  # numbers of values would change
        added = Operand(kind.dtype, broadcast_strides(kind.shape, self.shape))
        for index, pair in enumerate(zip(self.names, self.operands, strict=True)):
            if pair == (name, added):
                return Value(index, kind.dtype)
        self.names.append(name)
        self.operands.append(added)
        return Value(len(self.operands) - 1, kind.dtype)

    def constant(self, value: float | int | bool | Array, dtype: str) -> Value:
        """Add a number."""
        item = np.asarray(value).astype(dtype).reshape(-1)[0].item()
        return self._append(Instruction("constant", (), dtype, (item,)))

    def apply(self, operator: str, *sources: Value, dtype: str = "", parameters: tuple[float | int, ...] = ()) -> Value:
        """Add an operator; the result has the type of the last source unless another is given."""
        indices = tuple(source.index for source in sources)
        return self._append(Instruction(operator, indices, dtype or sources[-1].dtype, parameters))

    def cast(self, value: Value, dtype: str) -> Value:
        """Convert a value, if need be."""
        return value if value.dtype == dtype else self.apply("cast", value, dtype=dtype)

    def _append(self, instruction: Instruction) -> Value:
        self.program.append(instruction)
        return Value(len(self.operands) + len(self.program) - 1, instruction.dtype)

    def spec(self) -> PointwiseSpec:
        """The finished program: its result is that of the last instruction."""
        return PointwiseSpec(self.shape, tuple(self.operands), tuple(self.program))


def operand_kinds(
    names: Sequence[str], types: Mapping[str, TensorType], constants: Mapping[str, Array]
) -> list[TensorType]:
    """The types of tensors, constant or not."""
    return [
        TensorType(constants[name].shape, constants[name].dtype.name) if name in constants else types[name]
        for name in names
    ]
