"""How many rows the next batch of a model has, and whether it waits for more of them. Pure. Times are microseconds.

If nobody else came, batches of b1, b2, ... rows would run one after the other, and everybody waits while one runs. The
least sum of all rows' completion times, and with it the least mean latency, is

    cost(n) = min over b of n L(b) + cost(n - b)

with L(b) the time of a batch of b rows in the gangs that are best for it. A short queue gets small batches, since a row
that could be answered alone would wait for others. A long queue gets the batches with the most rows a second, since
everybody waits for everybody before. If batches gain nothing, rows go one by one.

But others come, and wait for the rows that are there. Under load rho n rows are the beginning of a busy period of
n / (1 - rho) rows: as many as flow in until the queue is empty. So the next batch is the one that so many rows would
begin with. If that is larger than n, it is the batch of at most n rows that has the most rows a second.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import cache, cached_property
from math import ceil

from gangway.executor.slots import MAX_PARTS, NEVER_JOINED
from gangway.scheduler.batching.planner import Part, PlanTable, min_gain_share, plan_table
from gangway.scheduler.messages import LoadModel
from gangway.scheduler.policies.arrival_rate import ArrivalRate
from gangway.scheduler.policy import Query
from gangway.scheduler.policy_config import BATCHING, DEFAULT
from gangway.scheduler.prediction import forecast
from gangway.scheduler.profiles import ModelProfile

NEVER_LATE = float("inf")


class BatchSizes:
    """The best next batch for each number of waiting rows, found when it is first asked for.

    `latency_us(rows)`: L. `allowed`: numbers of rows that a batch may have, ascending; empty: all up to `max_rows`. The
    last rows of a queue that are fewer than any of them go together. `batch_us`: cost of a batch beside its execution.
    """

    def __init__(
        self,
        latency_us: Callable[[int], float],
        max_rows: int,
        allowed: Sequence[int] = (),
        batch_us: float = BATCHING.gang_us,
    ) -> None:
        self.latency_us = latency_us
        self._batch_us = batch_us
        self._allowed = tuple(rows for rows in allowed if rows <= max_rows) or tuple(range(1, max_rows + 1))
        self._times_us: list[float] = []  # of the allowed sizes, as far as they were needed
        self._cost_us = [0.0]  # by waiting rows
        self._next = [0]

    def next_rows(self, waiting_rows: int, load: float = 0.0) -> int:
        """Return the size of the next batch; the smallest of equally good ones.

        `load`: share of the machine's time that the rows take that come meanwhile, in batches of the best size.
        """
        rows = min(waiting_rows, BATCHING.max_queue_rows)
        busy_rows = ceil(rows / (1.0 - min(load, BATCHING.max_load)))
        found = self._first_of(
            max(rows, min(busy_rows, BATCHING.max_busy_batches * self._allowed[-1], BATCHING.max_queue_rows))
        )
        return found if found <= rows else self._fastest(rows)

    @cached_property
    def row_us(self) -> float:
        """The least time of a row, in the batches with the most rows a second."""
        return min((self.latency_us(size) + self._batch_us) / size for size in self._allowed)

    def _first_of(self, rows: int) -> int:
        """Return the first batch of so many rows, by cost(n)."""
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
    batch_us: float = BATCHING.gang_us,
) -> BatchSizes:
    """Return the sizes for a model on so many cores, made once for a profile. `splits`: batches may be split."""
    key = (batch_sizes, cores, max_rows, tuple(allowed), splits, batch_us)
    known: BatchSizes | None = profile.derived.get(key)
    if known is None:
        table = plan_table(profile, cores, max_rows)
        measured_us = table.latency_of_single_rows_us if splits else table.one_gang_us

        @cache  # asked some fifty times for a decision with a hundred waiting, of few sizes
        def latency_us(rows: int) -> float:
            """A batch that gains less than a split must gains nothing."""
            one_by_one_us, time_us = rows * measured_us(cores, 1), measured_us(cores, rows)
            gains_too_little = (1 - min_gain_share(profile, rows)) * one_by_one_us < time_us < one_by_one_us
            return one_by_one_us if gains_too_little else time_us

        known = profile.derived[key] = BatchSizes(latency_us, max_rows, allowed, batch_us)
    return known


def is_worth_waiting(rows: int, more: int, gap_us: float, latency_us: Callable[[int], float]) -> bool:
    """Return whether `rows` rows had better wait for `more` rows that are expected in `gap_us`.

    If n rows go now, the r others wait until those are done, and then take L(r). If the n rows wait for w, they lose w
    and what the larger batch takes longer, and the others gain. In sum it pays if

        n (w + L(n + r) - L(n)) < r (max(L(n) - w, 0) + L(r) - L(n + r))

    A batch that takes no longer than a single row pays up to w = L / 2 for one row. If all who are expected have come
    it never pays: then n w is L or more.
    """
    together_us, now_us = latency_us(rows + more), latency_us(rows)
    cost_us = rows * (gap_us + together_us - now_us)
    return cost_us < more * (max(now_us - gap_us, 0.0) + latency_us(more) - together_us)


class BatchModel:
    """A model whose requests are joined or split: its settings, its rate of arrivals, the times of its batches.

    `update` comes before anything that has to do with time. A model with limits has only so many instances, and each
    gang counts as one, so its batches are not split. `dispatch_us`: what each dispatch takes of one core.
    """

    def __init__(self, spec: LoadModel, dispatch_us: float = 0.0) -> None:
        self.model_id = spec.model_id
        self.splits = spec.splits and spec.max_rows > 1 and not spec.indivisible and not spec.limits
        self.keeps_order = spec.preserve_ordering
        self.max_rows = spec.max_rows
        self.max_delay_us = spec.max_delay_us
        self.rate = ArrivalRate()
        self.min_row_us = 0.0  # one row takes at least so long; 0: not known
        self.cores = 0  # that a batch may be split over
        self.latency_us: Callable[[int], float]  # how long a batch takes on all cores, as it will be split
        self._joins = spec.joins and spec.max_rows > 1
        self._preferred = tuple(sorted(rows for rows in spec.preferred_rows if 0 < rows <= spec.max_rows))
        self._dispatch_us = dispatch_us
        self._profile: ModelProfile | None = None
        self._timed = False
        self._load = 0.0  # share of the machine's time that its requests take
        self._sizes: BatchSizes
        self._table: PlanTable

    @property
    def is_plain(self) -> bool:
        """Whether its requests are never joined, split or kept in order."""
        return not (self._joins or self.splits or self.keeps_order)

    @property
    def joins_any(self) -> bool:
        """Whether requests may be joined, unless they say otherwise."""
        return self._joins

    def joins(self, query: Query) -> bool:
        """Whether a request may be joined with others."""
        return self._joins and query.join_key < NEVER_JOINED

    def update(self, profile: ModelProfile, cores: int, prediction_error: float = 1.0, timed: bool = False) -> None:
        """Take this profile, on a machine of so many cores, for what follows.

        `prediction_error`: of its blocks lately. `timed`: what follows is about requests with a target. For them
        batches are not made larger to save dispatches: who waits for a longer batch of others may be late by it.
        """
        cores = min(cores, MAX_PARTS)
        if profile is not self._profile or cores != self.cores or timed != self._timed:
            self._profile, self.cores, self._timed = profile, cores, timed
            self._table = plan_table(profile, cores, self.max_rows)
            batch_us = BATCHING.gang_us if timed else BATCHING.gang_us + self._dispatch_us / cores
            most_rows = self.max_rows if self._joins else 1  # otherwise it may be any number
            self._sizes = batch_sizes(profile, cores, most_rows, self._preferred, self.splits, batch_us)
            self.latency_us = self._sizes.latency_us
            self.min_row_us = self.latency_us(1) if profile.measured and not profile.varies else 0.0
        if profile.measured and self.max_delay_us is None:
            self._load = self.rate.rows_per_us * self._sizes.row_us * prediction_error

    def may_delay(self, profile: ModelProfile, cores: int) -> bool:
        """Whether a request of one row that waits alone may have to wait on, with a target or without."""
        if self.keeps_order or (self._joins and self.max_delay_us):
            return True
        for timed in (False, True):
            self.update(profile, cores, timed=timed)
            if self._joins and self.gap_worth_waiting_us(1) is not None:
                return True
        return False

    def parts(self, rows: int, requests: int = 1, prediction_error: float = 1.0) -> Sequence[Part]:
        """Return the parts of a batch of so many requests. A single part has no number of cores: the policy decides."""
        whole = (Part(0, rows),)
        if not self.splits or rows == 1:
            return whole
        if requests == rows:
            plan = self._table.best_of_single_rows(self.cores, rows, prediction_error)
        else:
            plan = self._table.best(self.cores, rows)
        return plan.parts if len(plan.parts) > 1 else whole

    def time_left_us(self, query: Query, now_us: float) -> float | None:
        """Return the time until the deadline of a query; infinite if it has none; None if it will be late.

        A time that is not measured makes no query late.
        """
        if query.deadline_us is None:
            return NEVER_LATE
        left_us = query.deadline_us - now_us
        if not self.min_row_us:
            return NEVER_LATE if left_us > 0 else None
        return left_us if left_us >= self.latency_us(query.rows) else None

    def next_rows(self, waiting_rows: int) -> int:
        """Return how many of so many waiting rows the next batch should have; 0: they had better wait.

        With a configured delay as Triton does it: a preferred size at once, the largest that can be had. Without one:
        the size with the least mean latency, as far as times are measured.
        """
        assert self._profile is not None
        if self.max_delay_us is None:
            return self._sizes.next_rows(waiting_rows, self._load) if self._profile.measured else 1
        reached = [size for size in self._preferred or (self.max_rows,) if size <= waiting_rows]
        return reached[-1] if reached else 0

    def may_fill_up(self, rows: int, more_rows: int) -> bool:
        """Whether a batch of so many rows shall have `more_rows` in all, with rows that are not urgent.

        With a configured delay it shall, as Triton does it.
        """
        if self.max_delay_us is not None:
            return True
        extra_us = self.latency_us(more_rows) - self.latency_us(rows)
        return extra_us <= BATCHING.max_fill_cost_share * self.latency_us(more_rows - rows)

    def gap_worth_waiting_us(self, rows: int) -> float | None:
        """Return in what time the next request is expected if it pays that so many rows wait for it, else None."""
        gap_us, more = self.rate.gap_us, self.rate.rows
        assert self._profile is not None
        if self.max_delay_us is not None or gap_us is None or not self._profile.measured or rows + more > self.max_rows:
            return None
        if not is_worth_waiting(rows, more, gap_us, self.latency_us) or len(self.parts(rows + more)) > 1:
            return None
        known = forecast(self._profile, 0.0, rows, self.cores)
        takes_all = known.efficient_cores(DEFAULT.growth.idle_efficiency) == self.cores
        return gap_us if takes_all else None  # else there is a core for the next request anyway
