"""Queries that go before all others, for a bounded share of the machine's time: those behind for long, and brief ones.

A budget is time of the whole machine. It fills with a share of the time that passes, up to what may be spent at once.
"""

from collections.abc import Sequence
from operator import attrgetter

from gangway.scheduler import policy_config
from gangway.scheduler.policies.gangway_order import AGED, BEST_EFFORT, BRIEF
from gangway.scheduler.policy import Snapshot
from gangway.scheduler.policy_config import SWITCH_US
from gangway.scheduler.prediction import Work


class Aging:
    """Nothing starves: the oldest query behind its virtual deadline goes first while the budget has time.

    Best effort and late queries have half of it each, if there are both: of the hundreds of late ones that an overload
    leaves, some would always be behind for longer.
    """

    def __init__(self, config: policy_config.Aging = policy_config.DEFAULT.aging) -> None:
        self._config = config
        self._budget_us = config.burst_us
        self._updated_us = 0.0
        self._served: Work | None = None  # the query that is served from the budget, as it was decided
        self._late_lead_us = 0.0  # so much more than best effort the late ones had lately

    def promote(self, works: Sequence[Work], snapshot: Snapshot) -> None:
        """Let the query that has been behind for longest go first, if the budget has time for it.

        It is served until the budget is empty, and again when half of it is full.
        """
        if not self._config.enabled:
            return
        served, self._served = self._served, None
        self._settle(served, snapshot)
        behind = [work for work in works if work.tier == BEST_EFFORT and work.due_us < snapshot.now_us]
        if not behind:
            return
        serving = served is not None and any(work.query.query_id == served.query.query_id for work in behind)
        if self._budget_us > (0.0 if serving else self._config.burst_us / 2):
            self._served = chosen = self._next(behind, served if serving else None)
            chosen.tier = AGED

    def _settle(self, served: Work | None, snapshot: Snapshot) -> None:
        """Bring the budget up to date: since the last decision the query had the cores that it was granted."""
        burst_us = self._config.burst_us
        passed_us = snapshot.now_us - self._updated_us
        self._updated_us = snapshot.now_us
        used_us = passed_us * served.grant / snapshot.core_count if served else 0.0
        self._budget_us = min(burst_us, self._budget_us + passed_us * self._config.machine_share - used_us)
        if served is not None:
            lead_us = self._late_lead_us + (used_us if served.query.deadline_us is not None else -used_us)
            self._late_lead_us = max(-burst_us, min(burst_us, lead_us))

    def _next(self, behind: Sequence[Work], served: Work | None) -> Work:
        """Return the one that is served already, or else the oldest of the kind that had less."""
        if served is not None:
            return next(work for work in behind if work.query.query_id == served.query.query_id)
        due = [work for work in behind if (work.query.deadline_us is None) == (self._late_lead_us >= 0.0)]
        return min(due or behind, key=attrgetter("due_us"))


class Brief:
    """A brief query with a deadline goes first, late or not: to run it costs no more than to stop somebody for it.

    By deadlines it would wait behind long queries as soon as it is late, and a target of a millisecond is soon missed
    where others have the cores. The budget bounds what that costs the others.
    """

    def __init__(self, config: policy_config.Brief = policy_config.DEFAULT.brief) -> None:
        self._config = config
        self._budget_us = config.burst_us
        self._updated_us = 0.0

    def promote(self, works: Sequence[Work], snapshot: Snapshot) -> bool:
        """Let brief queries with a deadline go before all others of their class, while the budget has time.

        Where all are brief, nothing changes. Return whether there may be any.
        """
        config = self._config
        if not config.enabled:
            return False
        passed_us = snapshot.now_us - self._updated_us
        self._updated_us = snapshot.now_us
        self._budget_us = min(config.burst_us, self._budget_us + passed_us * config.machine_share)
        brief = [work for work in works if work.model.is_brief and work.query.deadline_us is not None]
        if not brief or len(brief) == len(works) or self._budget_us <= 0.0:
            return False
        for work in brief:
            if work.least_us <= SWITCH_US:  # a batch may take more
                work.tier = BRIEF
        return True

    def charge(self, works: Sequence[Work], core_count: int) -> None:
        """Let those pay that begin now, as `moves` has decided: for what they take, and for a switch."""
        for work in works:
            if work.tier == BRIEF and work.block is None:
                self._budget_us -= (work.least_us + SWITCH_US) * work.cores / core_count
