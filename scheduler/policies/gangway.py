"""The default policy: gangs that grow and yield, by deadlines. docs/explanation/scheduling.md explains it.

How many cores and for how long follows VELTAIR's profile (ASPLOS 2022), who goes next Layerweaver+'s slack (IEICE
2022). A decision takes three steps, in this order in the file:

1. `classify` and `in_order`: who goes first, and who is given up so that the others are in time;
2. `ask` and `share_out`: how many cores each shall have;
3. `moves`: what starts, stops, grows and shrinks for that.

`gangway_overload` adds who is given up for queries to come, and who goes before all others for a bounded share of the
time. Priority classes go strictly first. Within a class a query is of one of these tiers:

- `BRIEF`: it computes no longer than a switch takes, late or not, within a bounded share of the machine;
- `AHEAD`: it is shorter by half than all late queries that have waited for too long;
- `PROMOTED`: it has waited for too long, within a share of the machine, or it is late, shorter than all `ON_TIME` ones,
  and none of these is late if it goes first;
- `ON_TIME`: it is in time if all of this tier run in order of their deadlines;
- `BEST_EFFORT`: it is given up so that the others are in time, or has no deadline to meet, but a virtual one.
"""

import heapq
from collections.abc import Mapping, Sequence

from gangway.executor.fast_path import Completed
from gangway.scheduler.policies.base import Policy
from gangway.scheduler.policies.gangway_blocks import BlockPlanner
from gangway.scheduler.policies.gangway_overload import (
    Aging,
    ArrivalOrder,
    Brief,
    FairnessWeights,
    Foresight,
    excess_stopped,
)
from gangway.scheduler.policy import Decision, LoneStart, Query, Resize, Snapshot, Start, StartOver, Stop, Wake
from gangway.scheduler.policy_config import (
    DEFAULT,
    ERROR,
    SWITCH_US,
    Growth,
    Planning,
    PolicyConfig,
    StopAtOnce,
    VirtualDeadlines,
)
from gangway.scheduler.prediction import (
    AHEAD,
    BEST_EFFORT,
    BRIEF,
    ON_TIME,
    PROMOTED,
    DecisionContext,
    Job,
    JobTable,
)
from gangway.scheduler.profiles import ModelProfile

REASONS = {
    BRIEF: "brief: it delays others by next to nothing",
    ON_TIME: "earliest deadline of those that can be met",
    PROMOTED: "promoted: it is late, and no other becomes late by it, or it has waited for too long",
}
OTHERWISE = "best effort: no request that can meet its deadline needs the cores"
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


def classify(jobs: Sequence[Job], config: VirtualDeadlines = DEFAULT.virtual_deadlines) -> None:
    """Set tier and due time of each: `BEST_EFFORT`, or (so far) `ON_TIME`."""
    for job in jobs:
        query = job.query
        if query.deadline_us is None or job.is_lost:
            job.tier, job.due_us = BEST_EFFORT, virtual_due_us(query, job.request_us, config)
        else:
            job.tier, job.due_us = ON_TIME, query.deadline_us


def virtual_due_us(query: Query, isolated_us: float, config: VirtualDeadlines) -> float:
    """Return when a query that has no deadline, or cannot meet it, should be answered all the same."""
    if query.deadline_us is None:
        return query.arrival_us + max(config.best_effort_min_us, config.best_effort_factor * isolated_us)
    return query.arrival_us + config.late_factor * max(query.deadline_us - query.arrival_us, isolated_us)


def rank(job: Job) -> tuple[int, int, bool, float, int]:
    """Return the key by which queries are served. Of best effort, who was given up or has begun goes first."""
    query = job.query
    is_new = job.tier == BEST_EFFORT and job.is_lost and job.block is None and not query.started
    return (query.priority, job.tier, is_new, job.due_us, query.query_id)


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
    brief = {number for number, model in models.items() if model.is_brief}
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


def in_order(jobs: Sequence[Job], config: PolicyConfig = DEFAULT) -> list[Job]:
    """Return the queries most urgent first, after giving up those that cannot be saved together with the others."""
    ordered = sorted(jobs, key=rank)
    given_up = config.triage.enabled and _give_up(ordered)
    if (config.backfill.enabled and _backfill(ordered)) or given_up:
        ordered.sort(key=rank)
    return ordered


