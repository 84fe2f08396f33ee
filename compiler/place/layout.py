"""Give every activation a place and a layout: insert packing steps, decide halos, choose what is read in place.

Layouts are those of `kernels/specs.py`. A *vector* (1 x 1 pixels) is the same in blocked and plain memory once its
surplus channels exist, so dense layers, global means and elementwise layers hand vectors to each other without copies.
A new kind of layer is one function with `@places(Spec)`.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from gangway.artifact.format import MemorySpace, TargetSpec
from gangway.compiler.frontend.graph import TensorType
from gangway.compiler.kernels.attention_specs import AttentionSpec
from gangway.compiler.kernels.packed_specs import PackedDenseSpec
from gangway.compiler.kernels.plain_specs import (
    CopySpec,
    GatherPlacesSpec,
    GatherSpec,
    GridSampleSpec,
    IslandSpec,
    MatMulSpec,
    PlainPoolSpec,
    PointwiseSpec,
    ReduceSpec,
    RemapSpec,
    ScatterSpec,
    SoftmaxSpec,
    TailSpec,
    TensorProgramSpec,
    TopSpec,
    TreeSpec,
    contiguous,
)
from gangway.compiler.kernels.specs import (
    NONE,
    Array,
    BlockedElementwiseSpec,
    ConvSpec,
    ConvTransposeSpec,
    DepthWindow,
    ElementwiseSpec,
    GlobalPoolSpec,
    KernelSpec,
    LayerNormSpec,
    PoolSpec,
    RecurrentSpec,
    ResizeSpec,
    UnpackSpec,
    VolumeConvSpec,
    VolumePadSpec,
    VolumePoolSpec,
)
from gangway.compiler.lower.layers import (
    AdjacentPart,
    Attention,
    Concat,
    Expression,
    Geometry,
    LayerSpec,
    LoweredLayer,
    Pick,
    Program,
    StridedCut,
    Transpose,
    Value,
    geometry_of,
    sequence,
)
from gangway.compiler.place.dynamic_int8 import without_integers
from gangway.compiler.place.fusion import fuse_chains, fuse_depthwise
from gangway.compiler.place.int8 import with_filled_halos, with_int8
from gangway.compiler.place.limits import with_limits
from gangway.compiler.place.memory import Buffer, PlacedLayer, PlacedMemory, copied, datatype, unpack_spec
from gangway.compiler.place.recurrent import place_recurrent
from gangway.compiler.place.written import require_sizes

Placing = Callable[[PlacedMemory, LoweredLayer, Any], None]

_placings: dict[type[LayerSpec], Placing] = {RecurrentSpec: place_recurrent}


def place(
    program: Program, layers: list[LoweredLayer], lanes: int, target: TargetSpec | None = None
) -> list[PlacedLayer]:
    """Return the steps that run the layers on memory, with final specs. Raises UnsupportedModelError.

    `target`: its instructions for 8-bit numbers are used where the model has them.
    """
    memory = PlacedMemory(program, lanes)
    for layer in layers:
        _place_layer(memory, layer)
    for index, name in enumerate(program.graph.outputs):
        _deliver(memory, index, name)
    steps = fuse_chains(memory.steps)
    require_sizes(steps)
    steps = with_limits(without_integers(with_int8(steps, target) if target else steps))
    _settle_halos(steps)
    return [_with_halos(step) for step in fuse_depthwise(with_filled_halos(steps), lanes)]


def places(*kinds: type[LayerSpec]) -> Callable[[Placing], Placing]:
    """Register the decorated function for layers with these specs: it takes the layer and its spec, and appends it."""

    def register(function: Placing) -> Placing:
        _placings.update(dict.fromkeys(kinds, function))
        return function

    return register


def _place_layer(memory: PlacedMemory, layer: LoweredLayer) -> None:
    """Append the steps of one layer. Raises UnsupportedModelError."""
    _placings[type(layer.spec)](memory, layer, layer.spec)


@places(GlobalPoolSpec)
def _place_blocked(memory: PlacedMemory, layer: LoweredLayer, spec: KernelSpec) -> None:
    memory.append(layer, spec, tuple(memory.blocked(name) for name in layer.inputs), "blocked")


@places(PoolSpec, VolumePoolSpec)
def _place_pool(memory: PlacedMemory, layer: LoweredLayer, spec: PoolSpec | VolumePoolSpec) -> None:
    """Blocked, unless a plain tensor were packed for pooling alone."""
    name = layer.inputs[0]
    if memory.home(name).layout != "plain" or _is_read_blocked(memory.program, name):
        _place_blocked(memory, layer, spec)
        return
    pool, depth = (spec, DepthWindow(1, 1)) if isinstance(spec, PoolSpec) else (spec.pool, spec.depth)
    memory.append(layer, PlainPoolSpec(pool, depth), (memory.plain(name),), "plain")


@places(ConvSpec)
def _place_conv(memory: PlacedMemory, layer: LoweredLayer, spec: ConvSpec) -> None:
    name = layer.inputs[0]
    result = Geometry(spec.out_channels, *spec.output_size)
    if layer.channels_last:
        source, result = sequence(spec.in_channels, spec.width), sequence(spec.out_channels, spec.width)
        inputs = (memory.blocked(name, source), *(memory.blocked(other, result) for other in layer.inputs[1:]))
        memory.append(layer, spec, inputs, "blocked", result)
        return
    haloed = any(spec.pads)
    # With few channels most lanes of a blocked input would be idle; a planar one is also packed faster.
    planar = (
        spec.groups == spec.diagonal_blocks == 1
        and spec.in_channels < memory.lanes
        and not memory.image(name).is_vector
    )
    if planar and memory.home(name).layout == "plain":
        spec = replace(spec, input_layout="planar")
        x = memory.planar(name) if haloed else memory.plain(name)
    else:
        x = memory.blocked(name, haloed=haloed)
    residual = tuple(memory.blocked(other, result) for other in layer.inputs[1:])
    memory.append(layer, spec, (x, *residual), "blocked", result)


@places(PackedDenseSpec)
def _place_packed(memory: PlacedMemory, layer: LoweredLayer, spec: PackedDenseSpec) -> None:
    source, result = sequence(spec.in_channels, spec.positions), sequence(spec.out_channels, spec.positions)
    x, *others = layer.inputs
    inputs = (memory.blocked(x, source), *(memory.blocked(other, result) for other in others))
    memory.append(layer, spec, inputs, "blocked", result)


@places(ConvTransposeSpec)
def _place_conv_transpose(memory: PlacedMemory, layer: LoweredLayer, spec: ConvTransposeSpec) -> None:
    x = memory.blocked(layer.inputs[0], haloed=max(spec.pads) > 0)
    memory.append(layer, spec, (x,), "blocked")


@places(VolumeConvSpec)
def _place_volume_conv(memory: PlacedMemory, layer: LoweredLayer, spec: VolumeConvSpec) -> None:
    """Padding between slices is in a copy of the volume: what it costs is little beside a window over three axes."""
    conv, x = spec.conv, memory.blocked(layer.inputs[0])
    if any(conv.pads):
        pad = VolumePadSpec(conv.in_channels, spec.depth.length, conv.height, conv.width, conv.pads)
        height, width = pad.padded
        image = Geometry(conv.in_channels, spec.depth.length * height, width)
        padded = Buffer(TensorType((1, image.channels, image.height, width), "float32"), "blocked", image)
        memory.steps.append(PlacedLayer(f"{layer.name}:pad", "Pad", pad, (x,), padded))
        conv, x = replace(conv, height=height, width=width, pads=(0, 0, 0, 0)), padded
    memory.append(layer, replace(spec, conv=conv), (x,), "blocked")


@places(ResizeSpec)
def _place_resize(memory: PlacedMemory, layer: LoweredLayer, spec: ResizeSpec) -> None:
    """Blocked if convolutions read the result; else a plain tensor is made of a plain one, which packs no surplus."""
    name = layer.inputs[0]
    image = geometry_of(memory.program.type(name))
    fits = image == Geometry(spec.channels, spec.height, spec.width) and image is not None and not image.is_vector
    wide = image is not None and (memory.home(name).is_blocked(image) or spec.channels >= memory.lanes)
    if fits and wide and _is_read_blocked(memory.program, layer.output):
        memory.append(layer, spec, (memory.blocked(name),), "blocked")
    else:
        memory.append(layer, replace(spec, plain=True), (memory.plain(name),), "plain")


def _is_read_blocked(program: Program, name: str) -> bool:
    """Whether a kernel of blocked images reads the tensor, or what layers that take any layout make of it."""
    made = {name}
    for layer in program.layers:
        if made.isdisjoint(program.home(source) for source in layer.inputs):
            continue
        if isinstance(layer.spec, ConvSpec | ConvTransposeSpec | VolumeConvSpec | GlobalPoolSpec):
            return True
        if isinstance(layer.spec, ElementwiseSpec | ResizeSpec | PoolSpec | VolumePoolSpec | Concat):
            made.add(layer.output)
    return False


@places(ElementwiseSpec)
def _place_elementwise(memory: PlacedMemory, layer: LoweredLayer, spec: ElementwiseSpec) -> None:
    kind = memory.program.type(layer.output)
    if _place_on_sequence(memory, layer, spec):
        return
    image = geometry_of(kind)
    if image is None or image.is_vector or not _wants_blocked(memory, layer, image):
        pointwise = _as_pointwise(memory.program, layer, spec)
        _place_pointwise(memory, pointwise, pointwise.spec)
        return
    inputs = tuple(_operand(memory, name, kind, _surplus(spec)) for name in layer.inputs)
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


def _wants_blocked(memory: PlacedMemory, layer: LoweredLayer, image: Geometry) -> bool:
    """Whether an operand is blocked already, or one per channel, for which there is no plain kernel."""
    activations = [name for name in layer.inputs if name not in memory.program.constants]
    return any(memory.home(name).is_blocked(image) or memory.image(name) != image for name in activations)


def _operand(memory: PlacedMemory, name: str, kind: TensorType, surplus: float) -> Buffer:
    """Return a blocked tensor, or one of one number per channel, for a result of type `kind`.

    `surplus`: what a constant has in surplus channels.
    """
    if name not in memory.program.constants:
        return memory.blocked(name)
    value = memory.program.constants[name]
    value = value.reshape((1,) * (len(kind.shape) - value.ndim) + value.shape)
    small = all(n == 1 for axis, n in enumerate(value.shape) if axis != 1)
    shape = (*kind.shape[:2], *(1 for _ in kind.shape[2:])) if small else kind.shape
    value = np.broadcast_to(value, shape).reshape(*shape[:2], -1, shape[-1])
    _, channels, height, width = value.shape
    padded = np.pad(value[0], ((0, -channels % memory.lanes), (0, 0), (0, 0)), constant_values=surplus)
    packed = padded.reshape(-1, memory.lanes, height, width).transpose(0, 2, 3, 1)
    found = TensorType(value.shape, value.dtype.name)
    return Buffer(found, "blocked", geometry_of(found), MemorySpace.WEIGHTS, constant=packed)


def _place_on_sequence(memory: PlacedMemory, layer: LoweredLayer, spec: ElementwiseSpec) -> bool:
    """Place an elementwise layer in blocked memory, if an operand is a blocked sequence; return whether that was done.

    The others are tensors of the same shape, or constants with one number per channel.
    """
    kind = memory.program.type(layer.output)
    constants = memory.program.constants
    activations = [name for name in layer.inputs if name not in constants]
    found = [memory.home(name).image for name in activations if memory.home(name).layout == "blocked"]
    geometry = next((image for image in found if image and image.channels_last), None)
    if geometry is None or any(memory.program.type(name).shape != kind.shape for name in activations):
        return False
    shapes = [constants[name].shape for name in layer.inputs if name in constants]
    if any(not _fits(shape, kind.shape, geometry) for shape in shapes):
        return False
    inputs = tuple(
        _packed(memory, constants[name], geometry, _surplus(spec))
        if name in constants
        else memory.blocked(name, geometry)
        for name in layer.inputs
    )
    vectors = tuple(buffer.is_vector for buffer in inputs)
    halos = tuple(0 for _ in inputs)
    blocked = BlockedElementwiseSpec(
        spec.operator, geometry.channels, geometry.height, geometry.width, vectors, halos, spec.activation
    )
    memory.append(layer, blocked, inputs, "blocked", geometry)
    return True


def _fits(shape: tuple[int, ...], full: tuple[int, ...], geometry: Geometry) -> bool:
    """Whether a constant has a number for each number of the output, or for each channel, or is one for all."""
    inner = next((axis for axis, length in enumerate(shape) if length > 1), len(shape) - 1)
    per_channel = math.prod(shape) == geometry.channels and shape[inner:] == full[len(full) - len(shape) + inner :]
    return math.prod(shape) in (1, math.prod(full)) or per_channel


def _surplus(spec: ElementwiseSpec) -> float:
    """Return what constants have in surplus channels, so that these stay numbers."""
    return float(spec.operator == "div")


def _packed(memory: PlacedMemory, value: Array, geometry: Geometry, surplus: float) -> Buffer:
    """Return a constant in blocked memory: a vector, or a whole sequence; `surplus` is in surplus channels."""
    value = np.broadcast_to(value.reshape(1), geometry.channels) if value.size == 1 else value
    part = sequence(geometry.channels, value.size // geometry.channels)
    rows = np.pad(
        value.reshape(-1, geometry.channels), ((0, 0), (0, -geometry.channels % memory.lanes)), constant_values=surplus
    )
    blocks = rows.reshape(part.width, -1, memory.lanes).transpose(1, 0, 2)
    kind = TensorType((1, part.channels, 1, part.width), value.dtype.name)
    return Buffer(kind, "blocked", part, MemorySpace.WEIGHTS, constant=blocks)


@places(LayerNormSpec)
def _place_layer_norm(memory: PlacedMemory, layer: LoweredLayer, spec: LayerNormSpec) -> None:
    geometry = sequence(spec.channels, spec.positions)
    memory.append(layer, spec, (memory.blocked(layer.inputs[0], geometry),), "blocked", geometry)


@places(Attention)
def _place_attention(memory: PlacedMemory, layer: LoweredLayer, attention: Attention) -> None:
    """Queries, keys and values are parts of whatever tensors they are channels of, or are read by their strides."""
    spec = attention.spec
    parts = []
    for index, (name, begin) in enumerate(zip(layer.inputs, attention.begins, strict=False)):
        if spec.is_plain(index):
            parts.append(_numbers_from(memory.plain(name), begin))
            continue
        positions = spec.windows * (spec.queries if index == 0 else spec.keys)
        heads = spec.heads if index == 0 else spec.heads // spec.sharing
        size = spec.value_channels if index == 2 else spec.head_size
        channels = (heads - 1) * (spec.strides[index] or (size,))[0] + size
        whole = sequence(math.prod(memory.kind(name).shape) // positions, positions)
        buffer = memory.pixels(name) if attention.images[index] else memory.blocked(name, whole)
        parts.append(_channels(buffer, whole, begin, channels))
    inputs = (*parts, *(memory.plain(name) for name in layer.inputs[3:]))
    if spec.is_plain(3):
        memory.append(layer, spec, inputs, "plain")
    else:
        result = sequence(spec.heads * spec.value_channels, spec.windows * spec.queries)
        memory.append(layer, spec, inputs, "blocked", result)
        if attention.images[3]:
            memory.join_pixels(layer.output)


def _numbers_from(buffer: Buffer, begin: int) -> Buffer:
    """Return a plain tensor from one of its numbers on."""
    if not begin:
        return buffer
    kind = TensorType((math.prod(buffer.kind.shape) - begin,), buffer.kind.dtype)
    return Buffer(kind, "plain", None, parent=buffer, skipped=begin)


def _channels(buffer: Buffer, whole: Geometry, begin: int, channels: int) -> Buffer:
    """Return `channels` channels, from number `begin` on, of a tensor that is seen as `whole`."""
    if channels == whole.channels:
        return buffer
    part = replace(whole, channels=channels)
    kind = TensorType((1, channels, 1, whole.width), "float32")
    return Buffer(kind, "blocked", part, parent=buffer, skipped=begin)


def _as_pointwise(program: Program, layer: LoweredLayer, spec: ElementwiseSpec) -> LoweredLayer:
    """Return the layer of an `ElementwiseSpec` as one over plain tensors; constants are repeated by strides."""
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


@places(PointwiseSpec, RemapSpec, ReduceSpec)
def _place_pointwise(memory: PlacedMemory, layer: LoweredLayer, spec: Any) -> None:
    """All operands plain."""
    memory.append(layer, spec, tuple(_plain_operand(memory, name) for name in layer.inputs), "plain")


def _plain_operand(memory: PlacedMemory, name: str) -> Buffer:
    """Return a tensor in row-major order, which may be a constant of the program."""
    if name not in memory.program.constants:
        return memory.plain(name)
    value = memory.program.constants[name]
    return Buffer(TensorType(value.shape, value.dtype.name), "plain", None, MemorySpace.WEIGHTS, constant=value)


@places(SoftmaxSpec, ScatterSpec, GatherSpec, GatherPlacesSpec, GridSampleSpec, MatMulSpec, TreeSpec)
def _place_plain(memory: PlacedMemory, layer: LoweredLayer, spec: KernelSpec) -> None:
    memory.append(layer, spec, tuple(memory.plain(name) for name in layer.inputs), "plain")


@places(TensorProgramSpec)
def _place_tensor_program(memory: PlacedMemory, layer: LoweredLayer, spec: TensorProgramSpec) -> None:
    output, *more = (memory.tensor(name) for name in (layer.output, *layer.more_outputs))
    scratch = (Buffer(TensorType((elements,), kind), "plain", None) for elements, kind in spec.scratch)
    inputs = tuple(memory.plain(name) for name in layer.inputs)
    step = PlacedLayer(layer.name, layer.operator, spec, inputs, output, layer.weights, (*scratch, *more))
    memory.steps.append(step)


@places(IslandSpec, TopSpec)
def _place_several(memory: PlacedMemory, layer: LoweredLayer, spec: KernelSpec) -> None:
    """Plain tensors, several of them results."""
    output, *more = (memory.tensor(name) for name in (layer.output, *layer.more_outputs))
    inputs = tuple(memory.plain(name) for name in layer.inputs)
    memory.steps.append(PlacedLayer(layer.name, layer.operator, spec, inputs, output, more=tuple(more)))


@places(TailSpec)
def _place_tail(memory: PlacedMemory, layer: LoweredLayer, spec: TailSpec) -> None:
    """Its results are in no buffer: it tells how large they are when it has them."""
    inputs = tuple(memory.plain(name) for name in layer.inputs)
    nothing = Buffer(TensorType((0,), "uint8"), "plain", None, MemorySpace.OUTPUT)
    memory.steps.append(PlacedLayer(layer.name, layer.operator, spec, inputs, nothing))


@places(AdjacentPart)
def _place_part(memory: PlacedMemory, layer: LoweredLayer, spec: AdjacentPart) -> None:
    """Nothing is moved."""
    kind, whole = memory.program.type(layer.output), memory.plain(layer.inputs[0])
    memory.homes[layer.output] = Buffer(kind, "plain", geometry_of(kind), parent=whole, skipped=spec.skipped)


@places(Transpose)
def _place_transpose(memory: PlacedMemory, layer: LoweredLayer, moved: Transpose) -> None:
    """Move the numbers of a plain tensor; a blocked image becomes [H, W, C] while it is unpacked."""
    (name,), order = layer.inputs, moved.order
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


@places(StridedCut)
def _place_cut(memory: PlacedMemory, layer: LoweredLayer, cut: StridedCut) -> None:
    """Copy the numbers that are needed."""
    (name,), kind = layer.inputs, memory.program.type(layer.output)
    source = Buffer(kind, "plain", None, parent=memory.plain(name), skipped=cut.offset)
    spec = CopySpec(datatype(name, kind), kind.shape, cut.strides, contiguous(kind.shape))
    memory.append(layer, spec, (source,), "plain")


@places(Pick)
def _place_pick(memory: PlacedMemory, layer: LoweredLayer, pick: Pick) -> None:
    """Copy what is picked; of a blocked sequence one position, if its channels fill whole registers."""
    (name,), kind = layer.inputs, memory.program.type(layer.output)
    home, dtype = memory.home(name), datatype(name, kind)
    whole = sequence(pick.inner, pick.length)
    if pick.outer == 1 and home.is_blocked(whole) and pick.inner % memory.lanes == 0:
        source = Buffer(kind, "plain", None, parent=home, skipped=pick.index * memory.lanes)
        shape = (pick.inner // memory.lanes, memory.lanes)
        spec = CopySpec(dtype, shape, (pick.length * memory.lanes, 1), (memory.lanes, 1))
    else:
        source = Buffer(kind, "plain", None, parent=memory.plain(name), skipped=pick.index * pick.inner)
        spec = CopySpec(dtype, (pick.outer, pick.inner), (pick.length * pick.inner, 1), (pick.inner, 1))
    memory.append(layer, spec, (source,), "plain")


@places(Concat)
def _place_concat(memory: PlacedMemory, layer: LoweredLayer, spec: Concat) -> None:
    """Make the inputs parts of one tensor; those whose memory cannot be moved there are copied.

    Blocked images whose channels begin at whole registers stay blocked, all others become plain.
    """
    axis, kind = spec.axis, memory.program.type(layer.output)
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
            source = _plain_operand(memory, name)
            if outermost and _can_move(memory, source):
                source.parent, source.skipped = whole, begin * inner
            else:
                _copy_into(memory, f"{layer.name}:{index}", source, part, whole, begin * inner)
    memory.homes[layer.output] = whole


def _stays_blocked(memory: PlacedMemory, layer: LoweredLayer, begins: list[int]) -> bool:
    image = geometry_of(memory.program.type(layer.output))
    if any(name in memory.program.constants for name in layer.inputs):
        return False
    if image is None or image.is_vector or any(begin % memory.lanes for begin in begins):
        return False
    return any(memory.home(name).is_blocked(memory.image(name)) for name in layer.inputs)


def _can_move(memory: PlacedMemory, buffer: Buffer) -> bool:
    """Whether a buffer can become a part of another one: it has a place of its own, and no surplus behind it counts."""
    if buffer.space != MemorySpace.ARENA or buffer.parent or buffer.constant is not None:
        return False
    if buffer.layout == "blocked" and not buffer.is_vector:
        return True
    readers = (step for step in memory.steps if buffer in step.inputs)
    padded = buffer.is_vector or any(
        isinstance(step.spec, ConvSpec | ConvTransposeSpec | VolumeConvSpec | VolumePadSpec) for step in readers
    )
    return not (padded and buffer.surplus(memory.lanes))


def _join_blocked(memory: PlacedMemory, name: str, source: Buffer, whole: Buffer, begin: int) -> None:
    if _can_move(memory, source):
        source.parent, source.skipped = whole, begin
        return
    image = source.image
    assert image is not None
    part = Buffer(source.kind, "blocked", image, parent=whole, skipped=begin)
    memory.steps.append(PlacedLayer(name, "Copy", copied(image), (source,), part))


def _copy_into(memory: PlacedMemory, name: str, source: Buffer, kind: TensorType, whole: Buffer, skipped: int) -> None:
    """Copy a plain tensor of shape `kind` to where it belongs in a larger one of the same rank."""
    part = Buffer(kind, "plain", None, parent=whole, skipped=skipped)
    spec = CopySpec(datatype(name, kind), kind.shape, contiguous(kind.shape), contiguous(whole.kind.shape))
    memory.steps.append(PlacedLayer(name, "Copy", spec, (source,), part))


def _deliver(memory: PlacedMemory, index: int, name: str) -> None:
    """Make output `index` of the model hold the tensor: let its producer write there, or copy it at the end."""
    if 0 in memory.program.type(name).shape:
        return
    home = memory.home(name)
    if _can_move_out(memory, home):
        home.space, home.index = MemorySpace.OUTPUT, index
        return
    kind = memory.program.type(name)
    target = Buffer(kind, "plain", geometry_of(kind), MemorySpace.OUTPUT, index)
    if home.layout == "blocked" and home.image:
        memory.steps.append(PlacedLayer(f"{name}:unpack", "Unpack", unpack_spec(home.image), (home,), target))
    else:
        memory.steps.append(_copy(name, kind, memory.plain(name), target))


def _copy(name: str, kind: TensorType, source: Buffer, target: Buffer) -> PlacedLayer:
    spec = CopySpec(datatype(name, kind), (math.prod(kind.shape),), (1,), (1,))
    return PlacedLayer(f"{name}:copy", "Copy", spec, (source,), target)


def _can_move_out(memory: PlacedMemory, home: Buffer) -> bool:
    """Whether a tensor, or its parts, can be computed in an output: plain, without surplus, and without readers.

    Attention reads keys and values wherever a request has them, also those that a decoder returns.
    """
    written = [buffer for step in memory.steps for buffer in (step.output, *step.more) if buffer.is_in(home)]
    readers = [step for step in memory.steps if any(buffer.is_in(home) for buffer in step.inputs)]
    if readers:
        plain = home.layout == "plain" and all(isinstance(step.spec, AttentionSpec) for step in readers)
    else:
        plain = home.layout == "plain" or (home.is_vector and not home.surplus(memory.lanes))
    return bool(written) and home.space == MemorySpace.ARENA and not home.parent and plain


def _settle_halos(steps: list[PlacedLayer]) -> None:
    """Give each buffer the largest halo that a reader needs, of itself or of another part of the same tensor."""
    for step in steps:
        if isinstance(step.spec, ConvSpec | ConvTransposeSpec):
            whole = step.inputs[0].root
            whole.halo = max(whole.halo, *step.spec.pads)
    for step in steps:
        for buffer in step.buffers:
            buffer.settle_part()


def _with_halos(step: PlacedLayer) -> PlacedLayer:
    halos = tuple(buffer.halo for buffer in step.inputs)
    return replace(step, spec=step.spec.with_halos(halos, step.output.halo))
