"""Chains of pointwise steps become one: what nobody else reads is never written to memory.

A step takes in those before it whose result it alone reads, number by number, until no more fit into one kernel.
"""

import math
from dataclasses import replace

from gangway.artifact.format import MAX_CHECKS, Space
from gangway.compiler.buffers import Buffer, Step
from gangway.compiler.specs import MOST_OPERANDS, Instruction, Operand, PointwiseSpec, contiguous

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
        if source is not None and private and (merged := _merged(steps[source], step)):
            return merged, source
    return None


def _merged(first: Step | None, second: Step) -> Step | None:
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
