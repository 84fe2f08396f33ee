"""What people and the scheduler want to know of a step: its shape as text, its operations, its compulsory traffic."""

import math

from gangway.compiler.buffers import Step
from gangway.compiler.specs import (
    BlockedElementwiseSpec,
    ConvSpec,
    CopySpec,
    ElementwiseSpec,
    GlobalPoolSpec,
    PackSpec,
    PoolSpec,
    SoftmaxSpec,
    UnpackSpec,
)

# One core of a current server, within a factor of two: only the decision which layers are too small to share needs it.
_FLOPS_PER_US = 100_000
_ACTIVATION_BYTES_PER_US = 40_000  # from the second or third level cache
_WEIGHT_BYTES_PER_US = 20_000  # from memory
_SHARE_US = 8.0  # what a rank should at least have to do in a layer; a page turn and a cold cache cost some of it


def shape_text(step: Step) -> str:
    """Return input -> output, and the window if there is one: "64x56x56 -> 256x56x56 k1 s1"."""
    spec = step.spec
    match spec:
        case ConvSpec() if (spec.height, spec.width, *spec.kernel) == (1, 1, 1, 1):
            return f"{spec.in_channels} -> {spec.out_channels}"
        case ConvSpec():
            size = "x".join(map(str, (spec.out_channels, *spec.output_size)))
            groups = (
                ""
                if spec.groups == 1
                else " depthwise"
                if spec.groups == spec.in_channels
                else f" {spec.groups} groups"
            )
            return (
                f"{spec.in_channels}x{spec.height}x{spec.width} -> {size} {_window(spec.kernel, spec.stride)}{groups}"
            )
        case PoolSpec():
            size = "x".join(map(str, (spec.channels, *spec.output_size)))
            return f"{spec.channels}x{spec.height}x{spec.width} -> {size} {_window(spec.kernel, spec.stride)}"
        case GlobalPoolSpec():
            return f"{spec.channels}x{spec.height}x{spec.width} -> {spec.channels}"
        case PackSpec() | UnpackSpec() | BlockedElementwiseSpec():
            return f"{spec.channels}x{spec.height}x{spec.width}"
        case ElementwiseSpec() | CopySpec() | SoftmaxSpec():
            shape = step.output.kind.shape
            return "x".join(map(str, shape[1:] if shape[:1] == (1,) else shape)) or "1"


def _window(kernel: tuple[int, int], stride: tuple[int, int]) -> str:
    def text(pair: tuple[int, int]) -> str:
        return str(pair[0]) if pair[0] == pair[1] else f"{pair[0]}x{pair[1]}"

    return f"k{text(kernel)} s{text(stride)}"


def flops(step: Step) -> int:
    """Return the arithmetic operations of one row; a multiply-add counts as two."""
    spec = step.spec
    outputs = math.prod(step.output.kind.shape)
    match spec:
        case ConvSpec():
            return 2 * outputs * spec.in_channels // spec.groups * math.prod(spec.kernel)
        case PoolSpec():
            return outputs * math.prod(spec.kernel)
        case GlobalPoolSpec() | SoftmaxSpec():
            return math.prod(step.inputs[0].kind.shape)
        case ElementwiseSpec() | BlockedElementwiseSpec():
            return 0 if spec.operator == "copy" else outputs
        case PackSpec() | UnpackSpec() | CopySpec():
            return 0


def activation_bytes(step: Step) -> int:
    """Return the bytes of inputs and outputs, without halos and surplus channels."""
    kinds = [buffer.kind for buffer in (*step.inputs, step.output)]
    return sum(kind.size_bytes for kind in kinds)


def weight_bytes(step: Step) -> int:
    """Return the bytes of weights, as the model has them."""
    return sum(array.nbytes for array in step.weights.values())


def max_ranks(step: Step, tasks: int) -> int:
    """Estimate beyond how many ranks a layer gets slower: those of under about 15 us alone are not worth sharing."""
    alone_us = max(
        flops(step) / _FLOPS_PER_US,
        activation_bytes(step) / _ACTIVATION_BYTES_PER_US,
        weight_bytes(step) / _WEIGHT_BYTES_PER_US,
    )
    return max(1, min(tasks, int(alone_us / _SHARE_US)))
