"""What the former knows of one model: its settings, how often it is asked, how long its batches take. Pure."""

from collections.abc import Callable, Sequence

from gangway.executor.slots import MAX_PARTS, NEVER_JOINED
from gangway.scheduler.arrival_rate import ArrivalRate
from gangway.scheduler.batching.hold import pays
from gangway.scheduler.batching.size import BatchSizes, batch_sizes
from gangway.scheduler.batching.split import GANG_US
from gangway.scheduler.batching.waves import Part, PlanTable, plan_table
from gangway.scheduler.control import LoadModel
from gangway.scheduler.model_profile import ModelProfile
from gangway.scheduler.policies.gangway_shares import IDLE_EFFICIENCY
from gangway.scheduler.policy import Query
from gangway.scheduler.prediction import efficient_cores

NEVER_LATE = float("inf")
CHEAP = 0.5  # of the time that they would take alone may rows cost that fill up a batch


class BatchModel:
    """A model whose requests are joined or split. Call `see` before anything that has to do with time.

    `limited`: it has only so many instances, and each gang counts as one; so nothing is split. `dispatch_us`: what of a
    core each dispatch takes.
    """

    def __init__(self, spec: LoadModel, dispatch_us: float = 0.0) -> None:
        self.model_id = spec.model_id
        self.splits = spec.splits and spec.max_rows > 1 and not spec.indivisible and not spec.limits
        self.keeps_order = spec.preserve_ordering
        self.max_rows = spec.max_rows
        self.max_delay_us = spec.max_delay_us
        self.rate = ArrivalRate()
        self.sure_us = 0.0  # one row takes at least so long; 0: not known
        self._joins = spec.joins and spec.max_rows > 1
        self._preferred = tuple(sorted(rows for rows in spec.preferred_rows if 0 < rows <= spec.max_rows))
        self._dispatch_us = dispatch_us
        self._profile: ModelProfile | None = None
        self._timed = False
        self._load = 0.0  # the part of the machine's time that its requests take
        self.cores = 0  # that a batch may be split over
        self.latency_us: Callable[[int], float]  # how long a batch takes on all cores, as it will be split
        self._sizes: BatchSizes
        self._table: PlanTable

    @property
    def is_plain(self) -> bool:
        """Whether its requests are none of the former's business."""
        return not (self._joins or self.splits or self.keeps_order)

    def joins(self, query: Query) -> bool:
        """Whether a request may be joined with others."""
        return self._joins and query.join_key < NEVER_JOINED

    def may_hold(self, cores: int) -> bool:
        """Whether a request of one row that waits alone may have to wait on although one of so many cores is free."""
        return self.keeps_order or (self._joins and (self.max_delay_us is not None or cores == 1))

    def see(self, profile: ModelProfile, cores: int, stretch: float = 1.0, timed: bool = False) -> None:
        """Take this profile, on a machine of so many cores, for what follows. `stretch`: of its blocks lately.

        `timed`: it is about requests with a target. For them batches are not made larger to save dispatches: who waits
        for a longer batch of others may be late by it.
        """
        cores = min(cores, MAX_PARTS)
        if profile is not self._profile or cores != self.cores or timed != self._timed:
            self._profile, self.cores, self._timed = profile, cores, timed
            self._table = plan_table(profile, cores, self.max_rows)
            batch_us = GANG_US if timed else GANG_US + self._dispatch_us / cores
            most_rows = self.max_rows if self._joins else 1  # otherwise it may be any number
            self._sizes = batch_sizes(profile, cores, most_rows, self._preferred, self.splits, batch_us)
            self.latency_us = self._sizes.latency_us
            self.sure_us = self.latency_us(1) if profile.measured and not profile.varies else 0.0
        if profile.measured and self.max_delay_us is None:
            self._load = self.rate.rows_per_us * self._sizes.row_us * stretch

    def parts(self, rows: int, requests: int = 1, stretch: float = 1.0) -> Sequence[Part]:
        """Return what gangs do of a batch of so many requests.

        Of a single part cores are 0: as many as the policy likes. `stretch`: of the model's blocks lately.
        """
        whole = (Part(0, rows),)
        if not self.splits or rows == 1:
            return whole
        apart = requests == rows
        plan = self._table.apart(self.cores, rows, stretch) if apart else self._table.best(self.cores, rows)
        parts = plan.parts
        return parts if len(parts) > 1 else whole

    def time_left_us(self, query: Query, now_us: float) -> float | None:
        """Return how much time is left until it must be done; infinite if nothing is asked; None if it will be late.

        What is not measured is no reason to call a query late.
        """
        if query.deadline_us is None:
            return NEVER_LATE
        left_us = query.deadline_us - now_us
        if not self.sure_us:
            return NEVER_LATE if left_us > 0 else None
        return left_us if left_us >= self.latency_us(query.rows) else None

    def wanted_rows(self, rows: int) -> int:
        """Return how many of so many waiting rows the next batch should have; 0: what there is had better wait.

        With a configured delay as Triton does it: a preferred size at once, the largest that can be had. Without:
        whatever gives the least mean latency, as far as that is known.
        """
        assert self._profile is not None
        if self.max_delay_us is None:
            return self._sizes.next_rows(rows, self._load) if self._profile.measured else 1
        reached = [size for size in self._preferred or (self.max_rows,) if size <= rows]
        return reached[-1] if reached else 0

    def fills_up(self, rows: int, more_rows: int) -> bool:
        """Whether a batch of so many rows shall have `more_rows` in all, with rows that are not urgent.

        With a configured delay it shall, as Triton does it.
        """
        if self.max_delay_us is not None:
            return True
        extra_us = self.latency_us(more_rows) - self.latency_us(rows)
        return extra_us <= CHEAP * self.latency_us(more_rows - rows)

    def rewarding_gap_us(self, rows: int) -> float | None:
        """Return in what time the next request is expected if it pays that so many rows wait for it, else None."""
        gap_us, more = self.rate.gap_us, self.rate.rows
        assert self._profile is not None
        if self.max_delay_us is not None or gap_us is None or not self._profile.measured or rows + more > self.max_rows:
            return None
        if not pays(rows, more, gap_us, self.latency_us) or len(self.parts(rows + more)) > 1:
            return None
        takes_all = efficient_cores(self._profile, 0.0, rows, self.cores, IDLE_EFFICIENCY) == self.cores
        return gap_us if takes_all else None  # else there is a core for the next request anyway
