"""Finds gangs that stand still, and ranks that do not leave, unless they merely wait for a core.

Times count against a process, and what counts is compared with a limit: 5 s for a gang without progress, 1 s for a rank
that has not left after its gang has ended. These are faults of processes; no scheduling decision depends on them.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from gangway.base.blame import LOOK_EVERY_US, Blame
from gangway.executor.control import ControlSegment
from gangway.scheduler.gangs import Gang

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
