"""Programs of elementwise operators over plain tensors, while they grow: operands with their strides, instructions."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from gangway.compiler.graph import TensorType
from gangway.compiler.specs import Array, Instruction, Operand, PointwiseSpec

MOST_OPERANDS = 6
ELEMENT_TYPES = frozenset(
    ["bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64"]
)
FLOATS = frozenset({"float16", "float32", "float64"})


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """Distance, in numbers, of neighbours along each axis of a plain tensor."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def broadcast_strides(shape: Sequence[int], into: Sequence[int]) -> tuple[int, ...]:
    """The strides with which a plain tensor is read as one of the shape `into`; 0 where it is repeated.

    Raises ValueError if it cannot be broadcast.
    """
    aligned = (1,) * (len(into) - len(shape)) + tuple(shape)
    if len(aligned) != len(into) or any(n not in (1, wanted) for n, wanted in zip(aligned, into, strict=True)):
        raise ValueError(f"{list(shape)} cannot be broadcast to {list(into)}")
    return tuple(0 if n == 1 else step for n, step in zip(aligned, contiguous(aligned), strict=True))


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
