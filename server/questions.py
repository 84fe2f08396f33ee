"""What threads of a front end ask the supervisor: each question has a number, and its thread waits for that answer."""

import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import grpc

from gangway.server.errors import RequestError, unavailable
from gangway.server.front_end_messages import OK


class Answer(Protocol):
    """What the supervisor says to a question. `code` is the name of a gRPC status."""

    @property
    def number(self) -> int:
        """That of the question."""

    @property
    def code(self) -> str:
        """OK, or why not."""

    @property
    def message(self) -> str:
        """The same in words."""


@dataclass
class _Waiting:
    done: threading.Event = field(default_factory=threading.Event)
    answer: Answer | None = None


class Questions:
    """Those without an answer, `most` at a time: beyond that clients are told `too_many`. Safe for threads."""

    def __init__(self, most: int, too_many: str) -> None:
        self._most = most
        self._too_many = too_many
        self._lock = threading.Lock()
        self._waiting: dict[int, _Waiting] = {}
        self._refusal = ""
        self._numbers = itertools.count(time.monotonic_ns())  # no number that was a predecessor's

    def ask(self, send: Callable[[int], bool], seconds: float, not_now: str, unanswered: str) -> None:
        """Send a question with the number given; return when it has been answered by OK.

        `send` says whether the supervisor could be told. Raises RequestError: with what was answered, or UNAVAILABLE
        with `not_now` if it could not be told, with `unanswered` if it has said nothing for so long.
        """
        number, waiting = next(self._numbers), _Waiting()
        with self._lock:
            if self._refusal:
                unavailable(self._refusal)
            if len(self._waiting) >= self._most:
                unavailable(self._too_many)
            self._waiting[number] = waiting
        try:
            if not send(number):
                unavailable(not_now)
            waiting.done.wait(seconds)
        finally:
            with self._lock:
                del self._waiting[number]
        if waiting.answer is None:
            unavailable(self._refusal or unanswered)
        if waiting.answer.code != OK:
            raise RequestError(grpc.StatusCode[waiting.answer.code], waiting.answer.message)

    def answered(self, answer: Answer) -> None:
        """The supervisor has answered."""
        with self._lock:
            waiting = self._waiting.get(answer.number)
            if waiting is not None:  # else it was a predecessor's question, or its thread has waited too long
                waiting.answer = answer
                waiting.done.set()

    def refuse(self, reason: str) -> None:
        """Answer everything with UNAVAILABLE from now on, also what waits."""
        with self._lock:
            self._refusal = reason
            for waiting in self._waiting.values():
                waiting.done.set()
