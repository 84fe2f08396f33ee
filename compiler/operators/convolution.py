"""Conv, and BatchNormalization that no convolution could absorb."""

import numpy as np

from gangway.compiler.graph import Node
from gangway.compiler.layers import Program
from gangway.compiler.operators.registry import lowers
from gangway.compiler.operators.windows import window_of
from gangway.compiler.simplify import affine_factors
from gangway.compiler.specs import MOST_LANES, Array, ConvSpec


@lowers("Conv")
def conv(program: Program, node: Node) -> None:
    """Two-dimensional convolution, full, depthwise or in groups."""
    image = program.geometry(node, node.inputs[0])
    weights = program.constant(node, 1)
    if weights.ndim != 4:
        raise node.unsupported(f"weights of {weights.ndim} dimensions; only images of two dimensions")
    outputs, per_group, height, width = weights.shape
    groups = node.attributes.get("group", 1)
    if per_group * groups != image.channels:
        raise node.unsupported(f"weights {list(weights.shape)} of {groups} groups do not fit {image.channels} channels")
    if outputs % groups:
        raise node.unsupported(f"{groups} groups of {outputs} outputs")
    if groups != 1 and not groups == image.channels == outputs:
        weights, groups = _merge_groups(weights, groups)
    bias = program.optional(node, 2)
    if bias is None:
        bias = np.zeros(outputs, np.float32)
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
    )
    program.add(node, spec, (node.inputs[0],), {"weights": weights, "bias": bias})


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
