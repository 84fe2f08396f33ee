"""Give every activation a place and a layout: insert packing layers, decide halos, choose what is read in place.

Layouts are those of `kernels/specs`. A *vector* (1 x 1 pixels) is the same in blocked and plain memory once its surplus
channels exist, so dense layers, global means and elementwise layers hand vectors to each other without copies.
"""

import math
from dataclasses import replace

import numpy as np

from gangway.artifact.format import Space
from gangway.compiler.frontend.graph import TensorType
from gangway.compiler.kernels.plain_specs import CopySpec, GatherPlacesSpec, ScatterSpec, SoftmaxSpec, TensorProgramSpec
from gangway.compiler.kernels.specs import (
    BlockedElementwiseSpec,
    ConvSpec,
    ElementwiseSpec,
    GlobalPoolSpec,
    KernelSpec,
    PoolSpec,
)
from gangway.compiler.lower.layers import Geometry, Layer, Program, geometry_of, sequence
from gangway.compiler.place import movement  # noqa: F401 - its placings
from gangway.compiler.place.fusion import fuse_chains, fuse_depthwise
from gangway.compiler.place.memory import Memory, datatype, unpack_spec
from gangway.compiler.place.movement import as_pointwise, place_layer, place_pointwise, places
from gangway.compiler.place.sequences import place_on_sequence
from gangway.compiler.place.steps import Buffer, Step


def place(program: Program, layers: list[Layer], lanes: int) -> list[Step]:
    """Return the steps that run the layers on memory, with final specs. Raises UnsupportedModelError."""
    memory = Memory(program, lanes)
    for layer in layers:
        place_layer(memory, layer)
    for index, name in enumerate(program.graph.outputs):
        _deliver(memory, index, name)
    _settle_halos(memory.steps)
    return [_with_halos(step) for step in fuse_depthwise(fuse_chains(memory.steps), lanes)]


@places(PoolSpec, GlobalPoolSpec)
def _place_blocked(memory: Memory, layer: Layer) -> None:
    assert isinstance(layer.spec, KernelSpec)
    memory.append(layer, layer.spec, tuple(memory.blocked(name) for name in layer.inputs), "blocked")


@places(SoftmaxSpec, ScatterSpec, GatherPlacesSpec)
def _place_plain(memory: Memory, layer: Layer) -> None:
    assert isinstance(layer.spec, KernelSpec)
    memory.append(layer, layer.spec, tuple(memory.plain(name) for name in layer.inputs), "plain")


@places(TensorProgramSpec)
def _place_tensor_program(memory: Memory, layer: Layer) -> None:
    spec = layer.spec
    assert isinstance(spec, TensorProgramSpec)
    output, *more = (memory.tensor(name) for name in (layer.output, *layer.more_outputs))
    scratch = (Buffer(TensorType((elements,), kind), "plain", None) for elements, kind in spec.scratch)
    inputs = tuple(memory.plain(name) for name in layer.inputs)
    step = Step(layer.name, layer.operator, spec, inputs, output, layer.weights, (*scratch, *more))
    memory.steps.append(step)


@places(ConvSpec)
def _place_conv(memory: Memory, layer: Layer) -> None:
    spec, name = layer.spec, layer.inputs[0]
    assert isinstance(spec, ConvSpec)
    result = Geometry(spec.out_channels, *spec.output_size)
    if layer.channels_last:
        source, result = sequence(spec.in_channels, spec.width), sequence(spec.out_channels, spec.width)
        inputs = (memory.blocked(name, source), *(memory.blocked(other, result) for other in layer.inputs[1:]))
        memory.append(layer, spec, inputs, "blocked", result)
        return
    haloed = any(spec.pads)
    # With few channels most lanes of a blocked input would be idle; a planar one is also packed faster.
    planar = spec.groups == 1 and spec.in_channels < memory.lanes and not memory.image(name).is_vector
    if planar and memory.home(name).layout == "plain":
        spec = replace(spec, input_planar=True)
        x = memory.planar(name) if haloed else memory.plain(name)
    else:
        x = memory.blocked(name, haloed=haloed)
    residual = tuple(memory.blocked(other, result) for other in layer.inputs[1:])
    memory.append(layer, spec, (x, *residual), "blocked", result)


