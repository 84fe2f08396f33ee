"""Operators on images (convolution, batch normalisation, pooling), and reductions over any axes of plain tensors."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np

from gangway.compiler.frontend.graph import Node
from gangway.compiler.frontend.shapes.rules import same_pads, transposed_begin, windows_along
from gangway.compiler.frontend.simplify import affine_factors
from gangway.compiler.kernels.plain_specs import ELEMENT_TYPES, FLOATS, After, Before, ReduceSpec, Reduction
from gangway.compiler.kernels.specs import (
    MOST_LANES,
    Array,
    ConvSpec,
    ConvTransposeSpec,
    DepthWindow,
    GlobalPoolSpec,
    PoolSpec,
    VolumeConvSpec,
    VolumePoolSpec,
    window_output,
)
from gangway.compiler.lower.layers import Geometry, Program, geometry_of, lowers

Pair = tuple[int, int]
Pads = tuple[int, int, int, int]
_REDUCTIONS: dict[str, tuple[Reduction, Before, After]] = {
    "ReduceSum": ("sum", "none", "none"),
    "ReduceMean": ("sum", "none", "mean"),
    "ReduceMax": ("max", "none", "none"),
    "ReduceMin": ("min", "none", "none"),
    "ReduceProd": ("prod", "none", "none"),
    "ReduceL1": ("sum", "abs", "none"),
    "ReduceL2": ("sum", "square", "sqrt"),
    "ReduceSumSquare": ("sum", "square", "none"),
    "ReduceLogSum": ("sum", "none", "log"),
}
_OF_FLOATS = {"ReduceLogSum"}


@lowers("Conv")
def conv(program: Program, node: Node) -> None:
    """Convolution of an image, full, depthwise or in groups, or of a volume."""
    image = program.geometry(node, node.inputs[0])
    weights = program.constant(node, 1)
    if weights.ndim not in (4, 5) or weights.ndim != len(program.type(node.inputs[0]).shape):
        raise node.unsupported(f"weights of {weights.ndim} dimensions; only images and volumes")
    if weights.ndim == 5:
        _volume_conv(program, node, weights)
        return
    (outputs, per_group, height, width), diagonal_blocks = weights.shape, 1
    groups = node.attributes.get("group", 1)
    if per_group * groups != image.channels:
        raise node.unsupported(f"weights {list(weights.shape)} of {groups} groups do not fit {image.channels} channels")
    if outputs % groups:
        raise node.unsupported(f"{groups} groups of {outputs} outputs")
    if groups != 1 and not groups == image.channels == outputs:
        diagonal_blocks = groups
        weights, groups = _merge_groups(weights, groups)
    bias = _bias(program, node, outputs)
    if bias.shape != (outputs,):
        raise node.unsupported(f"bias {list(bias.shape)} for {outputs} channels")
    window = window_of(node, image, (height, width))
    spec = ConvSpec(
        image.channels,
        image.height,
        image.width,
        outputs,
        window.kernel,
        window.stride,
        window.pads,
        window.dilation,
        groups,
        diagonal_blocks if groups == 1 else 1,
    )
    program.add(node, spec, (node.inputs[0],), {"weights": weights, "bias": bias})


def _bias(program: Program, node: Node, outputs: int) -> Array:
    """The third input, or zeros."""
    given = program.optional(node, 2)
    return np.zeros(outputs, np.float32) if given is None else given


def _volume_conv(program: Program, node: Node, weights: Array) -> None:
    _, channels, length, height, width = program.type(node.inputs[0]).shape
    outputs, inputs, depth, *kernel = weights.shape
    if inputs != channels:
        raise node.unsupported("groups of a volume")
    bias = _bias(program, node, outputs)
    along, window = _volume_windows(node, (length, height, width), (depth, kernel[0], kernel[1]))
    steps, pads = (along.stride, *window.stride), (*along.pads, *window.pads)
    if weights.shape[2:] == (1, 1, 1) == steps and not any(pads):
        flat = ConvSpec(channels, length * height, width, outputs)
        program.add(node, flat, (node.inputs[0],), {"weights": weights[..., 0], "bias": bias})
        return
    conv = ConvSpec(
        channels, height, width, outputs, window.kernel, window.stride, window.pads, dilation=window.dilation
    )
    program.add(node, VolumeConvSpec(conv, along), (node.inputs[0],), {"weights": weights, "bias": bias})


def _volume_windows(
    node: Node, size: tuple[int, int, int], kernel: tuple[int, int, int]
) -> tuple[DepthWindow, "ImageWindow"]:
    """Return the window's first axis and the other two, each with explicit padding."""

    def part(axes: slice, rest: list[int]) -> Node:
        given = dict(node.attributes)
        for name, one in (("strides", 1), ("dilations", 1)):
            if name in given:
                given[name] = [*given[name][axes], *[one for _ in rest]]
        if "pads" in given:
            begins, ends = given["pads"][:3], given["pads"][3:]
            given["pads"] = [*begins[axes], *rest, *ends[axes], *rest]
        return replace(node, attributes=given)

    along = window_of(part(slice(0, 1), [0]), Geometry(1, size[0], 1), (kernel[0], 1))
    across = window_of(part(slice(1, 3), []), Geometry(1, *size[1:]), (kernel[1], kernel[2]))
    pads = along.pads[0], along.pads[2]
    return DepthWindow(size[0], kernel[0], along.stride[0], pads, along.dilation[0]), across


