"""How much an instance has computed, as the kernel counts it: the measure of what holds a core, and of what waits."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress

_ALL_THREADS = 2  # the clock of a process that counts what the scheduler has given it (CPUCLOCK_SCHED)
_STATE_BYTES = 64  # of what the kernel says of a thread: its number, its name, its state
_CHILDREN_BYTES = 4096
MOST_CHILDREN = 256
Thread = tuple[int, str]  # its process, and its number


class CpuClock:
    """The CPU time of a process and of those that it has started. Any process of the machine may read it."""

    def __init__(self, pid: int, others: Sequence[int] = ()) -> None:
        """Make it. `others`: some that it has started."""
        self._pid = pid
        self._others: dict[int, int] = {}  # what the clocks of those that it has started have shown
        self._others_ns = 0
        self._left_out: frozenset[str] = frozenset()
        self._add(others)

    def leave_out(self, threads: Iterable[int]) -> None:
        """Look no more at these threads: none of them starts a process, or keeps the others waiting."""
        self._left_out = frozenset(map(str, threads))

    def read_ns(self) -> int:
        """Return nanoseconds of all of them since some point of time. Raises OSError when the process has ended."""
        for pid, before_ns in list(self._others.items()):
            try:
                self._others[pid] = _clock_ns(pid)
            except OSError:
                del self._others[pid]
            else:
                self._others_ns += self._others[pid] - before_ns
        return _clock_ns(self._pid) + self._others_ns

    def find_others(self) -> bool:
        """Look for processes that it has started, which count from now on. Return whether there are new ones.

        Raises OSError when the process has ended.
        """
        before = set(self._others)
        self._add(self._descendants())
        return not before.issuperset(self._others)

    @property
    def pids(self) -> tuple[int, ...]:
        """The process, and those of the others that are known."""
        return (self._pid, *self._others)

    def threads(self) -> list[Thread]:
        """Return their threads. Raises OSError when the process has ended."""
        return [(pid, thread) for pid in self.pids for thread in self._threads(pid)]

    def others_threads(self) -> list[int]:
        """Return the threads of the processes that it has started, as there are now. Raises OSError as above."""
        return [int(thread) for pid in self._descendants() for thread in self._threads(pid)]

    def _add(self, others: Sequence[int]) -> None:
        for pid in others:
            if pid not in self._others:
                with suppress(OSError):  # it has ended
                    self._others[pid] = _clock_ns(pid)

    def _threads(self, pid: int) -> list[str]:
        try:
            return [thread for thread in os.listdir(f"/proc/{pid}/task") if thread not in self._left_out]
        except OSError:
            if pid == self._pid:
                raise
            return []

    def _descendants(self) -> list[int]:
        found = [self._pid]
        for each in found:
            for thread in self._threads(each):
                children = _beginning(f"/proc/{each}/task/{thread}/children", _CHILDREN_BYTES)
                found += map(int, children.split()[: MOST_CHILDREN - len(found)])
        return found[1:]


def has_children() -> bool:
    """Whether this process has any, ended ones included."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def clock_of(pid: int) -> int:
    """Return what clock_getcpuclockid does: the CPU clock of a process."""
    return (~pid << 3) | _ALL_THREADS


def _clock_ns(pid: int) -> int:
    return time.clock_gettime_ns(clock_of(pid))


def is_runnable(threads: Iterable[Thread]) -> bool:
    """Whether any of them computes, or would if it had a core."""
    return any(b") R " in _beginning(f"/proc/{pid}/task/{thread}/stat", _STATE_BYTES) for pid, thread in threads)


def queued_ns(threads: Iterable[Thread]) -> int:
    """Return how long they have waited for cores."""
    return sum(
        int((_beginning(f"/proc/{pid}/task/{thread}/schedstat", _STATE_BYTES).split() or (0, 0))[1])
        for pid, thread in threads
    )


def _beginning(path: str, size_bytes: int) -> bytes:
    with suppress(OSError):  # the thread has ended
        descriptor = os.open(path, os.O_RDONLY)
        try:
            return os.read(descriptor, size_bytes)
        finally:
            os.close(descriptor)
    return b""
