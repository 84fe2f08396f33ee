"""Processor time beside `decide`: of the scheduler's turns, which passes on the virtual clock, and of front ends.

The scheduler's numbers are those of `python -m benchmarks.scheduling.turn_cost`, Sapphire Rapids, 2026-11-29, beside
other work: whole turns of the live process under a policy whose decisions take next to nothing. Two runs differ much
(`docs/measurements/simulator.md`); these are of the run beside less work. In it the events of a turn share less.
Those of front ends are of `python -m benchmarks.front_end`, Zen 4, eight clients: 16 floats, an image of 602 KB.
"""

import math
from dataclasses import dataclass

MOST_BUSY = 0.7  # of a process: beyond it requests wait for it longer than it works for them


@dataclass(frozen=True)
class TurnCost:
    """Microseconds of a turn, and of each request that comes or ends."""

    turn_us: float
    event_us: float

    def us(self, events: int) -> float:
        """Return what a turn takes that hears of so many."""
        return self.turn_us + self.event_us * events


FREE_TURN = TurnCost(0.0, 0.0)
MEASURED_TURN = TurnCost(turn_us=146.0, event_us=44.7)
FRONT_END_US = 146.0
FRONT_END_US_PER_MB = 590.0


def front_end_us(size_mb: float) -> float:
    """Return a front end's processor time for a request of so many million bytes, inputs and outputs."""
    return FRONT_END_US + FRONT_END_US_PER_MB * size_mb


def processes_needed(busy: float) -> int:
    """Return how many processes do what would keep so many busy all the time, each for MOST_BUSY of it at most."""
    return max(1, math.ceil(busy / MOST_BUSY))
