"""Programs of elementwise operators over plain tensors, while they grow: operands with their strides, instructions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from gangway.compiler.graph import TensorType
from gangway.compiler.specs import Array, Instruction, Operand, PointwiseSpec, broadcast_strides


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
