"""What a kernel must compute, as data: the contract between the graph half of the compiler and the kernel templates.

The graph half (frontend, lower, place) turns a model into specs; `templates/` turns each distinct spec into code.
Nothing here imports TVM. This file has what all specs share, and the specs of kernels over blocked memory;
`plain_specs.py` has those over plain tensors.

Layouts of an activation of C channels, H x W pixels (one row of the batch), L = lanes of the target:
  blocked   [ceil(C/L)][H + 2 halo][W + 2 halo][L], halo always zero, surplus channels finite whenever the others are
            (they meet zeros among the weights)
  bf16      blocked by 32 channels of bfloat16, of which there is a whole number of blocks
  planar    [C][H + 2 halo][W + 2 halo]              (input of a first convolution with few channels)
  plain     row-major, as ONNX says
  bytes     [ceil(C/64)][H + 2 halo][W + 2 halo][64], halo always the tensor's zero point, surplus channels any number
  pixels    [H + 2 halo][W + 2 halo][4]              (of bytes, input of a first convolution with up to 4 channels)

A tensor of bytes holds numbers q from 0 to 255 that stand for (q - zero) scale; those of int8 are moved up by 128.
Scales, zero points and biases are among the weights, so that layers of one shape share a kernel.

A volume [C][D][H][W] is the image [C][D H][W]: its slices lie below each other.

A *sequence* is a tensor whose last axis are the channels: P positions (the product of all other axes of one row) of C
channels. Blocked, it is the blocked image of C channels and 1 x P pixels without a halo: [ceil(C/L)][P][L]. So a linear
layer over it is a 1x1 `ConvSpec`, residual and activation included.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Final, Literal, Self

import numpy as np
import numpy.typing as npt

from gangway.artifact.format import Precision

Array = npt.NDArray[Any]
MOST_LANES = 16  # of any target
READ_BEHIND_BYTES = 1024  # what kernels may read behind an activation that is stored in bfloat16, without using it
RawWeights = Mapping[str, Array]  # by the names that the spec states, as ONNX has them
PackedWeights = tuple[Array, ...]  # in argument order, ready for weights.bin
Layout = Literal["plain", "blocked", "planar", "bf16", "bytes", "pixels"]
"""Where the elements of an activation lie, and what they are: of float32 unless it says otherwise."""
Products = Precision | Literal["int8"]
"""The elements of weights and of what is multiplied by them."""
BYTES_CHANNELS = 64  # of a pixel of bytes, beside each other
PIXELS_CHANNELS = 4  # of one of pixels
Check = Literal["index", "zero", "least", "length"]
"""Which number a kernel refuses: an index out of range, a divisor of 0, the least integer divided by -1, a length of
less than 0 or of more steps than there are.
"""


@dataclass(frozen=True)
class KernelSpec:
    """Base of all specs. Specs are frozen and hashable: equal specs share one kernel."""

    # Whether subnormal numbers count as zero, unless sums are integers: sums of products are very slow with them.
    flushes_subnormals: ClassVar[bool] = False

    @property
    def flops(self) -> int:
        """Arithmetic operations of one row; a multiply-add counts as two. Moving numbers is none."""
        return 0

    @property
    def text(self) -> str:
        """Shape for people, "64x56x56 -> 256x56x56 k1 s1"; empty if the output's shape says it all."""
        return ""

    def has(self, *layouts: Layout) -> bool:
        """Whether an activation has one of these layouts: they are in fields called so."""
        found = (getattr(self, field.name) for field in fields(self) if "layout" in field.name)
        return any(layout in layouts for one in found for layout in ((one,) if isinstance(one, str) else one))

    @property
    def checks(self) -> tuple[Check, ...]:
        """What the kernel refuses. If anything, it has an argument more: two int64, see `artifact.format.Layer`."""
        return ()

    def with_halos(self, inputs: tuple[int, ...], output: int) -> Self:
        """The spec with the halos that its activations turned out to have, inputs in the order of the arguments.

        They become the fields `input_halo`, of the first input, `residual_halo`, `input_halos` and `output_halo`.
        """
        halos: dict[str, Any] = {"input_halos": inputs, "output_halo": output}
        halos["input_halo"] = inputs[0] if inputs else 0
        halos["residual_halo"] = inputs[-1] if getattr(self, "residual", False) else 0
        return replace(self, **{field.name: halos[field.name] for field in fields(self) if field.name in halos})


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


