"""Stretches of the io segment that several requests use: one writes its outputs where the next ones find their inputs.

A block lives as long as anybody holds it: requests until the executor has let go of them, also those that were closed
early, and whoever has yet to read it.
"""

from collections.abc import Sequence

from gangway.artifact.format import ALIGNMENT_BYTES
from gangway.server.data_plane import DataPlane, Request
from gangway.server.layouts import Layout, Placement

Place = tuple[int, int]  # offset from the segment's start, a multiple of 64, and size in bytes


class Block:
    """Memory at `offset`. `holders` changes under the data plane's lock only."""

    __slots__ = ("holders", "offset")

    def __init__(self, offset: int) -> None:
        self.offset = offset
        self.holders = 1  # whoever has made it


class SharedRequest(Request):
    """A request whose tensors lie in blocks that others use, too."""

    def __init__(
        self, plane: DataPlane, layout: Layout, rows: int, slot: int, placement: Placement, blocks: Sequence[Block]
    ) -> None:
        super().__init__(plane, layout, rows, slot, 0, placement)  # places are counted from the segment's start
        self._blocks = blocks

    def release(self) -> bool:
        """Free the slot and let go of the blocks, unless the executor still owns them."""
        if not self._plane.give_slot(self._slot):
            return False
        for block in self._blocks:
            _let_go(self._plane, block)
        return True


class SharedMemoryPool:
    """Makes blocks, and requests that lie in them. Safe for threads."""

    def __init__(self, plane: DataPlane) -> None:
        self._plane = plane

    def take(self, size_bytes: int) -> Block:
        """Return a new block, which the caller holds. Raises PoolExhaustedError, at once."""
        with self._plane.lock:
            return Block(self._plane.allocate(size_bytes))

    def hold(self, block: Block) -> None:
        """Hold a block that somebody holds already."""
        with self._plane.lock:
            block.holders += 1

    def let_go(self, block: Block) -> None:
        """Hold it no more."""
        with self._plane.lock:
            _let_go(self._plane, block)

    def view(self, place: Place) -> memoryview:
        """Return the memory at a place."""
        offset, size_bytes = place
        return self._plane.io.view[offset : offset + size_bytes]

    def open(
        self, layout: Layout, rows: int, inputs: Sequence[Place], outputs: Sequence[Place], blocks: Sequence[Block]
    ) -> SharedRequest:
        """Take a slot for a request whose tensors lie in these blocks, which it holds until it is over.

        Raises PoolExhaustedError, at once.
        """
        placement = Placement(tuple(inputs), tuple(outputs), 0)
        with self._plane.lock:
            slot = self._plane.take_slot()
            for block in blocks:
                block.holders += 1
            return SharedRequest(self._plane, layout, rows, slot, placement, blocks)


def places_within(block: Block, sizes_bytes: Sequence[int]) -> list[Place]:
    """Return places for tensors of these sizes, one after the other, in a block of `total_bytes` of them."""
    places, position = [], block.offset
    for size_bytes in sizes_bytes:
        places.append((position, size_bytes))
        position += _aligned(size_bytes)
    return places


def total_bytes(sizes_bytes: Sequence[int]) -> int:
    """Return the size of a block for tensors of these sizes."""
    return sum(map(_aligned, sizes_bytes))


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _let_go(plane: DataPlane, block: Block) -> None:
    block.holders -= 1
    if block.holders == 0:
        plane.heap.free(block.offset)
