"""Who will be late because of those that are still to come, while more come than the machine can carry.

Moore and Hodgson's algorithm (`gangway_order.py`) plans with those that are there. A long query has a long time to meet
its deadline, and of those that come meanwhile the shorter ones have earlier deadlines. So in an overload it begins in
good hope whenever nobody else waits, gives way again and again, and is late in the end; what it took of the machine
others would have needed. Here it is given up from the start, and so makes room for whoever can be saved.
"""

from dataclasses import dataclass, field
from typing import Final

from gangway.scheduler.arrival_rate import GAIN, ArrivalRate
from gangway.scheduler.policies.gangway_order import AT_RISK, IN_TIME
from gangway.scheduler.policies.gangway_shares import efficiency_to_ask_for
from gangway.scheduler.policy import Query, Snapshot
from gangway.scheduler.prediction import MARGIN, Work, outlook

FULL: Final = 1.0  # of the machine's time is asked for: below it nobody is given up for those to come
REVIEW_US: Final = 10_000.0  # loads are added up so often


@dataclass(slots=True)
class _Kind:
    """The requests of a model and a class that have a deadline: how many come, and how long it is until then."""

    rate: ArrivalRate = field(default_factory=ArrivalRate)
    target_us: float = 0.0

    def arrived(self, query: Query, target_us: float) -> None:
        self.target_us += (target_us - self.target_us) * (GAIN if self.target_us else 1.0)
        self.rate.arrived(query.arrival_us, query.rows)


@dataclass(frozen=True, slots=True)
class _Load:
    """What a kind takes: `share` of the time of the whole machine."""

    priority: int
    target_us: float
    share: float


class Foresight:
    """Knows the load of those that have deadlines."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[int, int], _Kind] = {}  # by model and class
        self._loads: list[_Load] = []
        self._is_full = False
        self._review_us = 0.0

    def arrived(self, query: Query) -> None:
        """A request has come."""
        if query.deadline_us is not None:
            kind = self._kinds.setdefault((query.model_id, query.priority), _Kind())
            kind.arrived(query, query.deadline_us - query.arrival_us)

    def give_up(self, works: list[Work], snapshot: Snapshot) -> None:
        """Move those from `IN_TIME` to `AT_RISK` for whom the others will leave too little of the machine."""
        if snapshot.now_us >= self._review_us:
            self._review(snapshot)
        if not self._is_full:
            return
        for work in works:
            if work.tier == IN_TIME and _needed_us(work, snapshot.core_count) > self._left_us(work):
                work.tier = AT_RISK

    def _left_us(self, work: Work) -> float:
        """Return how much of its slack the machine has, but for what will come meanwhile and go first."""
        slack_us, priority = work.slack_us, work.query.priority
        left_us = slack_us
        for load in self._loads:
            if load.priority < priority:
                left_us -= load.share * slack_us
            elif load.priority == priority and load.target_us < slack_us:
                left_us -= load.share * (slack_us - load.target_us)
        return left_us

    def _review(self, snapshot: Snapshot) -> None:
        self._review_us = snapshot.now_us + REVIEW_US
        for key in [key for key in self._kinds if key[0] not in snapshot.models]:
            del self._kinds[key]
        self._loads = [
            _Load(priority, kind.target_us, kind.rate.rows_per_us_at(snapshot.now_us) * _row_us(model_id, snapshot))
            for (model_id, priority), kind in self._kinds.items()
        ]
        self._is_full = sum(load.share for load in self._loads) >= FULL


def _needed_us(work: Work, core_count: int) -> float:
    """Return how long the whole machine has to do with a query that has all cores that it can use."""
    return work.least_us * work.margin * work.most / core_count


def _row_us(model_id: int, snapshot: Snapshot) -> float:
    """Return how long the whole machine has to do with a row, in gangs as a query asks for."""
    known = outlook(snapshot.models[model_id], 0.0, 1, snapshot.core_count)
    gang = known.efficient_cores(efficiency_to_ask_for(snapshot.wide_stretch))
    return known.whole_us[gang - 1] * snapshot.stretches.get(model_id, MARGIN) * gang / snapshot.core_count
