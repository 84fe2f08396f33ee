"""Which models are being compiled or measured, for those who watch the server."""

import time
from collections.abc import Callable
from typing import Final, Literal

import msgspec

from gangway.server.messages import BackgroundJob, JobsUnderWay

TELL_EVERY_S: Final = 1.0  # of a job's phases, which may change far more often


class Jobs:
    """All jobs under way. `tell` gets them whenever one begins or ends, and phases now and then."""

    def __init__(self, tell: Callable[[JobsUnderWay], None]) -> None:
        self._tell = tell
        self._jobs: dict[int, BackgroundJob] = {}
        self._told_s = 0.0
        self._next = 0

    def begin(self, kind: Literal["compile", "profile"], model: str) -> int:
        """A job begins; return its number."""
        self._next += 1
        self._jobs[self._next] = BackgroundJob(kind, model, time.time())
        self._tell_all()
        return self._next

    def advance(self, number: int, phase: str, done: int, total: int) -> None:
        """A job has done so many steps of a phase."""
        before = self._jobs[number]
        self._jobs[number] = msgspec.structs.replace(before, phase=phase, done=done, total=total)
        is_new = (before.phase, before.total) != (phase, total)  # how much is to do shows after a phase has begun
        if is_new or time.monotonic() - self._told_s >= TELL_EVERY_S:
            self._tell_all()

    def end(self, number: int) -> None:
        """A job has ended."""
        del self._jobs[number]
        self._tell_all()

    def _tell_all(self) -> None:
        self._told_s = time.monotonic()
        self._tell(JobsUnderWay(tuple(self._jobs.values())))
