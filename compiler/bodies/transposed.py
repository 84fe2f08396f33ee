"""ConvTranspose, as a convolution of the same image whose outputs are put between each other (Shi et al. 2016)."""

import math
from collections.abc import Sequence

import numpy as np

from gangway.compiler.bodies.base import Body, defines
from gangway.compiler.specs import Array


@defines("ConvTranspose")
def transposed_convolution(body: Body) -> None:
    """With stride s, outputs o, o + s, ... depend on every s-th number of the kernel: a convolution for each o < s.

    All of them are one convolution, with s times as many outputs along each axis and kernels padded to one length.
    """
    kind, weights = body.type(0), body.value(1)
    if weights is None or kind.dtype != "float32":
        raise body.node.unsupported("weights that are no constants, or other types than float32")
    sizes = kind.shape[2:]
    ones = [1] * len(sizes)
    strides, dilations = (list(body.attribute(name, ones)) for name in ("strides", "dilations"))
    groups = body.attribute("group", 1)
    kernel = _dilated(weights, dilations)
    taps = [-(-length // stride) for length, stride in zip(kernel.shape[2:], strides, strict=True)]
    phases = _phases(kernel, strides, taps, groups)
    pads = [tap - 1 for tap in taps]
    outputs = weights.shape[1] * groups
    convolved = body.op(
        "Conv", body.node.inputs[0], body.constant(phases), pads=[*pads, *pads], group=groups, kernel_shape=taps
    )
    lengths = [length + tap - 1 for length, tap in zip(sizes, taps, strict=True)]
    whole = _interleaved(body, convolved, outputs, lengths, strides)
    full = [length * stride for length, stride in zip(lengths, strides, strict=True)]
    begins, wanted = _window(body, sizes, kernel.shape[2:], strides)
    ends = [n - (length - begin) for n, length, begin in zip(wanted, full, begins, strict=True)]
    amounts = [0, 0, *(-begin for begin in begins), 0, 0, *ends]
    biased = len(body.node.inputs) > 2 and body.node.inputs[2] != ""
    cut = body.pad(whole, amounts) if any(amounts) else whole
    if biased:
        bias = body.reshape(body.node.inputs[2], [-1, *ones])
        body.op("Add", cut, bias, output=body.node.outputs[0])
    else:
        body.op("Identity", cut, output=body.node.outputs[0])


def _dilated(weights: Array, dilations: Sequence[int]) -> Array:
    """The kernel with zeros between its numbers."""
    lengths = [(length - 1) * step + 1 for length, step in zip(weights.shape[2:], dilations, strict=True)]
    result = np.zeros((*weights.shape[:2], *lengths), weights.dtype)
    result[(slice(None), slice(None), *(slice(None, None, step) for step in dilations))] = weights
    return result


def _phases(kernel: Array, strides: Sequence[int], taps: Sequence[int], groups: int) -> Array:
    """[inputs, outputs per group, ...] to [outputs x strides, inputs per group, taps ...]: phases beside each other."""
    inputs, per_group, *lengths = kernel.shape
    ends = [tap * stride - length for tap, stride, length in zip(taps, strides, lengths, strict=True)]
    padded = np.pad(kernel, [(0, 0), (0, 0), *((0, end) for end in ends)])
    split: list[int] = []
    for tap, stride in zip(taps, strides, strict=True):
        split += [tap, stride]
    rank = len(taps)
    parts = padded.reshape(groups, inputs // groups, per_group, *split)
    tap_axes, phase_axes = [3 + 2 * n for n in range(rank)], [4 + 2 * n for n in range(rank)]
    ordered = parts.transpose(0, 2, *phase_axes, 1, *tap_axes)
    flat = ordered.reshape(groups * per_group * math.prod(strides), inputs // groups, *taps)
    return np.ascontiguousarray(np.flip(flat, axis=tuple(range(2, 2 + rank))))


def _interleaved(body: Body, x: str, outputs: int, lengths: Sequence[int], strides: Sequence[int]) -> str:
    """[1, outputs x strides, ...] to [1, outputs, ...], each axis `stride` times as long."""
    if max(strides) == 1:
        return x
    rank = len(lengths)
    parts = body.reshape(x, [0, outputs, *strides, *lengths])
    order = [0, 1]
    for axis in range(rank):
        order += [2 + rank + axis, 2 + axis]
    moved = body.op("Transpose", parts, perm=order)
    return body.reshape(moved, [0, outputs, *(n * s for n, s in zip(lengths, strides, strict=True))])


def _window(
    body: Body, sizes: Sequence[int], kernel: Sequence[int], strides: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Where in the whole result the wanted one begins, and how long it is."""
    rank = len(sizes)
    wanted = list(body.type_of(body.node.outputs[0]).shape[2:])
    mode = body.attribute("auto_pad", b"NOTSET").decode()
    if mode == "VALID" or (mode == "NOTSET" and not body.attribute("output_shape", ())):
        pads = body.attribute("pads", [0] * (2 * rank)) if mode == "NOTSET" else [0] * rank
        return list(pads[:rank]), wanted
    extra = body.attribute("output_padding", [0] * rank)
    begins = []
    for axis in range(rank):
        total = strides[axis] * (sizes[axis] - 1) + extra[axis] + kernel[axis] - wanted[axis]
        begins.append(total // 2 if mode == "SAME_UPPER" else total - total // 2)
    return begins, wanted