@dataclass(frozen=True)
class BatchPlan:
    """A second kernel that all plans of a spec share: up to `rows` rows in one call, in `tasks` tasks together."""

    spec: KernelSpec
    rows: int
    tasks: int
    description: str


@dataclass(frozen=True)
class ImageSpec(KernelSpec):
    """Base of specs of which an image's shape says all to people."""

    channels: int
    height: int
    width: int

    @property
    def text(self) -> str:
        """Shape for people."""
        return _image(self.channels, self.height, self.width)


ActivationName = Literal[
    "none",
    "clip",
    "leaky_relu",
    "bounded_leaky_relu",
    "sigmoid",
    "swish",
    "hard_sigmoid",
    "hard_swish",
    "tanh",
    "erf",
    "gelu",
    "gelu_tanh",
    "elu",
    "mish",
    "softplus",
    "quantise",
    "quantise_int8",
    "quantise_uint8",
]


@dataclass(frozen=True)
class Activation:
    """A function of one number, which a kernel applies before it stores, and two parameters; unused ones are 0.

    none: x; clip: min(max(x, alpha), beta); leaky_relu: x if x >= 0 else alpha x; bounded_leaky_relu: the same, but
    at least beta; sigmoid: 1 / (1 + exp(-x)); swish: x sigmoid(x); hard_sigmoid: min(max(alpha x + beta, 0), 1);
    hard_swish: x hard_sigmoid(x); tanh; erf; gelu: x (1 + erf(x / sqrt 2)) / 2; gelu_tanh: x (1 + tanh(sqrt(2 / pi)
    (x + 0.044715 x^3))) / 2; elu: x if x > 0 else alpha (exp(x) - 1); softplus: log(1 + exp(x)); mish: x
    tanh(softplus(x)); quantise_int8, quantise_uint8: what is left of x once it was an integer of this type, of
    scale alpha and zero point beta; quantise: the same, where the kernel has limits as data.
    """

    name: ActivationName
    alpha: float = 0.0
    beta: float = 0.0


NONE: Final = Activation("none")
RELU: Final = Activation("clip", 0.0, math.inf)
RELU6: Final = Activation("clip", 0.0, 6.0)


@dataclass(frozen=True)
class ConvSpec(KernelSpec):
    """Convolution + bias [+ residual] [+ activation], blocked in and out. Arguments: x, weights, bias, [residual,] y.

    Weights arrive as ONNX has them, [out][in/groups][kh][kw]. `groups` is 1, or `in_channels` (depthwise), or such that
    inputs and outputs of a group are multiples of MOST_LANES. Other groups are one group whose weights are zero but in
    `diagonal_blocks` equal blocks.
    A dense layer (Gemm) is a 1x1 convolution over a 1 x M image; halos are 0 there.
    Each halo is at least what its consumers' padding needs; it belongs to the tensor: producer and consumers agree.

    `precision`: of weights and products. With "fp32", x is blocked or planar. With "bf16", sums are float32, and
    activations may be stored in bf16. With "int8", x is in bytes or pixels, sums are integers, and arguments are x,
    weights, bias, multiplier, zero, y. y is round(sum multiplier) + zero, from 0 to 255, in bytes; or, blocked,
    activation(sum multiplier). Raw weights: "weights" int8 [out][in][kh][kw], "bias" int32 [out], less the sum of the
    weights times x's zero point, "multiplier" float32 [out], "zero" float32 [1].

    If integers are `dynamic`, x's scale is known at run time only: the arguments are x, weights, integers, numbers,
    factors, [residual,] y. y is activation(sum scale + bias [+ residual]). Raw weights: "weights", "scales" float32
    [out], "bias" float32 [out], and zero points of the weights, "zeros" int32 [out], which are 0 unless `weight_zeros`.
    Those of a depthwise one are int16, less their zero points; its arguments are x, weights, sums, scales, bias,
    factors, y. `factors` are those of `Int8FactorsSpec`.

    Integer weights are `narrow` if products of two adjacent channels of one output, by uint8, have a sum of 16 bits.
    Sums of a depthwise convolution of integers are below 2^24.
    """

    flushes_subnormals = True

    in_channels: int
    height: int
    width: int
    out_channels: int
    kernel: tuple[int, int] = (1, 1)
    stride: tuple[int, int] = (1, 1)
    pads: tuple[int, int, int, int] = (0, 0, 0, 0)  # top, left, bottom, right
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1
    diagonal_blocks: int = 1
    activation: Activation = NONE
    residual: bool = False
    input_layout: Layout = "blocked"
    residual_layout: Layout = "blocked"
    output_layout: Layout = "blocked"
    input_halo: int = 0
    residual_halo: int = 0
    output_halo: int = 0
    precision: Products = "fp32"
    dynamic: bool = False
    weight_zeros: bool = False
    narrow: bool = False

    @property
    def is_depthwise(self) -> bool:
        """Whether each output is of one input."""
        return self.groups == self.in_channels == self.out_channels > 1

    @property
    def input_planar(self) -> bool:
        """Whether x is planar."""
        return self.input_layout == "planar"

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
        return self.in_channels // self.groups // self.diagonal_blocks * math.prod(self.kernel)

    @property
    def text(self) -> str:
        """Shape for people."""
        if (self.height, self.width, *self.kernel) == (1, 1, 1, 1):
            return f"{self.in_channels} -> {self.out_channels}"
        count = self.groups * self.diagonal_blocks
        depthwise = " depthwise" if self.groups == self.in_channels else f" {count} groups"
        groups = "" if count == 1 else depthwise
        source, size = _image(self.in_channels, self.height, self.width), _image(self.out_channels, *self.output_size)
        return f"{source} -> {size} {_window(self.kernel, self.stride)}{groups}"


