"""From what is to what should be: which queries start, stop, grow and shrink now.

A running query makes room only if that saves more than it costs: see `should_preempt`.
"""

from collections.abc import Sequence

from gangway.scheduler.policies.gangway_order import AGED, AT_RISK, BACKFILL, BEST_EFFORT, BRIEF, ON_TIME, machine_us
from gangway.scheduler.policy import Decision, Resize, Snapshot, Start, Stop, Wake
from gangway.scheduler.policy_config import DEFAULT, SWITCH_US, Growth, PolicyConfig, StopAtOnce
from gangway.scheduler.prediction import INFINITE, Work

REASONS = {BRIEF: "takes next to nothing", ON_TIME: "next by deadline", BACKFILL: "late, and nobody else will be by it"}
OTHERWISE = "nobody with a deadline to meet needs the cores"


def moves(ordered: Sequence[Work], snapshot: Snapshot, config: PolicyConfig = DEFAULT) -> list[Decision]:
    """Return the decisions that lead to the grants, as far as they save more than they cost."""
    decisions: list[Decision] = []
    free, short = _starts(ordered, snapshot, decisions)
    if short:
        if config.preemption.enabled:
            _make_room(ordered, short, snapshot, decisions, config)
    elif free and config.growth.enabled:
        _grow(ordered, free, decisions, config.growth)
    return decisions


def _starts(
    ordered: Sequence[Work], snapshot: Snapshot, decisions: list[Decision]
) -> tuple[tuple[int, ...], list[Work]]:
    """Start waiting queries on free cores; return the cores left and those that got too few, most urgent first."""
    free = snapshot.free_cores
    short = []
    for work in ordered:
        if work.block is not None or not work.grant:
            continue
        gang, free = free[: work.grant], free[work.grant :]
        if gang:
            decisions.append(_start(work, gang))
            work.cores = len(gang)
        if len(gang) < work.grant:
            short.append(work)
    return free, short


def _start(work: Work, gang: tuple[int, ...]) -> Start:
    query, versions = work.query, work.outlook.versions
    if versions and query.next_layer:
        versions = versions[query.next_layer :]
        versions = versions if any(versions) else ()
    return Start(query.query_id, work.model.layers, gang, versions, work.grant, REASONS.get(work.tier, OTHERWISE))


def _make_room(
    ordered: Sequence[Work],
    short: Sequence[Work],
    snapshot: Snapshot,
    decisions: list[Decision],
    config: PolicyConfig,
) -> None:
    """Let running queries yield cores to those that got too few, the least urgent ones first."""
    missing = sum(work.grant for work in short) - len(snapshot.free_cores)
    missing -= sum(len(block.cores) for block in snapshot.running if block.stopping)
    first = short[0]
    for victim in reversed(ordered):
        if missing <= 0:
            break
        if victim.block is None or victim.fixed or victim.grant >= victim.cores:
            continue
        if should_preempt(first, victim, config) or (
            config.rescue.enabled and _saves_several(ordered, victim, snapshot.core_count)
        ):
            decisions.append(_yield(victim, first.tier == BRIEF, config.stop_at_once))
            victim.fixed = True
            missing -= victim.cores - victim.grant
    wake_us = min(
        (work.slack_us - work.least_us * work.margin - SWITCH_US for work in short if work.tier == ON_TIME),
        default=float("inf"),
    )
    if config.preemption.min_wake_us < wake_us < float("inf"):
        decisions.append(Wake(snapshot.now_us + wake_us))


def _yield(victim: Work, to_brief: bool, config: StopAtOnce) -> Decision:
    """Return how it makes room. `to_brief`: a boundary that should have come already is not waited for."""
    block = victim.block
    assert block is not None
    boundary_us = victim.boundary_us()
    far = config.enabled and (boundary_us > config.min_boundary_us or (to_brief and boundary_us <= 0.0))
    if victim.grant and not far:
        return Resize(block.query.query_id, block.cores[: victim.grant], "others need the cores")
    return Stop(block.query.query_id, far, "others go first")


