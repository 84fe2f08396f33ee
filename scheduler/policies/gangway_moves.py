"""How the `gangway` policy gets from what runs to what should run: who starts, stops, grows, shrinks and makes room."""

from collections.abc import Sequence

from gangway.scheduler.policies.gangway_blocks import BlockPlanner
from gangway.scheduler.policies.gangway_jobs import BEST_EFFORT, BRIEF, ON_TIME, PROMOTED, Job
from gangway.scheduler.policy import Decision, Resize, Snapshot, Start, Stop, Wake
from gangway.scheduler.policy_config import DEFAULT, SWITCH_US, Growth, PolicyConfig, StopAtOnce

REASONS = {
    BRIEF: "brief: it delays others by next to nothing",
    ON_TIME: "earliest deadline of those that can be met",
    PROMOTED: "promoted: it is late, and no other becomes late by it, or it has waited for too long",
}
OTHERWISE = "best effort: no request that can meet its deadline needs the cores"


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
