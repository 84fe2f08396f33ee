"""What the processor counted beside measured levels of interference, as data: a part of a model's profile."""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class CounterSample:
    """Rates on a core per thousand cycles, and the level of interference at that time.

    `others`: of any further counters, for the analysis of variance alone.
    """

    accesses: float
    misses: float
    level: float
    others: tuple[float, ...] = ()

    @property
    def miss_rate(self) -> float:
        """Misses per access."""
        return self.misses / self.accesses if self.accesses > 0 else 0.0


@dataclass(frozen=True)
class CounterLog:
    """The samples of one model, a few per load and round. `events`: names of what was counted; empty: nothing was.

    The first event are accesses to the last-level cache, the second misses there, then come the `others`.
    """

    events: tuple[str, ...] = ()
    samples: tuple[CounterSample, ...] = ()


NOTHING_COUNTED: Final = CounterLog()
