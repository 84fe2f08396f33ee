"""Waiting requests of one model and kind, and the batches that are made of them. Pure.

Those that can be in time come first, by deadline; then the others, by arrival. So a batch is filled up with those that
are late already, but nobody is made late by them.
"""

import heapq
from collections.abc import Sequence
from itertools import accumulate
from operator import attrgetter

from gangway.executor.leases import MAX_MEMBERS
from gangway.scheduler.batching.model import NEVER_LATE, BatchModel
from gangway.scheduler.policy import Query
from gangway.scheduler.prediction import MARGIN


class Line:
    """The requests in order; `hopeful` of them, the first ones, have a deadline that they can meet.

    `waiting`, with so many `rows`, is in order of arrival. If the model keeps that order the members are, too, and
    nobody is sorted out as hopeful. Of a long queue only the first `most` hopeful ones and others are looked at.
    `stretch`: predictions were exceeded by this lately.
    """

    def __init__(
        self,
        waiting: Sequence[Query],
        rows: int,
        most: int,
        model: BatchModel,
        now_us: float,
        way_back_us: float,
        stretch: float,
    ) -> None:
        done_us = now_us + way_back_us
        self.hopeful = 0
        if not model.keeps_order and len(waiting) > 2 * most:
            waiting = _first(waiting, most, done_us + model.sure_us)
        timed = [(query, model.time_left_us(query, done_us)) for query in waiting]
        if not model.keeps_order:
            timed.sort(key=_urgency)
            self.hopeful = sum(query.deadline_us is not None and left_us is not None for query, left_us in timed)
        self.members = [query for query, _ in timed]
        self._left_us = [left_us for _, left_us in timed]
        self._before = list(accumulate((query.rows for query in self.members), initial=0))  # rows before a member
        self._rows = rows
        self._model = model
        self._now_us = now_us
        self._margin = max(MARGIN, stretch)

    def batches(self, most: int, may_wait: bool) -> tuple[list[tuple[int, int]], float | None]:
        """Return the next batches as (begin, end) of members, and until when the others wait for company, if they do.

        At most so many, and one more of those that are late if the others leave them none. `may_wait`: nobody else
        wants the cores.
        """
        found: list[tuple[int, int]] = []
        begin, end = 0, len(self.members)
        while begin < end and len(found) < most:
            rows = self._model.wanted_rows(self._rows - self._before[begin])
            if not rows:
                held_until_us = self._delayed_until_us(begin)
                if held_until_us > self._now_us:
                    return found, held_until_us
                rows = self._model.max_rows
            found.append((begin, self._take(begin, rows)))
            begin = found[-1][1]
        if may_wait and found == [(0, end)]:
            held_until_us = self._expected_us()
            if held_until_us > self._now_us:
                return [], held_until_us
        if begin < self.hopeful < end:
            rows = self._model.wanted_rows(self._rows - self._before[self.hopeful])
            found.append((self.hopeful, self._take(self.hopeful, rows)))
        return found, None

    def deadline_us(self, begin: int, end: int) -> float | None:
        """Return the earliest deadline of these members that can be met; the earliest at all if none can."""
        known = [
            (left_us is None, query.deadline_us)
            for query, left_us in zip(self.members[begin:end], self._left_us[begin:end], strict=True)
            if query.deadline_us is not None
        ]
        return min(known)[1] if known else None

    def _take(self, begin: int, wanted_rows: int) -> int:
        """Return the end of a batch that begins with this member. Whole requests only, but at least one.

        Nobody who would be in time alone becomes late by the batch.
        """
        bound_us = self._bound_us(begin)
        for end in range(begin + 1, min(len(self.members), begin + MAX_MEMBERS)):
            rows = self._before[end + 1] - self._before[begin]
            bound_us = min(bound_us, self._bound_us(end))
            if rows > wanted_rows or (bound_us < NEVER_LATE and self._stretched_us(rows) > bound_us):
                return end
        return min(len(self.members), begin + MAX_MEMBERS)

    def _delayed_until_us(self, begin: int) -> float:
        """When the configured delay of the oldest of the rest is over."""
        oldest_us = min(query.arrival_us for query in self.members[begin:])
        return min(oldest_us + (self._model.max_delay_us or 0.0), self._patience_us(0))

    def _expected_us(self) -> float:
        """When the next request is expected, if waiting for it pays; else the past."""
        gap_us = self._model.rewarding_gap_us(self._rows)
        if gap_us is None:
            return -NEVER_LATE
        latest_us = max(query.arrival_us for query in self.members)
        return min(latest_us + gap_us, self._patience_us(self._model.rate.rows))

    def _patience_us(self, more: int) -> float:
        """Until when all members can wait and be in time in one batch with so many further rows."""
        bound_us = min(self._bound_us(index) for index in range(len(self.members)))
        return self._now_us + bound_us - self._stretched_us(min(self._rows + more, self._model.max_rows))

    def _bound_us(self, index: int) -> float:
        """How long a member's batch may take; any time if the member is late even alone, as things usually go."""
        left_us = self._left_us[index]
        if left_us is None or left_us == NEVER_LATE or self._stretched_us(self.members[index].rows) > left_us:
            return NEVER_LATE
        return left_us

    def _stretched_us(self, rows: int) -> float:
        return self._model.latency_us(rows) * self._margin


def _first(waiting: Sequence[Query], most: int, done_us: float) -> list[Query]:
    """Return those with the earliest deadlines from the time on when one row would be done, and the oldest others."""
    hopeful = [query for query in waiting if query.deadline_us is not None and query.deadline_us >= done_us]
    others = [query for query in waiting if query.deadline_us is None or query.deadline_us < done_us]
    return heapq.nsmallest(most, hopeful, key=attrgetter("deadline_us")) + others[:most]


def _urgency(timed: tuple[Query, float | None]) -> tuple[float, float]:
    query, left_us = timed
    deadline_us = NEVER_LATE if query.deadline_us is None or left_us is None else query.deadline_us
    return deadline_us, query.arrival_us
