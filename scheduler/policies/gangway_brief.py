"""Who takes next to nothing goes first, late or not: a query of microseconds costs nobody anything.

By deadlines it would wait behind long queries as soon as it is late, and a target of a millisecond is soon missed where
others have the cores. What it costs them to make room is bounded by an account: some models are asked very often.
"""

from collections.abc import Sequence
from typing import Final

from gangway.scheduler.model_profile import SWITCH_US
from gangway.scheduler.policies.gangway_order import BRIEF
from gangway.scheduler.policy import Snapshot
from gangway.scheduler.prediction import Work

SHARE: Final = 0.05  # of the machine's time they have before all others,
BURST_US: Final = 20_000.0  # and so much of it at once


class Brief:
    """An account: time of the whole machine that brief queries may still take from the others."""

    def __init__(self) -> None:
        self._credit_us = BURST_US
        self._updated_us = 0.0

    def promote(self, works: Sequence[Work], snapshot: Snapshot) -> bool:
        """Let brief queries with a deadline go before all others of their class, while the account has time.

        Without others they are as others are. Return whether there may be any.
        """
        passed_us = snapshot.now_us - self._updated_us
        self._updated_us = snapshot.now_us
        self._credit_us = min(BURST_US, self._credit_us + passed_us * SHARE)
        brief = [work for work in works if work.model.is_brief and work.query.deadline_us is not None]
        if not brief or len(brief) == len(works) or self._credit_us <= 0.0:
            return False
        for work in brief:
            if work.least_us <= SWITCH_US:  # a batch may take more
                work.tier = BRIEF
        return True

    def charge(self, works: Sequence[Work], core_count: int) -> None:
        """Have those pay that begin now, as `moves` has decided: for what they take, and for a switch."""
        for work in works:
            if work.tier == BRIEF and work.block is None:
                self._credit_us -= (work.least_us + SWITCH_US) * work.cores / core_count
