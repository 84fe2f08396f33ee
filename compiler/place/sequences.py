"""The place of sequences: tensors whose channels are the last axis, blocked from layer to layer."""

import math
from dataclasses import replace

import numpy as np

from gangway.artifact.format import Space
from gangway.compiler.frontend.graph import TensorType
from gangway.compiler.kernels.plain_specs import CopySpec, GatherSpec, MatMulSpec
from gangway.compiler.kernels.specs import Array, BlockedElementwiseSpec, ElementwiseSpec, LayerNormSpec
from gangway.compiler.lower.layers import Attention, Geometry, Layer, Pick, sequence
from gangway.compiler.place.memory import Memory, datatype
from gangway.compiler.place.movement import places
from gangway.compiler.place.steps import Buffer


@places(LayerNormSpec)
def _place_layer_norm(memory: Memory, layer: Layer) -> None:
    assert isinstance(layer.spec, LayerNormSpec)
    geometry = sequence(layer.spec.channels, layer.spec.positions)
    memory.append(layer, layer.spec, (memory.blocked(layer.inputs[0], geometry),), "blocked", geometry)


@places(Attention)
def _place_attention(memory: Memory, layer: Layer) -> None:
    """Queries, keys and values are parts of whatever blocked tensors they are channels of."""
    assert isinstance(layer.spec, Attention)
    spec = layer.spec.spec
    channels, lengths = spec.heads * spec.head_size, (spec.queries, spec.keys, spec.keys)
    parts = [
        _channels(memory, name, sequence(whole, positions), begin, channels)
        for name, (whole, begin), positions in zip(layer.inputs, layer.spec.parts, lengths, strict=False)
    ]
    biases = [memory.plain(name) for name in layer.inputs[3:]]
    memory.append(layer, spec, (*parts, *biases), "blocked", sequence(channels, spec.queries))


def _channels(memory: Memory, name: str, whole: Geometry, begin: int, channels: int) -> Buffer:
    """Return `channels` channels, from number `begin` on, of a tensor that is seen as `whole`."""
    buffer = memory.blocked(name, whole)
    if channels == whole.channels:
        return buffer
    part = replace(whole, channels=channels)
    kind = TensorType((1, channels, 1, whole.width), "float32")
    return Buffer(kind, "blocked", part, parent=buffer, skipped=begin)


@places(GatherSpec)
def _place_gather(memory: Memory, layer: Layer) -> None:
    assert isinstance(layer.spec, GatherSpec)
    memory.append(layer, layer.spec, tuple(memory.plain(name) for name in layer.inputs), "plain")


@places(MatMulSpec)
def _place_matmul(memory: Memory, layer: Layer) -> None:
    assert isinstance(layer.spec, MatMulSpec)
    memory.append(layer, layer.spec, tuple(memory.plain(name) for name in layer.inputs), "plain")


@places(Pick)
def _place_pick(memory: Memory, layer: Layer) -> None:
    """Copy what is picked; of a blocked sequence one position, if its channels fill whole registers."""
    pick = layer.spec
    assert isinstance(pick, Pick)
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


def place_on_sequence(memory: Memory, layer: Layer) -> bool:
    """Place an elementwise layer in blocked memory, if an operand is a blocked sequence; return whether that was done.

    The others are tensors of the same shape, or constants with one number per channel.
    """
    spec, kind = layer.spec, memory.program.type(layer.output)
    assert isinstance(spec, ElementwiseSpec)
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
        _packed(memory, constants[name], geometry) if name in constants else memory.blocked(name, geometry)
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


def _packed(memory: Memory, value: Array, geometry: Geometry) -> Buffer:
    """Return a constant in blocked memory: a vector, or a whole sequence."""
    value = np.broadcast_to(value.reshape(1), geometry.channels) if value.size == 1 else value
    part = sequence(geometry.channels, value.size // geometry.channels)
    rows = np.pad(value.reshape(-1, geometry.channels), ((0, 0), (0, -geometry.channels % memory.lanes)))
    blocks = rows.reshape(part.width, -1, memory.lanes).transpose(1, 0, 2)
    kind = TensorType((1, part.channels, 1, part.width), value.dtype.name)
    return Buffer(kind, "blocked", part, Space.WEIGHTS, constant=blocks)
