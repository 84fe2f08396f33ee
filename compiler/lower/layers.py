"""The intermediate representation between ONNX and memory: fused layers over named tensors, not yet placed anywhere.

Functions with `@lowers("Name")` add the layers of one ONNX operator to a `Program`. Elementwise layers are small
programs themselves, which an `Expression` assembles.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from gangway.compiler.errors import UnsupportedModelError
from gangway.compiler.frontend.graph import Graph, Node, TensorType
from gangway.compiler.kernels.attention_specs import AttentionSpec
from gangway.compiler.kernels.plain_specs import (
    Instruction,
    Operand,
    PointwiseSpec,
    broadcast_strides,
)
from gangway.compiler.kernels.specs import Array, KernelSpec, RawWeights
from gangway.compiler.kernels.written_bytes import written_bytes


@dataclass(frozen=True)
class Geometry:
    """Channels and pixels of one row of an activation; a vector is an image of one pixel.

    `channels_last`: a sequence, one line of positions, whose channels are the tensor's last axis.
    """

    channels: int
    height: int
    width: int
    channels_last: bool = False

    @property
    def is_vector(self) -> bool:
        """Whether blocked and plain memory are the same (up to surplus channels)."""
        return self.height == self.width == 1


def geometry_of(kind: TensorType) -> Geometry | None:
    """Return how a kernel of images sees a tensor: float32 [1, C, H, W], [1, C], or a volume [1, C, D, H, W], whose
    slices lie below each other; None for all others.
    """
    if kind.dtype != "float32" or kind.shape[:1] != (1,) or len(kind.shape) not in (2, 4, 5):
        return None
    if len(kind.shape) == 5:
        _, channels, depth, height, width = kind.shape
        return Geometry(channels, depth * height, width)
    channels, height, width = (*kind.shape[1:], 1, 1)[:3]
    return Geometry(channels, height, width)


def sequence(channels: int, positions: int) -> Geometry:
    """Return the geometry of so many positions; that of one position is a vector, whichever axis its channels are."""
    return Geometry(channels, 1, positions, channels_last=positions > 1)


@dataclass(frozen=True)
class Movement:
    """What a layer does to memory, before it is known which kernels that takes."""


@dataclass(frozen=True)
class Concat(Movement):
    """Inputs beside each other along an axis; no kernel if their producers can write into the common tensor."""

    axis: int


@dataclass(frozen=True)
class Transpose(Movement):
    """Axis i of the output is axis order[i] of the input; which kernel does it depends on the input's layout."""

    order: tuple[int, ...]


@dataclass(frozen=True)
class Pick(Movement):
    """Item `index` along the middle axis of a tensor [outer][length][inner]."""

    outer: int
    length: int
    inner: int
    index: int


@dataclass(frozen=True)
class AdjacentPart(Movement):
    """The result lies in the source already: adjacent numbers from number `skipped` on."""

    skipped: int


@dataclass(frozen=True)
class StridedCut(Movement):
    """Number (i, j, ...) of the output is number offset + i strides[0] + ... of the plain input."""

    strides: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class Attention(Movement):
    """Attention whose queries, keys and values are parts of tensors, each from one of its numbers, or channels, on.

    `images`: which of these and of the result are images, whose pixels are positions.
    """

    spec: AttentionSpec
    begins: tuple[int, ...]
    images: tuple[bool, ...]


LayerSpec = KernelSpec | Movement


@dataclass(frozen=True)
class LoweredLayer:
    """One kernel call to be. `spec` has no halos yet; `inputs` are the activations in the order of the arguments."""

    name: str
    operator: str
    spec: LayerSpec
    inputs: tuple[str, ...]
    output: str
    weights: RawWeights = field(default_factory=dict)
    channels_last: bool = False  # of a convolution: its tensors are sequences
    more_outputs: tuple[str, ...] = ()


