"""The memory of activations, and the steps that work on it."""

import math
from dataclasses import dataclass, field
from typing import Literal, Self

import numpy as np

from gangway.artifact.format import Space
from gangway.compiler.graph import TensorType
from gangway.compiler.layers import Geometry
from gangway.compiler.specs import Array, KernelSpec, RawWeights

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