def _give_up(ordered: Sequence[Job]) -> bool:
    """Move queries to `BEST_EFFORT`, until the others are in time; return whether there were any.

    Moore and Hodgson's algorithm (1968) over cores x time: whenever the next one in order of deadlines would be late,
    the one with the largest time / weight so far is given up. They are as few as possible if all weigh the same.
    """
    if _all_in_time(ordered):
        return False
    planned_us = 0.0  # of the whole machine
    kept: list[tuple[float, int, float, Job]] = []  # heap, the largest time / weight on top
    found = False
    for index, job in enumerate(ordered):
        if job.tier != ON_TIME:
            if job.tier < ON_TIME:
                planned_us += job.area_us
            continue
        area_us = job.area_us
        if area_us > job.slack_us:
            job.tier = BEST_EFFORT
            found = True
            continue
        planned_us += area_us
        heapq.heappush(kept, (-area_us / job.weight, index, area_us, job))
        if planned_us > job.slack_us:
            _, _, given_up_us, given_up = heapq.heappop(kept)
            planned_us -= given_up_us
            given_up.tier = BEST_EFFORT
            found = True
    return found


def _all_in_time(ordered: Sequence[Job]) -> bool:
    """Return whether all `ON_TIME` queries are in time in this order: the usual case, found without a heap."""
    planned_us = 0.0
    for job in ordered:
        if job.tier <= ON_TIME:
            planned_us += job.area_us
            if job.tier == ON_TIME and planned_us > job.slack_us:
                return False
    return True


def _backfill(ordered: Sequence[Job]) -> bool:
    """Let late queries go before longer ones that can spare the time; return whether there were any.

    A lost deadline is no reason to wait for everybody else: mean latency counts, and how late it gets. Lengths are
    rest x isolated latency, since a wait counts by the share of the isolated latency that it is. Queries behind their
    virtual deadline are left out: of the hundreds that an overload leaves, one would always fit.
    """
    context = ordered[0].context
    late = [
        job
        for job in ordered
        if job.tier == BEST_EFFORT and job.query.deadline_us is not None and job.due_us > context.now_us
    ]
    if not late:
        return False
    if all(job.tier != ON_TIME for job in ordered):  # nobody can become late by it
        for job in late:
            job.tier = PROMOTED
        return True
    planned_us, spare_us, shortest = 0.0, float("inf"), float("inf")
    for job in ordered:
        if job.tier <= ON_TIME:
            planned_us += job.area_us
        if job.tier == ON_TIME:
            done_within_us = job.due_us - context.now_us - context.way_back_us  # less than its slack for a narrow gang
            spare_us = min(spare_us, done_within_us - planned_us)
            shortest = min(shortest, _length(job))
    found = False
    for job in sorted(late, key=_length):
        area_us = job.area_us
        if area_us <= spare_us and _length(job) < shortest:
            spare_us -= area_us
            job.tier = PROMOTED
            found = True
    return found


def _length(job: Job) -> float:
    return job.least_us * job.isolated_us


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


def moves(ordered: Sequence[Job], snapshot: Snapshot, config: PolicyConfig = DEFAULT) -> list[Decision]:
    """Return the decisions that lead to the grants, as far as they save more than they cost."""
    decisions: list[Decision] = []
    planner = BlockPlanner(ordered, config)
    free, short = _starts(ordered, snapshot, decisions, planner)
    if short:
        if config.preemption.enabled:
            _make_room(ordered, short, snapshot, decisions, planner, config)
    elif free and config.growth.enabled:
        _grow(ordered, free, decisions, planner, config.growth)
    if planner.may_change:
        resized = [decision.query_id for decision in decisions if isinstance(decision, Resize)]
        decisions += planner.changes(ordered, resized)
    return decisions


def _starts(
    ordered: Sequence[Job], snapshot: Snapshot, decisions: list[Decision], planner: BlockPlanner
) -> tuple[tuple[int, ...], list[Job]]:
    """Start waiting queries on free cores; return the cores left and those that got too few, most urgent first."""
    free = snapshot.free_cores
    short = []
    for job in ordered:
        if job.block is not None or not job.grant:
            continue
        gang, free = free[: job.grant], free[job.grant :]
        if gang:
            decisions.append(_start(job, gang, planner))
            job.cores = len(gang)
        if len(gang) < job.grant:
            short.append(job)
    return free, short


def _start(job: Job, gang: tuple[int, ...], planner: BlockPlanner) -> Start:
    versions, blocks = planner.versions(job, len(gang)), planner.blocks(job, len(gang))
    reason = REASONS.get(job.tier, OTHERWISE)
    return Start(job.query.query_id, job.model.layers, gang, versions, job.grant, reason, blocks)


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


