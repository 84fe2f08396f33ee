"""How many cores each query shall have, most urgent first.

Each asks for the most cores that do their work efficiently, or as many as its deadline needs if that is more: a gang
that is too large wastes cores that others need, one that is too small wastes time. Cores that nobody asks for go to the
first ones, as long as they gain by them.
"""

from collections.abc import Sequence

from gangway.scheduler.policies.gangway_order import ON_TIME
from gangway.scheduler.policy import Snapshot
from gangway.scheduler.policy_config import DEFAULT, PolicyConfig
from gangway.scheduler.prediction import Work


def ask(work: Work, snapshot: Snapshot, config: PolicyConfig = DEFAULT) -> None:
    """Set for how many cores a query asks; and, since it has only those, until when it must have begun.

    `due_us` becomes the moment by which the whole machine would have to be done with its cores x time: the deadline, if
    it asks for all cores; nearly its latest start, if it asks for few of many. A part of a batch asks for what was
    planned for it: more would be taken from the other parts, and the batch is done when all are.
    """
    if work.fixed:
        work.gang = work.cores
        return
    gang = work.query.cores
    if not gang:
        gang = work.outlook.efficient_cores(busy_efficiency(snapshot.gang_slowdown, config))
        may_grow = work.tier == ON_TIME and gang < work.most and config.deadline_gangs.enabled
        if may_grow and work.remaining_us(gang) * work.margin > work.slack_us:
            gang = max(gang, work.fewest_cores(work.slack_us / work.margin))
    work.gang = gang = gang if gang < work.most else work.most
    if work.tier == ON_TIME and config.latest_start.enabled:
        work.due_us -= work.remaining_us(gang) * work.margin * (1 - gang / snapshot.core_count)


def busy_efficiency(gang_slowdown: float, config: PolicyConfig) -> float:
    """Return what each core of a gang must do by the profile, of which gangs of several cores fall short by so much."""
    slowdown = gang_slowdown if config.gang_slowdown.enabled else 1.0
    step = config.shares.efficiency_step
    return min(1.0, round(config.shares.busy_efficiency * slowdown / step) * step)


def share_out(ordered: Sequence[Work], core_count: int, leases: int, config: PolicyConfig = DEFAULT) -> None:
    """Grant cores in this order, first as many as are asked for, then what is left.

    A query that has not started yet and finds no lease gets none.
    """
    left = core_count
    for work in ordered:
        if work.fixed:
            left -= work.cores
    able = _able(ordered, leases)
    for work in able:
        work.grant = grant = work.gang if work.gang < left else left
        left -= grant
        if left <= 0:
            return
    for work in able:
        if left <= 0 or not config.growth.enabled:
            return
        if work.query.cores and work.block is None:
            continue  # beside the other parts of its batch it has what it needs; later it may grow
        more = min(left, work.outlook.efficient_cores(config.growth.idle_efficiency) - work.grant)
        if more > 0:
            work.grant += more
            left -= more


def _able(ordered: Sequence[Work], leases: int) -> list[Work]:
    """Set the grants of what nothing changes, and return the others that can run, in order."""
    able = []
    for work in ordered:
        if work.fixed:
            work.grant = work.cores
        elif work.block is not None or work.query.started:
            able.append(work)
        elif leases > 0:
            leases -= 1
            able.append(work)
    return able
