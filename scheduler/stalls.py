"""Gangs that stand still. Ranks that wait for another notice it themselves; a gang whose every rank hangs cannot."""

from collections.abc import Iterable
from typing import Final

from gangway.executor.control import ControlSegment
from gangway.scheduler.gangs import Gang

STALLED_AFTER_US: Final = 10_000_000.0  # a claim is some 200 us of work
LONGEST_TASK_US: Final = 600_000_000.0  # of an indivisible query: nobody sees how far it is; no front end waits longer
CHECK_EVERY_US: Final = 1_000_000.0

Progress = tuple[int, int, int]  # term, layer, finished tasks of the layer


class StallWatch:
    """Remembers how far each gang was."""

    def __init__(self, control: ControlSegment) -> None:
        self._control = control
        self._marks: dict[int, tuple[Progress, float]] = {}  # by lease: progress, and since when it is that
        self._next_check_us = 0.0

    def stalled_cores(self, gangs: Iterable[Gang], now_us: float) -> list[int]:
        """Return the cores of gangs at work that have finished no task for too long; each once."""
        if now_us < self._next_check_us:
            return []
        self._next_check_us = now_us + CHECK_EVERY_US
        before, self._marks = self._marks, {}
        cores = []
        for gang in gangs:
            if not gang.outstanding:
                continue
            at = self._control.leases[gang.lease].progress()
            progress = (gang.term, at.next_layer, at.finished_tasks)
            known, since_us = before.get(gang.lease, (None, now_us))
            if known != progress:
                since_us = now_us
            elif now_us - since_us > (LONGEST_TASK_US if gang.indivisible else STALLED_AFTER_US):
                cores += [gang.cores[rank] for rank in sorted(gang.outstanding)]
                since_us = float("inf")
            self._marks[gang.lease] = (progress, since_us)
        return cores
