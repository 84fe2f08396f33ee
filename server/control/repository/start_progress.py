"""How far the start of a server is, and about how long the rest takes."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final

from gangway.server.messages import BackgroundJob, JobsUnderWay, StartUnderWay

KERNELS: Final = "kernels"  # the phase of a compilation that takes long
BRIEF_START_SECONDS: Final = 3.0  # of which nothing is estimated, and the log says nothing
_log = logging.getLogger(__name__)


@dataclass
class Compilation:
    """One that is under way: when it and its kernels began, in seconds since 1970, and how many of these are done."""

    began_s: float
    kernels_began_s: float = 0.0
    done: int = 0
    kernels: int = 0

    def advance(self, job: BackgroundJob, now_s: float) -> None:
        """The job has come further. What comes after the kernels is brief."""
        if job.phase == KERNELS:
            self.kernels_began_s = self.kernels_began_s or now_s
            self.done, self.kernels = job.done, job.total
        elif self.kernels:
            self.done = self.kernels

    def left_s(self, now_s: float) -> float | None:
        """Return how long it still takes if further kernels take as long as those that are done; None: none is."""
        return (self.kernels - self.done) * (now_s - self.kernels_began_s) / self.done if self.done else None


def expected_left_s(
    now_s: float, running: Sequence[Compilation], taken_s: Sequence[float], waiting: int, at_once: int
) -> float | None:
    """Return how long compilations still take, of which `at_once` run beside each other; None: nothing is known.

    `taken_s`: of those that have ended. `waiting`: those that have not begun, each expected to take the mean of others.
    """
    rests = [each.left_s(now_s) for each in running]
    totals = [now_s - each.began_s + rest for each, rest in zip(running, rests, strict=True) if rest is not None]
    if not (totals or taken_s):
        return None
    mean_s = fmean([*totals, *taken_s])
    sure = [
        max(0.0, mean_s - (now_s - each.began_s)) if rest is None else rest
        for each, rest in zip(running, rests, strict=True)
    ]
    return max([(sum(sure) + waiting * mean_s) / at_once, *sure])


class StartProgress:
    """Counts the models that a start has tried, and the kernels that are compiled for it.

    `tell` gets how far it is whenever that changes, kernels once a second. `at_once`: as in `Compiler`.
    """

    def __init__(self, at_once: int, tell: Callable[[StartUnderWay], None]) -> None:
        self._at_once = at_once
        self._tell = tell
        self._models = self._tried = 0
        self._begin_s = 0.0
        self._running: dict[tuple[str, float], Compilation] = {}
        self._taken_s: list[float] = []

    def begin(self, models: int) -> None:
        """So many models are to be tried."""
        self._models, self._begin_s = models, time.time()
        self._tell_all()

    def tried(self, task: "asyncio.Task[None]") -> None:
        """A model has been loaded, or has failed; not if the task was given up."""
        if task.cancelled():
            return
        self._tried += 1
        text = self._tell_all()
        if text and time.time() - self._begin_s > BRIEF_START_SECONDS:
            _log.info("start: %s", text)

    def take_jobs(self, message: JobsUnderWay) -> None:
        """Jobs have begun or ended, or are further."""
        if self._tried == self._models:
            return
        now_s = time.time()
        jobs = {(job.model, job.since_s): job for job in message.jobs if job.kind == "compile"}
        for key in self._running.keys() - jobs.keys():
            self._taken_s.append(now_s - self._running.pop(key).began_s)
        for key, job in jobs.items():
            self._running.setdefault(key, Compilation(job.since_s)).advance(job, now_s)
        self._tell_all()

    def _tell_all(self) -> str:
        """Tell how far it is; return it as text, "" after the last model."""
        left = self._models - self._tried
        if not left:
            return ""
        running = [each for each in self._running.values() if each.kernels]
        done, kernels = sum(each.done for each in running), sum(each.kernels for each in running)
        left_s = self._left_s(time.time(), left)
        text = f"{self._tried} of {self._models} models"
        text += f"; {KERNELS} {done} of {kernels}" if kernels else ""
        text += "" if left_s is None else f"; some {left_s:.0f} s left"
        self._tell(StartUnderWay(self._tried, self._models, done, kernels, left_s, text))
        return text

    def _left_s(self, now_s: float, left: int) -> float | None:
        passed_s = now_s - self._begin_s
        if passed_s < BRIEF_START_SECONDS:
            return None
        running = list(self._running.values())
        waiting = max(0, left - len(running))
        expected_s = expected_left_s(now_s, running, self._taken_s, waiting, self._at_once)
        if expected_s is None and self._tried and not running:  # nothing needs to be compiled
            return passed_s / self._tried * left
        return expected_s
