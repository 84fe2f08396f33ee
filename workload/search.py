"""The highest rate that reaches a goal: a bracket, a bisection on a grid, and repeated measurements against noise."""

import math
from collections.abc import Callable
from dataclasses import dataclass

Measure = Callable[[float, int], float]


@dataclass(frozen=True)
class Probe:
    """One measurement: `attempt` counts those of the same rate from 0."""

    rate_per_s: float
    attempt: int
    share: float


@dataclass(frozen=True)
class SearchResult:
    """`rate_per_s`: the highest that reached the goal; 0 if none did. `limited`: the highest allowed one did, too."""

    rate_per_s: float
    share: float  # at that rate, mean of its measurements; 0 if none reached the goal
    probes: tuple[Probe, ...]  # all, in order
    limited: bool = False


def highest_rate(
    measure: Measure,
    goal: float,
    start_per_s: float,
    step: float = 1.05,
    votes: int = 1,
    lowest_per_s: float | None = None,
    highest_per_s: float | None = None,
) -> SearchResult:
    """Return the highest rate on the grid `start_per_s * step ** i` whose satisfied share reaches the goal.

    `measure(rate_per_s, attempt)` returns the share, of all queries or of the worst model; it may use another seed for
    another attempt. From the start the search moves up or down, twice as far each time, until the goal lies between two
    rates, then halves the distance. With several `votes` the mean of so many measurements decides on each of the last
    two neighbours; if the means contradict the bisection, the search moves on by one step.
    Limits default to a hundredth and a hundred times the start.
    """
    lowest = _index(lowest_per_s or start_per_s / 100, start_per_s, step, math.ceil)
    highest = _index(highest_per_s or start_per_s * 100, start_per_s, step, math.floor)
    if not (step > 1 and lowest <= 0 <= highest):
        raise ValueError("the step must exceed 1 and the start must lie within the limits")
    grid = _Grid(measure, goal, start_per_s, step)
    best = _confirm(grid, _bisect(grid, *_bracket(grid, lowest, highest)), votes, lowest, highest)
    if best < lowest:
        return SearchResult(0.0, 0.0, tuple(grid.probes))
    return SearchResult(grid.rate(best), grid.share(best), tuple(grid.probes), limited=best == highest)


class _Grid:
    """The measurements, by index of the grid."""

    def __init__(self, measure: Measure, goal: float, start_per_s: float, step: float) -> None:
        self.probes: list[Probe] = []
        self._measure = measure
        self._goal = goal
        self._start = start_per_s
        self._step = step
        self._shares: dict[int, list[float]] = {}

    def rate(self, index: int) -> float:
        return float(self._start * self._step**index)

    def share(self, index: int) -> float:
        shares = self._shares[index]
        return math.fsum(shares) / len(shares)

    def passes(self, index: int, votes: int = 1) -> bool:
        """Say whether the mean of at least so many measurements reaches the goal."""
        shares = self._shares.setdefault(index, [])
        while len(shares) < votes:
            share = self._measure(self.rate(index), len(shares))
            self.probes.append(Probe(self.rate(index), len(shares), share))
            shares.append(share)
        return self.share(index) >= self._goal


def _index(rate: float, start: float, step: float, rounding: Callable[[float], int]) -> int:
    return rounding(round(math.log(rate / start) / math.log(step), 9))


def _bracket(grid: _Grid, lowest: int, highest: int) -> tuple[int, int]:
    """Return indices (passes, fails); beyond a limit counts as seen: lowest - 1 passes, highest + 1 fails."""
    stride = 1
    if grid.passes(0):
        passes = 0
        while passes < highest:
            upper = min(passes + stride, highest)
            if not grid.passes(upper):
                return passes, upper
            passes, stride = upper, stride * 2
        return passes, highest + 1
    fails = 0
    while fails > lowest:
        lower = max(fails - stride, lowest)
        if grid.passes(lower):
            return lower, fails
        fails, stride = lower, stride * 2
    return lowest - 1, fails


def _bisect(grid: _Grid, passes: int, fails: int) -> int:
    while fails - passes > 1:
        middle = (passes + fails) // 2
        if grid.passes(middle):
            passes = middle
        else:
            fails = middle
    return passes


def _confirm(grid: _Grid, best: int, votes: int, lowest: int, highest: int) -> int:
    """Move up while the next rate's mean passes, else down while this one's fails. One direction only, so it ends."""
    if best >= lowest and not grid.passes(best, votes):
        best -= 1
        while best >= lowest and not grid.passes(best, votes):
            best -= 1
        return best
    while best < highest and grid.passes(best + 1, votes):
        best += 1
    return best