@dataclass
class Program:
    """The layers of a model in order of execution, while operators add to them."""

    graph: Graph
    constants: dict[str, Array] = field(default_factory=dict)  # operands of elementwise layers
    layers: list[LoweredLayer] = field(default_factory=list)
    views: dict[str, str] = field(default_factory=dict)  # a tensor with the same numbers in the same order as another
    measures: bool = False  # whether layers that no template computes are compared with onnxruntime's speed
    slow: set[str] = field(default_factory=set)  # nodes, by first outputs, whose layers were slower
    refused: dict[str, str] = field(default_factory=dict)  # why nodes, by first outputs, are in islands

    def type(self, name: str) -> TensorType:
        """Return a tensor's type. Raises UnsupportedModelError if shape inference could not find it."""
        if name not in self.graph.types:
            raise UnsupportedModelError(f"the shape of tensor '{name}' depends on data or cannot be inferred")
        return self.graph.types[name]

    def add_types(self, types: Mapping[str, TensorType]) -> None:
        """Make known tensors that the graph does not have, between the layers of one node."""
        self.graph = replace(self.graph, types={**self.graph.types, **types})

    def geometry(self, node: Node, name: str) -> Geometry:
        """Return a tensor as an image. Raises UnsupportedModelError if it is none."""
        geometry = geometry_of(self.type(name))
        if geometry is None:
            kind = self.type(name)
            found = f"{kind.dtype}{list(kind.shape)}"
            raise node.unsupported(f"'{name}' is {found}, only float32 [1, C, H, W] or [1, C] can be")
        return geometry

    def constant(self, node: Node, index: int) -> Array:
        """Return input `index` of a node, which must be a constant."""
        name = node.inputs[index]
        if name not in self.graph.constants:
            raise node.unsupported(f"its input {index}, '{name}', is not a constant")
        return self.graph.constants[name]

    def optional(self, node: Node, index: int) -> Array | None:
        """Return input `index` of a node, a constant, or None if the node leaves it out."""
        return self.constant(node, index) if len(node.inputs) > index and node.inputs[index] else None

    def add(
        self,
        node: Node,
        spec: LayerSpec,
        inputs: tuple[str, ...],
        weights: Mapping[str, Array] | None = None,
        channels_last: bool = False,
    ) -> None:
        """Append the layer that computes the node's first output.

        Raises UnsupportedModelError if the kernel would write another number of bytes than the output has.
        """
        kind, found_bytes = self.type(node.outputs[0]), written_bytes(spec) if isinstance(spec, KernelSpec) else None
        if found_bytes not in (None, kind.size_bytes):
            raise node.unsupported(f"a kernel would write {found_bytes} bytes into {kind.dtype}{list(kind.shape)}")
        self.layers.append(
            LoweredLayer(node.name, node.operator, spec, inputs, node.outputs[0], weights or {}, channels_last)
        )

    def home(self, name: str) -> str:
        """Return the tensor whose numbers `name` shows, itself if it is no view."""
        while name in self.views:
            name = self.views[name]
        return name

    def writer(self, name: str) -> LoweredLayer | None:
        """Return the layer that writes these numbers; None for inputs and constants."""
        home = self.home(name)
        return next((layer for layer in reversed(self.layers) if layer.output == home), None)


Lowering = Callable[[Program, Node], None]

LOWERINGS: dict[str, Lowering] = {}


def lowers(*operators: str) -> Callable[[Lowering], Lowering]:
    """Register the decorated function for these operators. It adds layers or views to the program for one node."""

    def register(function: Lowering) -> Lowering:
        LOWERINGS.update(dict.fromkeys(operators, function))
        return function

    return register


@dataclass(frozen=True)
class Value:
    """A result of an expression, or an operand: its number in the program and its type."""

    index: int
    dtype: str


@dataclass
class Expression:
    """Grows into a `PointwiseSpec`. Operands come first; constants of one number are part of the program."""

    shape: tuple[int, ...]
    names: list[str] = field(default_factory=list)  # of the operands
    operands: list[Operand] = field(default_factory=list)
    program: list[Instruction] = field(default_factory=list)

    def operand(self, name: str, kind: TensorType) -> Value:
        """Add a tensor. Raises ValueError if it cannot be broadcast to the shape of the result."""
        assert not self.program  # numbers of values would change
        added = Operand(kind.dtype, broadcast_strides(kind.shape, self.shape))
        for index, pair in enumerate(zip(self.names, self.operands, strict=True)):
            if pair == (name, added):
                return Value(index, kind.dtype)
        self.names.append(name)
        self.operands.append(added)
        return Value(len(self.operands) - 1, kind.dtype)

    def constant(self, value: float | int | bool | Array, dtype: str) -> Value:
        """Add a number."""
        item = np.asarray(value).astype(dtype).reshape(-1)[0].item()
        return self._append(Instruction("constant", (), dtype, (item,)))

    def apply(self, operator: str, *sources: Value, dtype: str = "", parameters: tuple[float | int, ...] = ()) -> Value:
        """Add an operator; the result has the type of the last source unless another is given."""
        indices = tuple(source.index for source in sources)
        return self._append(Instruction(operator, indices, dtype or sources[-1].dtype, parameters))

    def cast(self, value: Value, dtype: str) -> Value:
        """Convert a value, if need be."""
        return value if value.dtype == dtype else self.apply("cast", value, dtype=dtype)

    def _append(self, instruction: Instruction) -> Value:
        self.program.append(instruction)
        return Value(len(self.operands) + len(self.program) - 1, instruction.dtype)

    def spec(self) -> PointwiseSpec:
        """The finished program: its result is that of the last instruction."""
        return PointwiseSpec(self.shape, tuple(self.operands), tuple(self.program))


def operand_kinds(
    names: Sequence[str], types: Mapping[str, TensorType], constants: Mapping[str, Array]
) -> list[TensorType]:
    """The types of tensors, constant or not."""
    return [
        TensorType(constants[name].shape, constants[name].dtype.name) if name in constants else types[name]
        for name in names
    ]
