"""How many of n waiting rows the next batch takes. Pure.

If nobody else came, batches of b1, b2, ... rows would run one after the other, and everybody waits while one runs. So
the least sum of all rows' completion times, and with it the least mean latency, is

    cost(n) = min over b of n * L(b) + cost(n - b)

with L(b) the time of a batch of b rows in the gangs that are best for it. A short queue gets small batches, since a row
that could be answered alone would wait for others. A long one gets those with the most rows a second, since everybody
waits for everybody before. Nothing has to be tuned. If batches gain nothing, rows go one by one.

But others come. They wait for the rows that are there, and the more of the machine's time they take, the more a batch
with few rows a second costs. Under load rho, n rows are the beginning of a busy period of n / (1 - rho) (as many as
flow in until the queue is empty): the next batch is the one that so many rows would begin with. If more rows than there
are, then the one of those that are there that has the most rows a second.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import cache, cached_property
from math import ceil

from gangway.scheduler.batching.split import GANG_US, least_gain
from gangway.scheduler.batching.waves import plan_table
from gangway.scheduler.model_profile import ModelProfile

LONGEST_QUEUE = 1024  # rows; in a longer one the next batch is the same: the one with the most rows a second
LONGEST_BUSY = 4  # batches of the most rows: so far a busy period is looked ahead
HIGHEST_LOAD = 0.95  # with more, a busy period has no end that could be planned for


class BatchSizes:
    """The best next batch for each number of waiting rows, found when it is first asked for.

    `latency_us(rows)`: L. `allowed`: numbers of rows that a batch may have, ascending; the last ones of a queue that
    are fewer than any go together. Empty: all up to `max_rows`. `batch_us`: what a batch costs beside its execution.
    """

    def __init__(
        self, latency_us: Callable[[int], float], max_rows: int, allowed: Sequence[int] = (), batch_us: float = GANG_US
    ) -> None:
        self.latency_us = latency_us
        self._batch_us = batch_us
        self._allowed = tuple(rows for rows in allowed if rows <= max_rows) or tuple(range(1, max_rows + 1))
        self._times_us: list[float] = []  # of the allowed sizes, as far as they were needed
        self._cost_us = [0.0]  # by waiting rows
        self._next = [0]

    def next_rows(self, waiting_rows: int, load: float = 0.0) -> int:
        """Return the size of the next batch; the smallest of equally good ones.

        `load`: the part of the machine's time that the rows take that come meanwhile, in batches of the best size.
        """
        rows = min(waiting_rows, LONGEST_QUEUE)
        busy_rows = ceil(rows / (1.0 - min(load, HIGHEST_LOAD)))
        found = self._first_of(max(rows, min(busy_rows, LONGEST_BUSY * self._allowed[-1], LONGEST_QUEUE)))
        return found if found <= rows else self._fastest(rows)

    @cached_property
    def row_us(self) -> float:
        """The least time of a row, in the batches with the most rows a second."""
        return min((self.latency_us(size) + self._batch_us) / size for size in self._allowed)

    def _first_of(self, rows: int) -> int:
        while len(self._next) <= rows:
            self._extend()
        return self._next[rows]

    def _fastest(self, rows: int) -> int:
        """Return the size of the batch of at most so many rows that has the most rows a second."""
        pairs = zip(self._times_us, self._allowed[: bisect_right(self._allowed, rows)], strict=False)
        return min(((time_us / size, size) for time_us, size in pairs), default=(0.0, rows))[1]

    def _extend(self) -> None:
        rows = len(self._next)
        known = bisect_right(self._allowed, rows)
        for size in self._allowed[len(self._times_us) : known]:
            self._times_us.append(self.latency_us(size) + self._batch_us)
        if known:
            pairs = zip(self._times_us, self._allowed, strict=False)
            cost_us, best = min((rows * time_us + self._cost_us[rows - size], size) for time_us, size in pairs)
        else:
            cost_us, best = rows * (self.latency_us(rows) + self._batch_us), rows
        self._cost_us.append(cost_us)
        self._next.append(best)


def batch_sizes(
    profile: ModelProfile,
    cores: int,
    max_rows: int,
    allowed: Sequence[int] = (),
    splits: bool = True,
    batch_us: float = GANG_US,
) -> BatchSizes:
    """Return the sizes for a model on so many cores, made once for a profile. `splits`: batches may be split."""
    key = (batch_sizes, cores, max_rows, tuple(allowed), splits, batch_us)
    known: BatchSizes | None = profile.derived.get(key)
    if known is None:
        table = plan_table(profile, cores, max_rows)
        measured_us = table.apart_us if splits else table.fat_us

        @cache  # asked some fifty times for a decision with a hundred waiting, of few sizes
        def latency_us(rows: int) -> float:
            """A batch that gains less than a split must gains nothing."""
            apart_us, time_us = rows * measured_us(cores, 1), measured_us(cores, rows)
            return apart_us if (1 - least_gain(profile, rows)) * apart_us < time_us < apart_us else time_us

        known = profile.derived[key] = BatchSizes(latency_us, max_rows, allowed, batch_us)
    return known
