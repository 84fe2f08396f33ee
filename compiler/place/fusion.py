"""Fusion: a layer, or a step, takes in those before it whose result it alone reads, where one kernel computes both.

Before layers are placed, convolutions and dense layers add residuals and apply activations (`fuse`). Afterwards chains
of pointwise steps become one (`fuse_chains`), and so do a convolution and the depthwise one behind it
(`fuse_depthwise`).
"""

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

from gangway.artifact.format import MAX_CHECKS, MemorySpace
from gangway.compiler.kernels.packed_specs import PackedDenseSpec
from gangway.compiler.kernels.plain_specs import MOST_OPERANDS, Instruction, Operand, PointwiseSpec, contiguous
from gangway.compiler.kernels.specs import (
    NONE,
    Activation,
    ConvDepthwiseSpec,
    ConvSpec,
    ConvTransposeSpec,
    ElementwiseSpec,
    VolumeConvSpec,
)
from gangway.compiler.lower.layers import LoweredLayer, Program
from gangway.compiler.place.memory import Buffer, PlacedLayer

MOST_INSTRUCTIONS = 64  # a longer program gains nothing and takes LLVM long
LEAST_BETWEEN = 100_000  # numbers: 400 KB, and as much beside it, which a second level cache does not keep
MOST_KEPT_BYTES = 192 << 10  # on the stack
Item = TypeVar("Item", LoweredLayer, PlacedLayer)


def fuse(program: Program) -> list[LoweredLayer]:
    """Return the program's layers, Add and activations merged into the layer before them where possible.

    It does not matter whether the last part reads a view of what the first one computes, and which side of an Add the
    convolution is on. The latest one comes first: the other operand is computed earlier, so its memory is in use.
    """
    places = {layer.output: place for place, layer in enumerate(program.layers)}

    def reads(layer: LoweredLayer) -> list[str]:
        homes = dict.fromkeys(program.home(name) for name in layer.inputs)
        return sorted(homes, key=lambda name: -places.get(name, -1))

    return _absorb(
        program.layers,
        reads,
        lambda layer: layer.output,
        lambda source, layer: _merge(source, layer, program),
        [program.home(name) for name in program.graph.outputs],
    )


def _merge(source: LoweredLayer, layer: LoweredLayer, program: Program) -> LoweredLayer | None:
    """Return one layer that computes what `layer` makes of the output of `source`, None if there is no such kernel."""
    if not isinstance(layer.spec, ElementwiseSpec):
        return None
    if isinstance(source.spec, VolumeConvSpec):
        return _activated_volume(source, source.spec, layer)
    if not isinstance(source.spec, ConvSpec | ConvTransposeSpec | PackedDenseSpec | ElementwiseSpec):
        return None
    if isinstance(source.spec, ElementwiseSpec) and not _is_alike(program, source.output, layer.output):
        return None
    spec, inputs = source.spec, source.inputs
    if layer.spec.operator == "copy":
        activation = _one_function(spec.activation, layer.spec.activation)
        if activation is None:
            return None
        spec = replace(spec, activation=activation)
    elif spec.activation != NONE:
        return None
    elif layer.spec.operator == "add" and isinstance(spec, ConvSpec | PackedDenseSpec) and not spec.residual:
        residual, summand = sorted(layer.inputs, key=lambda name: program.home(name) == source.output)
        if program.home(residual) == source.output:  # it is added to itself
            return None
        types = [program.graph.types.get(name) for name in (residual, summand, layer.output)]
        if residual in program.constants or types[0] != types[2] or types[1] != types[2]:
            return None
        spec, inputs = replace(spec, residual=True, activation=layer.spec.activation), (*inputs, residual)
    else:
        return None
    operator = f"{source.operator}+{layer.operator}"
    return replace(source, operator=operator, spec=spec, inputs=inputs, output=layer.output)


