"""Specs of kernels over images, alone and in pairs, and of the plain kernels that belong to them.

Layouts of an activation of C channels, H x W pixels (one row of the batch), L = lanes of the target:
  blocked   [ceil(C/L)][H + 2 halo][W + 2 halo][L], halo always zero, surplus channels finite whenever the others are
            (they meet zeros among the weights)
  planar    [C][H + 2 halo][W + 2 halo]              (input of a first convolution with few channels)
  plain     row-major, as ONNX says
"""

import math
from dataclasses import dataclass, replace
from typing import Literal, Self

from gangway.compiler.kernels.specs.base import MOST_LANES, NONE, Activation, KernelSpec

ElementwiseOperator = Literal["add", "sub", "mul", "copy"]


def window_output(
    size: tuple[int, int],
    kernel: tuple[int, int],
    stride: tuple[int, int],
    pads: tuple[int, int, int, int],
    dilation: tuple[int, int] = (1, 1),
) -> tuple[int, int]:
    """Height and width of what a sliding window computes; pads are top, left, bottom, right."""
    top, left, bottom, right = pads
    reach = [(k - 1) * d + 1 for k, d in zip(kernel, dilation, strict=True)]
    return (
        (size[0] + top + bottom - reach[0]) // stride[0] + 1,
        (size[1] + left + right - reach[1]) // stride[1] + 1,
    )


def _image(channels: int, height: int, width: int) -> str:
    return f"{channels}x{height}x{width}"


def _window(kernel: tuple[int, int], stride: tuple[int, int]) -> str:
    def text(pair: tuple[int, int]) -> str:
        return str(pair[0]) if pair[0] == pair[1] else f"{pair[0]}x{pair[1]}"

    return f"k{text(kernel)} s{text(stride)}"


@dataclass(frozen=True)
class ConvSpec(KernelSpec):
    """Convolution + bias [+ residual] [+ activation], blocked in and out. Arguments: x, weights, bias, [residual,] y.

    Weights arrive as ONNX has them, [out][in/groups][kh][kw]. `groups` is 1, or `in_channels` (depthwise), or such that
    inputs and outputs of a group are multiples of MOST_LANES.
    `input_planar`: x is planar. A dense layer (Gemm) is a 1x1 convolution over a 1 x M image; halos are 0 there.
    Each halo is at least what its consumers' padding needs; it belongs to the tensor: producer and consumers agree.
    """

    in_channels: int
    height: int
    width: int
    out_channels: int
    kernel: tuple[int, int] = (1, 1)
    stride: tuple[int, int] = (1, 1)
    pads: tuple[int, int, int, int] = (0, 0, 0, 0)  # top, left, bottom, right
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1
    activation: Activation = NONE
    residual: bool = False
    input_planar: bool = False
    input_halo: int = 0
    residual_halo: int = 0
    output_halo: int = 0

    @property
    def output_size(self) -> tuple[int, int]:
        """Height and width of the output."""
        return window_output((self.height, self.width), self.kernel, self.stride, self.pads, self.dilation)

    @property
    def flops(self) -> int:
        """Arithmetic operations of one row."""
        return 2 * self.out_channels * math.prod(self.output_size) * self._products

    @property
    def _products(self) -> int:
        """Products summed up for one output."""
        return self.in_channels // self.groups * math.prod(self.kernel)

    @property
    def text(self) -> str:
        """Shape for people."""
        if (self.height, self.width, *self.kernel) == (1, 1, 1, 1):
            return f"{self.in_channels} -> {self.out_channels}"
        depthwise = " depthwise" if self.groups == self.in_channels else f" {self.groups} groups"
        groups = "" if self.groups == 1 else depthwise
        source, size = _image(self.in_channels, self.height, self.width), _image(self.out_channels, *self.output_size)
        return f"{source} -> {size} {_window(self.kernel, self.stride)}{groups}"

    def with_halos(self, inputs: tuple[int, ...], output: int) -> Self:
        """The spec with its halos settled."""
        return replace(self, input_halo=inputs[0], residual_halo=inputs[1] if self.residual else 0, output_halo=output)


@dataclass(frozen=True)
class PoolSpec(KernelSpec):
    """Max or average pooling, blocked in and out. Arguments: x, y. Padding takes no part in a maximum or sum.

    With `count_include_pad` it counts in the mean, but for what ceil_mode added to it (bottom and right `ceil_pads`).
    No halo is needed: the kernel knows where the image ends.
    """

    mode: Literal["max", "average"]
    channels: int
    height: int
    width: int
    kernel: tuple[int, int]
    stride: tuple[int, int]
    pads: tuple[int, int, int, int]
    count_include_pad: bool = False
    ceil_pads: tuple[int, int] = (0, 0)
    input_halo: int = 0
    output_halo: int = 0

    @property
    def output_size(self) -> tuple[int, int]:
        """Height and width of the output."""
        return window_output((self.height, self.width), self.kernel, self.stride, self.pads)

    @property
    def flops(self) -> int:
        """Arithmetic operations of one row."""
        return self.channels * math.prod(self.output_size) * math.prod(self.kernel)

    @property
    def text(self) -> str:
        """Shape for people."""
        size = _image(self.channels, *self.output_size)
        return f"{_image(self.channels, self.height, self.width)} -> {size} {_window(self.kernel, self.stride)}"

    def with_halos(self, inputs: tuple[int, ...], output: int) -> Self:
        """The spec with its halos settled."""
        return replace(self, input_halo=inputs[0], output_halo=output)