@places(ElementwiseSpec)
def _place_elementwise(memory: Memory, layer: Layer) -> None:
    spec, kind = layer.spec, memory.program.type(layer.output)
    assert isinstance(spec, ElementwiseSpec)
    if place_on_sequence(memory, layer):
        return
    image = geometry_of(kind)
    if image is None or image.is_vector or not _wants_blocked(memory, layer, image):
        place_pointwise(memory, as_pointwise(memory.program, layer))
        return
    inputs = tuple(_operand(memory, name, kind) for name in layer.inputs)
    blocked = BlockedElementwiseSpec(
        spec.operator,
        image.channels,
        image.height,
        image.width,
        tuple(buffer.is_vector for buffer in inputs),
        tuple(0 for _ in inputs),
        spec.activation,
    )
    memory.append(layer, blocked, inputs, "blocked")


def _wants_blocked(memory: Memory, layer: Layer, image: Geometry) -> bool:
    """Whether an operand is blocked already, or one per channel, for which there is no plain kernel."""
    activations = [name for name in layer.inputs if name not in memory.program.constants]
    return any(memory.home(name).is_blocked(image) or memory.image(name) != image for name in activations)


def _operand(memory: Memory, name: str, kind: TensorType) -> Buffer:
    """Return a blocked tensor, or one of one number per channel, for a result of type `kind`."""
    if name not in memory.program.constants:
        return memory.blocked(name)
    value = memory.program.constants[name]
    value = value.reshape((1,) * (len(kind.shape) - value.ndim) + value.shape)
    small = all(n == 1 for axis, n in enumerate(value.shape) if axis != 1)
    value = np.broadcast_to(value, (*kind.shape[:2], 1, 1) if small else kind.shape)
    _, channels, height, width = value.shape
    padded = np.pad(value[0], ((0, -channels % memory.lanes), (0, 0), (0, 0)))
    packed = padded.reshape(-1, memory.lanes, height, width).transpose(0, 2, 3, 1)
    found = TensorType(value.shape, value.dtype.name)
    return Buffer(found, "blocked", geometry_of(found), Space.WEIGHTS, constant=packed)


def _deliver(memory: Memory, index: int, name: str) -> None:
    """Make output `index` of the model hold the tensor: let its producer write there, or copy it at the end."""
    if 0 in memory.program.type(name).shape:
        return
    home = memory.home(name)
    if _can_move_out(memory, home):
        home.space, home.index = Space.OUTPUT, index
        return
    kind = memory.program.type(name)
    target = Buffer(kind, "plain", geometry_of(kind), Space.OUTPUT, index)
    if home.layout == "blocked" and home.image:
        memory.steps.append(Step(f"{name}:unpack", "Unpack", unpack_spec(home.image), (home,), target))
    else:
        memory.steps.append(_copy(name, kind, memory.plain(name), target))


def _copy(name: str, kind: TensorType, source: Buffer, target: Buffer) -> Step:
    spec = CopySpec(datatype(name, kind), (math.prod(kind.shape),), (1,), (1,))
    return Step(f"{name}:copy", "Copy", spec, (source,), target)


def _can_move_out(memory: Memory, home: Buffer) -> bool:
    """Whether a tensor, or its parts, can be computed in an output: plain, without surplus, and without readers."""
    written = [buffer for step in memory.steps for buffer in (step.output, *step.more) if buffer.is_in(home)]
    read = any(buffer.is_in(home) for step in memory.steps for buffer in step.inputs)
    plain = home.layout == "plain" or (home.is_vector and not home.surplus(memory.lanes))
    return bool(written) and home.space == Space.ARENA and not home.parent and plain and not read


def _settle_halos(steps: list[Step]) -> None:
    """Give each buffer the largest halo that a reader needs, of itself or of another part of the same tensor."""
    for step in steps:
        if isinstance(step.spec, ConvSpec):
            whole = step.inputs[0].root
            whole.halo = max(whole.halo, *step.spec.pads)
    for step in steps:
        for buffer in step.buffers:
            buffer.settle_part()


def _with_halos(step: Step) -> Step:
    halos = tuple(buffer.halo for buffer in step.inputs)
    return replace(step, spec=step.spec.with_halos(halos, step.output.halo))
