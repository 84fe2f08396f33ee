"""Specs of kernels over tensors of 8-bit numbers, of which a model says scale and zero point.

A tensor is stored as numbers q from 0 to 255 that stand for (q - zero) scale; those of int8 are moved up by 128.
Scales, zero points and biases are among the weights, so that layers of one shape share a kernel.

  bytes     [ceil(C/64)][H + 2 halo][W + 2 halo][64], halo always the tensor's zero point, surplus channels any number
  pixels    [H + 2 halo][W + 2 halo][4]              (input of a first convolution with up to 4 channels)
"""

import math
from dataclasses import dataclass

from gangway.compiler.kernels.specs import (
    NONE,
    Activation,
    ConvSpec,
    ElementwiseOperator,
    ImageSpec,
    KernelSpec,
    PoolSpec,
    window_output,
)

BYTES_CHANNELS = 64  # of a pixel, beside each other
PIXELS_CHANNELS = 4
FACTORS = 4  # numbers that an `Int8FactorsSpec` writes


@dataclass(frozen=True)
class Int8ConvSpec(KernelSpec):
    """Convolution of a tensor of bytes or, if `input_pixels`, of pixels by 8-bit weights; sums are integers.

    Arguments: x, weights, bias, multiplier, zero, y. y is round(sum multiplier) + zero, from 0 to 255, in bytes; or,
    without `output_bytes`, activation(sum multiplier) in float32, blocked. Raw weights: "weights" int8
    [out][in][kh][kw], "bias" int32 [out], less the sum of the weights times x's zero point, "multiplier" float32
    [out], "zero" float32 [1].

    If it is `dynamic`, x's scale is known at run time only: the arguments are x, weights, integers, numbers, factors,
    [residual,] y, in float32. y is activation(sum scale + bias [+ residual]). Raw weights: "weights", "scales" float32
    [out], "bias" float32 [out], and zero points of the weights, "zeros" int32 [out], which are 0 unless `weight_zeros`.
    `factors` are those of `Int8FactorsSpec`.

    Weights are `narrow` if products of two adjacent channels of one output, by uint8, have a sum of 16 bits.
    """

    in_channels: int
    height: int
    width: int
    out_channels: int
    kernel: tuple[int, int] = (1, 1)
    stride: tuple[int, int] = (1, 1)
    pads: tuple[int, int, int, int] = (0, 0, 0, 0)
    dilation: tuple[int, int] = (1, 1)
    input_pixels: bool = False
    output_bytes: bool = True
    activation: Activation = NONE
    input_halo: int = 0
    output_halo: int = 0
    dynamic: bool = False
    weight_zeros: bool = False
    residual: bool = False
    residual_halo: int = 0
    narrow: bool = False

    @property
    def output_size(self) -> tuple[int, int]:
        """Height and width of the output."""
        return window_output((self.height, self.width), self.kernel, self.stride, self.pads, self.dilation)

    @property
    def flops(self) -> int:
        """Arithmetic operations of one row."""
        products = self.in_channels * math.prod(self.kernel)
        return 2 * self.out_channels * math.prod(self.output_size) * products

    @property
    def text(self) -> str:
        """Shape for people."""
        return ConvSpec(
            self.in_channels, self.height, self.width, self.out_channels, self.kernel, self.stride, self.pads,
            self.dilation,
        ).text  # fmt: skip


@dataclass(frozen=True)
class Int8DepthwiseSpec(KernelSpec):
    """Depthwise convolution of a tensor of bytes, each channel by its own window; y is a tensor of bytes.

    Arguments: x, weights, bias, multiplier, zero, y, as those of `Int8ConvSpec`. Sums are below 2^24. If it is
    `dynamic`, they are x, weights, sums, scales, bias, factors, y, in float32, and weights are int16, less their zero
    point; raw weights are "weights", "scales", "bias".
    """

    channels: int
    height: int
    width: int
    kernel: tuple[int, int]
    stride: tuple[int, int] = (1, 1)
    pads: tuple[int, int, int, int] = (0, 0, 0, 0)
    dilation: tuple[int, int] = (1, 1)
    input_halo: int = 0
    output_halo: int = 0
    dynamic: bool = False
    activation: Activation = NONE  # if it is dynamic

    @property
    def output_size(self) -> tuple[int, int]:
        """Height and width of the output."""
        return window_output((self.height, self.width), self.kernel, self.stride, self.pads, self.dilation)

    @property
    def flops(self) -> int:
        """Arithmetic operations of one row."""
        return 2 * self.channels * math.prod(self.output_size) * math.prod(self.kernel)

    @property
    def text(self) -> str:
        """Shape for people."""
        return ConvSpec(
            self.channels, self.height, self.width, self.channels, self.kernel, self.stride, self.pads, self.dilation,
            self.channels,
        ).text  # fmt: skip


@dataclass(frozen=True)
class Int8PoolSpec(KernelSpec):
    """Largest number of each window; x and y are tensors of bytes with the same scale and zero point."""

    pool: PoolSpec
    input_halo: int = 0
    output_halo: int = 0

    @property
    def flops(self) -> int:
        """Arithmetic operations of one row."""
        return self.pool.flops

    @property
    def text(self) -> str:
        """Shape for people."""
        return self.pool.text


@dataclass(frozen=True)
class Int8GlobalPoolSpec(KernelSpec):
    """Mean of all pixels of a tensor of bytes, as a float32 vector. Arguments: x, factors, y.

    Raw weights: "factors" float32: scale / pixels, -zero scale.
    """

    channels: int
    height: int
    width: int
    input_halo: int = 0

    @property
    def flops(self) -> int:
        """Arithmetic operations of one row."""
        return self.channels * self.height * self.width


@dataclass(frozen=True)
class Int8ElementwiseSpec(KernelSpec):
    """One operator over images, some of them tensors of bytes, then an activation.

    Arguments: a, factors, [b,] y. Each input is in bytes or blocked float32; one of `vectors` is blocked float32 and
    has one number per channel. Raw weights: "factors" float32: of each input scale and -zero scale, then of the output
    1 / scale and the zero point. If numbers are `in_steps`, scales are in steps of
    the output's one, and the first input's shift is that of all.
    """

    operator: ElementwiseOperator
    channels: int
    height: int
    width: int
    input_bytes: tuple[bool, ...]
    vectors: tuple[bool, ...]
    output_bytes: bool
    activation: Activation = NONE
    input_halos: tuple[int, ...] = ()
    output_halo: int = 0

    @property
    def in_steps(self) -> bool:
        """Whether the kernel adds multiples of the output's scale."""
        return self.operator == "add" and all((*self.input_bytes, self.output_bytes)) and self.activation == NONE

    @property
    def flops(self) -> int:
        """Arithmetic operations of one row."""
        return 0 if self.operator == "copy" else self.channels * self.height * self.width

    @property
    def text(self) -> str:
        """Shape for people."""
        return f"{self.channels}x{self.height}x{self.width}"


@dataclass(frozen=True)
class Int8PackSpec(ImageSpec):
    """Plain float32 [C][H][W] to bytes or `pixels`, halo included. Arguments: x, factors, y.

    Raw weights: "factors" float32: scale, least and largest less the zero point, the zero point.
    """

    pixels: bool
    output_halo: int = 0


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
