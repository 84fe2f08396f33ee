"""A convolution and the depthwise one that alone reads it become one step where what is between them is large."""

from collections import Counter
from dataclasses import replace

from gangway.artifact.format import Space
from gangway.compiler.buffers import Buffer, Step
from gangway.compiler.specs import ConvDepthwiseSpec, ConvSpec

LEAST_BETWEEN = 100_000  # numbers: 400 KB, and as much beside it, which a second level cache does not keep
MOST_KEPT_BYTES = 192 << 10  # on the stack


def fuse_depthwise(steps: list[Step], lanes: int) -> list[Step]:
    """Return equivalent steps, of which fewer are convolutions."""
    readers = Counter(buffer.root for step in steps for buffer in step.inputs)
    writers: dict[Buffer, int] = {}
    kept: list[Step | None] = []
    for step in steps:
        source = writers.get(step.inputs[0]) if step.inputs else None
        first = None if source is None or readers[step.inputs[0]] > 1 else kept[source]
        merged = _merged(first, step, lanes) if first else None
        if merged and source is not None:
            kept[source] = None
        writers[step.output] = len(kept)
        kept.append(merged or step)
    return [step for step in kept if step]


def _merged(first: Step, second: Step, lanes: int) -> Step | None:
    """Return one step that computes what `second` makes of the result of `first`; None if that does not pay."""
    conv, depthwise, between = first.spec, second.spec, first.output
    if not isinstance(conv, ConvSpec) or not isinstance(depthwise, ConvSpec):
        return None
    if between.space != Space.ARENA or between.parent or between.elements(lanes) < LEAST_BETWEEN:
        return None
    # Larger windows of many channels are done by Winograd's algorithm, whose tiles are no lines.
    plain = conv.groups == 1 and not conv.residual and (conv.kernel == (1, 1) or conv.input_planar)
    windowed = depthwise.groups == depthwise.in_channels == depthwise.out_channels > 1 and not depthwise.residual
    moves = depthwise.kernel[0] >= depthwise.stride[0] and depthwise.dilation == (1, 1)
    spec = ConvDepthwiseSpec(conv, depthwise)
    if not (plain and windowed and moves) or spec.kept_bytes > MOST_KEPT_BYTES:
        return None
    weights = {**first.weights, **{f"depthwise_{name}": array for name, array in second.weights.items()}}
    operator = f"{first.operator}+{second.operator}"
    return replace(second, operator=operator, spec=spec, inputs=first.inputs, weights=weights)
