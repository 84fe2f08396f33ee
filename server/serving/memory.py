"""A front end's memory: admission stops while it is full, and what an overload has left goes back to the system."""

import logging
import time
from collections.abc import Callable
from typing import Final

from gangway.base.host_limits import trim_heap
from gangway.base.memory_budget import MemoryBudget, fresh_s
from gangway.server.requests.data_plane import DataPlane

_log = logging.getLogger(__name__)

PERIOD_S: Final = 1.0
IDLE_PERIODS: Final = 10  # memory that no request has needed for these is given back
WORTH_BYTES: Final = 256 << 20  # less is kept,
WORTH_SHARE: Final = 1 / 8  # or less than this of the memory limit
IDLE_SHARE: Final = 1 / 8  # of the most since the last time
LEAST_WATCH_S: Final = 0.005
MOST_WATCH_S: Final = 0.1  # calls may wait for memory
RETURN_PERIOD_S: Final = 0.2  # freed memory is returned no more often


class MemoryGuard:
    """Watches a front end's memory: stops admission while it is full, and returns what an overload has left.

    Freed messages are kept for the next ones (`system.keep_freed_memory`), and so are the blocks of their tensors.
    After an overload that is far more than they need. What gRPC receives is counted only when it is complete, so the
    memory that is left is looked at as often as it could fill up (`memory_budget.fresh_s`).

    `in_flight_bytes` tells how many bytes of tensors requests have at the moment. `tell` is called at each look, with
    the text for refused calls, and whether memory is full: less than half of the budget's reserve is left. It returns
    whether any call waits for memory. `aside` calls what takes long: memory is returned by it.
    """

    def __init__(
        self,
        in_flight_bytes: Callable[[], int],
        plane: DataPlane,
        budget: MemoryBudget,
        tell: Callable[[str, bool], bool] = lambda reason, is_full: False,
        aside: Callable[[Callable[[], object]], object] = lambda function: function(),
    ) -> None:
        self._in_flight_bytes = in_flight_bytes
        self._plane = plane
        self._budget = budget
        self._tell = tell
        self._aside = aside
        self._reason = f"the server's memory is full, which is {budget.limit}"
        self._worth_bytes = budget.share_bytes(WORTH_SHARE, WORTH_BYTES)
        self._most_bytes = 0
        self._returned_s = 0.0
        self._is_short = False  # calls wait for memory
        self._periods, self._poll_s = 0, 0.0

    def turn(self) -> float:
        """Do what is due; return after how many seconds the next turn is."""
        room_bytes = self.watch()
        if (now_s := time.monotonic()) >= self._poll_s:
            self._poll_s, self._periods = now_s + PERIOD_S, self._periods + 1
            self.poll()
            if self._periods % IDLE_PERIODS == 0:
                self._aside(self._plane.give_back_idle)
        return min(max(fresh_s(room_bytes), LEAST_WATCH_S), MOST_WATCH_S)

    def watch(self) -> int:
        """Stop admission while memory is full; return how many bytes the budget has left."""
        room_bytes = self._budget.room_bytes()
        if (room_bytes < 0 or self._is_short) and time.monotonic() >= self._returned_s + RETURN_PERIOD_S:
            self._aside(self._return)
            self._returned_s = time.monotonic()
            room_bytes = self._budget.room_bytes()
        admission, is_full = self._plane.admission, room_bytes < -self._budget.reserve_bytes // 2
        if is_full and not admission.full_reason:
            left_bytes = max(0, room_bytes + self._budget.reserve_bytes)
            _log.warning(
                "memory is full, so new requests are refused: of %s %d bytes are left", self._budget.limit, left_bytes
            )
        admission.full_reason = self._reason if is_full else ""
        self._is_short = self._tell(self._reason, is_full)
        return room_bytes

    def poll(self) -> bool:
        """Return memory to the system if much of it is not needed any more; say whether that was so."""
        now_bytes = self._in_flight_bytes()
        self._most_bytes = max(self._most_bytes, now_bytes)
        if self._most_bytes < self._worth_bytes or now_bytes > IDLE_SHARE * self._most_bytes:
            return False
        self._most_bytes = now_bytes
        self._aside(trim_heap)
        return True

    def _return(self) -> None:
        self._plane.give_back_waiting()
        trim_heap()
