"""How long something takes, but for what other processes of the machine take: for promises in seconds.

A promise such as "nobody else waits for a second" is about our processes. On a machine that others use, too, such as
the other process of a test run, they also wait for cores.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from testing.processes import TICKS_PER_S, core_use, descendants_of

_IDLE = (3, 4)  # fields of /proc/stat: idle, iowait
_COUNTED = 8  # the others are in these already
LOOK_S = 0.1


@dataclass(frozen=True)
class _Look:
    at_s: float
    waited_s: float  # by our threads, for cores
    others_s: float  # that others had cores


def _look() -> _Look:
    ours = [os.getpid(), *descendants_of(os.getpid())]
    waited_s = sum(core_use(pid).wait_ns for pid in ours) / 1e9
    return _Look(time.monotonic(), waited_s, _busy_s() - sum(map(_used_s, ours)))


def _used_s(pid: int) -> float:
    """What a process has had of cores, with what those had that it has started and that have ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / TICKS_PER_S


def _busy_s() -> float:
    with Path("/proc/stat").open() as file:
        ticks = [int(field) for field in file.readline().split()[1 : 1 + _COUNTED]]
    return (sum(ticks) - sum(ticks[field] for field in _IDLE)) / TICKS_PER_S


class OwnTime:
    """The longest of several waits, one after the other."""

    def __init__(self) -> None:
        self._before = _look()
        self.longest_s = 0.0

    def waited(self, begin_s: float) -> None:
        """Note a wait that has begun at that time of the monotonic clock, and has just ended."""
        wait_s = time.monotonic() - begin_s
        if wait_s < LOOK_S and time.monotonic() - self._before.at_s < LOOK_S:
            self.longest_s = max(self.longest_s, wait_s)
            return
        now = _look()
        others_s = min(now.waited_s - self._before.waited_s, now.others_s - self._before.others_s)
        self._before = now
        self.longest_s = max(self.longest_s, wait_s - max(others_s, 0.0))


@contextmanager
def within(bound_s: float) -> Iterator[None]:
    """The block takes less than that."""
    own_time, begin_s = OwnTime(), time.monotonic()
    yield
    own_time.waited(begin_s)
    assert own_time.longest_s < bound_s
