"""What people and the scheduler want to know of a step: its shape as text, its traffic, how far it scales."""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from gangway.compiler.kernels.attention_specs import AttentionSpec
from gangway.compiler.kernels.plain_specs import GatherSpec, IslandSpec, TailSpec
from gangway.compiler.kernels.specs import ConvDepthwiseSpec, ConvSpec
from gangway.compiler.place.memory import PlacedLayer

# One core of a current server, within a factor of two: only the decision which layers are too small to share needs it.
_FLOPS_PER_US = 100_000
_LOW_FLOPS_PER_US = 400_000  # by products of low precision: vectors do half as many, tiles some times as many
_ACTIVATION_BYTES_PER_US = 40_000  # from the second or third level cache
_WEIGHT_BYTES_PER_US = 20_000  # from memory
_SHARE_US = 8.0  # what a rank should at least have to do in a layer; a change of phase and a cold cache cost some of it
_THREAD_US = 50.0  # what a thread of onnxruntime should have to do: to wake it up costs more than a change of phase
_CACHE_BYTES = 1 << 20  # what rows may take of a core's second level cache, which has one or two megabytes


def shape_text(step: PlacedLayer) -> str:
    """Return input -> output, and the window if there is one: "64x56x56 -> 256x56x56 k1 s1"."""
    shape = step.output.kind.shape
    return step.spec.text or "x".join(map(str, shape[1:] if shape[:1] == (1,) else shape)) or "1"


def activation_bytes(step: PlacedLayer) -> int:
    """Return the bytes of inputs and outputs, without halos and surplus channels; of a table only what is looked up."""
    kinds = [buffer.kind for buffer in (*step.inputs, step.output)]
    if isinstance(step.spec, GatherSpec):
        kinds[0] = step.output.kind
    return sum(kind.size_bytes for kind in kinds)


def weight_bytes(step: PlacedLayer) -> int:
    """Return the bytes of weights, as the model has them."""
    return sum(array.nbytes for array in step.weights.values())


def row_ns(step: PlacedLayer) -> int:
    """Estimate what one more row of a batch takes on one core; the weights are there already."""
    if isinstance(step.spec, IslandSpec) and step.spec.row_us:
        return step.spec.row_us * 1000
    row_us = max(step.spec.flops / _flops_per_us(step), activation_bytes(step) / _ACTIVATION_BYTES_PER_US)
    return int(row_us * 1000)


def max_ranks(step: PlacedLayer, tasks: int) -> int:
    """Estimate beyond how many ranks, or threads of an island, a layer gets slower.

    Those of under about 15 us alone are not worth sharing.
    """
    if isinstance(step.spec, IslandSpec):
        return max(1, int(step.spec.row_us / _THREAD_US))
    alone_us = max(
        step.spec.flops / _flops_per_us(step),
        activation_bytes(step) / _ACTIVATION_BYTES_PER_US,
        weight_bytes(step) / _WEIGHT_BYTES_PER_US,
    )
    return max(1, min(tasks, int(alone_us / _SHARE_US)))


def _flops_per_us(step: PlacedLayer) -> int:
    spec = step.spec.conv if isinstance(step.spec, ConvDepthwiseSpec) else step.spec
    low = isinstance(spec, ConvSpec | AttentionSpec) and spec.precision == "bf16"
    return _LOW_FLOPS_PER_US if low else _FLOPS_PER_US


class Passes(NamedTuple):
    """The first `layers` layers are computed pass by pass, `rows` rows for each core; no layers: all rows at once.

    Layer by layer each reads its weights once for all rows, but what it writes has left the second level cache before
    the next one reads it. Pass by pass it is the other way round. Convolutional networks begin with large images and
    small weights and end the other way: so the first layers are computed pass by pass, up to where most bytes are
    saved. (Packrat splits a batch for the same reason, but over instances.)
    """

    layers: int
    rows: int


def choose_passes(steps: Sequence[PlacedLayer]) -> Passes:
    """Return the passes of a model, in which a tail has no part."""
    steps = [step for step in steps if not isinstance(step.spec, TailSpec)]
    return passes_of([activation_bytes(step) for step in steps], [weight_bytes(step) for step in steps])


def passes_of(activations: Sequence[int], weights: Sequence[int]) -> Passes:
    """Return the passes for layers that move so many bytes of activations, and of weights, for one row."""
    saved = list(accumulate(here - there for here, there in zip(activations, weights, strict=True)))
    layers = 1 + max(range(len(saved)), key=lambda layer: saved[layer])
    if layers == 1 or saved[layers - 1] <= 0:
        return Passes(0, 1)
    return Passes(layers, max(1, _CACHE_BYTES // max(activations[:layers])))
