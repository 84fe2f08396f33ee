"""Calls that wait for their client: for the rest of a request, or for an answer to be taken.

Such a call holds something: a thread of the server, or the bytes of the answer. Few may do so for long. When there are
too many, those that have waited longest are ended; a client that is merely slow is left alone as long as nobody needs
the room.
"""

import logging
import threading
import time
from typing import Protocol, runtime_checkable

from gangway.executor.log_limit import OFTEN
from gangway.server.errors import RequestError

PERIOD_S = 0.5

_log = logging.getLogger(__name__)


class Call(Protocol):
    """The part of grpc.ServicerContext that is used."""

    def cancel(self) -> object:
        """End the call; whoever waits in it gets an exception."""


@runtime_checkable
class AnswerableCall(Protocol):
    """A call that can be answered from any thread, also before its message has come (`EarlyCall`)."""

    def answer(self, result: RequestError) -> object:
        """End the call with an error."""


class StalledCalls:
    """Safe for threads. `patience_s` seconds are granted to every call, whatever the others hold."""

    def __init__(self, max_calls: int, max_bytes: int, patience_s: float) -> None:
        self._max_calls = max_calls
        self._max_bytes = max_bytes
        self._patience_s = patience_s
        # In the order of their coming. Single operations on it are atomic, so requests need no lock here.
        self._calls: dict[Call, tuple[float, int]] = {}

    def enter(self, call: Call, held_bytes: int = 0) -> None:
        """Note that a call waits from now on, and how much memory it holds."""
        self._calls[call] = (time.monotonic(), held_bytes)

    def leave(self, call: Call) -> None:
        """Note that it does not wait any more."""
        self._calls.pop(call, None)

    def look(self) -> int:
        """End calls while there are too many; return how many were ended."""
        calls = self._calls.copy()  # at once: other threads come and go
        count, held_bytes = len(calls), sum(size for _, size in calls.values())
        now, ended = time.monotonic(), 0
        for call, (since, size) in calls.items():
            if (count <= self._max_calls and held_bytes <= self._max_bytes) or now - since < self._patience_s:
                break
            count, held_bytes, ended = count - 1, held_bytes - size, ended + 1
            self.leave(call)
            call.cancel()
        return ended

    def end_all(self, error: RequestError) -> int:
        """End all calls with this error, those that can have one, because there is no memory; return how many."""
        calls = self._calls.copy()
        for call in calls:
            self.leave(call)
            if isinstance(call, AnswerableCall):
                call.answer(error)
            else:
                call.cancel()
        return len(calls)


class Kind(Protocol):
    """What a watchman looks after."""

    def look(self) -> int:
        """End what there is too much of; return how many were ended."""


class Watchman:
    """A thread that looks after stalled calls, and the like, while a server runs."""

    def __init__(self, *kinds: Kind) -> None:
        self._kinds = kinds
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stalled calls", daemon=True)

    def watch(self, kind: Kind) -> None:
        """Look after these, too; before the start."""
        self._kinds = (*self._kinds, kind)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End; return when the thread has."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._stopping.wait(PERIOD_S):
            for kind in self._kinds:
                try:
                    kind.look()
                except Exception:  # of one that cannot be ended; the next ones can
                    _log.exception("what stalls could not be ended", extra=OFTEN)