@dataclass(frozen=True)
class ConvDepthwiseSpec(KernelSpec):
    """`depthwise` of what `conv` computes, which has no other reader and is never whole in memory.

    Arguments: x, weights, bias, depthwise weights, depthwise bias, y; raw weights "weights", "bias",
    "depthwise_weights", "depthwise_bias". Neither has a residual; the window of `depthwise` is not dilated.
    """

    flushes_subnormals = True

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


@dataclass(frozen=True)
class ConvTransposeSpec(KernelSpec):
    """Transposed convolution + bias [+ activation], blocked in and out. Arguments: x, weights, bias, y.

    The output has a whole number of strides along each axis. Its pixels q, q + stride, ... are a *phase*, which is a
    convolution of x by every stride-th number of the kernel, `taps` of them. Raw weights: "weights" [phases down]
    [phases across][out][in][taps][taps], "bias". `begins`: how much of the full result is cut off at the top and left.
    """

    flushes_subnormals = True

    in_channels: int
    height: int
    width: int
    out_channels: int
    taps: tuple[int, int]
    stride: tuple[int, int]
    begins: tuple[int, int]
    output_size: tuple[int, int]
    activation: Activation = NONE
    input_halo: int = 0
    output_halo: int = 0

    @property
    def grid(self) -> tuple[int, int]:
        """Height and width of a phase."""
        return self.output_size[0] // self.stride[0], self.output_size[1] // self.stride[1]

    @property
    def shifts(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """By how many pixels of x the windows of the first and of the last phase are moved, down and across."""
        down, across = (
            (begin // stride, (stride - 1 + begin) // stride)
            for begin, stride in zip(self.begins, self.stride, strict=True)
        )
        return down, across

    @property
    def pads(self) -> tuple[int, int, int, int]:
        """Pixels beyond the image that windows see: top, left, bottom, right; negative where they see less."""
        size = self.height, self.width
        first = [taps - 1 - shift[0] for taps, shift in zip(self.taps, self.shifts, strict=True)]
        last = [n + shift[1] - length for n, shift, length in zip(self.grid, self.shifts, size, strict=True)]
        return first[0], first[1], last[0], last[1]

    @property
    def flops(self) -> int:
        """Arithmetic operations of one row."""
        return 2 * self.out_channels * math.prod(self.output_size) * self.in_channels * math.prod(self.taps)

    @property
    def text(self) -> str:
        """Shape for people."""
        source, size = _image(self.in_channels, self.height, self.width), _image(self.out_channels, *self.output_size)
        reach = self.taps[0] * self.stride[0], self.taps[1] * self.stride[1]
        return f"{source} -> {size} {_window(reach, self.stride)} transposed"


@dataclass(frozen=True)
class PoolSpec(KernelSpec):
    """Max or average pooling, blocked in and out. Arguments: x, y. Padding takes no part in a maximum or sum.

    Both tensors may be stored in bf16. For a maximum both may be in bytes, with the same scale and zero point.

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
    input_layout: Layout = "blocked"
    output_layout: Layout = "blocked"
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


@dataclass(frozen=True)
class GlobalPoolSpec(KernelSpec):
    """Mean or maximum over all pixels, blocked in, blocked 1 x 1 out. Arguments: x, y.

    x may be stored in bf16. For a mean it may be in bytes: arguments are x, factors, y then, and raw weights "factors"
    float32: scale / pixels, -zero scale.
    """

    channels: int
    height: int
    width: int
    input_halo: int = 0
    mode: Literal["max", "average"] = "average"
    input_layout: Layout = "blocked"

    @property
    def flops(self) -> int:
        """Arithmetic operations of one row."""
        return self.channels * self.height * self.width

    @property
    def text(self) -> str:
        """Shape for people."""
        return f"{_image(self.channels, self.height, self.width)} -> {self.channels}"


@dataclass(frozen=True)
class ResizeSpec(KernelSpec):
    """Interpolation along both axes of an image, blocked in and out, or plain. Arguments: x, places, weights, y.

    A line of y is a sum of `taps[0]` lines of x, a pixel of it of `taps[1]` columns. Lines of x are needed one after
    the other, and each no longer than until `window` - 1 further ones are. Raw weights, by axis: "row_places",
    "column_places" [length of y][taps], ascending in each line; "row_weights", "column_weights" of the same shape, all
    1 of a single tap.
    """

    channels: int
    height: int
    width: int
    output_size: tuple[int, int]
    taps: tuple[int, int]
    window: int
    plain: bool = False
    input_halo: int = 0
    output_halo: int = 0

    @property
    def flops(self) -> int:
        """Arithmetic operations of one row."""
        return 2 * self.channels * math.prod(self.output_size) * sum(taps for taps in self.taps if taps > 1)

    @property
    def text(self) -> str:
        """Shape for people."""
        size = _image(self.channels, *self.output_size)
        return f"{_image(self.channels, self.height, self.width)} -> {size}"


@dataclass(frozen=True)
class DepthWindow:
    """The third axis of a window over a volume. A volume [C][D][H][W] is the image [C][D H][W], slice after slice."""

    length: int
    kernel: int
    stride: int = 1
    pads: tuple[int, int] = (0, 0)  # front, back
    dilation: int = 1

    @property
    def output(self) -> int:
        """Slices of the output."""
        return (self.length + sum(self.pads) - (self.kernel - 1) * self.dilation - 1) // self.stride + 1


@dataclass(frozen=True)
class VolumePadSpec(KernelSpec):
    """Zeros around each slice of a volume, blocked in and out. Arguments: x, y. y has no halo.

    `pads`: top, left, bottom, right.
    """

    channels: int
    depth: int
    height: int
    width: int
    pads: tuple[int, int, int, int]
    input_halo: int = 0

    @property
    def padded(self) -> tuple[int, int]:
        """Height and width of a slice of y."""
        top, left, bottom, right = self.pads
        return self.height + top + bottom, self.width + left + right


@dataclass(frozen=True)
class VolumeConvSpec(KernelSpec):
    """Convolution of a volume + bias [+ activation], blocked in and out. Arguments: x, weights, bias, y.

    `conv` is what happens to a slice, `depth` how many of them are added up. Slices have no padding but between them
    (see `VolumePadSpec`); slices before the first one and after the last one are passed over. Raw weights "weights"
    [out][in][kd][kh][kw], "bias".
    """

    flushes_subnormals = True

    conv: ConvSpec
    depth: DepthWindow

    @property
    def flops(self) -> int:
        """Arithmetic operations of one row."""
        return self.conv.flops * self.depth.kernel * self.depth.output

    @property
    def text(self) -> str:
        """Shape for people."""
        return f"{self.depth.length} slices {self.conv.text}, k{self.depth.kernel} s{self.depth.stride} of slices"

    def with_halos(self, inputs: tuple[int, ...], output: int) -> Self:
        """The spec with its halos settled."""
        return replace(self, conv=replace(self.conv, input_halo=inputs[0], output_halo=output))


@dataclass(frozen=True)
class VolumePoolSpec(KernelSpec):
    """Pooling of a volume, blocked in and out. Arguments: x, y. `pool` is what happens to a slice."""

    pool: PoolSpec
    depth: DepthWindow

    @property
    def flops(self) -> int:
        """Arithmetic operations of one row."""
        return self.pool.flops * self.depth.kernel * self.depth.output

    @property
    def text(self) -> str:
        """Shape for people."""
        return f"{self.depth.length} slices {self.pool.text}, k{self.depth.kernel} s{self.depth.stride} of slices"

    def with_halos(self, inputs: tuple[int, ...], output: int) -> Self:
        """The spec with its halos settled."""
        return replace(self, pool=replace(self.pool, input_halo=inputs[0], output_halo=output))


def first_needed(places: Array) -> Array:
    """Return the first line that each of some rows [rows][taps], or one after it, is made of: [rows]."""
    result: Array = np.minimum.accumulate(places[::-1, 0])[::-1]
    return result


def lines_kept(places: Array) -> int:
    """Return how many adjacent lines must be kept while rows are made of these places, one after the other."""
    return int((np.maximum.accumulate(places[:, -1]) - first_needed(places)).max()) + 1


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


ElementwiseOperator = Literal["add", "sub", "mul", "div", "copy"]


@dataclass(frozen=True)
class ElementwiseSpec(KernelSpec):
    """One operator over float32 tensors, then an activation, wherever they lie. Inputs have the size of the output, or
    are constants, or have one number per channel of an image. Divisors are constants without a zero.

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
    counts for every pixel; the others have the output's size and the halo of the same place in `input_halos`. If the
    activation is "quantise", "limits" follow the first input, raw weights of this name: see `PointwiseSpec`.

    Where layouts say so, images are in bytes. Then "factors" follow the first input, raw weights of this name, float32:
    of each input scale and -zero scale, then of the output 1 / scale and the zero point. If numbers are `in_steps`,
    scales are in steps of the output's one, and the first input's shift is that of all.
    """

    operator: ElementwiseOperator
    channels: int
    height: int
    width: int
    vectors: tuple[bool, ...]
    input_halos: tuple[int, ...]
    activation: Activation = NONE
    output_halo: int = 0
    input_layouts: tuple[Layout, ...] = ()  # none: all are blocked
    output_layout: Layout = "blocked"

    @property
    def in_steps(self) -> bool:
        """Whether the kernel adds multiples of the output's scale."""
        layouts = {*self.input_layouts, self.output_layout}
        return self.operator == "add" and layouts == {"bytes"} and self.activation == NONE

    @property
    def flops(self) -> int:
        """Arithmetic operations of one row."""
        return 0 if self.operator == "copy" else self.channels * self.height * self.width

    @property
    def text(self) -> str:
        """Shape for people."""
        return _image(self.channels, self.height, self.width)


@dataclass(frozen=True)
class PackSpec(ImageSpec):
    """Plain [C][H][W] float32 to another `layout`, with a halo. Arguments: x, [factors,] y.

    Raw weights of bytes and pixels, whose halo is written, too: "factors" float32: scale, least and largest less the
    zero point, the zero point.
    """

    layout: Layout
    output_halo: int = 0


@dataclass(frozen=True)
class UnpackSpec(ImageSpec):
    """Blocked to plain [C][H][W], or [H][W][C] if `channels_last`. Arguments: x, y."""

    input_halo: int = 0
    channels_last: bool = False


@dataclass(frozen=True)
class SequencePackSpec(KernelSpec):
    """Plain float32 [positions][channels] to blocked, or back if `unpack`. Arguments: x, y. Surplus becomes zero.

    `position_stride`: numbers from one position of the plain tensor to the next, at least `channels`.
    """

    positions: int
    channels: int
    position_stride: int
    unpack: bool = False


@dataclass(frozen=True)
class LayerNormSpec(KernelSpec):
    """(x - mean) / sqrt(variance + epsilon) * scale + shift over the channels of each position, blocked in and out.

    Arguments: x, scale, shift, y. Raw weights: "scale" [channels], "shift" [channels]. `centred` false: the mean is
    taken as 0 (RMS normalisation). y's surplus channels are zero.
    """

    channels: int
    positions: int
    epsilon: float
    centred: bool = True
    input_layout: Layout = "blocked"
    output_layout: Layout = "blocked"

    @property
    def flops(self) -> int:
        """Arithmetic operations of one row, roughly."""
        return 8 * self.channels * self.positions


Cell = Literal["LSTM", "GRU", "RNN"]
GATES: Final[Mapping[Cell, int]] = {"LSTM": 4, "GRU": 3, "RNN": 1}
CACHED_MATRIX_BYTES = 3 << 19
Part = Literal["gates", "candidate"]  # of a step


@dataclass(frozen=True)
class RecurrentSpec(KernelSpec):
    """All steps of ONNX's LSTM, GRU or RNN, given the products of all inputs with their weights.

    Arguments: x, weights, [h,] [c,] [lengths,] then those of (Y, Y_h, Y_c) that `outputs` says, the first one last.

    x is a blocked sequence of steps x sequences positions, with the biases, and `channels` channels: direction by
    direction, gate by gate, each gate filled up to `units`. The others are plain, of ONNX's shapes. Raw weights:
    "recurrent" [directions][gates x hidden][hidden], "peepholes" [directions][3 x hidden] if there are any, and, with
    `linear_before_reset`, "bias" [directions][hidden], the recurrent one of the hidden gate.

    `int8`: raw "recurrent" are integers of 8 bits then, "scales" [directions][gates x hidden] theirs, and there is an
    argument more, behind weights: these, then biases or peepholes.

    `part` divides a single step of a GRU that resets its state before the product. "gates": x, weights, [h,] the reset
    state, the update gate. "candidate": x, weights, [h,] these two, then the results.
    """

    flushes_subnormals = True

    cell: Cell
    steps: int
    sequences: int  # the batch axis of the tensors
    hidden: int
    activations: tuple[tuple[Activation, ...], ...]  # f, g and h of each direction, as far as the cell has them
    reverse: bool = False  # the only direction begins with the last step
    sequences_first: bool = False  # layout 1
    clip: float = math.inf  # of what activations get
    input_forget: bool = False
    peepholes: bool = False
    linear_before_reset: bool = False
    initial_h: bool = False
    initial_c: bool = False
    lengths: bool = False
    outputs: tuple[bool, bool, bool] = (True, False, False)
    positions: int = 0  # of x, if it has those of other steps, too
    part: Part | None = None  # None: all of each step
    int8: bool = False  # the recurrent matrix

    @property
    def directions(self) -> int:
        """1, or 2: forward and backward."""
        return len(self.activations)

    @property
    def gates(self) -> int:
        """Gates of the cell."""
        return GATES[self.cell]

    @property
    def gate_groups(self) -> tuple[tuple[int, ...], ...]:
        """Gates whose products are computed together: those of the state, then that of the reset state."""
        if self.cell != "GRU" or self.linear_before_reset:
            return (tuple(range(self.gates)),)
        return {None: ((0, 1), (2,)), "gates": ((0, 1),), "candidate": ((2,),)}[self.part]

    @property
    def units(self) -> int:
        """Units of a gate in x, those that fill up vectors of any target included."""
        return -(-self.hidden // MOST_LANES) * MOST_LANES

    @property
    def channels(self) -> int:
        """Channels of x."""
        return self.directions * self.gates * self.units

    @property
    def is_cached(self) -> bool:
        """Whether the matrix of a direction stays in a second level cache of one or two megabytes from step to step."""
        size_bytes = 1 if self.int8 else 4
        return size_bytes * self.gates * self.units * self.hidden <= CACHED_MATRIX_BYTES

    @property
    def checks(self) -> tuple[Check, ...]:
        """Lengths."""
        return ("length",) if self.lengths else ()

    @property
    def flops(self) -> int:
        """Arithmetic operations of one row: products, and roughly 16 for an activation of a number."""
        gates = sum(map(len, self.gate_groups))
        numbers = self.steps * self.sequences * self.directions * gates * self.hidden
        return numbers * (2 * self.hidden + 16)

    @property
    def text(self) -> str:
        """Shape for people."""
        return f"{self.steps} steps of {self.sequences}x{self.directions}x{self.hidden}"
