"""Steps that find a scale at run time and make bytes of it, in the place of those that round float32 numbers.

A tensor that `DynamicFakeQuantise` rounds gets three steps: its range, the scale and zero point, and the bytes, in the
layout that the product behind it reads. They read the tensor where it was computed.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from gangway.artifact.format import MemorySpace, TargetSpec
from gangway.compiler.frontend.graph import TensorType
from gangway.compiler.kernels.int8_specs import FACTORS, Int8FactorsSpec, Int8QuantiseSpec, Int8RangeSpec
from gangway.compiler.kernels.plain_specs import PointwiseSpec
from gangway.compiler.kernels.specs import (
    MOST_LANES,
    PIXELS_CHANNELS,
    Array,
    ConvSpec,
    KernelSpec,
    PackSpec,
    RawWeights,
    SequencePackSpec,
    UnpackSpec,
)
from gangway.compiler.kernels.templates.int8 import depthwise as int8_depthwise
from gangway.compiler.kernels.templates.int8 import work as int8_work
from gangway.compiler.lower.layers import Geometry
from gangway.compiler.place.memory import Buffer, PlacedLayer

DYNAMIC = "DynamicFakeQuantise"
MOST_PARTS = 32
LEAST_PART = 8192  # numbers
_MOST_PRODUCT = 255 * 255
_INTEGERS = ("integers", "scales", "zeros")


def rounds(step: PlacedLayer) -> bool:
    """Whether a step makes of float32 numbers what is left of them once they were bytes."""
    return step.operator == DYNAMIC and isinstance(step.spec, PointwiseSpec)


def without_integers(steps: Sequence[PlacedLayer]) -> list[PlacedLayer]:
    """Return the steps, those of float32 numbers without what integers their weights were."""
    return [
        replace(step, weights={name: array for name, array in step.weights.items() if name not in _INTEGERS})
        if isinstance(step.spec, ConvSpec) and "integers" in step.weights
        else step
        for step in steps
    ]


@dataclass(frozen=True)
class _Source:
    """Where a tensor of float32 numbers is: in memory that a product's layout suits, or only plain."""

    buffer: Buffer
    blocked: Geometry | None


