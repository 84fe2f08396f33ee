"""How many cores each query shall have, most urgent first.

Each asks for the most cores that do their work efficiently, or as many as its deadline needs if that is more: a gang
that is too large wastes cores that others need, one that is too small wastes time. Cores that nobody asks for go to the
first ones, as long as they gain by them.
"""

from collections.abc import Sequence

from gangway.scheduler.policies.gangway_order import IN_TIME
from gangway.scheduler.policy import Snapshot
from gangway.scheduler.prediction import Work, efficient_cores

EFFICIENCY = 0.75  # of each core of a gang, against one alone, while others want cores
IDLE_EFFICIENCY = 0.25  # while nobody does
RESERVED_LEASES = 2  # for queries that can be in time


def ask(work: Work, snapshot: Snapshot, margin: float) -> None:
    """Set for how many cores a query asks."""
    if work.fixed:
        work.gang = work.cores
        return
    gang = efficient_cores(work.model, work.level, work.query.rows, snapshot.core_count, EFFICIENCY)
    if work.tier == IN_TIME and gang < work.most and work.remaining_us(gang) * margin > work.slack_us:
        gang = max(gang, work.fewest_cores(work.slack_us / margin))
    work.gang = gang


def share_out(ordered: Sequence[Work], snapshot: Snapshot) -> None:
    """Grant cores in this order, first as many as are asked for, then what is left.

    A query that has not started yet and finds no lease gets none. The last leases are for those that can be in time:
    stopped queries hold theirs, and if all did, an urgent one could not begin.
    """
    left = snapshot.core_count - sum(work.cores for work in ordered if work.fixed)
    able = _able(ordered, snapshot.free_leases)
    for work in able:
        if left <= 0:
            return
        work.grant = min(work.gang, left)
        left -= work.grant
    for work in able:
        if left <= 0:
            return
        rows, count = work.query.rows, snapshot.core_count
        widest = efficient_cores(work.model, work.level, rows, count, IDLE_EFFICIENCY)
        more = min(left, max(0, widest - work.grant))
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
        elif leases > (0 if work.tier <= IN_TIME else RESERVED_LEASES):
            leases -= 1
            able.append(work)
    if not able and leases:
        return [work for work in ordered if not work.fixed][:1]
    return able
