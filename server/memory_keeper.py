"""Gives the memory of a long queue back to the system when the queue has gone.

Freed messages are kept for the next ones (`process.keep_freed_memory`). After an overload that is far more than they
need.
"""

import time
from collections.abc import Callable

from gangway.executor.process import return_freed_memory

PERIOD_S = 1.0
WORTH_BYTES = 256 << 20  # less is kept
GONE = 1 / 8  # of the most since the last time


class MemoryKeeper:
    """`in_flight_bytes` tells how many bytes of tensors requests have at the moment."""

    def __init__(self, in_flight_bytes: Callable[[], int]) -> None:
        self._in_flight_bytes = in_flight_bytes
        self._most_bytes = 0

    def run(self) -> None:
        """Look after the memory for ever."""
        while True:
            time.sleep(PERIOD_S)
            self.look()

    def look(self) -> bool:
        """Return memory to the system if much of it is not needed any more; say whether that was so."""
        now_bytes = self._in_flight_bytes()
        self._most_bytes = max(self._most_bytes, now_bytes)
        if self._most_bytes < WORTH_BYTES or now_bytes > GONE * self._most_bytes:
            return False
        self._most_bytes = now_bytes
        return_freed_memory()
        return True
