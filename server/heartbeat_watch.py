"""Sees to it that scheduler and front ends get on: whoever hangs is killed, and replaced as after any other death.

Each writes into shared memory that it gets on (`executor/status_blocks.py`), and so does the supervisor, for whoever
asks for the server's health. What counts against one that does not is told as of workers (`scheduler/watchdog.py`): one
that is stopped, or sleeps, is replaced within two seconds; one that computes, when it has done nothing else for long;
one that only waits for a core never.
"""

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from gangway.executor.status_blocks import Heartbeats
from gangway.scheduler.watchdog import Blame
from gangway.server.children import KeptProcess

LOOK_SECONDS: Final = 0.15
STARTING_US: Final = 60e6  # until it is seen for the first time
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Bounds:
    """What makes a process hung: `hung_us` without anything to run, or `computing_us` on a core."""

    hung_us: float
    computing_us: float


SCHEDULER: Final = Bounds(hung_us=0.7e6, computing_us=5e6)  # it sleeps 0.4 s at most; a turn takes milliseconds
FRONT_END: Final = Bounds(hung_us=0.55e6, computing_us=30e6)  # a message of many megabytes is read in one go


@dataclass
class _Seen:
    """A process as it was found. `blame`: since it was found so again."""

    pid: int
    last_ns: int
    starting: bool
    blame: Blame | None = None


class HeartbeatWatch:
    """`front_ends`: by number, as in Heartbeats. Everything happens in the supervisor's event loop."""

    def __init__(self, beats: Heartbeats, scheduler: KeptProcess, front_ends: Mapping[int, KeptProcess]) -> None:
        self._beats = beats
        self._watched = {beats.scheduler: (scheduler, SCHEDULER)}
        self._watched |= {number: (kept, FRONT_END) for number, kept in front_ends.items()}
        self._seen: dict[int, _Seen] = {}

    async def look(self) -> None:
        """Say that the supervisor gets on, and look at all others, then wait until it is time for the next look."""
        self._beats.beat(self._beats.SUPERVISOR)
        for number, (kept, bounds) in self._watched.items():
            if kept.is_running:
                self._look_at(number, kept, bounds)
        await asyncio.sleep(LOOK_SECONDS)

    def _look_at(self, number: int, kept: KeptProcess, bounds: Bounds) -> None:
        last_ns, now_us = self._beats.last_ns(number), time.monotonic_ns() / 1e3
        seen = self._seen.get(number)
        if seen is None or seen.pid != kept.pid:  # what stands there is of a predecessor
            self._seen[number] = _Seen(kept.pid, last_ns, starting=True)
        elif seen.last_ns != last_ns:
            self._seen[number] = _Seen(kept.pid, last_ns, starting=False)
        elif seen.blame is None:
            weight = bounds.hung_us / bounds.computing_us
            seen.blame = Blame(kept.pid, STARTING_US if seen.starting else bounds.hung_us, now_us, weight)
        elif seen.blame.is_too_much(now_us):
            _log.error("the %s (process %d) makes no progress; killing it", kept.name, kept.pid)
            kept.kill()