@dataclass(frozen=True)
class GlobalPoolSpec(KernelSpec):
    """Mean or maximum over all pixels, blocked in, blocked 1 x 1 out. Arguments: x, y."""

    channels: int
    height: int
    width: int
    input_halo: int = 0
    mode: Literal["max", "average"] = "average"

    @property
    def flops(self) -> int:
        """Arithmetic operations of one row."""
        return self.channels * self.height * self.width

    @property
    def text(self) -> str:
        """Shape for people."""
        return f"{_image(self.channels, self.height, self.width)} -> {self.channels}"

    def with_halos(self, inputs: tuple[int, ...], output: int) -> Self:
        """The spec with its halos settled."""
        return replace(self, input_halo=inputs[0])


@dataclass(frozen=True)
class PackSpec(KernelSpec):
    """Plain [C][H][W] float32 to blocked or planar with a halo. Arguments: x, y."""

    channels: int
    height: int
    width: int
    planar: bool
    output_halo: int = 0

    @property
    def text(self) -> str:
        """Shape for people."""
        return _image(self.channels, self.height, self.width)

    def with_halos(self, inputs: tuple[int, ...], output: int) -> Self:
        """The spec with its halos settled."""
        return replace(self, output_halo=output)


@dataclass(frozen=True)
class UnpackSpec(KernelSpec):
    """Blocked to plain [C][H][W], or [H][W][C] if `channels_last`. Arguments: x, y."""

    channels: int
    height: int
    width: int
    input_halo: int = 0
    channels_last: bool = False

    @property
    def text(self) -> str:
        """Shape for people."""
        return _image(self.channels, self.height, self.width)

    def with_halos(self, inputs: tuple[int, ...], output: int) -> Self:
        """The spec with its halos settled."""
        return replace(self, input_halo=inputs[0])


@dataclass(frozen=True)
class SoftmaxSpec(KernelSpec):
    """exp(x) over its sum, or the logarithm of that, along the middle axis of plain float32 [rows][columns][inner].

    Arguments: x, y.
    """

    rows: int
    columns: int
    inner: int = 1
    logarithm: bool = False

    @property
    def flops(self) -> int:
        """Arithmetic operations of one row."""
        return self.rows * self.columns * self.inner


@dataclass(frozen=True)
class CopySpec(KernelSpec):
    """Plain numbers moved: number (i, j, ...) of `shape`, which lies at i input_strides[0] + ..., goes to i
    output_strides[0] + ... Arguments: x, y.
    """

    dtype: str  # numpy's name
    shape: tuple[int, ...]
    input_strides: tuple[int, ...]
    output_strides: tuple[int, ...]


@dataclass(frozen=True)
class ElementwiseSpec(KernelSpec):
    """One operator over float32 tensors, then an activation, wherever they lie. Inputs have the size of the output, or
    are constants, or have one number per channel of an image.

    There is no kernel for it: layout makes it a `BlockedElementwiseSpec` or a `PointwiseSpec`.
    """

    operator: ElementwiseOperator
    dtype: Literal["float32"]
    elements: int
    activation: Activation = NONE

    @property
    def flops(self) -> int:
        """Arithmetic operations of one row."""
        return 0 if self.operator == "copy" else self.elements


@dataclass(frozen=True)
class BlockedElementwiseSpec(KernelSpec):
    """One operator over blocked images, then an activation. Arguments: inputs, y.

    An input whose `vectors` is true holds one number per channel (a blocked image of one pixel without a halo), which
    counts for every pixel; the others have the output's size and the halo of the same place in `input_halos`.
    """

    operator: ElementwiseOperator
    channels: int
    height: int
    width: int
    vectors: tuple[bool, ...]
    input_halos: tuple[int, ...]
    activation: Activation = NONE
    output_halo: int = 0

    @property
    def flops(self) -> int:
        """Arithmetic operations of one row."""
        return 0 if self.operator == "copy" else self.channels * self.height * self.width

    @property
    def text(self) -> str:
        """Shape for people."""
        return _image(self.channels, self.height, self.width)

    def with_halos(self, inputs: tuple[int, ...], output: int) -> Self:
        """The spec with its halos settled."""
        return replace(self, input_halos=inputs, output_halo=output)


# Spec of a convolution and the depthwise one behind it, in one kernel.


@dataclass(frozen=True)
class ConvDepthwiseSpec(KernelSpec):
    """`depthwise` of what `conv` computes, which has no other reader and is never whole in memory.

    Arguments: x, weights, bias, depthwise weights, depthwise bias, y; raw weights "weights", "bias",
    "depthwise_weights", "depthwise_bias". Neither has a residual; the window of `depthwise` is not dilated.
    """

    conv: ConvSpec
    depthwise: ConvSpec

    @property
    def flops(self) -> int:
        """Arithmetic operations of one row, as if each number between the two were computed once."""
        return self.conv.flops + self.depthwise.flops

    @property
    def kept_bytes(self) -> int:
        """Most bytes of the lines that a kernel keeps: those that a window sees, of two channel blocks."""
        columns = self.depthwise.width + self.depthwise.pads[1] + self.depthwise.pads[3]
        return 4 * 2 * MOST_LANES * self.depthwise.kernel[0] * columns

    @property
    def text(self) -> str:
        """Shape for people."""
        return f"{self.conv.text}, then {self.depthwise.text}"

    def with_halos(self, inputs: tuple[int, ...], output: int) -> Self:
        """The spec with its halos settled."""
        conv, depthwise = replace(self.conv, input_halo=inputs[0]), replace(self.depthwise, output_halo=output)
        return replace(self, conv=conv, depthwise=depthwise)
