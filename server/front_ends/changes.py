"""What a client changes for all front ends, as the front end sees it that the client has asked."""

import itertools
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import grpc
from gangway.server.errors import RequestError, unavailable
from gangway.server.front_end_messages import OK, Agreed, Applied, Change, FrontEndMessage, Proposed, Settled

MAX_WAITING = 64  # each has a thread
WAIT_SECONDS = 10.0  # every wait ends; the others are told nevertheless
NOT_NOW = "this cannot be changed now; it may be tried again"
_log = logging.getLogger(__name__)


@dataclass
class _Waiting:
    done: threading.Event = field(default_factory=threading.Event)
    answer: Settled | None = None


class Changes:
    """`apply` makes a change in this process, and may raise RequestError. Safe for threads.

    `ask` says whether the supervisor could be told; None: there are no other processes to agree with.
    """

    def __init__(self, apply: Callable[[Change], None], ask: Callable[[FrontEndMessage], bool] | None = None) -> None:
        self._apply = apply
        self._ask = ask
        self._lock = threading.Lock()
        self._waiting: dict[int, _Waiting] = {}
        self._refusal = ""
        self._numbers = itertools.count(time.monotonic_ns())  # no number that was a predecessor's

    def make(self, change: Change) -> None:
        """Return when every front end has made the change. Raises RequestError: then none has made it."""
        if self._ask is None:
            self._apply(change)
            return
        number, waiting = next(self._numbers), _Waiting()
        with self._lock:
            if self._refusal:
                unavailable(self._refusal)
            if len(self._waiting) >= MAX_WAITING:
                unavailable(NOT_NOW)
            self._waiting[number] = waiting
        try:
            if not self._ask(Proposed(number, change)):
                unavailable(NOT_NOW)
            waiting.done.wait(WAIT_SECONDS)
        finally:
            with self._lock:
                del self._waiting[number]
        if waiting.answer is None:
            unavailable(self._refusal or f"not known to all front ends within {WAIT_SECONDS:.0f} seconds")
        if waiting.answer.code != OK:
            raise RequestError(grpc.StatusCode[waiting.answer.code], waiting.answer.message)

    def agreed(self, message: Agreed) -> Applied | None:
        """Make a change that goes to all front ends; return what the supervisor is to be told, if anything."""
        answer = Applied(message.number)
        try:
            if message.change is not None:
                self._apply(message.change)
        except RequestError as error:
            answer = Applied(message.number, error.code.name, error.message)
            if not message.number:
                _log.warning("not here what other front ends have: %s", error.message)
        return answer if message.number else None

    def settled(self, message: Settled) -> None:
        """All front ends have answered to what was asked of them."""
        with self._lock:
            waiting = self._waiting.get(message.number)
            if waiting is not None:  # else it waited too long
                waiting.answer = message
                waiting.done.set()

    def refuse(self, reason: str) -> None:
        """Answer everything with UNAVAILABLE from now on, also what waits."""
        with self._lock:
            self._refusal = reason
            for waiting in self._waiting.values():
                waiting.done.set()
