"""Which stopped queries give up what they hold: leases and memory are for those that can be in time.

A query that is stopped for a more urgent one may lose its deadline while it waits. In an overload most do, and then
wait for long: the more of them, the fewer leases are left for those that come, in the end none.
"""

from collections.abc import Sequence
from typing import Final

from gangway.scheduler.policies.gangway_order import BEHIND
from gangway.scheduler.prediction import Work

STOPPED_PER_CORE: Final = 2  # late queries that may wait in the middle


def stopped_in_vain(works: Sequence[Work], core_count: int) -> list[Work]:
    """Return the stopped late queries beyond so many: those that have least to lose."""
    stopped = [
        work
        for work in works
        if work.tier == BEHIND and work.query.started and work.block is None and work.query.deadline_us is not None
    ]
    stopped.sort(key=lambda work: (_done_us(work), -work.query.query_id))
    return stopped[: max(0, len(stopped) - STOPPED_PER_CORE * core_count)]


def _done_us(work: Work) -> float:
    return work.outlook.whole_us[0] - work.remaining_us(1)
