"""The default policy: gangs that grow and yield, by deadlines. docs/explanation/scheduling.md explains it.

How many cores and for how long follows VELTAIR's profile (ASPLOS 2022), who goes next Layerweaver+'s slack (IEICE
2022). A decision takes three steps:

1. who goes next, and who is given up so that the others are in time (`gangway_order`, and `gangway_overload` for
   queries to come and those that waited for long);
2. how many cores each shall have (`ask` and `share_out`);
3. what starts, stops, grows and shrinks for that (`gangway_moves`, with the plans of `gangway_blocks`).
"""

import heapq
from collections.abc import Mapping, Sequence

from gangway.artifact.precision import DEADLINE
from gangway.executor.fast_path import Completed
from gangway.scheduler.policies.base import Policy
from gangway.scheduler.policies.gangway_jobs import AHEAD, BEST_EFFORT, ON_TIME, DecisionContext, Job, JobTable
from gangway.scheduler.policies.gangway_moves import moves
from gangway.scheduler.policies.gangway_order import classify, in_order
from gangway.scheduler.policies.gangway_overload import (
    Aging,
    ArrivalOrder,
    Brief,
    FairnessWeights,
    Foresight,
    excess_stopped,
)
from gangway.scheduler.policy import Decision, LoneStart, Query, Snapshot, StartOver
from gangway.scheduler.policy_config import DEFAULT, ERROR, Planning, PolicyConfig
from gangway.scheduler.profiles import ModelProfile

START_OVER = "too many stopped requests are late and hold memory"


class Gangway(Policy):
    """Orders all queries, shares out the cores in this order, and moves from what is to what should be."""

    name = "gangway"
    batches = True

    def __init__(self, config: PolicyConfig = DEFAULT) -> None:
        self.config = config
        self._arrival_order = ArrivalOrder(config.late_bound)
        self._aging = Aging(config.aging)
        self._brief = Brief(config.brief)
        self._foresight = Foresight(config)
        self._fairness = FairnessWeights(config.fairness)
        self._jobs = JobTable(config)

    def decide(self, snapshot: Snapshot) -> Sequence[Decision]:
        """Return how to get from what is to what should be."""
        if not snapshot.waiting and (not snapshot.free_cores or not snapshot.running):
            return ()
        config = self.config
        waiting = candidates(snapshot.waiting, snapshot.now_us, snapshot.core_count, snapshot.models, config.planning)
        self._aging.settle(snapshot)
        jobs = self._jobs.at(snapshot, waiting)
        classify(jobs, config.virtual_deadlines)
        self._foresight.give_up(jobs, snapshot)
        self._arrival_order.promote(jobs, snapshot)
        self._aging.promote(jobs, snapshot)
        any_brief = self._brief.promote(jobs, snapshot)
        over = excess_stopped(jobs, snapshot.core_count, config.restarts)
        if over:
            jobs = [job for job in jobs if job not in over]
        self._fairness.weigh(jobs)
        for job in jobs:
            ask(job)
        ordered = jobs
        if len(jobs) > 1:
            ordered = in_order(jobs, config)
        share_out(ordered, snapshot.core_count, snapshot.free_leases + len(over), config)
        decisions: list[Decision] = [StartOver(job.query.query_id, START_OVER) for job in over]
        decisions += moves(ordered, snapshot, config)
        if any_brief:
            self._brief.charge(ordered, snapshot.core_count)
        return decisions

    def lone_start(self, model: ModelProfile, core_count: int, level: float) -> LoneStart | None:
        """Return what `decide` would return. Without growth only a decision can say, which knows gangs' slowdown."""
        return lone_start(model, core_count, level, self.config) if self.config.growth.enabled else None

    def arrived(self, query: Query) -> None:
        """Note how much is asked for."""
        self._arrival_order.arrived(query)
        self._foresight.arrived(query)

    def finished(self, query: Query, now_us: float) -> None:
        """Note whether a deadline was met."""
        self._arrival_order.finished(query, now_us)
        self._fairness.note(query, now_us)

    def answered(self, model_id: int, requests: Sequence[Completed], first_id: int) -> None:
        """Note the same of requests that it has not seen."""
        if self._arrival_order.answered(model_id, requests):
            self._foresight.answered(model_id, requests)
            self._fairness.note_each(model_id, requests)
        else:
            super().answered(model_id, requests, first_id)


