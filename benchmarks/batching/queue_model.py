"""One queue and one machine that serves it in batches, simulated: who decides how large a batch is, and when it begins.

Pure. Packrat decides now and then: an estimator watches the queue, and a change takes time. Gangway decides at every
dispatch. Times are microseconds; a batch of n rows takes what the best configuration for n rows takes.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from gangway.scheduler.policies.arrival_rate import ArrivalRate
from gangway.workload.arrivals import Floats

BatchTime = Callable[[int], float]  # microseconds of a batch of so many rows
GRID = 4096  # steps in which the expected number of arrivals is added up


@dataclass(frozen=True)
class Dispatch:
    """A batch that begins now: its rows, and how long it takes."""

    rows: int
    time_us: float


class Dispatcher(ABC):
    """Decides whenever the machine is free and somebody waits."""

    def arrived(self, at_us: float) -> None:  # noqa: B027 - not everybody wants to know
        """Hear of a query that has come; all of those that wait have been told of before `decide`."""

    @abstractmethod
    def decide(self, now_us: float, depth: int, oldest_us: float) -> Dispatch | float:
        """Return the next batch of `depth` waiting rows, the oldest of which arrived at `oldest_us`.

        Or a later time until which to wait for more; an arrival asks again before it.
        """


class PerDispatch(Dispatcher):
    """As many rows as `rows_of` says of those that wait and the rows that come in a microsecond, at once."""

    def __init__(self, rows_of: Callable[[int, float], int], batch_us: BatchTime) -> None:
        self._rows_of = rows_of
        self._batch_us = batch_us
        self._rate = ArrivalRate()

    def arrived(self, at_us: float) -> None:
        """Learn the rate."""
        self._rate.arrived(at_us, 1)

    def decide(self, now_us: float, depth: int, oldest_us: float) -> Dispatch | float:
        """Begin at once."""
        rows = self._rows_of(depth, self._rate.rows_per_us)
        return Dispatch(rows, self._batch_us(rows))


class Estimator(Protocol):
    """Packrat's, section 3.8."""

    def observe(self, depth: int) -> int:
        """Take in the depth of the queue when a batch begins; return the batch size to configure for."""
        ...


@dataclass(frozen=True)
class Change:
    """What a change of configuration costs: how long it takes, how much slower batches are meanwhile, how often it may.

    The paper: about 5 s, two to three times the latency.
    """

    time_us: float
    slowdown: float
    least_us: float  # between two comparisons of the estimate with the configuration


class Packrat(Dispatcher):
    """Batches of the configured size, or what has come until a timeout; the estimator says when to configure anew.

    Kinder to the paper than its system: a batch that is not full takes what the best configuration for its rows takes.
    """

    def __init__(
        self, estimator: Estimator, batch_us: BatchTime, timeout_us: float, change: Change, max_rows: int = 1024
    ) -> None:
        self._estimator = estimator
        self._max_rows = max_rows
        self._batch_us = batch_us
        self._timeout_us = timeout_us
        self._change = change
        self._rows = self._wanted = 1
        self._ready_us = 0.0  # when the change that has begun is over
        self._compare_us = 0.0

    def decide(self, now_us: float, depth: int, oldest_us: float) -> Dispatch | float:
        """Wait for a full batch, not longer than the timeout."""
        if now_us >= self._ready_us:
            self._rows = self._wanted
        if depth < self._rows and now_us < oldest_us + self._timeout_us:
            return oldest_us + self._timeout_us
        self._compare(now_us, min(self._estimator.observe(depth), self._max_rows))
        rows = min(depth, self._rows)
        changing = now_us < self._ready_us
        return Dispatch(rows, self._batch_us(rows) * (self._change.slowdown if changing else 1.0))

    def _compare(self, now_us: float, estimate: int) -> None:
        if now_us < max(self._compare_us, self._ready_us):
            return
        self._compare_us = now_us + self._change.least_us
        if estimate != self._rows:
            self._wanted = estimate
            self._ready_us = now_us + self._change.time_us
            if self._change.time_us == 0:
                self._rows = estimate


def serve(arrivals_us: Floats, dispatcher: Dispatcher) -> Floats:
    """Return the latency of every query; `arrivals_us` ascend. Batches are of the oldest, one batch at a time."""
    ends_us, times = np.empty_like(arrivals_us), arrivals_us.tolist()
    first, next_one, now_us = 0, 0, 0.0
    while first < len(times):
        now_us = max(now_us, times[first])
        while next_one < len(times) and times[next_one] <= now_us:
            dispatcher.arrived(times[next_one])
            next_one += 1
        decided = dispatcher.decide(now_us, next_one - first, times[first])
        if isinstance(decided, Dispatch):
            now_us += decided.time_us
            ends_us[first : first + decided.rows] = now_us
            first += decided.rows
            continue
        if decided <= now_us:
            raise ValueError(f"asked to wait until {decided} at {now_us}")
        now_us = min(decided, times[next_one]) if next_one < len(times) else decided
    return ends_us - arrivals_us


def arrivals_at(knots: Sequence[tuple[float, float]], seconds: float, seed: int) -> Floats:
    """Return arrivals of a Poisson process whose rate changes, in microseconds.

    `knots`: (share of the time, queries per second), straight lines between them; two at one share are a step.
    """
    shares, rates = (np.array(side) for side in zip(*knots, strict=True))
    grid = np.union1d(np.linspace(0.0, 1.0, GRID), shares)
    middles = (grid[:-1] + grid[1:]) / 2
    expected = np.concatenate([[0.0], np.cumsum(np.interp(middles, shares, rates) * np.diff(grid) * seconds)])
    gaps = np.random.default_rng(seed).exponential(size=int(expected[-1] + 10 * expected[-1] ** 0.5 + 50))
    unit = np.cumsum(gaps)
    return np.interp(unit[unit < expected[-1]], expected, grid) * seconds * 1e6
