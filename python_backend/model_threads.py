"""The threads that a model starts, and those of its processes: they have the cores and the weight of their instance.

While the instance has a core they are on it, as its main thread is. While it waits without one they go on where there
is room, with little weight. One that computes while nobody waits for anything of the model rests: it runs in the idle
class, where a core has nothing else to do.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterable, Set
from contextlib import suppress
from pathlib import Path

from gangway.python_backend.cpu_clock import CpuClock, has_children
from gangway.python_backend.messages import WAITING_NICE

_OWN_AT = 64  # bytes, in the status: how many threads are not the model's, and their numbers
_MOST_OWN = (mmap.PAGESIZE - _OWN_AT) // 4 - 1
_LOWEST_NICE = 19
_TASKS = "/proc/self/task"
RESTLESS_SHARE = 0.1  # of the time, if nobody waits for anything
LOOK_AGAIN_SECONDS = 0.1  # at what they compute, when a request has ended


class Status:
    """What an instance shows its workers without a message: a page of memory that they share.

    `executor/native/instance.h` has its first bytes.
    """

    def __init__(self, descriptor: int, is_own: bool) -> None:
        """Map it. Raises OSError. `is_own`: the instance's, which writes."""
        self._bytes = mmap.mmap(descriptor, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE * is_own)
        self._words = memoryview(self._bytes).cast("I")
        self.page = memoryview(self._bytes)

    @property
    def load(self) -> int:
        """How many executions are open; OCCUPIED while none can begin."""
        return self._bytes[0]

    @load.setter
    def load(self, count: int) -> None:
        self._bytes[0] = count

    @property
    def rests(self) -> bool:
        """Whether a thread of the model rests, which may hold Python's lock."""
        return bool(self._bytes[1])

    @rests.setter
    def rests(self, rests: bool) -> None:
        self._bytes[1] = rests

    @property
    def own_threads(self) -> frozenset[int]:
        """The threads that are not the model's. Those that are too many are not told."""
        begin = _OWN_AT // 4 + 1
        return frozenset(self._words[begin : begin + self._words[begin - 1]])

    @own_threads.setter
    def own_threads(self, threads: Iterable[int]) -> None:
        begin, told = _OWN_AT // 4 + 1, sorted(threads)[:_MOST_OWN]
        self._words[begin - 1] = 0
        for place, thread in enumerate(told):
            self._words[begin + place] = thread
        self._words[begin - 1] = len(told)


def place_thread(thread: int, cores: Set[int], nice: int | None, wakes: bool) -> None:
    """Have a thread these cores (none: as it has), and this nice value (None: as it has). `wakes`: it rests no more."""
    with suppress(OSError):  # it has ended, or the system does not permit it
        if wakes:
            os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))
        if cores:
            os.sched_setaffinity(thread, cores)
        if nice is not None:
            os.setpriority(os.PRIO_PROCESS, thread, nice)


class ModelThreads:
    """All threads of an instance's process but its own, and of processes that it has started.

    Used with the host's lock held. `own`: numbers of those that are not the model's. `nice`: of threads that have a
    core. `may_raise`: a thread may have that again after a larger one. `processes`: the instance's. `has_new`: the last
    look has found threads of its own process of which it is not known yet whether they compute.
    """

    def __init__(self, status: Status, own: Iterable[int], nice: int, may_raise: bool, processes: CpuClock) -> None:
        self._status, self._own = status, set(own)
        self._processes = processes
        self._nice, self._may_raise = nice, may_raise
        self._cores = os.sched_getaffinity(0)
        self._tasks = os.open(_TASKS, os.O_RDONLY | os.O_DIRECTORY)  # each request looks at it
        self._resting: set[int] = set()
        self._restless: set[int] = set()  # those that have computed while nobody waited for anything
        self._placed: tuple[int | None, int, bool] | None = None  # core, how many threads, any processes
        self._looked_at, self.has_new = 0.0, False
        self._seen: dict[int, tuple[int, int]] = {}  # of each: when it was looked at, and how long it has computed
        status.own_threads = self._own

    @property
    def own(self) -> frozenset[int]:
        """The numbers of the threads that are not the model's."""
        return frozenset(self._own)

    def begin_own(self, thread: int) -> None:
        """A thread has begun that is not the model's."""
        self._own.add(thread)
        self._status.own_threads = self._own

    def end_own(self, thread: int) -> None:
        """It ends."""
        self._own.discard(thread)
        self._status.own_threads = self._own

    def place(self, core: int | None) -> None:
        """Have all of them this core; None: all cores, with little weight. What they compute meanwhile is wanted."""
        self.has_new = False
        self._seen.clear()
        placed = core, self._count(), has_children()
        if placed == self._placed and not self._resting:
            return
        self._placed = placed
        if any(placed[1:]):
            cores = self._cores if core is None else {core}
            nice = self._nice + WAITING_NICE * (core is None) if self._may_raise else None
            for thread in self._found() + self._found_others():
                place_thread(thread, cores, nice, wakes=bool(self._resting))  # what rests may have started others
        self._resting.clear()
        self._status.rests = False

    def rest(self, looks: bool) -> None:
        """Nobody waits for anything of the model. `looks`: at what they have computed since the last such call."""
        looks = looks or time.monotonic() - self._looked_at > LOOK_AGAIN_SECONDS
        if looks and (self._count() or has_children()):
            self._look()
        for thread in self._restless - self._resting:
            self._let_rest(thread)
        self._status.rests = bool(self._resting)

    def _look(self) -> None:
        """Find out which of them compute, or would if they had a core. New processes have little weight."""
        before, self._seen, self._looked_at = self._seen, {}, time.monotonic()
        others = self._found_others()
        for thread in others:
            if thread not in before:
                place_thread(thread, self._cores, self._nice + WAITING_NICE if self._may_raise else None, wakes=False)
                self._placed = None
        found = self._found()
        self.has_new = not before.keys() >= set(found)
        for thread in found + others:
            with suppress(OSError, ValueError, IndexError):  # it has ended
                computed_ns, queued_ns = map(int, Path(f"/proc/{thread}/schedstat").read_text().split()[:2])
                now_ns = time.monotonic_ns()
                self._seen[thread] = now_ns, computed_ns + queued_ns
                begin_ns, had_ns = before.get(thread, self._seen[thread])
                if computed_ns + queued_ns - had_ns > RESTLESS_SHARE * (now_ns - begin_ns):
                    self._restless.add(thread)
                elif thread in before:
                    self._restless.discard(thread)
        self._restless &= self._seen.keys()
        self._resting &= self._seen.keys()

    def _let_rest(self, thread: int) -> None:
        """Have a thread the idle class, or the least weight where it could not leave that class again."""
        self._placed = None
        if self._may_raise:
            with suppress(OSError):
                os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
                self._resting.add(thread)
        place_thread(thread, self._cores, None if self._may_raise else _LOWEST_NICE, wakes=False)

    def _count(self) -> int:
        return os.fstat(self._tasks).st_nlink - 2 - len(self._own)

    def _found(self) -> list[int]:
        return [thread for thread in map(int, os.listdir(_TASKS)) if thread not in self._own]

    def _found_others(self) -> list[int]:
        return self._processes.others_threads() if has_children() else []
