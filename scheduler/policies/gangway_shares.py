"""How many cores each query shall have, most urgent first.

Each asks for the most cores that do their work efficiently, or as many as its deadline needs if that is more: a gang
that is too large wastes cores that others need, one that is too small wastes time. Cores that nobody asks for go to the
first ones, as long as they gain by them.
"""

from collections.abc import Sequence

from gangway.scheduler.policies.gangway_order import IN_TIME
from gangway.scheduler.policy import Snapshot
from gangway.scheduler.prediction import Work, efficient_cores

EFFICIENCY = 0.7  # of each core of a gang, against one alone, while others want cores
IDLE_EFFICIENCY = 0.25  # while nobody does


def ask(work: Work, snapshot: Snapshot, margin: float) -> None:
    """Set for how many cores a query asks."""
    if work.fixed:
        work.gang = work.cores
        return
    gang = efficient_cores(work.model, work.level, work.query.rows, snapshot.core_count, EFFICIENCY)
    if work.tier == IN_TIME and gang < work.most and work.remaining_us(gang) * margin > work.slack_us:
        gang = max(gang, work.fewest_cores(work.slack_us / margin))
    work.gang = gang


def share_out(ordered: Sequence[Work], snapshot: Snapshot, margin: float) -> None:
    """Grant cores in this order, first as many as are asked for, then what is left."""
    left = snapshot.core_count
    for work in ordered:
        if work.fixed:
            work.grant = work.cores
            left -= work.cores
    for work in ordered:
        if left <= 0:
            return
        if not work.fixed:
            work.grant = min(work.gang, left)
            left -= work.grant
    for work in ordered:
        if left <= 0:
            return
        if not work.fixed:
            rows, count = work.query.rows, snapshot.core_count
            widest = efficient_cores(work.model, work.level, rows, count, IDLE_EFFICIENCY)
            more = min(left, max(0, widest - work.grant))
            work.grant += more
            left -= more
