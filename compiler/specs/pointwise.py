"""Spec of the generic kernel over plain tensors: any chain of elementwise operators, with broadcasting, any type."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gangway.compiler.specs.base import Check, KernelSpec

_POLYNOMIAL = 16
_SIMPLE = frozenset(
    """
    constant cast where equal less less_or_equal greater greater_or_equal is_nan is_inf add sub mul div and or xor not
    bit_and bit_or bit_xor bit_not shift_left shift_right min max neg abs sign floor ceil round truncate sqrt mod
    clip leaky_relu hard_sigmoid hard_swish
    """.split()  # noqa: SIM905
)


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
class Operand:
    """An input: its element type and, for each axis of the output's shape, its stride in elements (0 broadcasts)."""

    dtype: str  # numpy's name
    strides: tuple[int, ...]


@dataclass(frozen=True)
class Instruction:
    """One operator of a straight-line program: what it takes and what type comes out.

    `sources` number the values so far: first the operands, then the results of the instructions before. `parameters`
    are immediate numbers, whose meaning is the operator's (the number of "constant", alpha and beta of an activation).
    Operators are those of `templates/instructions.py` and, of float16 and float32, the names of `activations.py`.
    """

    operator: str
    sources: tuple[int, ...]
    dtype: str
    parameters: tuple[float | int, ...] = ()


@dataclass(frozen=True)
class PointwiseSpec(KernelSpec):
    """y[i, j, ...] = program(operands at i, j, ...); y is plain, contiguous, of the last instruction's type.

    Arguments: the operands (six at most), y. A chain of ONNX nodes that nobody else reads becomes one kernel.
    """

    shape: tuple[int, ...]
    operands: tuple[Operand, ...]
    program: tuple[Instruction, ...]

    @property
    def checks(self) -> tuple[Check, ...]:
        """Those of all instructions, in their order."""
        return tuple(check for item in self.program for check in self.checks_of(item))

    def checks_of(self, item: Instruction) -> Sequence[Check]:
        """What a division of integers has no answer to, as far as its divisor is not known.

        The least integer of 8 or 16 bits has one, itself.
        """
        if item.operator not in ("div", "mod", "fmod") or np.dtype(item.dtype).kind not in "iu":
            return ()
        divisor = item.sources[1] - len(self.operands)
        known = self.program[divisor] if divisor >= 0 and self.program[divisor].operator == "constant" else None
        checks: list[Check] = ["zero"] if known is None or known.parameters[0] == 0 else []
        limits = np.iinfo(item.dtype)
        if (
            item.operator != "fmod"
            and limits.min < 0
            and limits.bits >= 32
            and (known is None or known.parameters[0] == -1)
        ):
            checks.append("least")
        return checks

    @property
    def cost(self) -> int:
        """Arithmetic operations of one number, roughly: a polynomial counts as many."""
        return sum(_POLYNOMIAL if item.operator not in _SIMPLE else 1 for item in self.program)

    @property
    def flops(self) -> int:
        """Arithmetic operations of one row, roughly."""
        return self.cost * math.prod(self.shape)
