"""A share of the cores for work in the background: after this server's requests, but beside other processes.

A job runs where a core is idle (SCHED_IDLE), so no request waits for it. On a machine that others keep busy it would
wait for ever. Who waits while it is not this server's requests that have the cores gets an ordinary policy, and a nice
value with which two busy processes leave it a quarter of a core.
"""

import asyncio
import logging
import os
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gangway.base.process import leave_idle_priority, use_idle_priority

_log = logging.getLogger(__name__)

POLL_SECONDS: Final = 0.25
LEAST_SHARE: Final = 0.25  # of a core
# Its weight is 423; a busy process of ordinary priority has 1024, so a job that shares a core with one has 29 %. Beside
# several it gets as much as each of them in the end: never more, so workers (-1) always go first.
BESIDE_OTHERS_NICE: Final = 4
LEAST_NICE: Final = 0
BESIDE_REQUESTS_NICE: Final = 10  # of what is brief, and has waited for requests for so long:
BRIEF_SECONDS: Final = 5.0
REQUESTS_SHARE: Final = 0.5  # of the cores; with more the requests of this server are what a job waits for
FREE_SHARE: Final = 0.05  # of the time: who waits for less finds idle cores
TELL_AFTER_SECONDS: Final = 5.0  # of computing and waits, from which the log says whether a job waits
GOES_ON_SHARE: Final = 0.75  # of these seconds computing: a job that waited goes on; one waits below half of that
_PROC: Final = Path("/proc")


@dataclass(frozen=True)
class CoreTime:
    """Of a process and its descendants, or of several: seconds on cores and, of its threads, waiting for one."""

    used_s: float = 0.0
    waited_s: float = 0.0

    def __add__(self, other: "CoreTime") -> "CoreTime":
        return CoreTime(self.used_s + other.used_s, self.waited_s + other.waited_s)

    def __sub__(self, other: "CoreTime") -> "CoreTime":
        return CoreTime(max(0.0, self.used_s - other.used_s), max(0.0, self.waited_s - other.waited_s))


def is_starved(job: CoreTime, requests_s: float, passed_s: float, cores: int) -> bool:
    """Whether others than requests keep a job from its share. `requests_s`: what processes of requests have used."""
    wants_more = job.used_s < LEAST_SHARE * passed_s and job.used_s + job.waited_s > LEAST_SHARE * passed_s
    return wants_more and requests_s < REQUESTS_SHARE * cores * passed_s


class WaitLog:
    """Says once that a job begins to wait for cores, and once that it goes on. `name`: of the job."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._window = self._waits = CoreTime()
        self._is_waiting = False

    def add(self, spent: CoreTime, holders: str) -> None:
        """The job has spent so much more. `holders`: who has the cores."""
        self._window += spent
        self._waits += spent
        whole_s = self._window.used_s + self._window.waited_s
        if whole_s < TELL_AFTER_SECONDS:
            return
        share = self._window.used_s / whole_s
        if not self._is_waiting:
            self._waits = self._window
            if share < GOES_ON_SHARE / 2:
                self._is_waiting = True
                self._tell(f"waits for cores, which {holders} have")
        elif share >= GOES_ON_SHARE:
            self._is_waiting = False
            self._tell("goes on")
        self._window = CoreTime()

    def _tell(self, what: str) -> None:
        text = "%s %s: it had %.1f s of CPU time and waited for %.1f s"
        _log.info(text, self._name, what, self._waits.used_s, self._waits.waited_s)


async def keep_share(
    waits: WaitLog,
    pid: int,
    cores: int,
    is_brief: Callable[[], bool] = lambda: False,
    jobs: Callable[[], Collection[int]] = tuple,
) -> None:
    """Give a job that waits a share beside other processes; until cancelled. `pid`: of the job.

    `waits` hears how it does. `jobs` returns the processes of all jobs; other children of this process are of requests.
    `is_brief`: whether the job gets a little beside them, too.
    """
    loop = asyncio.get_running_loop()
    job, requests, seen_s = core_time(pid), _requests({pid, *jobs()}), loop.time()
    nice: int | None = None
    waited_for_requests_s = 0.0
    while True:
        await asyncio.sleep(POLL_SECONDS)
        now_s, now_job, now_requests = loop.time(), core_time(pid), _requests({pid, *jobs()})
        passed_s, spent, requests_s = now_s - seen_s, now_job - job, (now_requests - requests).used_s
        job, requests, seen_s = now_job, now_requests, now_s
        are_busy = requests_s >= REQUESTS_SHARE * cores * passed_s
        waited_for_requests_s += spent.waited_s if are_busy else 0.0
        if are_busy:
            nice = BESIDE_REQUESTS_NICE if is_brief() and waited_for_requests_s > BRIEF_SECONDS else None
        elif is_starved(spent, requests_s, passed_s, cores):
            nice = BESIDE_OTHERS_NICE if nice is None else max(LEAST_NICE, nice - 1)
        elif spent.waited_s < FREE_SHARE * passed_s:
            nice = None
        for thread in _threads(pid):  # those that have begun meanwhile, too
            if nice is None:
                use_idle_priority(thread)
            else:
                with suppress(OSError):  # the system does not permit it, or the thread has ended
                    os.setpriority(os.PRIO_PROCESS, thread, nice)
                leave_idle_priority(thread, nice)
        waits.add(spent, "requests" if are_busy else "other processes")


def core_time(pid: int) -> CoreTime:
    """Return what a process and its living descendants have had; nothing of what has ended."""
    return sum((_core_time_of(thread) for thread in _threads(pid)), CoreTime())


def _requests(jobs: Collection[int]) -> CoreTime:
    others = [pid for pid in _children(os.getpid()) if pid not in jobs]
    return sum((core_time(pid) for pid in others), CoreTime())


def _core_time_of(thread: int) -> CoreTime:
    with suppress(OSError, ValueError):  # it has ended
        used_ns, waited_ns, _ = map(int, (_PROC / str(thread) / "schedstat").read_text().split())
        return CoreTime(used_ns / 1e9, waited_ns / 1e9)
    return CoreTime()


def _threads(pid: int) -> Iterator[int]:
    """Yield the threads of a process and of its descendants."""
    with suppress(OSError):
        yield from [int(name) for name in os.listdir(_PROC / str(pid) / "task")]
    for child in _children(pid):
        yield from _threads(child)


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with suppress(OSError):
        for task in (_PROC / str(pid) / "task").iterdir():
            with suppress(OSError):
                found += map(int, (task / "children").read_text().split())
    return found
