"""The place of concatenated and transposed tensors, and of pointwise layers over plain memory."""

import math
from collections.abc import Callable
from dataclasses import replace

from gangway.artifact.format import Space
from gangway.compiler.frontend.graph import TensorType
from gangway.compiler.kernels.plain_specs import CopySpec, PointwiseSpec, ReduceSpec, RemapSpec, contiguous
from gangway.compiler.kernels.specs import (
    NONE,
    BlockedElementwiseSpec,
    ConvSpec,
    ElementwiseSpec,
    KernelSpec,
    UnpackSpec,
)
from gangway.compiler.lower.layers import (
    Concat,
    Cut,
    Expression,
    Layer,
    LayerSpec,
    Part,
    Program,
    Transpose,
    Value,
    geometry_of,
)
from gangway.compiler.place.memory import Memory, datatype
from gangway.compiler.place.steps import Buffer, Step

# Which function gives which kind of layer its memory. A new kind of layer is one function with `@places(Spec)`.

Placing = Callable[[Memory, Layer], None]

_placings: dict[type[LayerSpec], Placing] = {}


def places(*kinds: type[LayerSpec]) -> Callable[[Placing], Placing]:
    """Register the decorated function for layers with these specs. It appends the layer."""

    def register(function: Placing) -> Placing:
        _placings.update(dict.fromkeys(kinds, function))
        return function

    return register


def place_layer(memory: Memory, layer: Layer) -> None:
    """Append the steps of one layer. Raises UnsupportedModelError."""
    _placings[type(layer.spec)](memory, layer)


# Where pointwise layers and their constants lie: in plain memory, which has no halos.


@places(PointwiseSpec, RemapSpec, ReduceSpec)
def place_pointwise(memory: Memory, layer: Layer) -> None:
    """All operands plain."""
    assert isinstance(layer.spec, KernelSpec)
    memory.append(layer, layer.spec, tuple(plain_operand(memory, name) for name in layer.inputs), "plain")


@places(Part)
def _place_part(memory: Memory, layer: Layer) -> None:
    """Nothing is moved."""
    assert isinstance(layer.spec, Part)
    kind, whole = memory.program.type(layer.output), memory.plain(layer.inputs[0])
    memory.homes[layer.output] = Buffer(kind, "plain", geometry_of(kind), parent=whole, skipped=layer.spec.skipped)


def plain_operand(memory: Memory, name: str) -> Buffer:
    """Return a tensor in row-major order, which may be a constant of the program."""
    if name not in memory.program.constants:
        return memory.plain(name)
    value = memory.program.constants[name]
    return Buffer(TensorType(value.shape, value.dtype.name), "plain", None, Space.WEIGHTS, constant=value)


def as_pointwise(program: Program, layer: Layer) -> Layer:
    """Return the layer of an `ElementwiseSpec` as one over plain tensors; constants are repeated by strides."""
    spec = layer.spec
    assert isinstance(spec, ElementwiseSpec)
    expression = Expression(program.type(layer.output).shape)
    values: list[Value | None] = []
    for name in layer.inputs:
        value = program.constants.get(name)
        if value is not None and value.size == 1:
            values.append(None)
            continue
        kind = program.type(name) if value is None else TensorType(value.shape, value.dtype.name)
        values.append(expression.operand(name, kind))
    operands = [
        expression.constant(program.constants[name], spec.dtype) if value is None else value
        for name, value in zip(layer.inputs, values, strict=True)
    ]
    result = operands[0] if spec.operator == "copy" else expression.apply(spec.operator, *operands)
    if spec.activation != NONE:
        parameters = (spec.activation.alpha, spec.activation.beta)
        result = expression.apply(spec.activation.name, result, parameters=parameters)
    return replace(layer, spec=expression.spec(), inputs=tuple(expression.names))