def should_preempt(first: Work, victim: Work, config: PolicyConfig = DEFAULT) -> bool:
    """Return whether taking cores from a running query now is better than waiting for its end.

    - A higher class always preempts a lower one. In a class, nobody is preempted with less than a switch to go.
    - `BRIEF` and `AGED` preempt all but each other; `BEST_EFFORT` victims yield to `ON_TIME` and better.
    - An `AT_RISK` or `BACKFILL` victim yields to a query that it would make late, if its cores x time / weight are more
      than twice that query's: it may still be in time, so it is one deadline for another.
    - An `ON_TIME` victim yields if it is in time all the same, and saves a deadline by it; or gives up only some of its
      cores; or if its wait x isolated latency is more than what the other one takes, times that one's.
    """
    if first.query.priority != victim.query.priority:
        return first.query.priority < victim.query.priority
    wait_us = victim.remaining_us(victim.cores)
    if wait_us <= SWITCH_US or first.tier > ON_TIME:
        return False
    if first.tier == BRIEF:
        return True
    if victim.tier == AGED:
        return False
    if first.tier == AGED or victim.tier == BEST_EFFORT:
        return True
    first_us = first.remaining_us(first.grant)
    saves = first.tier != BACKFILL and wait_us + first_us * first.margin > first.slack_us
    if victim.tier != ON_TIME:
        factor = config.trading.min_length_factor
        longer = wait_us * victim.cores / victim.weight > factor * first_us * first.grant / first.weight
        return saves and longer and config.trading.enabled
    if not can_spare(victim, first_us, victim.grant):
        return False
    if saves or victim.grant > 0:
        return True
    shortens = wait_us * victim.isolated_us > (first_us + SWITCH_US) * first.isolated_us
    return shortens and config.latency_preemption.enabled


def can_spare(victim: Work, first_us: float, cores: int) -> bool:
    """Return whether a running query is in time if it goes on with so many cores; none: later, after `first_us`."""
    delay_us = 0.0 if cores else first_us + SWITCH_US
    return delay_us + victim.remaining_us(cores or victim.cores) * victim.margin <= victim.slack_us


def _saves_several(ordered: Sequence[Work], victim: Work, core_count: int) -> bool:
    """Return whether taking its cores from a query that was given up saves more deadlines than its own.

    Counted are those that are in time by the plan, which is without it, and late if it goes on to its end.
    """
    if victim.tier not in (AT_RISK, BACKFILL):
        return False
    planned_us = victim.remaining_us(victim.cores) * victim.cores / core_count
    late = 0
    for work in ordered:
        if work.tier == ON_TIME and work.block is None and work.query.priority == victim.query.priority:
            planned_us += machine_us(work, core_count)
            late += planned_us > work.slack_us
    return late > (not victim.is_lost)


def _grow(ordered: Sequence[Work], free: tuple[int, ...], decisions: list[Decision], config: Growth) -> None:
    """Let running queries have more cores where that pays."""
    for work in ordered:
        if not free:
            return
        block = work.block
        if block is None or work.fixed or work.grant <= work.cores:
            continue
        joining = free[: work.grant - work.cores]
        rest_us = work.remaining_us(work.cores)
        gain_us = rest_us - work.remaining_us(work.cores + len(joining))
        if gain_us > max(config.min_gain_us, config.min_gain_share * rest_us):
            free = free[len(joining) :]
            decisions.append(Resize(block.query.query_id, block.cores + joining, "idle cores"))


def yields_in_us(works: Sequence[Work]) -> float:
    """Return for how long nobody who runs would yield to a newcomer with a deadline; 0 if somebody would at once.

    `works`: after `moves`. By `should_preempt`: `BEST_EFFORT`, and who was given up, may yield at once. An `ON_TIME`
    query yields only what it can spare, to a query as short as the shortest that is there; if it runs longer than
    predicted, it is given up when its slack is gone. Who is leaving anyway is not asked.
    """
    shortest_us = min(work.isolated_us for work in works)
    found_us = INFINITE
    for work in works:
        if not work.cores or work.fixed:
            continue
        if work.tier != ON_TIME or can_spare(work, shortest_us, 0) or (work.cores > 1 and can_spare(work, 0.0, 1)):
            return 0.0
        found_us = min(found_us, work.slack_us - work.remaining_us(work.cores) * work.margin)
    return max(0.0, found_us)
