"""Spec of the generic kernel over plain tensors: any chain of elementwise operators, with broadcasting, any type."""

from dataclasses import dataclass

from gangway.compiler.specs.base import KernelSpec


@dataclass(frozen=True)
class Operand:
    """An input: its element type and, for each axis of the output's shape, its stride in elements (0 broadcasts)."""

    dtype: str  # numpy's name
    strides: tuple[int, ...]


@dataclass(frozen=True)
class Instruction:
    """One operator of a straight-line program: what it takes and what type comes out.

    `sources` number the values so far: first the operands, then the results of the instructions before. `parameters`
    are immediate numbers, whose meaning is the operator's (alpha of Elu, the constant of "constant", ...).
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
    def flops(self) -> int:
        """Operators times numbers; what an operator costs differs."""
        total = len(self.program)
        for length in self.shape:
            total *= length
        return total
