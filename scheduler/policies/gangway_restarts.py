"""Which stopped queries give up what they hold: leases and memory are for those that can be in time.

A query that is stopped for a more urgent one may lose its deadline while it waits. In an overload most do, and then
wait for long: the more of them, the fewer leases are left for those that come, in the end none.
"""

from typing import Final

from gangway.scheduler.policies.gangway_order import BEHIND
from gangway.scheduler.policy import Decision, StartOver
from gangway.scheduler.prediction import Work

STOPPED_PER_CORE: Final = 2  # late queries that may wait in the middle
REASON: Final = "too many that are late were stopped"


def start_over(works: list[Work], core_count: int, decisions: list[Decision]) -> list[Work]:
    """Let stopped late queries beyond so many start over, those that have least to lose; return the other works."""
    stopped = [
        work
        for work in works
        if work.tier == BEHIND and work.query.started and work.block is None and work.query.deadline_us is not None
    ]
    excess = len(stopped) - STOPPED_PER_CORE * core_count
    if excess <= 0:
        return works
    stopped.sort(key=lambda work: (_done_us(work), -work.query.query_id))
    decisions += [StartOver(work.query.query_id, REASON) for work in stopped[:excess]]
    gone = set(map(id, stopped[:excess]))
    return [work for work in works if id(work) not in gone]


def _done_us(work: Work) -> float:
    return work.outlook.whole_us[0] - work.remaining_us(1)
