"""Gives the memory of a long queue back to the system when the queue has gone.

Freed messages are kept for the next ones (`process.keep_freed_memory`), and so are the places of their tensors. After
an overload that is far more than they need. While it lasts the places would be a record of what was ever needed at
once, which grows for minutes.
"""

import time
from collections.abc import Callable

from gangway.executor.process import return_freed_memory

PERIOD_S = 1.0
IDLE_PERIODS = 10  # what no request has needed for so long is given back
WORTH_BYTES = 256 << 20  # less is kept
GONE = 1 / 8  # of the most since the last time


class MemoryKeeper:
    """`in_flight_bytes` tells how many bytes of tensors requests have at the moment.

    `give_back_idle` gives back what none has needed since the last call.
    """

    def __init__(self, in_flight_bytes: Callable[[], int], give_back_idle: Callable[[], None]) -> None:
        self._in_flight_bytes = in_flight_bytes
        self._give_back_idle = give_back_idle
        self._most_bytes = 0

    def run(self) -> None:
        """Look after the memory for ever."""
        while True:
            for _ in range(IDLE_PERIODS):
                time.sleep(PERIOD_S)
                self.look()
            self._give_back_idle()

    def look(self) -> bool:
        """Return memory to the system if much of it is not needed any more; say whether that was so."""
        now_bytes = self._in_flight_bytes()
        self._most_bytes = max(self._most_bytes, now_bytes)
        if self._most_bytes < WORTH_BYTES or now_bytes > GONE * self._most_bytes:
            return False
        self._most_bytes = now_bytes
        return_freed_memory()
        return True
