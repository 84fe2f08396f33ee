"""Nothing starves: the oldest query behind its virtual deadline has the machine, for a bounded share of the time."""

from collections.abc import Sequence

from gangway.scheduler.policies.gangway_order import AGED, BEHIND
from gangway.scheduler.policy import Snapshot
from gangway.scheduler.prediction import Work

SHARE = 0.05  # of the machine's time
BURST_US = 20_000.0  # so much of it at once


class Aging:
    """An account: time of the whole machine that aged queries may still take from the others."""

    def __init__(self) -> None:
        self._credit_us = BURST_US
        self._updated_us = 0.0
        self._served: Work | None = None  # the query that is served from the account, as it was decided

    def promote(self, works: Sequence[Work], snapshot: Snapshot) -> None:
        """Let the query that has been behind for longest go first, if the account has time for it.

        It is served until the account is empty, and again when half of it is full.
        """
        now_us = snapshot.now_us
        passed_us = now_us - self._updated_us
        self._updated_us = now_us
        served, self._served = self._served, None
        used_share = served.grant / snapshot.core_count if served else 0.0  # what it was granted after the last look
        self._credit_us = min(BURST_US, self._credit_us + passed_us * (SHARE - used_share))
        oldest = None
        for work in works:
            if work.tier == BEHIND and work.due_us < now_us and (oldest is None or work.due_us < oldest.due_us):
                oldest = work
        if oldest is None:
            return
        serving = served is not None and served.query.query_id == oldest.query.query_id
        if self._credit_us > (0.0 if serving else BURST_US / 2):
            self._served = oldest
            oldest.tier = AGED