@places(Concat)
def place_concat(memory: Memory, layer: Layer) -> None:
    """Make the inputs parts of one tensor; those whose memory cannot be moved there are copied.

    Blocked images whose channels begin at whole registers stay blocked, all others become plain.
    """
    assert isinstance(layer.spec, Concat)
    axis, kind = layer.spec.axis, memory.program.type(layer.output)
    constants = memory.program.constants
    kinds = [
        TensorType(constants[name].shape, kind.dtype) if name in constants else memory.program.type(name)
        for name in layer.inputs
    ]
    begins = [sum(part.shape[axis] for part in kinds[:index]) for index in range(len(kinds))]
    if axis == 1 and _stays_blocked(memory, layer, begins):
        whole = Buffer(kind, "blocked", geometry_of(kind))
        for index, (name, begin) in enumerate(zip(layer.inputs, begins, strict=True)):
            _join_blocked(memory, f"{layer.name}:{index}", memory.blocked(name), whole, begin)
    else:
        whole = Buffer(kind, "plain", geometry_of(kind))
        inner = math.prod(kind.shape[axis + 1 :])
        outermost = math.prod(kind.shape[:axis]) == 1
        for index, (name, part, begin) in enumerate(zip(layer.inputs, kinds, begins, strict=True)):
            source = plain_operand(memory, name)
            if outermost and _can_move(memory, source):
                source.parent, source.skipped = whole, begin * inner
            else:
                _copy_into(memory, f"{layer.name}:{index}", source, part, whole, begin * inner)
    memory.homes[layer.output] = whole


def _stays_blocked(memory: Memory, layer: Layer, begins: list[int]) -> bool:
    image = geometry_of(memory.program.type(layer.output))
    if any(name in memory.program.constants for name in layer.inputs):
        return False
    if image is None or image.is_vector or any(begin % memory.lanes for begin in begins):
        return False
    return any(memory.home(name).is_blocked(memory.image(name)) for name in layer.inputs)


def _can_move(memory: Memory, buffer: Buffer) -> bool:
    """Whether a buffer can become a part of another one: it has a place of its own, and no surplus behind it counts."""
    if buffer.space != Space.ARENA or buffer.parent or buffer.constant is not None:
        return False
    if buffer.layout == "blocked" and not buffer.is_vector:
        return True
    readers = (step for step in memory.steps if buffer in step.inputs)
    padded = buffer.is_vector or any(isinstance(step.spec, ConvSpec) for step in readers)
    return not (padded and buffer.surplus(memory.lanes))


def _join_blocked(memory: Memory, name: str, source: Buffer, whole: Buffer, begin: int) -> None:
    if _can_move(memory, source):
        source.parent, source.skipped = whole, begin
        return
    image = source.image
    assert image is not None
    part = Buffer(source.kind, "blocked", image, parent=whole, skipped=begin)
    spec = BlockedElementwiseSpec("copy", image.channels, image.height, image.width, (False,), (0,))
    memory.steps.append(Step(name, "Copy", spec, (source,), part))


def _copy_into(memory: Memory, name: str, source: Buffer, kind: TensorType, whole: Buffer, skipped: int) -> None:
    """Copy a plain tensor of shape `kind` to where it belongs in a larger one of the same rank."""
    part = Buffer(kind, "plain", None, parent=whole, skipped=skipped)
    spec = CopySpec(datatype(name, kind), kind.shape, contiguous(kind.shape), contiguous(whole.kind.shape))
    memory.steps.append(Step(name, "Copy", spec, (source,), part))


@places(Transpose)
def place_transpose(memory: Memory, layer: Layer) -> None:
    """Move the numbers of a plain tensor; a blocked image becomes [H, W, C] while it is unpacked."""
    assert isinstance(layer.spec, Transpose)
    (name,), order = layer.inputs, layer.spec.order
    home, kind, result = memory.home(name), memory.program.type(name), memory.program.type(layer.output)
    if order == (0, 2, 3, 1) and home.layout == "blocked" and home.image == geometry_of(kind) and not home.is_vector:
        assert home.image is not None
        unpack = UnpackSpec(home.image.channels, home.image.height, home.image.width, channels_last=True)
        memory.append(layer, unpack, (home,), "plain")
        return
    strides = contiguous(kind.shape)
    spec = CopySpec(
        datatype(name, kind), result.shape, tuple(strides[axis] for axis in order), contiguous(result.shape)
    )
    memory.append(layer, spec, (memory.plain(name),), "plain")


@places(Cut)
def place_cut(memory: Memory, layer: Layer) -> None:
    """Copy the numbers that are needed."""
    assert isinstance(layer.spec, Cut)
    (name,), kind = layer.inputs, memory.program.type(layer.output)
    source = Buffer(kind, "plain", None, parent=memory.plain(name), skipped=layer.spec.offset)
    spec = CopySpec(datatype(name, kind), kind.shape, layer.spec.strides, contiguous(kind.shape))
    memory.append(layer, spec, (source,), "plain")
