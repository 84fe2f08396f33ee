"""Waits until a machine whose host has others to serve, too, gives its cores whole: for seconds or minutes it does not.

What the machine could do is learned on the way: the best speed of any core in any look so far.
"""

import os
import time
from typing import Final

from gangway.measure.machine import speeds_at_once

LANES: Final = 8  # floats of a vector that every x86-64-v3 machine has
ROUNDS: Final = 4_000_000  # of multiply-adds: some tens of milliseconds
WHOLE: Final = 0.9  # of the best speed, of each core while all work
LOOKS: Final = 8  # in a row
LONGEST_WAIT_S: Final = 60.0
PAUSE_S: Final = 0.15  # between them


class QuietMachine:
    """Looks how fast the cores are, all at once. `best_flops_per_us`: the best of a core so far."""

    def __init__(self) -> None:
        self._cores = sorted(os.sched_getaffinity(0))
        self.best_flops_per_us = 0.0

    def look(self) -> float:
        """Return the speed of the slowest core over the best speed so far, this one included."""
        speeds = speeds_at_once(self._cores, LANES, ROUNDS)
        self.best_flops_per_us = max(self.best_flops_per_us, *speeds)
        return min(speeds) / self.best_flops_per_us

    def wait(self, limit_s: float = LONGEST_WAIT_S) -> bool:
        """Wait until the cores were whole in LOOKS looks, at most for so long; return whether they were."""
        end_s = time.monotonic() + limit_s
        good = 0
        while good < LOOKS and time.monotonic() < end_s:
            good = good + 1 if self.look() >= WHOLE else 0
            time.sleep(PAUSE_S)
        return good >= LOOKS