def candidates(
    waiting: Sequence[Query],
    now_us: float,
    core_count: int,
    models: Mapping[int, ModelProfile],
    config: Planning = DEFAULT.planning,
) -> Sequence[Query]:
    """Return the waiting queries to be planned: all, or of very many those that may be served next.

    These are the ones that have begun, those whose deadlines come first, the oldest that are late, brief and others,
    and the oldest without a deadline. A higher class comes before a lower one. One pass over the queries, with little
    work for each.
    """
    most = max(config.min_queries, core_count)
    if len(waiting) <= 2 * most or not config.enabled:
        return waiting
    brief = {number for number, model in models.items() if model.at(DEADLINE).is_brief}
    found: list[Query] = []
    classes: dict[int, _Fresh] = {}
    for query in waiting:
        if query.started:
            found.append(query)
            continue
        fresh = classes.get(query.priority)
        if fresh is None:
            fresh = classes[query.priority] = _Fresh()
        deadline_us = query.deadline_us
        if deadline_us is not None and deadline_us > now_us:
            fresh.possible.append(query)
            continue
        kind = fresh.late
        if deadline_us is None:
            kind = fresh.best_effort
        elif query.model_id in brief:
            kind = fresh.brief
        if len(kind) < core_count:
            kind.append(query)
    for priority in sorted(classes):
        fresh = classes[priority]
        found += heapq.nsmallest(most, fresh.possible, key=_deadline_us)
        found += fresh.late
        found += fresh.brief
        found += fresh.best_effort
        if len(found) >= most:
            break
    return found


class _Fresh:
    """Queries of one class that have not begun: those that may be in time, and the oldest of the others."""

    __slots__ = ("best_effort", "brief", "late", "possible")

    def __init__(self) -> None:
        self.possible: list[Query] = []
        self.late: list[Query] = []
        self.brief: list[Query] = []
        self.best_effort: list[Query] = []


def _deadline_us(query: Query) -> float:
    return query.deadline_us or 0.0


def ask(job: Job) -> None:
    """Set for how many cores a query asks; and, since it has only those, until when it must have begun.

    `due_us` becomes the moment by which the whole machine would have to be done with its cores x time: the deadline, if
    it asks for all cores; nearly its latest start, if it asks for few of many. A part of a batch asks for what was
    planned for it: more would be taken from the other parts, and the batch is done when all are.
    """
    context, margin, slack_us = job.context, job.margin, job.slack_us
    config, most = context.config, job.most
    gang, rest_us = job.usual, job.usual_us * margin
    if job.fixed:
        gang = job.cores
        rest_us = job.remaining_us(gang) * margin
    if (
        rest_us > slack_us > 0
        and job.tier in (AHEAD, ON_TIME)
        and gang < most
        and not (job.fixed or job.query.cores)
        and config.deadline_gangs.enabled
    ):
        gang = max(gang, job.cores_within(slack_us / margin))
        rest_us = job.remaining_us(gang) * margin
    job.gang = gang
    job.area_us = rest_us * gang / context.core_count
    if job.tier == ON_TIME and config.latest_start.enabled and not job.fixed:
        job.due_us -= rest_us * (1 - gang / context.core_count)


def share_out(ordered: Sequence[Job], core_count: int, leases: int, config: PolicyConfig = DEFAULT) -> None:
    """Grant cores in this order, first as many as are asked for, then what is left.

    A query that has not started yet and finds no lease gets none.
    """
    left = core_count
    for job in ordered:
        if job.fixed:
            left -= job.cores
    able = _able(ordered, leases)
    for job in able:
        job.grant = grant = job.gang if job.gang < left else left
        left -= grant
        if left <= 0:
            return
    for job in able:
        if left <= 0 or not config.growth.enabled:
            return
        if job.query.cores and job.block is None:
            continue  # beside the other parts of its batch it has what it needs; later it may grow
        more = min(left, job.idle - job.grant)
        if more > 0:
            job.grant += more
            left -= more


def _able(ordered: Sequence[Job], leases: int) -> list[Job]:
    """Set the grants of what nothing changes, and return the others that can run, in order."""
    able = []
    for job in ordered:
        if job.fixed:
            job.grant = job.cores
        elif job.block is not None or job.query.started:
            able.append(job)
        elif leases > 0:
            leases -= 1
            able.append(job)
    return able


def lone_start(model: ModelProfile, core_count: int, level: float, config: PolicyConfig = DEFAULT) -> LoneStart:
    """Return how a query of one row begins that waits alone, whatever its class, and whether it has a deadline."""
    query, free = Query(0, model.model_id, 1, 0.0, None), tuple(range(core_count))
    snapshot = Snapshot(0.0, (query,), (), free, core_count, {model.model_id: model}, level)
    job = Job(query, None, DecisionContext(snapshot, config))
    job.tier = BEST_EFFORT
    ask(job)
    share_out([job], core_count, 1, config)
    may_grow = job.grant < job.most
    least_us = job.remaining_us(job.grant) * max(config.prediction.min_margin_factor, ERROR.max_factor)
    return LoneStart(job.grant, job.forecast.table.versions_on(job.grant), may_grow, least_us if may_grow else 0.0)
