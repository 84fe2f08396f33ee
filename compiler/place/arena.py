"""The place of each activation in the arena: memory is reused after its last reader.

Kernels read halos and never write them, so a halo must stay zero for ever, and so must what a plain tensor has beyond
its numbers (kernels that write blocked memory write to its surplus channels, too). A buffer that has either shares
memory only with buffers of exactly its geometry. All others share freely, placed by decreasing size at the lowest free
offset (Pisarchyk and Lee 2020, "greedy by size"). The parts of a tensor live as long as the whole.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from gangway.artifact.format import MemorySpace, align_up
from gangway.compiler.kernels.specs import READ_BEHIND_BYTES
from gangway.compiler.kernels.templates.int8 import instructions as int8
from gangway.compiler.place.memory import BF16, Buffer, PlacedLayer


@dataclass(frozen=True)
class _Interval:
    """A buffer's size and the first and last step that touch it."""

    buffer: Buffer
    size_bytes: int
    first: int
    last: int


def plan_arena(steps: list[PlacedLayer], lanes: int) -> int:
    """Set the offset of every buffer in the arena; return the arena's size in bytes (of one row)."""
    free: list[_Interval] = []
    strict: list[_Interval] = []
    for interval in _intervals(steps, lanes):
        buffer = interval.buffer
        (strict if keeps_zeros(buffer, lanes) else free).append(interval)
    end_bytes = _place_strict(strict, _place_free(free))
    for step in steps:
        for buffer in step.buffers:
            buffer.settle_part()
    return end_bytes


def keeps_zeros(buffer: Buffer, lanes: int) -> bool:
    """Whether kernels read zeros in a buffer that no kernel writes."""
    return bool(buffer.halo) or (buffer.layout == "plain" and buffer.surplus(lanes))


def _intervals(steps: list[PlacedLayer], lanes: int) -> list[_Interval]:
    touched: dict[Buffer, list[int]] = {}
    for index, step in enumerate(steps):
        for buffer in step.buffers:
            if buffer.space == MemorySpace.ARENA:
                touched.setdefault(buffer.root, []).append(index)
    return [_Interval(buffer, size_bytes_of(buffer, lanes), min(at), max(at)) for buffer, at in touched.items()]


def size_bytes_of(buffer: Buffer, lanes: int) -> int:
    """Of a buffer, and of what kernels read behind it."""
    behind = READ_BEHIND_BYTES if buffer.kind.dtype == BF16 and buffer.layout == "blocked" else 0
    if buffer.layout in ("bytes", "pixels"):
        behind = int8.READ_BEHIND_BYTES
    return align_up(buffer.elements(lanes) * np.dtype(buffer.kind.dtype).itemsize + behind)


def _place_free(intervals: Iterable[_Interval]) -> int:
    """Place buffers that may share memory with any other; return the end."""
    placed: list[_Interval] = []
    for interval in sorted(intervals, key=lambda item: -item.size_bytes):
        offset_bytes = 0
        for other in sorted(placed, key=lambda item: item.buffer.offset_bytes):
            if other.last < interval.first or interval.last < other.first:
                continue
            if offset_bytes + interval.size_bytes <= other.buffer.offset_bytes:
                break
            offset_bytes = max(offset_bytes, other.buffer.offset_bytes + other.size_bytes)
        interval.buffer.offset_bytes = offset_bytes
        placed.append(interval)
    return max((item.buffer.offset_bytes + item.size_bytes for item in placed), default=0)


def _place_strict(intervals: Iterable[_Interval], begin_bytes: int) -> int:
    """Place buffers with zeros to keep from `begin_bytes` on, if possible in an equal one's place; return the end."""
    slots: dict[object, list[_Interval]] = {}  # by geometry: the last user of each slot
    end_bytes = begin_bytes
    for interval in sorted(intervals, key=lambda item: item.first):
        buffer = interval.buffer
        users = slots.setdefault((buffer.layout, buffer.kind.dtype, buffer.kind.shape, buffer.halo), [])
        free = next((index for index, user in enumerate(users) if user.last < interval.first), None)
        if free is None:
            buffer.offset_bytes = end_bytes
            end_bytes += interval.size_bytes
            users.append(interval)
        else:
            buffer.offset_bytes = users[free].buffer.offset_bytes
            users[free] = interval
    return end_bytes
