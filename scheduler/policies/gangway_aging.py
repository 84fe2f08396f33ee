"""Nothing starves: the oldest query behind its virtual deadline has the machine, for a bounded share of the time."""

from collections.abc import Sequence
from operator import attrgetter

from gangway.scheduler.policies.gangway_order import AGED, BEHIND
from gangway.scheduler.policy import Snapshot
from gangway.scheduler.prediction import Work

SHARE = 0.05  # of the machine's time
BURST_US = 20_000.0  # so much of it at once


class Aging:
    """An account: time of the whole machine that aged queries may still take from the others.

    Best effort and those that are late have it half and half, if there are both: of hundreds that are late, as an
    overload leaves them, some would always be behind for longer.
    """

    def __init__(self) -> None:
        self._credit_us = BURST_US
        self._updated_us = 0.0
        self._served: Work | None = None  # the query that is served from the account, as it was decided
        self._lead_us = 0.0  # so much more than best effort the late ones had lately

    def promote(self, works: Sequence[Work], snapshot: Snapshot) -> None:
        """Let the query that has been behind for longest go first, if the account has time for it.

        It is served until the account is empty, and again when half of it is full.
        """
        served, self._served = self._served, None
        self._settle(served, snapshot)
        behind = [work for work in works if work.tier == BEHIND and work.due_us < snapshot.now_us]
        if not behind:
            return
        serving = served is not None and any(work.query.query_id == served.query.query_id for work in behind)
        if self._credit_us > (0.0 if serving else BURST_US / 2):
            self._served = chosen = self._next(behind, served if serving else None)
            chosen.tier = AGED

    def _settle(self, served: Work | None, snapshot: Snapshot) -> None:
        """Bring the account up to date: after the last look the query was granted what it was granted."""
        passed_us = snapshot.now_us - self._updated_us
        self._updated_us = snapshot.now_us
        used_us = passed_us * served.grant / snapshot.core_count if served else 0.0
        self._credit_us = min(BURST_US, self._credit_us + passed_us * SHARE - used_us)
        if served is not None:
            lead_us = self._lead_us + (used_us if served.query.deadline_us is not None else -used_us)
            self._lead_us = max(-BURST_US, min(BURST_US, lead_us))

    def _next(self, behind: Sequence[Work], served: Work | None) -> Work:
        """Return who goes on, or else the oldest of those who had less."""
        if served is not None:
            return next(work for work in behind if work.query.query_id == served.query.query_id)
        due = [work for work in behind if (work.query.deadline_us is None) == (self._lead_us >= 0.0)]
        return min(due or behind, key=attrgetter("due_us"))
