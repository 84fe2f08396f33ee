"""The memory of activations, the steps that work on it, and estimates of what a step costs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal, NamedTuple, Self

import numpy as np

from gangway.artifact.format import Space
from gangway.compiler.frontend.graph import TensorType
from gangway.compiler.kernels.plain_specs import GatherSpec
from gangway.compiler.kernels.specs import Array, KernelSpec, RawWeights
from gangway.compiler.lower.layers import Geometry

FormatName = Literal["plain", "blocked", "planar"]


@dataclass(eq=False)
class Buffer:
    """The memory of one activation in one layout. `halo` is settled when all readers are known, `offset_bytes` last."""

    kind: TensorType
    layout: FormatName
    image: Geometry | None  # None: only plain memory
    space: Space = Space.ARENA
    index: int = 0
    halo: int = 0
    offset_bytes: int = 0
    constant: Array | None = None
    parent: Self | None = None  # this is a part of another buffer: of its channels or, if plain, of its numbers
    skipped: int = 0  # channels or numbers of the parent before this part

    @property
    def root(self) -> "Buffer":
        """The buffer that this is a part of, directly or not; itself if it is none."""
        return self.parent.root if self.parent else self

    def is_in(self, other: "Buffer") -> bool:
        """Whether this is the other buffer or a part of it."""
        return self is other or (self.parent is not None and self.parent.is_in(other))

    @property
    def is_vector(self) -> bool:
        """Whether this is an image of one pixel, blocked and plain at once."""
        return self.image is not None and self.image.is_vector

    def is_blocked(self, image: Geometry) -> bool:
        """Whether a kernel that wants `image` in blocked layout can use this memory."""
        return self.layout == "blocked" and self.image == image

    @property
    def channels(self) -> int:
        """Channels that are interleaved or, if plain, numbers: a plain tensor can be viewed as a vector of them."""
        return self.image.channels if self.image and self.layout != "plain" else math.prod(self.kind.shape)

    def surplus(self, lanes: int) -> bool:
        """Whether channels exist only to fill a vector register; readers rely on zeros there."""
        return self.layout != "planar" and self.channels % lanes != 0

    @property
    def pixels(self) -> int:
        """Numbers of one channel, with the halo; 1 if plain, where every number is a channel."""
        if self.image is None or self.layout == "plain":
            return 1
        return (self.image.height + 2 * self.halo) * (self.image.width + 2 * self.halo)

    def elements(self, lanes: int) -> int:
        """Numbers of one row, with halo and surplus channels."""
        channels = self.channels if self.layout == "planar" else -(-self.channels // lanes) * lanes
        return channels * self.pixels

    def settle_part(self) -> None:
        """Take over the parent's place and halo, if there is a parent; it has been placed."""
        if self.parent:
            self.parent.settle_part()
            self.space, self.index, self.halo = self.parent.space, self.parent.index, self.parent.halo
            skipped_bytes = self.skipped * self.pixels * np.dtype(self.kind.dtype).itemsize
            self.offset_bytes = self.parent.offset_bytes + skipped_bytes


@dataclass(frozen=True)
class Step:
    """A layer whose activations are placed: the arguments are inputs[0], packed weights, inputs[1:], more, output.

    `more` is what else it writes: further outputs, and scratch memory. `checks`: a text for each of the spec's.
    """

    name: str
    operator: str
    spec: KernelSpec
    inputs: tuple[Buffer, ...]
    output: Buffer
    weights: RawWeights = field(default_factory=dict)
    more: tuple[Buffer, ...] = ()
    checks: tuple[str, ...] = ()

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """All activations, in the order of the arguments."""
        return *self.inputs, *self.more, self.output


# What people and the scheduler want to know of a step: its shape as text, its traffic, how far it scales.

# One core of a current server, within a factor of two: only the decision which layers are too small to share needs it.
_FLOPS_PER_US = 100_000
_ACTIVATION_BYTES_PER_US = 40_000  # from the second or third level cache
_WEIGHT_BYTES_PER_US = 20_000  # from memory
_SHARE_US = 8.0  # what a rank should at least have to do in a layer; a change of phase and a cold cache cost some of it


def shape_text(step: Step) -> str:
    """Return input -> output, and the window if there is one: "64x56x56 -> 256x56x56 k1 s1"."""
    shape = step.output.kind.shape
    return step.spec.text or "x".join(map(str, shape[1:] if shape[:1] == (1,) else shape)) or "1"


def activation_bytes(step: Step) -> int:
    """Return the bytes of inputs and outputs, without halos and surplus channels; of a table only what is looked up."""
    kinds = [buffer.kind for buffer in (*step.inputs, step.output)]
    if isinstance(step.spec, GatherSpec):
        kinds[0] = step.output.kind
    return sum(kind.size_bytes for kind in kinds)


def weight_bytes(step: Step) -> int:
    """Return the bytes of weights, as the model has them."""
    return sum(array.nbytes for array in step.weights.values())


def row_ns(step: Step) -> int:
    """Estimate what one more row of a batch takes on one core; the weights are there already."""
    row_us = max(step.spec.flops / _FLOPS_PER_US, activation_bytes(step) / _ACTIVATION_BYTES_PER_US)
    return int(row_us * 1000)


def max_ranks(step: Step, tasks: int) -> int:
    """Estimate beyond how many ranks a layer gets slower: those of under about 15 us alone are not worth sharing."""
    alone_us = max(
        step.spec.flops / _FLOPS_PER_US,
        activation_bytes(step) / _ACTIVATION_BYTES_PER_US,
        weight_bytes(step) / _WEIGHT_BYTES_PER_US,
    )
    return max(1, min(tasks, int(alone_us / _SHARE_US)))


# Which layers a batch computes pass by pass: some rows through all of them, then the next rows.
#
# Layer by layer each reads its weights once for all rows, but what it writes has left the second level cache before
# the next one reads it. Pass by pass it is the other way round. Convolutional networks begin with large images and
# small weights and end the other way: so the first layers are computed pass by pass, up to where most bytes are saved.
# (Packrat splits a batch for the same reason, but over instances.)

_CACHE_BYTES = 1 << 20  # what rows may take of a core's second level cache, which has one or two megabytes


class Passes(NamedTuple):
    """The first `layers` layers are computed pass by pass, `rows` rows for each core; no layers: all rows at once."""

    layers: int
    rows: int


def choose_passes(steps: Sequence[Step]) -> Passes:
    """Return the passes of a model."""
    return passes_of([activation_bytes(step) for step in steps], [weight_bytes(step) for step in steps])


def passes_of(activations: Sequence[int], weights: Sequence[int]) -> Passes:
    """Return the passes for layers that move so many bytes of activations, and of weights, for one row."""
    saved = list(accumulate(here - there for here, there in zip(activations, weights, strict=True)))
    layers = 1 + max(range(len(saved)), key=lambda layer: saved[layer])
    if layers == 1 or saved[layers - 1] <= 0:
        return Passes(0, 1)
    return Passes(layers, max(1, _CACHE_BYTES // max(activations[:layers])))
