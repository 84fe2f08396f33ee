"""Whether a process that does not get on is to blame for it, or merely waits for a core.

On a machine that is busy with other things a process may get no core for seconds. Nothing is wrong with it then, and
a successor would get none either. So time counts against a process while it has nothing to run (it sleeps, or
somebody has stopped it); while it has, or waits for a disk, only that counts which it spends on a core.
"""

import os
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

LOOK_EVERY_US: Final = 100_000.0
LEAST_LOOKS: Final = 4  # one moment says little, and who looks may be late himself
_TICK_US: Final = 1e6 / os.sysconf("SC_CLK_TCK")
_STATE, _USER, _SYSTEM = 0, 11, 12  # fields of /proc/PID/stat after the name


class Activity(NamedTuple):
    """A process at one moment: whether any thread runs, or would if it had a core or a disk answered; time on cores."""

    wants_core: bool
    cpu_us: float


class Blame:
    """What has counted against process `pid` since `now_us`; more than `limit_us` is too much.

    `core_weight`: how much the time on a core counts, measured by the time in which the process has nothing to run.
    """

    def __init__(self, pid: int, limit_us: float, now_us: float, core_weight: float = 1.0) -> None:
        self.pid = pid
        self._core_weight = core_weight
        self._limit_us = limit_us
        self._blamed_us = 0.0
        self._looked_us = now_us
        self._cpu_us = 0.0
        self._counted_us(0.0)

    def is_too_much(self, now_us: float) -> bool:
        """Look again, unless the last look was just now."""
        passed_us = now_us - self._looked_us
        if passed_us >= LOOK_EVERY_US:
            self._looked_us = now_us
            self._blamed_us += min(self._counted_us(passed_us), self._limit_us / (LEAST_LOOKS - 1))
        return self._blamed_us > self._limit_us

    def _counted_us(self, passed_us: float) -> float:
        try:
            activity = activity_of(self.pid)
        except OSError:  # who looks has no descriptor left: that says nothing about others
            return 0.0
        if activity is None:
            return passed_us
        spent_us, self._cpu_us = activity.cpu_us - self._cpu_us, activity.cpu_us
        return min(spent_us, passed_us) * self._core_weight if activity.wants_core else passed_us


def activity_of(pid: int) -> Activity | None:
    """Return what a process does at this moment; None if it is not there."""
    states = []
    try:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
                states.append(_fields(thread / "stat")[_STATE])
        total = _fields(Path(f"/proc/{pid}/stat"))
    except (FileNotFoundError, ProcessLookupError):
        return None
    ticks = int(total[_USER]) + int(total[_SYSTEM])
    return Activity(any(state in "RD" for state in states), ticks * _TICK_US)


def _fields(stat: Path) -> list[str]:
    return stat.read_text().rpartition(")")[2].split()