class DynamicProducts:
    """Products of such tensors. `append` adds a step; `floats` is called for each float32 tensor before it is read."""

    def __init__(
        self,
        writers: Mapping[Buffer, PlacedLayer],
        append: Callable[[PlacedLayer], None],
        floats: Callable[[Buffer], Buffer],
        target: TargetSpec,
    ) -> None:
        self._writers, self._append, self._floats, self._target = writers, append, floats, target
        self._sources: dict[Buffer, _Source] = {}
        self._factors: dict[Buffer, Buffer] = {}
        self._bytes: dict[tuple[Buffer, Geometry, bool], Buffer] = {}

    def add(self, step: PlacedLayer, spec: ConvSpec) -> bool:
        """Add a convolution in integers, and what it needs; return whether that can be done."""
        rounded = self._rounded(step.inputs[0])
        if rounded is None or "integers" not in step.weights or spec.activation.name.startswith("quantise"):
            return False
        pixels = spec.input_planar and spec.in_channels <= PIXELS_CHANNELS
        new, raw = _product(spec, step.weights, pixels, self._target)
        if new is None:
            return False
        image = Geometry(spec.in_channels, spec.height, spec.width)
        x, factors = self._quantised(rounded, step.inputs[0], image, pixels)
        others = (self._floats(buffer) for buffer in step.inputs[1:])
        self._append(replace(step, spec=new, inputs=(x, factors, *others), weights=raw))
        return True

    def _rounded(self, buffer: Buffer) -> PlacedLayer | None:
        """Return the step that rounds what a product reads, if there is one."""
        writer = self._writers.get(buffer)
        if writer and isinstance(writer.spec, PackSpec | SequencePackSpec):
            writer = self._writers.get(writer.inputs[0])
        return writer if writer and rounds(writer) else None

    def _quantised(self, rounded: PlacedLayer, read: Buffer, image: Geometry, pixels: bool) -> tuple[Buffer, Buffer]:
        key = rounded.output, image, pixels
        factors = self._factors_of(rounded)
        if key not in self._bytes:
            x = Buffer(TensorType(read.kind.shape, "uint8"), "pixels" if pixels else "bytes", image)
            size = image.channels, image.height, image.width
            source = rounded.inputs[0] if pixels else self._blocked(rounded, read, image)
            spec: KernelSpec = PackSpec(*size, "pixels") if pixels else Int8QuantiseSpec(*size)
            inputs = self._floats(source), factors
            self._append(PlacedLayer(f"{rounded.name}:{len(self._bytes)}", "DynamicQuantizeLinear", spec, inputs, x))
            self._bytes[key] = x
        return self._bytes[key], factors

    def _source(self, rounded: PlacedLayer) -> _Source:
        """Where the numbers are before they are unpacked, or else the plain tensor."""
        x = rounded.inputs[0]
        if x not in self._sources:
            writer = self._writers.get(x)
            unpacked = writer and isinstance(writer.spec, UnpackSpec | SequencePackSpec)
            image = writer.inputs[0].image if writer and unpacked else None
            self._sources[x] = _Source(writer.inputs[0], image) if writer and image else _Source(x, None)
        return self._sources[x]

    def _factors_of(self, rounded: PlacedLayer) -> Buffer:
        """Scale and zero point of a tensor."""
        if rounded.output not in self._factors:
            source = self._source(rounded)
            length, image = math.prod(rounded.inputs[0].kind.shape), source.blocked
            lines = length if image is None else -(-image.channels // self._target.lanes) * image.height
            size = -(-lines // max(1, min(MOST_PARTS, length // LEAST_PART)))
            parts = -(-lines // size)
            spec = Int8RangeSpec(length, 1, 1, parts, plain=True)
            if image is not None:
                spec = Int8RangeSpec(image.channels, image.height, image.width, parts)
            limits, factors = (Buffer(TensorType((count,), "float32"), "plain", None) for count in (2 * parts, FACTORS))
            operator = "DynamicQuantizeLinear"
            self._append(PlacedLayer(f"{rounded.name}:range", operator, spec, (self._floats(source.buffer),), limits))
            self._append(PlacedLayer(f"{rounded.name}:scale", operator, Int8FactorsSpec(parts), (limits,), factors))
            self._factors[rounded.output] = factors
        return self._factors[rounded.output]

    def _blocked(self, rounded: PlacedLayer, read: Buffer, image: Geometry) -> Buffer:
        """The numbers as a blocked image."""
        source, x = self._source(rounded), rounded.inputs[0]
        found = source.blocked
        if found and (found.channels, found.height, found.width) == (image.channels, image.height, image.width):
            return source.buffer
        whole = image.channels % MOST_LANES == 0
        if image.is_vector and (whole or (x.space == MemorySpace.ARENA and not x.parent and x.constant is None)):
            return x
        blocked = Buffer(TensorType(read.kind.shape, "float32"), "blocked", image)
        writer = self._writers.get(read)
        spec: KernelSpec = PackSpec(image.channels, image.height, image.width, "blocked")
        if writer and isinstance(writer.spec, SequencePackSpec):
            spec = writer.spec
        self._append(PlacedLayer(f"{rounded.name}:pack{len(self._bytes)}", "Pack", spec, (self._floats(x),), blocked))
        return blocked


def in_integers(spec: ConvSpec, integers: Array, pixels: bool, target: TargetSpec) -> ConvSpec | None:
    """Return the convolution with these weights, of a tensor of bytes or `pixels`; None if no kernel computes it."""
    new = replace(spec, input_layout="pixels" if pixels else "bytes", precision="int8")
    if spec.is_depthwise:
        return new if int8_depthwise.computes(new, target) else None
    new = int8_work.suited(new, integers, target)
    return new if int8_work.computes(new, target) else None


def _product(
    spec: ConvSpec, weights: RawWeights, pixels: bool, target: TargetSpec
) -> tuple[ConvSpec | None, RawWeights]:
    """Return the product of integers and its weights; None if no kernel computes it."""
    integers, zeros = weights["integers"], weights["zeros"]
    raw = {name: weights[name] for name in ("scales", "bias")}
    if spec.is_depthwise:
        possible = math.prod(spec.kernel) * _MOST_PRODUCT < int8_depthwise.MOST_SUM and not spec.residual
        new, whole = replace(spec, dynamic=True), integers - zeros.reshape(-1, 1, 1, 1)
        raw["weights"] = whole.astype(np.int16)
    else:
        possible = spec.groups == spec.diagonal_blocks == 1
        new = replace(spec, dynamic=True, weight_zeros=bool(zeros.any()))
        raw = {**raw, "weights": integers, "zeros": zeros}
    return in_integers(new, integers, pixels, target) if possible else None, raw