def _make_room(
    ordered: Sequence[Job],
    short: Sequence[Job],
    snapshot: Snapshot,
    decisions: list[Decision],
    planner: BlockPlanner,
    config: PolicyConfig,
) -> None:
    """Let running queries yield cores to those that got too few, the least urgent ones first."""
    missing = sum(job.grant for job in short) - len(snapshot.free_cores)
    missing -= sum(len(block.cores) for block in snapshot.running if block.stopping)
    first = short[0]
    for victim in reversed(ordered):
        if missing <= 0:
            break
        if victim.block is None or victim.fixed or victim.grant >= victim.cores:
            continue
        if should_preempt(first, victim, config):
            decisions.append(_yield(victim, first.tier == BRIEF, planner, config.stop_at_once))
            victim.fixed = True
            missing -= victim.cores - victim.grant
    wake_us = min(
        (job.slack_us - job.least_us * job.margin - SWITCH_US for job in short if job.tier == ON_TIME),
        default=float("inf"),
    )
    if config.preemption.min_wake_us < wake_us < float("inf"):
        decisions.append(Wake(snapshot.now_us + wake_us))


def _yield(victim: Job, to_brief: bool, planner: BlockPlanner, config: StopAtOnce) -> Decision:
    """Return how it makes room. `to_brief`: a boundary that should have come already is not waited for."""
    block = victim.block
    assert block is not None
    boundary_us = victim.boundary_us()
    far = config.enabled and (boundary_us > config.min_boundary_us or (to_brief and boundary_us <= 0.0))
    if victim.grant and not far:
        return _resize(victim, block.cores[: victim.grant], "requests that go first need the other cores", planner)
    return Stop(block.query.query_id, far, "requests that go first need the cores")


def should_preempt(first: Job, victim: Job, config: PolicyConfig = DEFAULT) -> bool:
    """Return whether taking cores from a running query now is better than waiting for its end.

    - A higher class always preempts a lower one. In a class, nobody is preempted with less than a switch to go.
    - `BRIEF` preempts all; `BEST_EFFORT` victims that have no deadline to meet yield to `ON_TIME` and better.
    - A `PROMOTED` victim yields only to a query that is less than half as long. One that is behind its due time
      preempts no others.
    - A victim that was given up yields to a query that it would make late, if its cores x time / weight are more than
      twice that query's: it may still be in time, so it is one deadline for another.
    - An `ON_TIME` victim yields if it is in time all the same, and saves a deadline by it; or gives up only some of its
      cores; or if its wait x isolated latency is more than what the other one takes, times that one's.
    """
    if first.query.priority != victim.query.priority:
        return first.query.priority < victim.query.priority
    wait_us = victim.remaining_us(victim.cores)
    if wait_us <= SWITCH_US or first.tier > ON_TIME:
        return False
    if first.tier == BRIEF or (victim.tier == BEST_EFFORT and victim.is_lost):
        return True
    if victim.tier == PROMOTED:
        return first.least_us <= config.late_bound.shorter_share * wait_us
    if first.tier == PROMOTED and first.due_us <= first.context.now_us:
        return False
    first_us = first.remaining_us(first.grant)
    saves = first.tier != PROMOTED and wait_us + first_us * first.margin > first.slack_us
    if victim.tier == BEST_EFFORT:
        factor = config.trading.min_length_factor
        longer = wait_us * victim.cores / victim.weight > factor * first_us * first.grant / first.weight
        return saves and longer and config.trading.enabled
    if not can_spare(victim, first_us, victim.grant):
        return False
    if saves or victim.grant > 0:
        return True
    shortens = wait_us * victim.isolated_us > (first_us + SWITCH_US) * first.isolated_us
    return shortens and config.latency_preemption.enabled


def can_spare(victim: Job, first_us: float, cores: int) -> bool:
    """Return whether a running query is in time if it goes on with so many cores; none: later, after `first_us`."""
    delay_us = 0.0 if cores else first_us + SWITCH_US
    return delay_us + victim.remaining_us(cores or victim.cores) * victim.margin <= victim.slack_us


def _resize(job: Job, cores: tuple[int, ...], reason: str, planner: BlockPlanner) -> Resize:
    running, versions, blocks = job.block, planner.versions(job, len(cores)), planner.blocks(job, len(cores))
    if running is not None and (versions, blocks) == (running.versions, running.blocks):
        return Resize(job.query.query_id, cores, reason)
    return Resize(job.query.query_id, cores, reason, versions, blocks)


def _grow(
    ordered: Sequence[Job], free: tuple[int, ...], decisions: list[Decision], planner: BlockPlanner, config: Growth
) -> None:
    """Let running queries have more cores where that pays."""
    for job in ordered:
        if not free:
            return
        block = job.block
        if block is None or job.fixed or job.grant <= job.cores:
            continue
        joining = free[: job.grant - job.cores]
        rest_us = job.remaining_us(job.cores)
        gain_us = rest_us - job.remaining_us(job.cores + len(joining))
        if gain_us > max(config.min_gain_us, config.min_gain_share * rest_us):
            free = free[len(joining) :]
            decisions.append(_resize(job, block.cores + joining, "it can use idle cores", planner))
