"""Turns of Python models: who has had a core for long leaves it to others that wait.

Nothing stops a Python model's `execute`, but its worker can leave it: it goes on with little weight, and asks for a
core again (`executor/python_instance.py`). So no request of one model holds up another model for longer than a turn.
Pure: no clock, no process.
"""

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

from gangway.executor.slots import GOES_ON
from gangway.scheduler.policy import Query

DUE_TURN_US: Final = 4_000.0  # before a query with a deadline: a switch costs .3 to 1 ms
TURN_US: Final = 10_000.0  # before others: most runs end in that time, and few switches are lost to them
TURNS_TO_END: Final = 2  # for who usually ends in so many turns: no switch is paid for its last milliseconds


class Holder(NamedTuple):
    """A query of a Python model that has cores since `started_us`. `usual_us`: what such a query takes."""

    query: Query
    started_us: float
    usual_us: float


def over(
    waiting: Sequence[Query], holders: Sequence[Holder], leaving: int, now_us: float
) -> tuple[list[int], float | None]:
    """Return the numbers of the queries whose turn is over, and when the next one's is (None: nobody's).

    `waiting`: could begin if a core were free, and none is. So many cores are `leaving` already. Each of those that
    wait takes one from the holder that has had it for longest, if it may go before that.
    """
    left = sorted(holders, key=lambda holder: holder.started_us)
    ended: list[int] = []
    next_us = math.inf
    for query in sorted(waiting, key=_urgency)[leaving : leaving + len(holders)]:
        holder = next((holder for holder in left if _goes_before(query, holder.query)), None)
        if holder is None:
            continue
        end_us = _end_us(holder, TURN_US if query.deadline_us is None else DUE_TURN_US)
        if now_us >= end_us:
            ended.append(holder.query.query_id)
        else:
            next_us = min(next_us, end_us)
        left.remove(holder)
    return ended, None if next_us == math.inf else next_us


def first_end_us(holders: Sequence[Holder], turn_us: float) -> float:
    """Return when one of these, which have turns of this length, may leave its core to a newcomer at the earliest."""
    return min((_end_us(holder, turn_us) for holder in holders), default=math.inf)


def _end_us(holder: Holder, turn_us: float) -> float:
    ends_in_more = turn_us < holder.usual_us <= TURNS_TO_END * turn_us
    return holder.started_us + (TURNS_TO_END * turn_us if ends_in_more else turn_us)


def _urgency(query: Query) -> tuple[int, float]:
    return query.priority, math.inf if query.deadline_us is None else query.deadline_us


def _goes_before(query: Query, holder: Query) -> bool:
    """Whether it is more urgent; or as urgent, and of another model, or the holder has had a turn before."""
    if _urgency(query) != _urgency(holder):
        return _urgency(query) < _urgency(holder)
    return query.model_id != holder.model_id or holder.join_key == GOES_ON
