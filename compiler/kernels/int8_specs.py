"""Specs of kernels that only tensors of bytes need: see `specs.py`, where those of both kinds of tensors are."""

from dataclasses import dataclass

from gangway.compiler.kernels.specs import ImageSpec, KernelSpec

FACTORS = 4  # numbers that an `Int8FactorsSpec` writes


@dataclass(frozen=True)
class Int8TableSpec(ImageSpec):
    """y = table[x], both tensors of bytes. Arguments: x, table, y. Raw weights: "table" uint8 [256]."""

    input_halo: int = 0
    output_halo: int = 0


@dataclass(frozen=True)
class Int8HaloSpec(KernelSpec):
    """The zero point in the halo of a tensor of bytes. Arguments: zero, y. Raw weights: "zero" uint8 [1]."""

    channels: int
    height: int
    width: int
    output_halo: int = 0


@dataclass(frozen=True)
class Int8RangeSpec(ImageSpec):
    """The least and the largest number of each part of a float32 tensor, and 0. Arguments: x, y. y is [parts][2].

    x is blocked or, as `plain`, a line of numbers, which are its channels.
    """

    parts: int
    plain: bool = False
    input_halo: int = 0

    @property
    def flops(self) -> int:
        """Arithmetic operations of one row."""
        return 2 * self.channels * self.height * self.width


@dataclass(frozen=True)
class Int8FactorsSpec(KernelSpec):
    """What ONNX's DynamicQuantizeLinear makes of a range. Arguments: x, the result of an `Int8RangeSpec`, and y.

    y: the scale, the least and the largest number less the zero point, and that, as float32.
    """

    parts: int


@dataclass(frozen=True)
class Int8QuantiseSpec(ImageSpec):
    """Blocked float32 numbers to bytes, halo included. Arguments: x, factors, y. `factors`: of an `Int8FactorsSpec`."""

    input_halo: int = 0
    output_halo: int = 0
