"""Sides that take turns on one machine: all of them see the same load of it, and ratios are taken round by round."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

from benchmarks.peers.onnxruntime_peer import Timed

ROUND_MS = 60.0  # a side runs short queries several times a round, for about so long
MOST_QUERIES = 20
LEAST_ROUNDS = 2
SETTLE_S = 0.02  # between sides: other engines' threads spin for a while after a query


class Turns:
    """Times of several sides. `rounds_ms[side][n]`: the median milliseconds of its queries in round n."""

    def __init__(self, sides: Mapping[str, Timed], settle_s: float = SETTLE_S) -> None:
        self._sides = dict(sides)
        self._settle_s = settle_s
        self.rounds_ms: dict[str, list[float]] = {name: [] for name in sides}

    def run(self, seconds: float, least: int = LEAST_ROUNDS, clock: Callable[[], float] = time.monotonic) -> None:
        """Let every side run once without counting, then in rounds until `seconds` are over, at least `least`."""
        end_s = clock() + seconds
        counts = {name: _queries(timed()) for name, timed in self._sides.items()}
        names, number = list(self._sides), 0
        while number < least or clock() < end_s:
            first = number % len(names)
            for name in names[first:] + names[:first]:
                time.sleep(self._settle_s)
                times_ms = [self._sides[name]() for _ in range(counts[name])]
                self.rounds_ms[name].append(statistics.median(times_ms))
            number += 1

    @property
    def rounds(self) -> int:
        """How many rounds counted."""
        return len(next(iter(self.rounds_ms.values())))

    def median_ms(self, name: str) -> float:
        """Return the median over the rounds."""
        return statistics.median(self.rounds_ms[name])

    def fastest(self, names: Sequence[str]) -> str:
        """Return which of some sides has the smallest median."""
        return min(names, key=self.median_ms)

    def ratio(self, name: str, other: str) -> float:
        """Return the median of each round's ratio, so that drifting load of the machine cancels out."""
        pairs = zip(self.rounds_ms[name], self.rounds_ms[other], strict=True)
        return statistics.median(one / another for one, another in pairs)


def _queries(query_ms: float) -> int:
    return max(1, min(MOST_QUERIES, round(ROUND_MS / max(query_ms, 1e-3))))
