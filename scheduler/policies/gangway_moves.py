"""From what is to what should be: which queries start, stop, grow and shrink now.

A running query makes room only if that is worth it: see `worth_it`.
"""

from collections.abc import Sequence

from gangway.scheduler.policies.gangway_order import AGED, AT_RISK, BACKFILL, BEST_EFFORT, BRIEF, ON_TIME, machine_us
from gangway.scheduler.policy import Decision, Resize, Snapshot, Start, Stop, Wake
from gangway.scheduler.prediction import Work
from gangway.scheduler.profiles import SWITCH_US

LONGER = 2.0  # a query that was given up yields to a single one if it still takes so many times as much
FAR_US = 300.0  # a layer boundary that is farther away is not waited for
LEAST_GAIN_US = 150.0  # growing must save so much,
LEAST_GAIN = 0.03  # and such a share of the rest
EARLIEST_WAKE_US = 50.0
REASONS = {BRIEF: "takes next to nothing", ON_TIME: "next by deadline", BACKFILL: "late, and nobody else will be by it"}
OTHERWISE = "nobody with a deadline to meet needs the cores"


def moves(ordered: Sequence[Work], snapshot: Snapshot) -> list[Decision]:
    """Return the decisions that lead to the grants, as far as they are worth it."""
    decisions: list[Decision] = []
    free, short = _starts(ordered, snapshot, decisions)
    if short:
        _make_room(ordered, short, snapshot, decisions)
    elif free:
        _grow(ordered, free, decisions)
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


def _make_room(ordered: Sequence[Work], short: Sequence[Work], snapshot: Snapshot, decisions: list[Decision]) -> None:
    """Let running queries yield cores to those that got too few, the least urgent ones first."""
    missing = sum(work.grant for work in short) - len(snapshot.free_cores)
    missing -= sum(len(block.cores) for block in snapshot.running if block.stopping)
    first = short[0]
    for victim in reversed(ordered):
        if missing <= 0:
            break
        if victim.block is None or victim.fixed or victim.grant >= victim.cores:
            continue
        if worth_it(first, victim) or _saves_several(ordered, victim, snapshot.core_count):
            decisions.append(_yield(victim, first.tier == BRIEF))
            victim.fixed = True
            missing -= victim.cores - victim.grant
    wake_us = min(
        (work.slack_us - work.least_us * work.margin - SWITCH_US for work in short if work.tier == ON_TIME),
        default=float("inf"),
    )
    if EARLIEST_WAKE_US < wake_us < float("inf"):
        decisions.append(Wake(snapshot.now_us + wake_us))


def _yield(victim: Work, hurried: bool) -> Decision:
    """Return how it makes room. `hurried`: a boundary that should have come already is not waited for."""
    block = victim.block
    assert block is not None
    boundary_us = victim.boundary_us()
    far = boundary_us > FAR_US or (hurried and boundary_us <= 0.0)
    if victim.grant and not far:
        return Resize(block.query.query_id, block.cores[: victim.grant], "others need the cores")
    return Stop(block.query.query_id, far, "others go first")


def worth_it(first: Work, victim: Work) -> bool:
    """Return whether taking cores from a running query now is better than waiting for its end.

    For a higher class it always is, for one that takes next to nothing, and for a query that can be in time if the
    other is lost. One that was given up may still be in time if it goes on: then it is one deadline for another, and
    the time counts that the longer one would take from those who come meanwhile. Otherwise it must save more deadlines
    than it costs; if it costs none, shorter latencies count, each in proportion to the isolated one.
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
        longer = wait_us * victim.cores / victim.worth > LONGER * first_us * first.grant / first.worth
        return saves and longer
    if not can_spare(victim, first_us, victim.grant):
        return False
    return saves or victim.grant > 0 or wait_us * victim.isolated_us > (first_us + SWITCH_US) * first.isolated_us


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


def _grow(ordered: Sequence[Work], free: tuple[int, ...], decisions: list[Decision]) -> None:
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
        if gain_us > max(LEAST_GAIN_US, LEAST_GAIN * rest_us):
            free = free[len(joining) :]
            decisions.append(Resize(block.query.query_id, block.cores + joining, "idle cores"))
