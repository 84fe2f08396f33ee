"""Give every activation a place and a layout: insert packing layers, decide halos, choose what is read in place.

Layouts are those of `specs.py`. A *vector* (1 x 1 pixels) is the same in blocked and plain memory once its surplus
channels exist, so dense layers, global means and elementwise layers hand vectors to each other without copies.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Literal, cast

import numpy as np
from gangway.artifact.format import Space
from gangway.compiler.errors import UnsupportedModelError
from gangway.compiler.graph import TensorType
from gangway.compiler.layers import Geometry, Layer, Program, geometry_of
from gangway.compiler.specs import (
    Array,
    BlockedElementwiseSpec,
    ConvSpec,
    ElementwiseSpec,
    GlobalPoolSpec,
    KernelSpec,
    PackSpec,
    PoolSpec,
    RawWeights,
    UnpackSpec,
)

Datatype = Literal["float32", "int32", "int64"]
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

    def elements(self, lanes: int) -> int:
        """Numbers of one row, with halo and surplus channels."""
        channels = self.channels if self.layout == "planar" else -(-self.channels // lanes) * lanes
        if self.image is None or self.layout == "plain":
            return channels
        return channels * (self.image.height + 2 * self.halo) * (self.image.width + 2 * self.halo)


@dataclass(frozen=True)
class Step:
    """A layer whose activations are placed: the arguments are inputs[0], packed weights, inputs[1:], output."""

    name: str
    operator: str
    spec: KernelSpec
    inputs: tuple[Buffer, ...]
    output: Buffer
    weights: RawWeights = field(default_factory=dict)


def place(program: Program, layers: list[Layer], lanes: int) -> list[Step]:
    """Return the steps that run the layers on memory, with final specs. Raises UnsupportedModelError."""
    placer = _Placer(program, lanes)
    for layer in layers:
        placer.place(layer)
    for index, name in enumerate(program.graph.outputs):
        placer.deliver(index, name)
    _settle_halos(placer.steps)
    return [_with_halos(step) for step in placer.steps]


class _Placer:
    def __init__(self, program: Program, lanes: int) -> None:
        self._program = program
        self._lanes = lanes
        self._homes: dict[str, Buffer] = {}  # where each tensor is computed
        self._copies: dict[tuple[Buffer, FormatName, Geometry | None], Buffer] = {}
        self.steps: list[Step] = []
        for index, name in enumerate(program.graph.inputs):
            kind = program.type(name)
            _datatype(name, kind)
            self._homes[name] = Buffer(kind, "plain", geometry_of(kind), Space.INPUT, index)

    def place(self, layer: Layer) -> None:
        """Append the layer after whatever its inputs need."""
        match layer.spec:
            case ConvSpec():
                self._place_conv(layer, layer.spec)
            case ElementwiseSpec():
                self._place_elementwise(layer, layer.spec)
            case _:
                inputs = tuple(self._blocked(name) for name in layer.inputs)
                self._append(layer, layer.spec, inputs, "blocked")

    def _place_conv(self, layer: Layer, spec: ConvSpec) -> None:
        name = layer.inputs[0]
        haloed = any(spec.pads)
        # With few channels most lanes of a blocked input would be idle; a planar one is also packed faster.
        planar = spec.groups == 1 and spec.in_channels < self._lanes and not self._image(name).is_vector
        if planar and self._home(name).layout == "plain":
            spec = replace(spec, input_planar=True)
            x = self._planar(name) if haloed else self._plain(name)
        else:
            x = self._blocked(name, haloed)
        residual = tuple(self._blocked(other) for other in layer.inputs[1:])
        self._append(layer, spec, (x, *residual), "blocked")

    def _place_elementwise(self, layer: Layer, spec: ElementwiseSpec) -> None:
        kind = self._program.type(layer.output)
        image = geometry_of(kind)
        if image is None or image.is_vector or not self._wants_blocked(layer, image):
            inputs = tuple(self._spread(name, kind) for name in layer.inputs)
            self._append(layer, spec, inputs, "plain")
            return
        inputs = tuple(self._operand(name) for name in layer.inputs)
        blocked = BlockedElementwiseSpec(
            spec.operator,
            image.channels,
            image.height,
            image.width,
            tuple(_vector(buffer) for buffer in inputs),
            tuple(0 for _ in inputs),
            spec.activation,
        )
        self._append(layer, blocked, inputs, "blocked")

    def _wants_blocked(self, layer: Layer, image: Geometry) -> bool:
        """Whether an operand is blocked already, or one per channel, for which there is no plain kernel."""
        activations = [name for name in layer.inputs if name not in self._program.constants]
        return any(self._home(name).is_blocked(image) or self._image(name) != image for name in activations)

    def _operand(self, name: str) -> Buffer:
        """Return a blocked tensor, or one of one number per channel."""
        if name not in self._program.constants:
            return self._blocked(name)
        value = self._program.constants[name]
        kind = TensorType(value.shape, value.dtype.name)
        _, channels, height, width = value.shape
        padded = np.pad(value[0], ((0, -channels % self._lanes), (0, 0), (0, 0)))
        packed = padded.reshape(-1, self._lanes, height, width).transpose(0, 2, 3, 1)
        return Buffer(kind, "blocked", geometry_of(kind), Space.WEIGHTS, constant=packed)

    def _spread(self, name: str, kind: TensorType) -> Buffer:
        """Return a plain tensor; a constant is repeated until it has the shape of `kind`."""
        if name not in self._program.constants:
            return self._plain(name)
        value = np.broadcast_to(self._program.constants[name], kind.shape)
        return Buffer(kind, "plain", None, Space.WEIGHTS, constant=value)

    def deliver(self, index: int, name: str) -> None:
        """Make output `index` of the model hold the tensor: let its producer write there, or copy it at the end."""
        home = self._home(name)
        read = any(home in step.inputs for step in self.steps)
        producer = next((step for step in self.steps if step.output is home), None)
        if home.space == Space.ARENA and not read and producer and self._writes_plain(producer):
            home.space, home.index = Space.OUTPUT, index
            return
        kind = self._program.type(name)
        target = Buffer(kind, "plain", geometry_of(kind), Space.OUTPUT, index)
        if home.layout == "blocked" and home.image:
            self.steps.append(Step(f"{name}:unpack", "Unpack", _unpack_spec(home.image), (home,), target))
        else:
            spec = ElementwiseSpec("copy", _datatype(name, kind), math.prod(kind.shape))
            self.steps.append(Step(f"{name}:copy", "Copy", spec, (self._plain(name),), target))

    def _writes_plain(self, step: Step) -> bool:
        """Whether a step's output is exactly the plain tensor, without halo or surplus."""
        return step.output.layout == "plain" or (_vector(step.output) and not step.output.surplus(self._lanes))

    def _append(self, layer: Layer, spec: KernelSpec, inputs: tuple[Buffer, ...], layout: FormatName) -> None:
        kind = self._program.type(layer.output)
        output = Buffer(kind, layout, geometry_of(kind))
        self._homes[layer.output] = output
        self.steps.append(Step(layer.name, layer.operator, spec, inputs, output, layer.weights))

    def _home(self, name: str) -> Buffer:
        while name in self._program.views:
            name = self._program.views[name]
        if name not in self._homes:
            raise UnsupportedModelError(f"tensor '{name}' is constant where an activation is needed")
        return self._homes[name]

    def _image(self, name: str) -> Geometry:
        image = geometry_of(self._program.type(name))
        assert image is not None, name  # lowering has checked it
        return image

    def _plain(self, name: str) -> Buffer:
        home = self._home(name)
        if home.layout == "plain" or home.image is None or _vector(home):
            return home
        return self._copy(home, "plain", home.image, "Unpack", _unpack_spec(home.image))

    def _blocked(self, name: str, haloed: bool = False) -> Buffer:
        image, home = self._image(name), self._home(name)
        if image.is_vector and not haloed:
            plain = self._plain(name)
            in_place = plain.space == Space.ARENA or image.channels % self._lanes == 0
            return plain if in_place else self._pack(plain, image, "blocked")
        if home.is_blocked(image) and not image.is_vector:
            return home
        return self._pack(self._plain(name), image, "blocked")

    def _planar(self, name: str) -> Buffer:
        return self._pack(self._plain(name), self._image(name), "planar")

    def _pack(self, plain: Buffer, image: Geometry, layout: FormatName) -> Buffer:
        spec = PackSpec(image.channels, image.height, image.width, layout == "planar")
        return self._copy(plain, layout, image, "Pack", spec)

    def _copy(
        self, source: Buffer, layout: FormatName, image: Geometry, operator: str, spec: PackSpec | UnpackSpec
    ) -> Buffer:
        """Return the buffer that holds `source` in another layout; the step that fills it is added once."""
        key = (source, layout, image)
        if key not in self._copies:
            kind = TensorType((1, image.channels, image.height, image.width), source.kind.dtype)
            self._copies[key] = Buffer(kind, layout, image)
            name = f"{operator.lower()}{len(self._copies)}"
            self.steps.append(Step(name, operator, spec, (source,), self._copies[key]))
        return self._copies[key]


