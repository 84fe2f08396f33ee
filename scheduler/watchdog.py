"""Finds gangs that stand still, and ranks that do not leave, unless they merely wait for a core.

Times count against a process, and what counts is compared with a limit: 5 s for a gang without progress, 1 s for a rank
that has not left after its gang has ended. These are faults of processes; no scheduling decision depends on them.
"""

import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from gangway.executor.control import ControlSegment
from gangway.scheduler.gangs import Gang

# Whether a process that does not get on is to blame for it, or merely waits for a core.
#
# On a machine that is busy with other things a process may get no core for seconds. Nothing is wrong with it then, and
# a successor would get none either. So time counts against a process while it has nothing to run (it sleeps, or
# somebody has stopped it); while it has, or waits for a disk, only that counts which it spends on a core.

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


STALLED_AFTER_US: Final = 5_000_000.0  # a claim is some 200 us of work
LONGEST_TASK_US: Final = 600_000_000.0  # of onnxruntime: nobody sees how far it is; no front end waits longer
STUCK_AFTER_US: Final = 1_000_000.0  # a rank that has not left so long after its gang has ended does not run at all
CHECK_EVERY_US: Final = 500_000.0

Progress = tuple[int, int, int]  # generation, layer, finished tasks of the layer


@dataclass
class _Mark:
    """Where a gang was, and what counts against each of its cores since then."""

    progress: Progress
    blames: dict[int, Blame] = field(default_factory=dict)


class StallWatch:
    """Remembers how far each gang was, and who is late."""

    def __init__(self, control: ControlSegment) -> None:
        self._control = control
        self._marks: dict[int, _Mark] = {}  # by lease
        self._late: dict[tuple[int, int, int], Blame] = {}  # by lease, generation and rank
        self._next_check_us = 0.0

    def stalled(self, gangs: Iterable[Gang], now_us: float) -> list[Gang]:
        """Return the gangs at work that have finished no task for too long, and no rank of which waits for a core."""
        if now_us < self._next_check_us:
            return []
        self._next_check_us = now_us + CHECK_EVERY_US
        before, self._marks = self._marks, {}
        stalled = []
        for gang in gangs:
            if not gang.outstanding or gang.ended_us is not None:
                continue
            at = self._control.leases[gang.lease].progress()
            progress = (gang.generation, at.phase, at.finished_tasks)
            mark = before.get(gang.lease)
            if mark is None or mark.progress != progress:
                self._marks[gang.lease] = _Mark(progress)
                continue
            self._marks[gang.lease] = mark
            limit_us = LONGEST_TASK_US if at.next_layer in gang.long_layers else STALLED_AFTER_US
            to_blame = [self._is_to_blame(mark, gang.cores[rank], limit_us, now_us) for rank in gang.outstanding]
            if all(to_blame):  # each has been looked at
                stalled.append(gang)
        return stalled

    def stuck_cores(self, ending: Iterable[Gang], now_us: float) -> list[int]:
        """Return the cores of ranks that have not left although their gang ended long ago; again until they do."""
        before, self._late = self._late, {}
        cores = []
        for gang in ending:
            if gang.ended_us is None or now_us < gang.ended_us + LOOK_EVERY_US:
                continue
            for rank in sorted(gang.outstanding):
                key, core = (gang.lease, gang.generation, rank), gang.cores[rank]
                blame = self._late[key] = before.get(key) or self._blame(core, STUCK_AFTER_US, now_us)
                if blame.is_too_much(now_us):
                    cores.append(core)
                    del self._late[key]
        return cores

    def _is_to_blame(self, mark: _Mark, core: int, limit_us: float, now_us: float) -> bool:
        if core not in mark.blames:
            mark.blames[core] = self._blame(core, limit_us, now_us)
        return mark.blames[core].is_too_much(now_us)

    def _blame(self, core: int, limit_us: float, now_us: float) -> Blame:
        return Blame(self._control.status(core).pid, limit_us, now_us)
