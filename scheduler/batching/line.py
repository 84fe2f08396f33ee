"""Waiting requests of one model and kind, and the batches that are made of them. Pure.

Those that can be in time come first, by deadline; then the others, by arrival. A batch is filled up with those that are
late already where this costs little, but nobody is made late by them.
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from gangway.executor.leases import MAX_MEMBERS
from gangway.scheduler.batching.model import NEVER_LATE, BatchModel
from gangway.scheduler.policy import Query
from gangway.scheduler.prediction import MARGIN


class Line:
    """The requests in order; `hopeful` of them, the first ones, have a deadline that they can meet.

    If the model keeps the order of arrival nobody is sorted out as hopeful. Of a long queue `members` are those that
    come first; `rows` are of all. `stretch`: predictions were exceeded by this lately.
    """

    def __init__(
        self,
        members: Sequence[Query],
        hopeful: int,
        rows: int,
        model: BatchModel,
        now_us: float,
        way_back_us: float,
        stretch: float,
    ) -> None:
        self.members = members
        self.hopeful = hopeful
        self._before = list(accumulate([query.rows for query in members], initial=0))  # rows before a member
        self._rows = rows
        self.model = model
        self._now_us = now_us
        self._done_us = now_us + way_back_us
        self._margin = max(MARGIN, stretch)

    def batches(self, most: int, most_late: int, may_wait: bool) -> tuple[list[tuple[int, int]], float | None]:
        """Return the next batches as (begin, end) of members, and until when the others wait for company, if they do.

        At most so many; `most_late` if there are any among them who are late, but always one of theirs. `may_wait`:
        nobody else wants the cores.
        """
        found: list[tuple[int, int]] = []
        begin, end = 0, len(self.members)
        while begin < end and len(found) < (most if begin < self.hopeful else min(most, most_late)):
            rows, last = self._wanted(begin)
            if not rows:
                held_until_us = self._delayed_until_us(begin)
                if held_until_us > self._now_us:
                    return found, held_until_us
                rows = self.model.max_rows
            found.append((begin, self._take(begin, rows, last)))
            begin = found[-1][1]
        if may_wait and found == [(0, end)]:
            held_until_us = self._expected_us()
            if held_until_us > self._now_us:
                return [], held_until_us
        begin = max(begin, self.hopeful)
        if begin < end and most_late and found[-1][0] < self.hopeful:
            rows = self.model.wanted_rows(self._rows - self._before[begin])
            found.append((begin, self._take(begin, rows, end)))
        return found, None

    def rows(self, begin: int, end: int) -> int:
        """Return how many rows these members have."""
        return self._before[end] - self._before[begin]

    def deadline_us(self, begin: int, end: int) -> float | None:
        """Return the earliest deadline of these members that can be met; the earliest at all if none can."""
        known = [
            (self._left_us(query) is None, query.deadline_us)
            for query in self.members[begin:end]
            if query.deadline_us is not None
        ]
        return min(known)[1] if known else None

    def _wanted(self, begin: int) -> tuple[int, int]:
        """Return how many rows a batch should have that begins with this member, and where it has to end.

        Whoever is late fills up a batch of those who are not only if that takes little time: others come for whom it
        would be too much, and in an overload there is always somebody late.
        """
        rows = self.model.wanted_rows(self._rows - self._before[begin])
        hopeful_rows = self._before[self.hopeful] - self._before[begin]
        if hopeful_rows <= 0 or rows <= hopeful_rows or self.model.fills_up(hopeful_rows, rows):
            return rows, len(self.members)
        return self.model.wanted_rows(hopeful_rows), self.hopeful

    def _take(self, begin: int, wanted_rows: int, last: int) -> int:
        """Return the end of a batch that begins with this member. Whole requests only, but at least one.

        Nobody who would be in time alone becomes late by the batch.
        """
        with_enough_rows = bisect_right(self._before, self._before[begin] + wanted_rows) - 1
        last = min(last, begin + MAX_MEMBERS, with_enough_rows)
        if last <= begin + 1:
            return begin + 1
        bound_us = self._bound_us(begin)
        for end in range(begin + 1, last):
            bound_us = min(bound_us, self._bound_us(end))
            if bound_us < NEVER_LATE and self._stretched_us(self.rows(begin, end + 1)) > bound_us:
                return end
        return last

    def _delayed_until_us(self, begin: int) -> float:
        """When the configured delay of the oldest of the rest is over."""
        oldest_us = min(query.arrival_us for query in self.members[begin:])
        return min(oldest_us + (self.model.max_delay_us or 0.0), self._patience_us(0))

    def _expected_us(self) -> float:
        """When the next request is expected, if waiting for it pays; else the past."""
        gap_us = self.model.rewarding_gap_us(self._rows)
        if gap_us is None:
            return -NEVER_LATE
        latest_us = max(query.arrival_us for query in self.members)
        return min(latest_us + gap_us, self._patience_us(self.model.rate.rows))

    def _patience_us(self, more: int) -> float:
        """Until when all members can wait and be in time in one batch with so many further rows."""
        bound_us = min(self._bound_us(index) for index in range(len(self.members)))
        return self._now_us + bound_us - self._stretched_us(min(self._rows + more, self.model.max_rows))

    def _bound_us(self, index: int) -> float:
        """How long a member's batch may take; any time if the member is late even alone, as things usually go."""
        query = self.members[index]
        if query.deadline_us is None or not self.model.sure_us:
            return NEVER_LATE
        left_us = query.deadline_us - self._done_us
        return left_us if self._stretched_us(query.rows) <= left_us else NEVER_LATE

    def _left_us(self, query: Query) -> float | None:
        return self.model.time_left_us(query, self._done_us)

    def _stretched_us(self, rows: int) -> float:
        return self.model.latency_us(rows) * self._margin
