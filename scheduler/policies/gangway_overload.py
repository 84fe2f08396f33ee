"""Overload: who is given up for queries to come, who weighs more, who starts over, and who goes before all others.

Of the `gangway` policy. A decision calls these in turn (`gangway.Gangway.decide`): `Foresight`, `Aging`, `Brief`,
`excess_stopped`, `FairnessWeights`. A budget is time of the whole machine: it fills with a share of the time that
passes, up to what may be spent at once.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter

from gangway.artifact.precision import DEADLINE
from gangway.executor.fast_path import Completed
from gangway.scheduler import policy_config
from gangway.scheduler.policies.arrival_rate import ArrivalRate
from gangway.scheduler.policies.gangway_jobs import (
    AHEAD,
    BEST_EFFORT,
    BRIEF,
    INFINITE,
    ON_TIME,
    PROMOTED,
    Job,
    busy_efficiency,
)
from gangway.scheduler.policy import Query, Snapshot
from gangway.scheduler.policy_config import ARRIVALS, SWITCH_US, PolicyConfig
from gangway.scheduler.prediction import forecast
from gangway.scheduler.profiles import ModelProfile


@dataclass(slots=True)
class _Kind:
    """The requests of a model and a class that have a deadline: how many come, and how long it is until then."""

    rate: ArrivalRate = field(default_factory=ArrivalRate)
    target_us: float = 0.0

    def arrived(self, arrival_us: float, rows: int, deadline_us: float) -> None:
        self._note_target(deadline_us - arrival_us)
        self.rate.arrived(arrival_us, rows)

    def arrived_each(self, timed: Sequence[tuple[float, float]]) -> None:
        """Note arrival and deadline of each of several requests of one row."""
        for arrival_us, deadline_us in timed:
            self._note_target(deadline_us - arrival_us)
        self.rate.arrived_each([arrival_us for arrival_us, _ in timed], 1)

    def _note_target(self, target_us: float) -> None:
        self.target_us += (target_us - self.target_us) * (ARRIVALS.gain if self.target_us else 1.0)


class _Load:
    """What a kind takes: `share` of the time of the whole machine."""

    __slots__ = ("priority", "share", "target_us")

    def __init__(self, priority: int, target_us: float, share: float) -> None:
        self.priority = priority
        self.target_us = target_us
        self.share = share


class Foresight:
    """Gives up a query if needed time > slack - time that earlier deadlines will take, while the load is full.

    Moore and Hodgson's algorithm (`gangway.in_order`) plans with the queries that are there. A long query has a long
    time to meet its deadline, and shorter ones with earlier deadlines come meanwhile. In an overload it begins whenever
    nobody else waits, yields again and again, and is late in the end: what it took is wasted. So it is given up early.
    """

    def __init__(self, config: PolicyConfig = policy_config.DEFAULT) -> None:
        self._config = config
        self._kinds: dict[tuple[int, int], _Kind] = {}  # by model and class
        self._loads: list[_Load] = []
        self._is_full = False
        self._review_us = 0.0

    def arrived(self, query: Query) -> None:
        """A request has come."""
        if query.deadline_us is not None:
            self._kind(query.model_id, query.priority).arrived(query.arrival_us, query.rows, query.deadline_us)

    def answered(self, model_id: int, requests: Sequence[Completed]) -> None:
        """Note the same of requests of one row to one model."""
        for priority, group in groupby(requests, attrgetter("priority")):
            timed = [(each.arrival_us, each.deadline_us) for each in group if each.deadline_us is not None]
            if timed:
                self._kind(model_id, priority).arrived_each(timed)

    def _kind(self, model_id: int, priority: int) -> _Kind:
        return self._kinds.setdefault((model_id, priority), _Kind())

    def give_up(self, jobs: list[Job], snapshot: Snapshot) -> None:
        """Move those from `ON_TIME` to `BEST_EFFORT` for whom the others will leave too little of the machine."""
        if not self._config.foresight.enabled:
            return
        if snapshot.now_us >= self._review_us:
            self._review(snapshot)
        if not self._is_full:
            return
        for job in jobs:
            if job.tier == ON_TIME and _needed_us(job, snapshot.core_count) > self._left_us(job):
                job.tier = BEST_EFFORT

    def _left_us(self, job: Job) -> float:
        """Return how much of its slack the machine has, but for what will come meanwhile and go first."""
        slack_us, priority = job.slack_us, job.query.priority
        left_us = slack_us
        for load in self._loads:
            if load.priority < priority:
                left_us -= load.share * slack_us
            elif load.priority == priority and load.target_us < slack_us:
                left_us -= load.share * (slack_us - load.target_us)
        return left_us

    def _review(self, snapshot: Snapshot) -> None:
        now_us = snapshot.now_us
        self._review_us = now_us + self._config.foresight.review_us
        for key in [key for key in self._kinds if key[0] not in snapshot.models]:
            del self._kinds[key]
        efficiency = busy_efficiency(snapshot.gang_slowdown, self._config)
        self._loads = [
            _Load(
                priority,
                kind.target_us,
                kind.rate.rows_per_us_at(now_us) * self._row_us(model_id, snapshot, efficiency),
            )
            for (model_id, priority), kind in self._kinds.items()
        ]
        self._is_full = sum(load.share for load in self._loads) >= self._config.foresight.min_load

    def _row_us(self, model_id: int, snapshot: Snapshot, efficiency: float) -> float:
        """Return how long the whole machine has to do with a row, in gangs as a query asks for."""
        model = snapshot.models[model_id].at(DEADLINE)
        known = forecast(model, 0.0, 1, snapshot.core_count)
        gang = known.efficient_cores(efficiency)
        margin = self._config.prediction.min_margin_factor
        if self._config.prediction_error.enabled:
            margin = snapshot.prediction_errors.get(model.model_id, margin)
        return known.whole_us[gang - 1] * margin * gang / snapshot.core_count


def _needed_us(job: Job, core_count: int) -> float:
    """Return how long the whole machine has to do with a query that has all cores that it can use."""
    return job.least_us * job.margin * job.most / core_count


ROUNDING_US = 1.0  # of sums over all requests
MAX_ANSWERED = 65_536  # requests that order of arrival would have answered, and that may still wait; a bound


class ArrivalOrder:
    """Bounds how long a late query waits: by `factor` times what order of arrival would have made it wait.

    As much work gets done in any order. So order of arrival would have answered a request when as much has been done as
    had arrived with it. Work is time on a single core, as predicted: what it takes in reality is the same in any order.
    """

    def __init__(self, config: policy_config.LateBound = policy_config.DEFAULT.late_bound) -> None:
        self._config = config
        self._models: Mapping[int, ModelProfile] = {}
        self._queue: deque[tuple[float, float]] = deque()  # arrival, and all work that had arrived with it
        self._arrived_us = 0.0
        self._done_us = 0.0
        self._since_us = INFINITE  # when the first request came that counts
        self._due_us: dict[float, float] = {}  # by arrival, of those that order of arrival would have answered

    def arrived(self, query: Query) -> None:
        """A request has come."""
        if (model := self._asked(query)) is not None:
            self._since_us = min(self._since_us, query.arrival_us)
            self._arrived_us += model.work_us(query.rows)
            self._queue.append((query.arrival_us, self._arrived_us))

    def finished(self, query: Query, now_us: float) -> None:
        """A query was answered."""
        model = self._asked(query)
        if model is None or query.arrival_us < self._since_us:
            return
        self._done_us = min(self._arrived_us, self._done_us + model.work_us(query.rows))
        while self._queue and self._queue[0][1] <= self._done_us + ROUNDING_US:
            arrival_us = self._queue.popleft()[0]
            wait_us = now_us - arrival_us
            if wait_us <= self._config.max_wait_us and arrival_us != query.arrival_us:
                self._due_us[arrival_us] = arrival_us + self._config.factor * wait_us
        if len(self._due_us) > MAX_ANSWERED:
            self._due_us.clear()

    def answered(self, model_id: int, requests: Sequence[Completed]) -> bool:
        """Note requests of one row that have come, and were answered one after the other; False: others wait or run.

        Nothing is noted then. Otherwise each of them was its own turn, and only the sums of work change.
        """
        if self._queue:
            return False
        if (model := self._models.get(model_id)) is not None:
            self._since_us = min(self._since_us, *[request.arrival_us for request in requests])
            work_us = model.work_us(1) * len(requests)
            self._arrived_us += work_us
            self._done_us = min(self._arrived_us, self._done_us + work_us)
        return True

    def _asked(self, query: Query) -> ModelProfile | None:
        """Return the times of a request as it came, whatever it is computed in."""
        model = self._models.get(query.model_id)
        return model if model is None or query.deadline_us is None else model.at(DEADLINE)

    def promote(self, jobs: Sequence[Job], snapshot: Snapshot) -> None:
        """Let late queries go first that would wait for longer, and before them those that are far shorter."""
        self._models = snapshot.models
        if not self._config.enabled:
            return
        self._forget(snapshot)
        if max(len(snapshot.waiting), snapshot.waiting_count) > self._config.max_waiting:
            self._due_us.clear()
        due_us = self._due_us
        overdue = [job for job in jobs if job.query.arrival_us in due_us and self._is_due(job)] if due_us else ()
        if not overdue:
            return
        shorter_us = min(job.least_us for job in overdue) * self._config.shorter_share
        for job in jobs:
            if job.tier in (ON_TIME, BEST_EFFORT) and job.query.deadline_us is not None:
                job.tier = AHEAD if job.least_us <= shorter_us else job.tier
        for job in overdue:
            job.due_us = due_us[job.query.arrival_us]
            waited_on_us = snapshot.now_us - job.due_us  # shorter ones go ahead for as long again, no longer
            job.tier = PROMOTED if waited_on_us < job.due_us - job.query.arrival_us else AHEAD

    def _is_due(self, job: Job) -> bool:
        """Return whether a late query has to begin now to be answered when it is due."""
        if job.tier != BEST_EFFORT or not job.is_lost or job.query.deadline_us is None:
            return False
        return self._due_us[job.query.arrival_us] <= job.context.now_us + job.remaining_us(1)

    def _forget(self, snapshot: Snapshot) -> None:
        """Take out what came before all that waits and runs: it has left, with an answer or without."""
        oldest_us = snapshot.oldest_us
        if oldest_us is None:
            oldest_us = snapshot.waiting[0].arrival_us if snapshot.waiting else snapshot.now_us
        oldest_us = min([oldest_us, *[block.query.arrival_us for block in snapshot.running]])
        while self._queue and self._queue[0][0] < oldest_us:
            self._done_us = max(self._done_us, self._queue.popleft()[1])
        while self._due_us and (arrival_us := next(iter(self._due_us))) < oldest_us:
            del self._due_us[arrival_us]


class Aging:
    """Nothing starves: the oldest query behind its virtual deadline goes first while the budget has time.

    Best effort and late queries have half of it each, if there are both: of the hundreds of late ones that an overload
    leaves, some would always be behind for longer.
    """

    def __init__(self, config: policy_config.AgingConfig = policy_config.DEFAULT.aging) -> None:
        self._config = config
        self._budget_us = config.burst_us
        self._updated_us = 0.0
        self._served: Job | None = None  # the query that is served from the budget, as it was decided
        self._late_lead_us = 0.0  # so much more than best effort the late ones had lately

    def settle(self, snapshot: Snapshot) -> None:
        """Bring the budget up to date: since the last decision the query had the cores that it was granted."""
        if not self._config.enabled:
            return
        served, burst_us = self._served, self._config.burst_us
        passed_us = snapshot.now_us - self._updated_us
        self._updated_us = snapshot.now_us
        used_us = passed_us * served.grant / snapshot.core_count if served else 0.0
        self._budget_us = min(burst_us, self._budget_us + passed_us * self._config.machine_share - used_us)
        if served is not None:
            lead_us = self._late_lead_us + (used_us if served.query.deadline_us is not None else -used_us)
            self._late_lead_us = max(-burst_us, min(burst_us, lead_us))

    def promote(self, jobs: Sequence[Job], snapshot: Snapshot) -> None:
        """Let the query that has been behind for longest go first, if the budget has time for it.

        It is served until the budget is empty, and again when half of it is full.
        """
        if not self._config.enabled:
            return
        served, self._served = self._served, None
        behind = [job for job in jobs if job.tier == BEST_EFFORT and job.is_lost and job.due_us < snapshot.now_us]
        if not behind:
            return
        serving = served is not None and any(job.query.query_id == served.query.query_id for job in behind)
        if self._budget_us > (0.0 if serving else self._config.burst_us / 2):
            self._served = chosen = self._next(behind, served if serving else None)
            chosen.tier = PROMOTED

    def _next(self, behind: Sequence[Job], served: Job | None) -> Job:
        """Return the one that is served already, or else the oldest of the kind that had less."""
        if served is not None:
            return next(job for job in behind if job.query.query_id == served.query.query_id)
        due = [job for job in behind if (job.query.deadline_us is None) == (self._late_lead_us >= 0.0)]
        return min(due or behind, key=attrgetter("due_us"))


class Brief:
    """A brief query with a deadline goes first, late or not: to run it costs no more than to stop somebody for it.

    By deadlines it would wait behind long queries as soon as it is late, and a target of a millisecond is soon missed
    where others have the cores. The budget bounds what that costs the others.
    """

    def __init__(self, config: policy_config.BriefConfig = policy_config.DEFAULT.brief) -> None:
        self._config = config
        self._budget_us = config.burst_us
        self._updated_us = 0.0

    def promote(self, jobs: Sequence[Job], snapshot: Snapshot) -> bool:
        """Let brief queries with a deadline go before all others of their class, while the budget has time.

        Where all are brief, nothing changes. Return whether there may be any.
        """
        config = self._config
        if not config.enabled:
            return False
        passed_us = snapshot.now_us - self._updated_us
        self._updated_us = snapshot.now_us
        self._budget_us = min(config.burst_us, self._budget_us + passed_us * config.machine_share)
        brief = [job for job in jobs if job.model.is_brief and job.query.deadline_us is not None]
        if not brief or len(brief) == len(jobs) or self._budget_us <= 0.0:
            return False
        for job in brief:
            if job.least_us <= SWITCH_US:  # a batch may take more
                job.tier = BRIEF
        return True

    def charge(self, jobs: Sequence[Job], core_count: int) -> None:
        """Let those pay that begin now, as `moves` has decided: for what they take, and for a switch."""
        for job in jobs:
            if job.tier == BRIEF and job.block is None:
                self._budget_us -= (job.least_us + SWITCH_US) * job.cores / core_count


def excess_stopped(jobs: Sequence[Job], core_count: int, config: policy_config.Restarts) -> list[Job]:
    """Return the stopped late queries beyond so many for each core: those that have computed least.

    A query that is stopped for a more urgent one may lose its deadline while it waits. In an overload most do, and wait
    for long with their leases and memory, until none is left for those that come.
    """
    if not config.enabled:
        return []
    stopped = [
        job
        for job in jobs
        if job.tier == BEST_EFFORT
        and job.is_lost
        and job.query.deadline_us is not None
        and job.query.started
        and job.block is None
    ]
    excess = len(stopped) - config.max_stopped_per_core * core_count
    if excess <= 0:
        return []
    stopped.sort(key=lambda job: (_done_us(job), -job.query.query_id))
    return stopped[:excess]


def _done_us(job: Job) -> float:
    return job.forecast.whole_us[0] - job.remaining_us(1)


class FairnessWeights:
    """What a deadline of a model weighs: 1, or more the further the model is below the goal.

    Whoever gives up the longest query first gives up those of the same models always. So a model that misses its goal
    weighs more, until others take their turn.
    """

    def __init__(self, config: policy_config.Fairness = policy_config.DEFAULT.fairness) -> None:
        self._config = config
        self._in_time: dict[int, float] = {}  # share of each model's deadlines that were met lately
        self._weights: dict[int, float] = {}  # of the models below the goal

    def note(self, query: Query, now_us: float) -> None:
        """A query was answered."""
        if query.deadline_us is not None:
            self._note(query.model_id, (now_us <= query.deadline_us,))

    def note_each(self, model_id: int, requests: Sequence[Completed]) -> None:
        """Requests to one model were answered."""
        self._note(model_id, [each.end_us <= each.deadline_us for each in requests if each.deadline_us is not None])

    def _note(self, model_id: int, in_time: Sequence[bool]) -> None:
        """Take into account which deadlines of a model were met, one after the other."""
        config = self._config
        share = before = self._in_time.get(model_id, 1.0)
        if not config.enabled or not in_time or (before == 1.0 and all(in_time)):
            return
        for met in in_time:
            share += config.gain * (met - share)
        self._in_time[model_id] = share
        if share < config.goal_share:
            weight = 1.0 + config.weight_per_share * (config.goal_share - share)
            self._weights[model_id] = min(config.max_weight, weight)
        else:
            self._weights.pop(model_id, None)

    def weigh(self, jobs: list[Job]) -> None:
        """Set what each query's deadline weighs."""
        if self._weights:
            for job in jobs:
                job.weight = self._weights.get(job.query.model_id, 1.0)
