"""Which calls may receive their message now, where memory could not hold all that clients may be sending at once.

gRPC takes a message in as soon as it is asked for, however large it turns out to be, and nobody sees of it before it is
complete. So it is asked for only while the memory budget has room for the largest message that is possible, as gRPC
has it and as it is put together for Python. Other calls wait in their order. What they send meanwhile stays with the
client, but for the first 64 KiB. A client that takes long holds a place no longer than others need one.
"""

import threading
import time
from collections import deque
from typing import Final, Protocol

from gangway.executor.memory_budget import SMALL_BYTES, MemoryBudget
from gangway.server.errors import RequestError

COPIES: Final = 4  # pieces, all of them joined while that grows, and what Python gets
SLOW_S: Final = 0.5  # after so long a call's place is another's; what it takes is watched (`memory_keeper.py`)
PATIENCE_S: Final = 1.0  # so long a call waits for its place


class WaitingCall(Protocol):
    """The part of an early call that is used."""

    def ask(self) -> None:
        """Ask gRPC for the message."""

    def answer(self, result: RequestError) -> object:
        """End the call with an error."""


class Arrivals:
    """Safe for threads. `message_bytes`: of the largest message that is possible."""

    def __init__(self, budget: MemoryBudget, message_bytes: int) -> None:
        self._budget = budget
        self._place_bytes = COPIES * message_bytes
        self._lock = threading.Lock()
        self._begun: dict[WaitingCall, float] = {}  # calls that have a place, since when
        self._waiting: deque[tuple[WaitingCall, float]] = deque()

    def enter(self, call: WaitingCall) -> None:
        """Have a call ask for its message as soon as there is room."""
        with self._lock:
            if self._waiting or not self._has_place():
                self._waiting.append((call, time.monotonic()))
                return
            self._begun[call] = time.monotonic()
        call.ask()

    def leave(self, call: WaitingCall, message_bytes: int) -> None:
        """The message has come, or there is none (0 bytes)."""
        if message_bytes > SMALL_BYTES:
            self._budget.note(message_bytes)
        with self._lock:
            self._begun.pop(call, None)
            called = self._next() if self._waiting else ()
        for other in called:
            other.ask()

    @property
    def waits(self) -> bool:
        """Whether any call waits for a place."""
        return bool(self._waiting)

    def look(self, error: RequestError) -> None:
        """Take their places from slow calls, and end those with this error that have waited for too long for one."""
        now_s = time.monotonic()
        refused = []
        with self._lock:
            for call, since_s in list(self._begun.items()):
                if since_s + SLOW_S > now_s:
                    break
                del self._begun[call]
            called = self._next()
            while self._waiting and self._waiting[0][1] + PATIENCE_S <= now_s:
                refused.append(self._waiting.popleft()[0])
        for call in refused:
            call.answer(error)
        for call in (*called, *refused):
            call.ask()  # also of who is refused: gRPC tells of the end of a call by that

    def _has_place(self) -> bool:
        """Whether there is room for one more. For the first one the reserve is enough."""
        return self._budget.fits((len(self._begun) + 1) * self._place_bytes if self._begun else 0)

    def _next(self) -> list[WaitingCall]:
        """Give places to those who wait, as far as there are any; return them. The caller holds the lock."""
        called = []
        while self._waiting and self._has_place():
            call, _ = self._waiting.popleft()
            self._begun[call] = time.monotonic()
            called.append(call)
        return called
