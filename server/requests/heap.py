"""The heap of a shared-memory segment: where the tensors of requests in flight lie."""

from bisect import bisect_left
from collections.abc import Callable
from functools import lru_cache

from gangway.artifact.format import ALIGNMENT_BYTES, align_up

KEPT_BYTES = 256 << 20  # of freed blocks stay warm

MoveRange = Callable[[int, int], None]  # offset and size


class HeapFullError(MemoryError):
    """No free range is large enough."""


class ColdError(Exception):
    """There is free memory, but the system would have to be asked for it, which takes time."""


class Heap:
    """Where in a shared-memory segment tensors go: an allocator that deals in offsets and touches no memory.

    Freed blocks wait in a list per size class and the last one freed is reused first, so a steady load runs in a few
    warm pages. Behind the lists lie the free ranges, in address order and merged with their neighbours. When a class
    has nothing and no range is large enough, all waiting blocks go back to the ranges, so no sequence of sizes wastes
    memory for good. A block that is cut from a range takes memory from the system, and one that goes back returns it,
    so a long queue leaves none behind. Blocks that have waited for long go back, too (`give_back_idle`).

    Offsets are in [begin, end), aligned to 64 bytes. Not safe for threads: the caller holds a lock. `take` asks the
    system for memory of a range before it is used, and raises OSError if there is none; `give_back` returns it.
    """

    def __init__(
        self, begin: int, end: int, take: MoveRange, give_back: MoveRange, kept_bytes: int = KEPT_BYTES
    ) -> None:
        begin = align_up(begin)
        end -= end % ALIGNMENT_BYTES
        if end < begin:
            raise ValueError(f"no room between {begin} and {end}")
        self._ranges: list[tuple[int, int]] = [(begin, end)] if begin < end else []  # ascending, never touching
        self._waiting: dict[int, list[int]] = {}  # size class -> offsets, the warmest last
        self._waiting_bytes = 0
        self._idle: dict[int, int] = {}  # size class -> how many of its first ones have waited since the last look
        self._take = take
        self._give_back = give_back
        self._kept_bytes = kept_bytes
        self._sizes: dict[int, int] = {}  # of the blocks in use
        self.bytes_in_use = 0
        self.capacity_bytes = end - begin

    @property
    def blocks_in_use(self) -> int:
        """How many blocks are allocated now."""
        return len(self._sizes)

    def allocate(self, size_bytes: int, most_cold_bytes: int | None = None) -> int:
        """Return the offset of a block of at least `size_bytes`. Raises HeapFullError, or OSError as `take` does.

        Raises ColdError if the system would have to be asked for more than `most_cold_bytes`.
        """
        size = size_class(size_bytes)
        if waiting := self._waiting.get(size):
            offset = waiting.pop()
            self._waiting_bytes -= size
            if len(waiting) < self._idle.get(size, 0):
                self._idle[size] = len(waiting)
        elif most_cold_bytes is not None and size > most_cold_bytes:
            raise ColdError
        else:
            offset = self._carve(size)
            try:
                self._take_from_system(offset, size)
            except OSError:
                self._return(offset, size)
                raise
        self._sizes[offset] = size
        self.bytes_in_use += size
        return offset

    def reserve(self, size_bytes: int) -> int:
        """Return the offset of a block for which the caller asks the system. Raises HeapFullError."""
        size = size_class(size_bytes)
        offset = self._carve(size)
        self._sizes[offset] = size
        self.bytes_in_use += size
        return offset

    def unreserve(self, offset: int) -> None:
        """Take back a block for which the system has no memory."""
        size = self._sizes.pop(offset)
        self.bytes_in_use -= size
        self._return(offset, size)

    def free(self, offset: int, keeps: bool = False) -> None:
        """Give a block back, which stays warm if it `keeps`. Raises KeyError if `offset` is no allocated block."""
        size = self._sizes.pop(offset)
        self.bytes_in_use -= size
        if self._waiting_bytes + size > self._kept_bytes and not keeps:
            self._return(offset, size)
        else:
            self._waiting.setdefault(size, []).append(offset)
            self._waiting_bytes += size

    def give_back_idle(self, most: int) -> int:
        """Give back up to `most` blocks that have waited since the last call that found none; return how many.

        One of each size stays, so that rare requests do not wait for memory each time.
        """
        count = 0
        for size, offsets in self._waiting.items():
            idle = min(self._idle.get(size, 0) - 1, most - count)
            if idle > 0:
                for offset in offsets[:idle]:
                    self._return(offset, size)
                del offsets[:idle]
                self._idle[size] -= idle
                self._waiting_bytes -= idle * size
                count += idle
        if not count:
            self._idle = {size: len(offsets) for size, offsets in self._waiting.items()}
        return count

    def _carve(self, size: int) -> int:
        offset = self._first_fit(size)
        if offset is None and self._waiting:
            self.give_back_waiting()
            offset = self._first_fit(size)
        if offset is None:
            raise HeapFullError(f"{size} bytes asked for, {self.capacity_bytes - self.bytes_in_use} free in pieces")
        return offset

    def _take_from_system(self, offset: int, size: int) -> None:
        try:
            self._take(offset, size)
        except OSError:
            if not self._waiting:
                raise
            self.give_back_waiting()  # what is kept warm is given back first
            self._take(offset, size)

    def _first_fit(self, size: int) -> int | None:
        for index, (begin, end) in enumerate(self._ranges):
            if end - begin >= size:
                if end - begin == size:
                    del self._ranges[index]
                else:
                    self._ranges[index] = (begin + size, end)
                return begin
        return None

    def give_back_waiting(self) -> None:
        """Give back all blocks that are not in use, to the system and to the ranges."""
        for size, offsets in self._waiting.items():
            for offset in offsets:
                self._return(offset, size)
        self._waiting.clear()
        self._idle.clear()
        self._waiting_bytes = 0

    def _return(self, offset: int, size: int) -> None:
        self._give_back(offset, size)
        self._add_range(offset, offset + size)

    def _add_range(self, begin: int, end: int) -> None:
        index = bisect_left(self._ranges, (begin, end))
        if index < len(self._ranges) and self._ranges[index][0] == end:
            end = self._ranges.pop(index)[1]
        if index > 0 and self._ranges[index - 1][1] == begin:
            index -= 1
            begin = self._ranges.pop(index)[0]
        self._ranges.insert(index, (begin, end))


@lru_cache(maxsize=4096)
def size_class(size_bytes: int) -> int:
    """Round up so that a power of two has eight classes (at most an eighth is wasted), each a multiple of 64 bytes."""
    step = max(ALIGNMENT_BYTES, 1 << max(0, size_bytes.bit_length() - 4))
    return max(align_up(size_bytes, step), ALIGNMENT_BYTES)
