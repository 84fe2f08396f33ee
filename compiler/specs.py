"""What a kernel must compute, as data: the contract between the graph half of the compiler and the kernel templates.

The graph half (import, fusion, layout, arena) turns a model into specs; `templates/` turns each distinct spec into
code. Specs are frozen and hashable: equal specs share one kernel. Nothing here imports TVM.

Layouts of an activation of C channels, H x W pixels (one row of the batch), L = lanes of the target:
  blocked   [ceil(C/L)][H + 2 halo][W + 2 halo][L], halo always zero, surplus channels finite whenever the others are
            (they meet zeros among the weights)
  planar    [C][H + 2 halo][W + 2 halo]              (input of a first convolution with few channels)
  plain     row-major, as ONNX says
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy.typing as npt
from gangway.compiler.activations import NONE, Activation

Array = npt.NDArray[Any]
MOST_LANES = 16  # of any target
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


@dataclass(frozen=True)
class ConvSpec:
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


@dataclass(frozen=True)
class PoolSpec:
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


@dataclass(frozen=True)
class GlobalPoolSpec:
    """Mean or maximum over all pixels, blocked in, blocked 1 x 1 out. Arguments: x, y."""

    channels: int
    height: int
    width: int
    input_halo: int = 0
    mode: Literal["max", "average"] = "average"


@dataclass(frozen=True)
class PackSpec:
    """Plain [C][H][W] float32 to blocked or planar with a halo. Arguments: x, y."""

    channels: int
    height: int
    width: int
    planar: bool
    output_halo: int = 0


@dataclass(frozen=True)
class UnpackSpec:
    """Blocked to plain [C][H][W], or [H][W][C] if `channels_last`. Arguments: x, y."""

    channels: int
    height: int
    width: int
    input_halo: int = 0
    channels_last: bool = False


@dataclass(frozen=True)
class SoftmaxSpec:
    """exp(x) over its sum, for each row of a plain float32 matrix. Arguments: x, y."""

    rows: int
    columns: int


@dataclass(frozen=True)
class CopySpec:
    """Plain numbers moved: number (i, j, ...) of `shape`, which lies at i input_strides[0] + ..., goes to i
    output_strides[0] + ... Arguments: x, y.
    """

    dtype: Literal["float32", "int32", "int64"]
    shape: tuple[int, ...]
    input_strides: tuple[int, ...]
    output_strides: tuple[int, ...]


@dataclass(frozen=True)
class ElementwiseSpec:
    """One operator over plain tensors of equal size, then an activation (float32 only). Arguments: inputs, y."""

    operator: ElementwiseOperator
    dtype: Literal["float32", "int32", "int64"]
    elements: int
    activation: Activation = NONE


@dataclass(frozen=True)
class BlockedElementwiseSpec:
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


KernelSpec = (
    ConvSpec
    | PoolSpec
    | GlobalPoolSpec
    | PackSpec
    | UnpackSpec
    | CopySpec
    | SoftmaxSpec
    | ElementwiseSpec
    | BlockedElementwiseSpec
)


@dataclass(frozen=True)
class KernelPlan:
    """A spec with the template's knobs chosen: what will be compiled and how the executor must call it.

    `knobs` are the template's own (register tile, task blocking, loop order), sorted by name. Equal plans share one.
    """

    spec: KernelSpec
    knobs: tuple[tuple[str, int | str], ...]
    tasks: int
    description: str
    blocking_bytes: int
    parallelism: int


PackedWeights = tuple[Array, ...]  # in argument order, ready for weights.bin
RawWeights = Mapping[str, Array]  # "weights" and "bias", as ONNX has them
