"""Which layers multiply numbers of a lower precision, and which activations are stored so.

A layer does if it is estimated to be faster so. An activation is, if all that write and read it are such layers.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace

from gangway.artifact.format import MemorySpace, Precision, TargetSpec
from gangway.compiler.kernels.attention_specs import AttentionSpec
from gangway.compiler.kernels.specs import (
    ConvDepthwiseSpec,
    ConvSpec,
    GlobalPoolSpec,
    KernelSpec,
    LayerNormSpec,
    Layout,
    PoolSpec,
)
from gangway.compiler.kernels.templates.bf16 import attention, depthwise, work
from gangway.compiler.place.memory import BF16, Buffer, PlacedLayer

LEAST_PIXELS = 16  # of an activation that is stored in bfloat16: a smaller one is no traffic to speak of


def with_precision(
    steps: Sequence[PlacedLayer], precision: Precision, target: TargetSpec, keep_fp32: Collection[str] = ()
) -> list[PlacedLayer]:
    """Return the steps with the precision of each decided; those called `keep_fp32` stay float32.

    Buffers that are stored otherwise have another type from then on; the arena is to be planned again.
    """
    if precision == "fp32":
        return list(steps)
    lowered = [step if step.name in keep_fp32 else _lowered(step, target) for step in steps]
    stored = _stored(lowered, target)
    for buffer in stored:
        buffer.kind = replace(buffer.kind, dtype=BF16)
    return [_settled(step, stored) for step in lowered]


def _lowered(step: PlacedLayer, target: TargetSpec) -> PlacedLayer:
    """Return the step in bfloat16, if that is faster."""
    if isinstance(step.spec, ConvSpec) and step.spec.precision == "fp32" and work.is_faster(step.spec, target):
        return replace(step, spec=replace(step.spec, precision="bf16"))
    if isinstance(step.spec, ConvDepthwiseSpec) and depthwise.is_faster(step.spec, target):
        return replace(step, spec=replace(step.spec, conv=replace(step.spec.conv, precision="bf16")))
    return step


def _stored(steps: Collection[PlacedLayer], target: TargetSpec) -> set[Buffer]:
    """Return the activations to be stored in bfloat16: all that touch them can, and some multiply such numbers.

    An attention takes queries, keys and values in bfloat16 or none of them.
    """
    without: set[int] = set()  # by place
    while True:
        stored = _possible(steps, without, target)
        split = {
            index
            for index, step in enumerate(steps)
            if isinstance(step.spec, AttentionSpec) and index not in without and not stored.issuperset(step.inputs[:3])
        }
        if not split:
            return stored
        without |= split


def _possible(steps: Iterable[PlacedLayer], without: AbstractSet[int], target: TargetSpec) -> set[Buffer]:
    """Return the same, if the steps `without` are to touch none."""
    parts: dict[Buffer, set[Buffer]] = defaultdict(set)
    barred: set[Buffer] = set()
    wanted: set[Buffer] = set()
    for index, step in enumerate(steps):
        for buffer in step.buffers:
            parts[buffer.root].update(_with_wholes(buffer))
            if index in without or not _takes(step, buffer, target):
                barred.add(buffer.root)
            elif isinstance(step.spec, ConvSpec | ConvDepthwiseSpec):
                wanted.add(buffer.root)
    return {buffer for root in wanted - barred for buffer in parts[root]}


def _with_wholes(buffer: Buffer) -> Iterator[Buffer]:
    """Yield a buffer and all that it is a part of."""
    part: Buffer | None = buffer
    while part:
        yield part
        part = part.parent


def _takes(step: PlacedLayer, buffer: Buffer, target: TargetSpec) -> bool:
    """Whether a step can have one of its activations in bfloat16."""
    image = buffer.image
    if (
        buffer.layout != "blocked"
        or buffer.root.space != MemorySpace.ARENA
        or image is None
        or buffer.constant is not None
    ):
        return False
    whole = all(work.can_store(part.channels | part.skipped) for part in _with_wholes(buffer))
    large = image.height * image.width >= LEAST_PIXELS and buffer.kind.dtype == "float32"
    return whole and large and _reads_or_writes(step.spec, buffer is step.inputs[0], target)


def _reads_or_writes(spec: KernelSpec, first: bool, target: TargetSpec) -> bool:
    """Whether a kernel can have its `first` input, or what else is large, in bfloat16."""
    if isinstance(spec, ConvSpec):
        return spec.precision == "bf16" and not (spec.input_planar and first)
    if isinstance(spec, ConvDepthwiseSpec):
        return spec.conv.precision == "bf16" and not (spec.conv.input_planar and first)
    if isinstance(spec, AttentionSpec):
        return attention.computes(spec, target)
    return isinstance(spec, PoolSpec | GlobalPoolSpec | LayerNormSpec)


def _settled(step: PlacedLayer, stored: AbstractSet[Buffer]) -> PlacedLayer:
    """Return the step with a spec that says how its activations are stored."""
    spec = step.spec
    if stored.isdisjoint(step.buffers):
        return step

    def settled(layout: Layout, *buffers: Buffer) -> Layout:
        return layout if stored.isdisjoint(buffers) else "bf16"

    x, *residual = step.inputs
    match spec:
        case ConvSpec():
            spec = replace(
                spec,
                input_layout=settled(spec.input_layout, x),
                residual_layout=settled(spec.residual_layout, *residual),
                output_layout=settled(spec.output_layout, step.output),
            )
        case ConvDepthwiseSpec():
            conv = replace(spec.conv, input_layout=settled(spec.conv.input_layout, x))
            second = replace(spec.depthwise, output_layout=settled(spec.depthwise.output_layout, step.output))
            spec = replace(spec, conv=conv, depthwise=second)
        case PoolSpec() | LayerNormSpec():
            layouts = settled(spec.input_layout, x), settled(spec.output_layout, step.output)
            spec = replace(spec, input_layout=layouts[0], output_layout=layouts[1])
        case AttentionSpec() if x in stored:
            spec = replace(spec, precision="bf16", output_layout=settled(spec.output_layout, step.output))
        case GlobalPoolSpec():
            spec = replace(spec, input_layout=settled(spec.input_layout, x))
    return replace(step, spec=spec)