def _vector(buffer: Buffer) -> bool:
    return buffer.image is not None and buffer.image.is_vector


def _datatype(name: str, kind: TensorType) -> Datatype:
    if kind.dtype not in ("float32", "int32", "int64"):
        raise UnsupportedModelError(f"tensor '{name}' has the element type {kind.dtype}")
    return cast(Datatype, kind.dtype)


def _unpack_spec(image: Geometry) -> UnpackSpec:
    return UnpackSpec(image.channels, image.height, image.width)


def _settle_halos(steps: list[Step]) -> None:
    """Give each buffer the largest halo that a reader needs."""
    for step in steps:
        if isinstance(step.spec, ConvSpec):
            step.inputs[0].halo = max(step.inputs[0].halo, *step.spec.pads)


def _with_halos(step: Step) -> Step:
    halos = [buffer.halo for buffer in step.inputs]
    match step.spec:
        case ConvSpec() as spec:
            residual = halos[1] if spec.residual else 0
            return replace(
                step,
                spec=replace(spec, input_halo=halos[0], residual_halo=residual, output_halo=step.output.halo),
            )
        case PoolSpec() as spec:
            return replace(step, spec=replace(spec, input_halo=halos[0], output_halo=step.output.halo))
        case GlobalPoolSpec() | UnpackSpec() as spec:
            return replace(step, spec=replace(spec, input_halo=halos[0]))
        case PackSpec() as spec:
            return replace(step, spec=replace(spec, output_halo=step.output.halo))
        case BlockedElementwiseSpec() as spec:
            return replace(step, spec=replace(spec, input_halos=tuple(halos), output_halo=step.output.halo))
    return step
