"""The memory of activations while layers are placed: buffers, the steps that work on them, copies in other layouts."""

import math
from dataclasses import dataclass, field
from typing import Self

import numpy as np

from gangway.artifact.format import MemorySpace
from gangway.compiler.errors import UnsupportedModelError
from gangway.compiler.frontend.graph import TensorType
from gangway.compiler.kernels.plain_specs import ELEMENT_TYPES, GatherPlacesSpec, GatherSpec, ScatterSpec
from gangway.compiler.kernels.specs import (
    BYTES_CHANNELS,
    PIXELS_CHANNELS,
    Array,
    BlockedElementwiseSpec,
    Check,
    KernelSpec,
    Layout,
    PackSpec,
    RawWeights,
    RecurrentSpec,
    SequencePackSpec,
    UnpackSpec,
)
from gangway.compiler.lower.layers import Geometry, LoweredLayer, Program, geometry_of, sequence

BF16 = "uint16"  # the type of an activation of a float32 tensor that is stored in bfloat16


@dataclass(eq=False)
class Buffer:
    """The memory of one activation in one layout. `halo` is settled when all readers are known, `offset_bytes` last."""

    kind: TensorType
    layout: Layout
    image: Geometry | None  # None: only plain memory
    space: MemorySpace = MemorySpace.ARENA
    index: int = 0
    halo: int = 0
    offset_bytes: int = 0
    constant: Array | None = None
    parent: Self | None = None  # this is a part of another buffer: of its channels or, if plain, of its numbers
    skipped: int = 0  # channels or numbers of the parent before this part
    zero: int = 0  # of bytes and pixels: what stands for 0, which halos hold

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
        return self.layout in ("plain", "blocked") and self.channels % lanes != 0

    @property
    def pixels(self) -> int:
        """Numbers of one channel, with the halo; 1 if plain, where every number is a channel."""
        if self.image is None or self.layout == "plain":
            return 1
        return (self.image.height + 2 * self.halo) * (self.image.width + 2 * self.halo)

    def elements(self, lanes: int) -> int:
        """Numbers of one row, with halo and surplus channels."""
        beside = {"planar": 1, "bytes": BYTES_CHANNELS, "pixels": PIXELS_CHANNELS}.get(self.layout, lanes)
        channels = -(-self.channels // beside) * beside
        return channels * self.pixels

    def settle_part(self) -> None:
        """Take over the parent's place and halo, if there is a parent; it has been placed."""
        if self.parent:
            self.parent.settle_part()
            self.space, self.index, self.halo = self.parent.space, self.parent.index, self.parent.halo
            skipped_bytes = self.skipped * self.pixels * np.dtype(self.kind.dtype).itemsize
            self.offset_bytes = self.parent.offset_bytes + skipped_bytes


@dataclass(frozen=True)
class PlacedLayer:
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


class PlacedMemory:
    """Grows step by step: asking for a tensor in some layout may append the step that packs or unpacks it."""

    def __init__(self, program: Program, lanes: int) -> None:
        self.program = program
        self.lanes = lanes
        self.steps: list[PlacedLayer] = []
        self.homes: dict[str, Buffer] = {}  # where each tensor is computed
        self._copies: dict[tuple[Buffer, Layout, Geometry | None], Buffer] = {}
        for index, name in enumerate(program.graph.inputs):
            kind = program.type(name)
            self.homes[name] = Buffer(kind, "plain", geometry_of(kind), MemorySpace.INPUT, index)

    def append(
        self,
        layer: LoweredLayer,
        spec: KernelSpec,
        inputs: tuple[Buffer, ...],
        layout: Layout,
        geometry: Geometry | None = None,
    ) -> None:
        """Add the step that computes a layer into memory of its own, from now on the home of the layer's output.

        `geometry` is what the kernel writes, if that is not the image which the output's shape suggests.
        """
        kind = self.program.type(layer.output)
        output = Buffer(kind, layout, geometry or geometry_of(kind))
        self.homes[layer.output] = output
        self.steps.append(
            PlacedLayer(layer.name, layer.operator, spec, inputs, output, layer.weights, (), refusal_texts(layer, spec))
        )

    def tensor(self, name: str) -> Buffer:
        """Give a tensor plain memory of its own, from now on its home."""
        kind = self.program.type(name)
        self.homes[name] = Buffer(kind, "plain", geometry_of(kind))
        return self.homes[name]

    def home(self, name: str) -> Buffer:
        """Return where a tensor was computed, or what it is a view of."""
        home = self.program.home(name)
        if home not in self.homes:
            if home not in self.program.graph.constants:
                raise UnsupportedModelError(f"tensor '{home}' is constant where an activation is needed")
            value = self.program.graph.constants[home]
            kind = TensorType(value.shape, value.dtype.name)
            self.homes[home] = Buffer(kind, "plain", None, MemorySpace.WEIGHTS, constant=value)
        return self.homes[home]

    def kind(self, name: str) -> TensorType:
        """Return the type of a tensor, which may be a constant of the graph."""
        return self.home(name).kind if name in self.program.graph.constants else self.program.type(name)

    def image(self, name: str) -> Geometry:
        """Return a tensor that lowering has found to be an image as such."""
        image = geometry_of(self.program.type(name))
        assert image is not None, name  # lowering has checked it
        return image

    def plain(self, name: str) -> Buffer:
        """Return a tensor in row-major order."""
        home = self.home(name)
        if home.layout == "plain" or home.image is None or home.is_vector:
            return home
        return self._copy(home, "plain", home.image, "Unpack", unpack_spec(home.image))

    def blocked(self, name: str, geometry: Geometry | None = None, haloed: bool = False) -> Buffer:
        """Return a tensor in blocked layout, as an image or as `geometry` says; a vector may lie in plain memory,
        unless it needs a halo.
        """
        image, home = geometry or self.image(name), self.home(name)
        if image.is_vector and not haloed:
            plain = self.plain(name)
            # The surplus is not kept zero in a client's memory, nor behind a part of a larger tensor.
            in_place = (plain.space == MemorySpace.ARENA and not plain.parent) or image.channels % self.lanes == 0
            return plain if in_place else self._pack(plain, image, "blocked")
        if home.is_blocked(image) and not image.is_vector:
            return home
        return self._pack(self.plain(name), image, "blocked")

    def pixels(self, name: str) -> Buffer:
        """Return an image as a blocked sequence of its pixels, which has no halo."""
        image = self.image(name)
        return self._copy(
            self.blocked(name), "blocked", sequence(image.channels, image.height * image.width), "Copy", copied(image)
        )

    def join_pixels(self, name: str) -> None:
        """Make an image of a tensor that was computed as a sequence of pixels."""
        image, source, kind = self.image(name), self.homes[name], self.program.type(name)
        self.homes[name] = Buffer(kind, "blocked", image)
        self.steps.append(PlacedLayer(f"{name}:image", "Copy", copied(image), (source,), self.homes[name]))

    def planar(self, name: str) -> Buffer:
        """Return an image in planar layout."""
        return self._pack(self.plain(name), self.image(name), "planar")

    def _pack(self, plain: Buffer, image: Geometry, layout: Layout) -> Buffer:
        spec: KernelSpec = PackSpec(image.channels, image.height, image.width, layout)
        if image.channels_last:
            spec = SequencePackSpec(image.width, image.channels, image.channels)
        return self._copy(plain, layout, image, "Pack", spec)

    def _copy(self, source: Buffer, layout: Layout, image: Geometry, operator: str, spec: KernelSpec) -> Buffer:
        """Return the buffer that holds `source` in another layout; the step that fills it is added once."""
        key = (source, layout, image)
        if key not in self._copies:
            kind = TensorType((1, image.channels, image.height, image.width), source.kind.dtype)
            self._copies[key] = Buffer(kind, layout, image)
            name = f"{operator.lower()}{len(self._copies)}"
            self.steps.append(PlacedLayer(name, operator, spec, (source,), self._copies[key]))
        return self._copies[key]


def copied(image: Geometry) -> BlockedElementwiseSpec:
    """Return what copies a blocked image."""
    return BlockedElementwiseSpec("copy", image.channels, image.height, image.width, (False,), (0,))


def datatype(name: str, kind: TensorType) -> str:
    """Return the element type of a tensor. Raises UnsupportedModelError if kernels do not know it."""
    if kind.dtype not in ELEMENT_TYPES:
        raise UnsupportedModelError(f"tensor '{name}' has the element type {kind.dtype}")
    return kind.dtype


def unpack_spec(image: Geometry) -> KernelSpec:
    """Return how an image or a sequence is unpacked; halos are settled later."""
    if image.channels_last:
        return SequencePackSpec(image.width, image.channels, image.channels, unpack=True)
    return UnpackSpec(image.channels, image.height, image.width)


_OUTSIDE = "indices element out of data bounds"
_INDEX = {
    "GatherElements": "GatherElements op: Out of range value in index tensor",
    "GatherND": "invalid index found, index = {}",
    "ScatterND": "invalid indice found, indice = {}",
}


def refusal_texts(layer: LoweredLayer, spec: KernelSpec) -> tuple[str, ...]:
    """Return a text for each check of a layer's kernel, with {} for the number that a request had there.

    The words are onnxruntime's where it has any.
    """
    named = layer.name != layer.output  # a node without a name is called by its output
    node = f"{layer.operator} node '{layer.name}'" if named else layer.operator
    return tuple(f"{_literal(node)}: {_sentence(check, layer.operator, spec)}" for check in spec.checks)


def _sentence(check: Check, operator: str, spec: KernelSpec) -> str:
    match check:
        case "zero":
            return f"Integer {'modulo' if operator == 'Mod' else 'division'} by zero"
        case "least":
            return "the least integer divided by -1 is no integer of its type"
        case "length":
            assert isinstance(spec, RecurrentSpec)
            return (
                "Invalid value/s in sequence_lens. All values must be >= 0 and <= seq_length."
                f" seq_length={spec.steps}, found {{}}"
            )
        case "index":
            length = _length(spec)
            bounds = f"[{-length},{length - 1}]"
            return _INDEX.get(operator, f"{_OUTSIDE}, idx={{}} must be within the inclusive range {bounds}")


def _length(spec: KernelSpec) -> int:
    """How many items the first axis has that indices point into."""
    if isinstance(spec, ScatterSpec | GatherPlacesSpec):
        return spec.picked[0].length
    assert isinstance(spec, GatherSpec)
    return spec.length


def _literal(text: str) -> str:
    """The text without a place for the number: names of nodes may contain anything."""
    return text.replace("{}", "")
