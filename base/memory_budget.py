"""The budget of memory that all processes under the same limits share: what this process may still take.

No process keeps accounts for the others. Free memory is measured by the limits themselves (`FreeMemory`). So the memory
of a process that dies is free at once, and what no account would hold (libraries, onnxruntime, the kernel's own) is
counted, too. Between two measurements a process counts what it takes. Large memory is taken in pieces of `PIECE_BYTES`.
"""

import errno
import threading
import time
from collections.abc import Callable
from functools import cache
from typing import Final

from gangway.base.host_limits import FreeMemory, MemoryLimit, memory_limit

PIECE_BYTES: Final = 4 << 20  # of a large piece of memory are taken at once, so that processes see each other's
RESERVE: Final = 1 / 8  # of the limit stays free for memory that is taken without asking, between these bounds
RESERVE_BYTES: Final = (16 << 20, 256 << 20)
SMALL_BYTES: Final = 64 << 10  # so little may be taken from the first half of the reserve: small requests go on
MESSAGE_SHARE: Final = 1 / 32  # of the limit is what one message may have: the reserve has room for it, four times
FASTEST_BYTES_PER_S: Final = 4 << 30  # no process takes memory faster: a measurement is valid for so long
FRESH_S: Final = (0.001, 1.0)


class MemoryFullError(OSError):
    """The budget has no room for so much now. ENOMEM, as if the system had said so."""

    def __init__(self, size_bytes: int, room_bytes: int, limit: MemoryLimit) -> None:
        super().__init__(errno.ENOMEM, _text(size_bytes, room_bytes, limit))

    def __str__(self) -> str:
        return str(self.strerror)


class MemoryBudget:
    """Safe for threads. `measure`: bytes that are free now; `now_s`: any steady clock."""

    def __init__(
        self, limit: MemoryLimit, measure: Callable[[], int], now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self.limit = limit
        self.reserve_bytes = min(max(int(limit.size_bytes * RESERVE), RESERVE_BYTES[0]), RESERVE_BYTES[1])
        self._measure = measure
        self._now_s = now_s
        self._lock = threading.Lock()
        self._room_bytes = 0
        self._until_s = 0.0  # the measurement is valid

    def share_bytes(self, share: float, most_bytes: int) -> int:
        """Return a share of the limit, but not more than `most_bytes`."""
        return min(int(share * self.limit.size_bytes), most_bytes)

    def take(self, size_bytes: int) -> None:
        """Take so much, or raise MemoryFullError. Nothing is given back: what is freed is found by measuring."""
        needed_bytes = size_bytes if size_bytes > SMALL_BYTES else -self.reserve_bytes // 2
        with self._lock:
            if self._room_bytes < needed_bytes or self._now_s() >= self._until_s:
                self._poll()
                if self._room_bytes < needed_bytes:
                    raise MemoryFullError(size_bytes, max(0, self._room_bytes), self.limit)
            self._room_bytes -= size_bytes

    def fits(self, size_bytes: int) -> bool:
        """Return whether so much could be taken now."""
        with self._lock:
            if self._room_bytes < size_bytes or self._now_s() >= self._until_s:
                self._poll()
            return self._room_bytes >= size_bytes

    def note(self, size_bytes: int) -> None:
        """Count what has been taken without asking, until it is found by measuring."""
        with self._lock:
            self._room_bytes -= size_bytes

    def room_bytes(self) -> int:
        """Return how much could be taken now, measured; below 0 if not even the reserve is left."""
        with self._lock:
            self._poll()
            return self._room_bytes

    def _poll(self) -> None:
        self._room_bytes = self._measure() - self.reserve_bytes
        self._until_s = self._now_s() + fresh_s(self._room_bytes)


def fresh_s(room_bytes: int) -> float:
    """Return for how many seconds such a measurement is valid: others take memory only so fast."""
    return min(max(room_bytes / FASTEST_BYTES_PER_S, FRESH_S[0]), FRESH_S[1])


@cache
def memory_budget() -> MemoryBudget:
    """Return this process's budget."""
    return MemoryBudget(memory_limit(), FreeMemory().measure)


def _text(size_bytes: int, room_bytes: int, limit: MemoryLimit) -> str:
    return f"the server's memory is full: {size_bytes} bytes are asked for, {room_bytes} are left of {limit}"