def _one_function(first: Activation, second: Activation) -> Activation | None:
    """Return the activation function that is `second` of `first`; None if there is none."""
    match first.name, second.name:
        case "none", _:
            return second
        case "clip", "clip":
            return Activation(
                "clip", *(min(max(limit, second.alpha), second.beta) for limit in (first.alpha, first.beta))
            )
        case "leaky_relu", "clip" if second.beta == math.inf:
            return Activation("bounded_leaky_relu", first.alpha, second.alpha)
    return None


def _is_alike(program: Program, before: str, after: str) -> bool:
    """Whether a view between two elementwise layers leaves operands of the first one where they are broadcast to."""
    shape, seen = program.type(before).shape, program.type(after).shape
    return seen == (1,) * (len(seen) - len(shape)) + shape


def _activated_volume(source: LoweredLayer, spec: VolumeConvSpec, layer: LoweredLayer) -> LoweredLayer | None:
    assert isinstance(layer.spec, ElementwiseSpec)
    if spec.conv.activation != NONE or layer.spec.operator != "copy":
        return None
    activated = replace(spec, conv=replace(spec.conv, activation=layer.spec.activation))
    return replace(source, operator=f"{source.operator}+{layer.operator}", spec=activated, output=layer.output)


def fuse_chains(steps: Sequence[PlacedLayer]) -> list[PlacedLayer]:
    """Return equivalent steps, of which fewer are pointwise: what is between them is never written to memory."""
    return _absorb(steps, _roots_read, lambda step: step.output, _merged_pointwise)


def _merged_pointwise(first: PlacedLayer, second: PlacedLayer) -> PlacedLayer | None:
    """Return one step that computes what `second` makes of the result of `first`; None if no kernel can."""
    if not isinstance(first.spec, PointwiseSpec) or not isinstance(second.spec, PointwiseSpec) or first.more:
        return None
    if not _is_between(first, second):
        return None
    result = first.output
    operands = list(zip(second.inputs, second.spec.operands, strict=True))
    whole = _ordered(second.spec.shape)
    if any(buffer is result and _steps(item, second.spec.shape) != whole for buffer, item in operands):
        return None
    earlier = _reshaped(first.spec, second.spec.shape)
    if earlier is None or len(first.spec.program) + len(second.spec.program) > MOST_INSTRUCTIONS:
        return None
    own = [pair for pair in operands if pair[0] is not result]
    merged = list(dict.fromkeys([*zip(first.inputs, earlier, strict=True), *own]))
    if len(merged) > MOST_OPERANDS:
        return None
    values = [merged.index(pair) for pair in zip(first.inputs, earlier, strict=True)]
    values += range(len(merged), len(merged) + len(first.spec.program))
    program = _renumbered(first.spec.program, values)
    last = len(merged) + len(program) - 1
    values = [last if pair[0] is result else merged.index(pair) for pair in operands]
    values += range(last + 1, last + 1 + len(second.spec.program))
    program += _renumbered(second.spec.program, values)
    spec = PointwiseSpec(second.spec.shape, tuple(item for _, item in merged), tuple(program))
    checks = first.checks + second.checks
    if len(checks) > MAX_CHECKS:
        return None
    inputs = tuple(buffer for buffer, _ in merged)
    return replace(second, operator=f"{first.operator}+{second.operator}", spec=spec, inputs=inputs, checks=checks)


def _renumbered(program: tuple[Instruction, ...], values: list[int]) -> list[Instruction]:
    return [replace(item, sources=tuple(values[source] for source in item.sources)) for item in program]


