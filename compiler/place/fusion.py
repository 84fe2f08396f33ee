"""Let convolutions and dense layers add a residual, and elementwise layers, too, apply the activation after them."""

import math
from collections import Counter
from dataclasses import replace

from gangway.artifact.format import MAX_CHECKS, Space
from gangway.compiler.kernels.specs import (
    MOST_OPERANDS,
    ConvDepthwiseSpec,
    ConvSpec,
    ElementwiseSpec,
    Instruction,
    Operand,
    PointwiseSpec,
    contiguous,
)
from gangway.compiler.kernels.specs.base import NONE
from gangway.compiler.lower.layers import Layer, Program
from gangway.compiler.place.steps import Buffer, Step

# Chains of pointwise steps become one: what nobody else reads is never written to memory.
#
# A step takes in those before it whose result it alone reads, number by number, until no more fit into one kernel.

MOST_INSTRUCTIONS = 64  # a longer program gains nothing and takes LLVM long


def fuse_chains(steps: list[Step]) -> list[Step]:
    """Return equivalent steps, of which fewer are pointwise."""
    readers: dict[Buffer, set[int]] = {}
    writers: dict[Buffer, int] = {}
    for index, step in enumerate(steps):
        for buffer in step.inputs:
            readers.setdefault(buffer.root, set()).add(index)
        writers[step.output] = index
    kept: list[Step | None] = list(steps)
    for index in range(len(steps)):
        while (found := _next(kept, index, writers, readers)) is not None:
            merged, absorbed = found
            for buffer in merged.inputs:
                readers.setdefault(buffer.root, set()).discard(absorbed)
                readers[buffer.root].add(index)
            kept[index], kept[absorbed] = merged, None
    return [step for step in kept if step]


def _next(
    steps: list[Step | None], index: int, writers: dict[Buffer, int], readers: dict[Buffer, set[int]]
) -> tuple[Step, int] | None:
    """Return step `index` with another one in it, and which one that was."""
    step = steps[index]
    if step is None or not isinstance(step.spec, PointwiseSpec):
        return None
    for buffer in step.inputs:
        source = writers.get(buffer)
        private = buffer.space == Space.ARENA and not buffer.parent and readers[buffer] == {index}
        if source is not None and private and (merged := _merged_pointwise(steps[source], step)):
            return merged, source
    return None


def _merged_pointwise(first: Step | None, second: Step) -> Step | None:
    """Return one step that computes what `second` makes of the result of `first`; None if no kernel can."""
    if first is None or not isinstance(first.spec, PointwiseSpec) or first.more:
        return None
    assert isinstance(second.spec, PointwiseSpec)
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


# A convolution and the depthwise one that alone reads it become one step where what is between them is large.

LEAST_BETWEEN = 100_000  # numbers: 400 KB, and as much beside it, which a second level cache does not keep
MOST_KEPT_BYTES = 192 << 10  # on the stack


def fuse_depthwise(steps: list[Step], lanes: int) -> list[Step]:
    """Return equivalent steps, of which fewer are convolutions."""
    readers = Counter(buffer.root for step in steps for buffer in step.inputs)
    writers: dict[Buffer, int] = {}
    kept: list[Step | None] = []
    for step in steps:
        source = writers.get(step.inputs[0]) if step.inputs else None
        first = None if source is None or readers[step.inputs[0]] > 1 else kept[source]
        merged = _merged_depthwise(first, step, lanes) if first else None
        if merged and source is not None:
            kept[source] = None
        writers[step.output] = len(kept)
        kept.append(merged or step)
    return [step for step in kept if step]


def _merged_depthwise(first: Step, second: Step, lanes: int) -> Step | None:
    """Return one step that computes what `second` makes of the result of `first`; None if that does not pay."""
    conv, depthwise, between = first.spec, second.spec, first.output
    if not isinstance(conv, ConvSpec) or not isinstance(depthwise, ConvSpec):
        return None
    if between.space != Space.ARENA or between.parent or between.elements(lanes) < LEAST_BETWEEN:
        return None
    # Larger windows of many channels are done by Winograd's algorithm, whose tiles are no lines.
    plain = conv.groups == 1 and not conv.residual and (conv.kernel == (1, 1) or conv.input_planar)
    windowed = depthwise.groups == depthwise.in_channels == depthwise.out_channels > 1 and not depthwise.residual
    moves = depthwise.kernel[0] >= depthwise.stride[0] and depthwise.dilation == (1, 1)
    spec = ConvDepthwiseSpec(conv, depthwise)
    if not (plain and windowed and moves) or spec.kept_bytes > MOST_KEPT_BYTES:
        return None
    weights = {**first.weights, **{f"depthwise_{name}": array for name, array in second.weights.items()}}
    operator = f"{first.operator}+{second.operator}"
    return replace(second, operator=operator, spec=spec, inputs=first.inputs, weights=weights)


def fuse(program: Program) -> list[Layer]:
    """Return the program's layers, Add and activations merged into the layer before them where possible.

    A merged layer stands where its last part stood: there everything it reads has been computed, whichever side of an
    Add the convolution is on. It does not matter whether the last part reads a view of what the first one computes.
    """
    uses = Counter(program.home(name) for layer in program.layers for name in layer.inputs)
    uses.update(program.home(name) for name in program.graph.outputs)
    done: dict[str, Layer] = {}  # by output, in order of execution
    for layer in program.layers:
        # The latest convolution first: the other operand is computed earlier, so its memory is in use anyway.
        homes = [program.home(name) for name in layer.inputs]
        sources = [source for source in reversed(done.values()) if source.output in homes]
        merged = None
        for source in sources:
            merged = _merge(source, layer, program) if uses[source.output] == 1 else None
            if merged:
                del done[source.output]
                break
        done[layer.output] = merged or layer
    return list(done.values())


def _merge(source: Layer, layer: Layer, program: Program) -> Layer | None:
    """Return one layer that computes what `layer` makes of the output of `source`, None if there is no such kernel."""
    if not isinstance(source.spec, ConvSpec | ElementwiseSpec) or not isinstance(layer.spec, ElementwiseSpec):
        return None
    if source.spec.activation != NONE:
        return None
    spec, inputs = source.spec, source.inputs
    if layer.spec.operator == "copy":
        spec = replace(spec, activation=layer.spec.activation)
    elif layer.spec.operator == "add" and isinstance(spec, ConvSpec) and not spec.residual:
        (residual,) = (name for name in layer.inputs if program.home(name) != source.output)
        (summand,) = (name for name in layer.inputs if program.home(name) == source.output)
        types = [program.graph.types.get(name) for name in (residual, summand, layer.output)]
        if residual in program.constants or types[0] != types[2] or types[1] != types[2]:
            return None
        spec, inputs = replace(spec, residual=True, activation=layer.spec.activation), (*inputs, residual)
    else:
        return None
    operator = f"{source.operator}+{layer.operator}"
    return replace(source, operator=operator, spec=spec, inputs=inputs, output=layer.output)