def _merge_groups(weights: Array, groups: int) -> tuple[Array, int]:
    """Return an equal convolution of as many groups as are whole registers: zeros between what was merged.

    [outputs, inputs / groups, height, width] in and out.
    """
    outputs, inputs = weights.shape[0] // groups, weights.shape[1]
    whole = [n for n in range(1, groups) if not (groups % n or n * outputs % MOST_LANES or n * inputs % MOST_LANES)]
    merged = whole[0] if whole else groups
    result = np.zeros((len(weights), inputs * merged, *weights.shape[2:]), weights.dtype)
    for group in range(groups):
        rows = slice(group * outputs, (group + 1) * outputs)
        first = group % merged * inputs
        result[rows, first : first + inputs] = weights[rows]
    return result, groups // merged


@lowers("ConvTranspose")
def conv_transpose(program: Program, node: Node) -> None:
    """Of images, where the output is a whole number of strides long; its definition does all others."""
    image, weights = program.geometry(node, node.inputs[0]), program.constant(node, 1)
    stride, result = _pair(node, "strides", (1, 1)), program.type(node.outputs[0]).shape
    plain = node.attributes.get("group", 1) == 1 and _pair(node, "dilations", (1, 1)) == (1, 1)
    if (
        weights.ndim != 4
        or weights.shape[0] != image.channels
        or not plain
        or any(n % step for n, step in zip(result[2:], stride, strict=True))
    ):
        raise node.unsupported("groups, dilations, or an output that is no whole number of strides long")
    inputs, outputs, *kernel = weights.shape
    begins = _begins(node, (image.height, image.width), (kernel[0], kernel[1]), stride, (result[2], result[3]))
    taps = tuple(-(-length // step) for length, step in zip(kernel, stride, strict=True))
    spec = ConvTransposeSpec(
        inputs,
        image.height,
        image.width,
        outputs,
        (taps[0], taps[1]),
        stride,
        begins,
        (result[2], result[3]),
    )
    if min(begins) < 0 or min(spec.pads[:2]) < 0 or min(spec.grid) < 1:
        raise node.unsupported(f"pads {begins} of a kernel {kernel}")
    bias = _bias(program, node, outputs)
    program.add(node, spec, (node.inputs[0],), {"weights": _phases(weights, stride, begins, taps), "bias": bias})


def _begins(node: Node, size: Pair, kernel: Pair, stride: Pair, result: Pair) -> Pair:
    """Return how much of the full result is cut off at the top and left."""
    mode = node.attributes.get("auto_pad", b"NOTSET").decode()
    is_given = bool(node.attributes.get("output_shape", ()))
    pads, extra = node.attributes.get("pads", (0, 0, 0, 0)), _pair(node, "output_padding", (0, 0))
    whole = [stride[n] * (size[n] - 1) + extra[n] + kernel[n] for n in range(2)]
    top, left = (transposed_begin(mode, is_given, pads[n], whole[n], result[n]) for n in range(2))
    return top, left


def _phases(weights: Array, stride: Pair, begins: Pair, taps: Sequence[int]) -> Array:
    """[in][out][kernel] to [phases down][across][out][in][taps]: phase q has numbers (q + begin) mod stride, ... of the
    kernel, last first.
    """
    ends = [(0, tap * step - length) for tap, step, length in zip(taps, stride, weights.shape[2:], strict=True)]
    inputs, outputs = weights.shape[:2]
    parts = np.pad(weights, [(0, 0), (0, 0), *ends]).reshape(inputs, outputs, taps[0], stride[0], taps[1], stride[1])
    phases = parts.transpose(3, 5, 1, 0, 2, 4)[..., ::-1, ::-1]
    moved = np.roll(phases, [-begin % step for begin, step in zip(begins, stride, strict=True)], axis=(0, 1))
    return np.ascontiguousarray(moved)


@lowers("BatchNormalization")
def batch_normalization(program: Program, node: Node) -> None:
    """A scale and a shift per channel: a depthwise convolution of one pixel."""
    image = program.geometry(node, node.inputs[0])
    factors = affine_factors(node, program.graph.constants, program.type(node.inputs[0]).shape)
    if factors is None:
        raise node.unsupported("training mode, or statistics that are not constants")
    scale, shift = factors
    spec = ConvSpec(image.channels, image.height, image.width, image.channels, groups=image.channels)
    program.add(node, spec, (node.inputs[0],), {"weights": scale.reshape(-1, 1, 1, 1), "bias": shift})


@lowers("MaxPool", "AveragePool")
def pool(program: Program, node: Node) -> None:
    """Maximum or mean of a window."""
    image = program.geometry(node, node.inputs[0])
    if len(node.attributes["kernel_shape"]) == 3:
        _volume_pool(program, node)
        return
    height, width = node.attributes["kernel_shape"]
    window = window_of(node, image, (height, width))
    average = node.operator == "AveragePool"
    if window.dilation != (1, 1):
        raise node.unsupported(f"dilations {window.dilation}")
    if average and window.kernel == window.stride == (1, 1) and not any(window.pads):
        program.views[node.outputs[0]] = node.inputs[0]  # an adaptive pooling, exported where it has nothing to do
        return
    if average and window.kernel == (image.height, image.width) and not any(window.pads):
        program.add(node, global_pool(image), (node.inputs[0],))
        return
    spec = PoolSpec(
        "average" if average else "max",
        image.channels,
        image.height,
        image.width,
        window.kernel,
        window.stride,
        window.pads,
        average and bool(node.attributes.get("count_include_pad", 0)),
        window.ceil_pads,
    )
    program.add(node, spec, (node.inputs[0],))


def _volume_pool(program: Program, node: Node) -> None:
    _, channels, *size = program.type(node.inputs[0]).shape
    kernel, average = node.attributes["kernel_shape"], node.operator == "AveragePool"
    along, window = _volume_windows(node, (size[0], size[1], size[2]), tuple(kernel))
    if (along.dilation, *window.dilation) != (1, 1, 1):
        raise node.unsupported("dilations")
    counted = average and bool(node.attributes.get("count_include_pad", 0))
    if counted and node.attributes.get("ceil_mode", 0):
        raise node.unsupported("ceil_mode of a volume whose padding counts")
    pool = PoolSpec(
        "average" if average else "max",
        channels,
        size[1],
        size[2],
        window.kernel,
        window.stride,
        window.pads,
        counted,
        window.ceil_pads,
    )
    program.add(node, VolumePoolSpec(pool, along), (node.inputs[0],))


@lowers("GlobalAveragePool")
def global_average_pool(program: Program, node: Node) -> None:
    """Mean over all pixels."""
    program.add(node, global_pool(program.geometry(node, node.inputs[0])), (node.inputs[0],))


@lowers("GlobalMaxPool")
def global_max_pool(program: Program, node: Node) -> None:
    """Maximum of all pixels."""
    spec = replace(global_pool(program.geometry(node, node.inputs[0])), mode="max")
    program.add(node, spec, (node.inputs[0],))


def global_pool(image: Geometry) -> GlobalPoolSpec:
    """The mean of all pixels."""
    return GlobalPoolSpec(image.channels, image.height, image.width)


@dataclass(frozen=True)
class ImageWindow:
    """A window that slides over an image; pads are top, left, bottom, right, `ceil_pads` of them are ceil_mode's."""

    kernel: Pair
    stride: Pair
    pads: Pads
    dilation: Pair
    ceil_pads: Pair  # bottom, right


def window_of(node: Node, image: Geometry, kernel: Pair) -> ImageWindow:
    """Return the node's window with explicit padding; `ceil_mode` becomes padding at the bottom and right."""
    stride = _pair(node, "strides", (1, 1))
    dilation = _pair(node, "dilations", (1, 1))
    size = (image.height, image.width)
    pads = given = _pads(node, size, kernel, stride, dilation)
    if node.attributes.get("ceil_mode", 0):
        pads = _ceil_pads(size, kernel, stride, pads, dilation)
    if min(pads) < 0 or min(*kernel, *stride, *dilation) < 1:
        raise node.unsupported(f"kernel {kernel}, strides {stride}, pads {pads}, dilations {dilation}")
    if min(window_output(size, kernel, stride, pads, dilation)) < 1:
        raise node.unsupported(f"the image {size} is smaller than the window {kernel}")
    return ImageWindow(kernel, stride, pads, dilation, (pads[2] - given[2], pads[3] - given[3]))


def _pair(node: Node, name: str, default: Pair) -> Pair:
    values = tuple(node.attributes.get(name, default))
    if len(values) != 2:
        raise node.unsupported(f"{name} {values}: only images of two dimensions")
    return values


def _pads(node: Node, size: Pair, kernel: Pair, stride: Pair, dilation: Pair) -> Pads:
    mode = node.attributes.get("auto_pad", b"NOTSET").decode()
    if mode == "NOTSET":
        top, left, bottom, right = node.attributes.get("pads", (0, 0, 0, 0))
        return top, left, bottom, right
    if mode == "VALID":
        return 0, 0, 0, 0
    steps = dilation if node.operator == "Conv" else (1, 1)  # onnxruntime leaves out those of pooling
    (top, bottom), (left, right) = (
        same_pads(n, (k - 1) * d + 1, s, mode == "SAME_LOWER")
        for n, k, s, d in zip(size, kernel, stride, steps, strict=True)
    )
    if node.operator == "Conv":
        return max(top, 0), max(left, 0), max(bottom, 0), max(right, 0)
    return top, left, bottom, right


def _ceil_pads(size: Pair, kernel: Pair, stride: Pair, pads: Pads, dilation: Pair) -> Pads:
    """Return pads with which rounding down gives ceil_mode's output."""
    ends = list(pads[2:])
    for axis in range(2):
        reach = (kernel[axis] - 1) * dilation[axis] + 1
        count = windows_along(size[axis], reach, stride[axis], (pads[axis], ends[axis]), ceil_mode=True)
        ends[axis] += max((count - 1) * stride[axis] + reach - size[axis] - pads[axis] - ends[axis], 0)
    return pads[0], pads[1], ends[0], ends[1]


@lowers(*_REDUCTIONS)
def reduce_axes(program: Program, node: Node) -> None:
    """Axes are a constant input or an attribute; none at all mean every axis, or none if the node says so."""
    kind = program.type(node.inputs[0])
    rank = len(kind.shape)
    given = program.optional(node, 1)
    stated = node.attributes.get("axes", ()) if given is None else given.reshape(-1).tolist()
    axes = {axis % rank for axis in stated} if rank else set()
    if not len(stated):
        axes = set() if node.attributes.get("noop_with_empty_axes", 0) else set(range(rank))
    if node.operator in _OF_FLOATS and kind.dtype not in FLOATS:
        raise node.unsupported(f"element type {kind.dtype}")
    image = geometry_of(kind)
    if node.operator == "ReduceMean" and image and rank > 2 and axes == set(range(2, rank)):
        program.add(node, global_pool(image), (node.inputs[0],))
    else:
        operator, before, after = _REDUCTIONS[node.operator]
        operator = "wrapping_sum" if node.attributes.get("wraps", 0) else operator
        _add(program, node, axes, operator, before, after)


@lowers("ArgMax", "ArgMin")
def arg(program: Program, node: Node) -> None:
    """The place of the first extreme along an axis, or of the last one."""
    rank = len(program.type(node.inputs[0]).shape)
    prefix = "last_" if node.attributes.get("select_last_index", 0) else ""
    operator = cast(Reduction, f"{prefix}{node.operator.lower()}")
    _add(program, node, {node.attributes.get("axis", 0) % rank}, operator, "none", "none")


def _add(program: Program, node: Node, axes: set[int], operator: Reduction, before: Before, after: After) -> None:
    kind = program.type(node.inputs[0])
    if kind.dtype not in ELEMENT_TYPES:
        raise node.unsupported(f"element type {kind.dtype}")
    shape: list[int] = []
    reduced: list[bool] = []
    for axis, length in enumerate(kind.shape):
        if length == 1 and not (operator.endswith(("argmax", "argmin")) and axis in axes):
            continue
        if reduced and reduced[-1] == (axis in axes):
            shape[-1] *= length
        else:
            shape.append(length)
            reduced.append(axis in axes)
    if not shape:
        shape, reduced = [math.prod(kind.shape)], [bool(axes)]
    spec = ReduceSpec(kind.dtype, tuple(shape), tuple(reduced), operator, before, after)
    program.add(node, spec, (node.inputs[0],))
