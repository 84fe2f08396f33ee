"""Histograms as Prometheus has them: they cost one search and one addition, and add up over servers."""

from bisect import bisect_left

_STEPS = (1, 2.5, 5)  # of each decade
TIME_BOUNDS_NS = (
    *(round(step * 10**power) for power in range(5, 10) for step in _STEPS),
    10**10,
)  # 0.1 ms to 10 s
ROW_BOUNDS = tuple(2**power for power in range(9))


class Histogram:
    """Counts values by range: up to the first bound, up to the second, ..., beyond the last. Not safe for threads."""

    def __init__(self, bounds: tuple[int, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)

    def add(self, value: int) -> None:
        """Count a value."""
        self._counts[bisect_left(self._bounds, value)] += 1

    @property
    def counts(self) -> tuple[int, ...]:
        """Values in each range."""
        return tuple(self._counts)