def _steps(operand: Operand, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides along the axes that are longer than 1."""
    return tuple(step for step, length in zip(operand.strides, shape, strict=True) if length > 1)


def _ordered(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Those of a plain tensor."""
    return tuple(step for step, length in zip(contiguous(shape), shape, strict=True) if length > 1)


def _reshaped(spec: PointwiseSpec, shape: tuple[int, ...]) -> list[Operand] | None:
    """Return the operands with strides along the axes of `shape`, which has as many numbers; None if there are none."""
    if math.prod(spec.shape) != math.prod(shape):
        return None
    long = [length for length in spec.shape if length > 1]
    operands = []
    for operand in spec.operands:
        steps = _steps(operand, spec.shape)
        if long == [length for length in shape if length > 1]:
            rest = iter(steps)
            strides = tuple(next(rest) if length > 1 else 0 for length in shape)
        elif steps == _ordered(spec.shape):
            strides = contiguous(shape)
        elif not any(steps):
            strides = tuple(0 for _ in shape)
        else:
            return None
        operands.append(Operand(operand.dtype, strides))
    return operands


def fuse_depthwise(steps: Sequence[PlacedLayer], lanes: int) -> list[PlacedLayer]:
    """Return equivalent steps, of which fewer are convolutions: a depthwise one takes in that before it.

    Only where what is between them is large and has no other reader.
    """
    return _absorb(
        steps, _roots_read, lambda step: step.output, lambda first, second: _merged_depthwise(first, second, lanes)
    )


def _merged_depthwise(first: PlacedLayer, second: PlacedLayer, lanes: int) -> PlacedLayer | None:
    """Return one step that computes what `second` makes of the result of `first`; None if that does not pay."""
    conv, depthwise, between = first.spec, second.spec, first.output
    if not isinstance(conv, ConvSpec) or not isinstance(depthwise, ConvSpec):
        return None
    if conv.precision != "fp32" or depthwise.precision != "fp32":
        return None
    if not _is_between(first, second) or between.elements(lanes) < LEAST_BETWEEN:
        return None
    # Larger windows of many channels are done by Winograd's algorithm, whose tiles are no lines.
    plain = (
        conv.groups == conv.diagonal_blocks == 1 and not conv.residual and (conv.kernel == (1, 1) or conv.input_planar)
    )
    windowed = depthwise.is_depthwise and not depthwise.residual
    moves = depthwise.kernel[0] >= depthwise.stride[0] and depthwise.dilation == (1, 1)
    spec = ConvDepthwiseSpec(conv, depthwise)
    if not (plain and windowed and moves) or spec.kept_bytes > MOST_KEPT_BYTES:
        return None
    weights = {**first.weights, **{f"depthwise_{name}": array for name, array in second.weights.items()}}
    operator = f"{first.operator}+{second.operator}"
    return replace(second, operator=operator, spec=spec, inputs=first.inputs, weights=weights)


def _roots_read(step: PlacedLayer) -> list[Buffer]:
    return [buffer.root for buffer in step.inputs]


def _is_between(first: PlacedLayer, second: PlacedLayer) -> bool:
    """Whether the first step's result is an input of the second, as a whole, in memory that need not exist."""
    result = first.output
    return result.space == MemorySpace.ARENA and not result.parent and any(buffer is result for buffer in second.inputs)


def _absorb(
    items: Sequence[Item],
    reads: Callable[[Item], Iterable[Hashable]],
    writes: Callable[[Item], Hashable],
    merge: Callable[[Item, Item], Item | None],
    kept_results: Iterable[Hashable] = (),
) -> list[Item]:
    """Let each item take in earlier ones whose result it alone reads, until `merge(earlier, item)` finds no kernel.

    `reads` returns keys of what an item reads, those to be tried first in front, and `writes` the key of what it
    computes. `kept_results` are read by others, too. A merged item stands where the later one stood: there everything
    it reads has been computed.
    """
    kept: list[Item | None] = list(items)
    writers = {writes(item): index for index, item in enumerate(items)}
    readers: dict[Hashable, set[int]] = defaultdict(set, {key: {-1} for key in kept_results})
    for index, item in enumerate(items):
        for key in reads(item):
            readers[key].add(index)
    for index, item in enumerate(items):
        tried = list(reads(item))
        while tried:
            key = tried.pop(0)
            source = writers.get(key, index)
            earlier = kept[source]
            if source >= index or earlier is None or readers[key] != {index}:
                continue
            if merged := merge(earlier, item):
                kept[index], kept[source], item = merged, None, merged  # noqa: PLW2901
                tried = list(reads(merged))
                for read in tried:
                    readers[read].discard(source)
                    readers[read].add(index)
    return [item for item in kept if item is not None]
