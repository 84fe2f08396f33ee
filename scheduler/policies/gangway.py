"""The default policy: gangs that grow and yield, by deadlines. docs/scheduling.md explains it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Final

from gangway.scheduler.arrival_rate import GAIN, ArrivalRate
from gangway.scheduler.policies.gangway_moves import can_spare, moves
from gangway.scheduler.policies.gangway_order import (
    AGED,
    AT_RISK,
    BEST_EFFORT,
    BRIEF,
    ON_TIME,
    candidates,
    classify,
    in_order,
)
from gangway.scheduler.policies.gangway_shares import ask, efficiency_to_ask_for, pair, share_out
from gangway.scheduler.policy import Decision, Policy, Query, Snapshot, StartOver
from gangway.scheduler.prediction import INFINITE, MARGIN, Work, outlook
from gangway.scheduler.profiles import SWITCH_US

# Nothing starves: the oldest query behind its virtual deadline has the machine, for a bounded share of the time.

AGING_SHARE = 0.05  # of the machine's time
AGING_BURST_US = 20_000.0  # so much of it at once


class Aging:
    """An account: time of the whole machine that aged queries may still take from the others.

    Best effort and those that are late have it half and half, if there are both: of hundreds that are late, as an
    overload leaves them, some would always be behind for longer.
    """

    def __init__(self) -> None:
        self._credit_us = AGING_BURST_US
        self._updated_us = 0.0
        self._served: Work | None = None  # the query that is served from the account, as it was decided
        self._lead_us = 0.0  # so much more than best effort the late ones had lately

    def promote(self, works: Sequence[Work], snapshot: Snapshot) -> None:
        """Let the query that has been behind for longest go first, if the account has time for it.

        It is served until the account is empty, and again when half of it is full.
        """
        served, self._served = self._served, None
        self._settle(served, snapshot)
        behind = [work for work in works if work.tier == BEST_EFFORT and work.due_us < snapshot.now_us]
        if not behind:
            return
        serving = served is not None and any(work.query.query_id == served.query.query_id for work in behind)
        if self._credit_us > (0.0 if serving else AGING_BURST_US / 2):
            self._served = chosen = self._next(behind, served if serving else None)
            chosen.tier = AGED

    def _settle(self, served: Work | None, snapshot: Snapshot) -> None:
        """Bring the account up to date: after the last look the query was granted what it was granted."""
        passed_us = snapshot.now_us - self._updated_us
        self._updated_us = snapshot.now_us
        used_us = passed_us * served.grant / snapshot.core_count if served else 0.0
        self._credit_us = min(AGING_BURST_US, self._credit_us + passed_us * AGING_SHARE - used_us)
        if served is not None:
            lead_us = self._lead_us + (used_us if served.query.deadline_us is not None else -used_us)
            self._lead_us = max(-AGING_BURST_US, min(AGING_BURST_US, lead_us))

    def _next(self, behind: Sequence[Work], served: Work | None) -> Work:
        """Return who goes on, or else the oldest of those who had less."""
        if served is not None:
            return next(work for work in behind if work.query.query_id == served.query.query_id)
        due = [work for work in behind if (work.query.deadline_us is None) == (self._lead_us >= 0.0)]
        return min(due or behind, key=attrgetter("due_us"))


# Who takes next to nothing goes first, late or not: a query of microseconds costs nobody anything.
#
# By deadlines it would wait behind long queries as soon as it is late, and a target of a millisecond is soon missed
# where others have the cores. What it costs them to make room is bounded by an account: some models are asked very
# often.

BRIEF_SHARE: Final = 0.05  # of the machine's time they have before all others,
BRIEF_BURST_US: Final = 20_000.0  # and so much of it at once


class Brief:
    """An account: time of the whole machine that brief queries may still take from the others."""

    def __init__(self) -> None:
        self._credit_us = BRIEF_BURST_US
        self._updated_us = 0.0

    def promote(self, works: Sequence[Work], snapshot: Snapshot) -> bool:
        """Let brief queries with a deadline go before all others of their class, while the account has time.

        Without others they are as others are. Return whether there may be any.
        """
        passed_us = snapshot.now_us - self._updated_us
        self._updated_us = snapshot.now_us
        self._credit_us = min(BRIEF_BURST_US, self._credit_us + passed_us * BRIEF_SHARE)
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


# Who will be late because of those that are still to come, while more come than the machine can carry.
#
# Moore and Hodgson's algorithm (`gangway_order.py`) plans with those that are there. A long query has a long time to
# meet its deadline, and of those that come meanwhile the shorter ones have earlier deadlines. So in an overload it
# begins in good hope whenever nobody else waits, gives way again and again, and is late in the end; what it took of
# the machine others would have needed. Here it is given up from the start, and so makes room for whoever can be saved.

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
        """Move those from `ON_TIME` to `AT_RISK` for whom the others will leave too little of the machine."""
        if snapshot.now_us >= self._review_us:
            self._review(snapshot)
        if not self._is_full:
            return
        for work in works:
            if work.tier == ON_TIME and _needed_us(work, snapshot.core_count) > self._left_us(work):
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


# How much a deadline of a model is worth: more, the more of its deadlines were missed lately.
#
# Whoever gives up the longest query first gives up always those of the same models. A user of such a model sees only
# that. So a model that misses its goal becomes dearer, until others take their turn.

GOAL = 0.98  # share of each model's queries in time; somewhat more than what is asked for
MEMORY = 0.02  # weight of the latest query in the share
RISE = 100.0  # worth of a deadline per missing share
MOST = 10.0


class Worth:
    """The share of deadlines that each model met lately."""

    def __init__(self) -> None:
        self._met: dict[int, float] = {}
        self._dear: dict[int, float] = {}  # what deadlines are worth of those models that miss the goal

    def note(self, query: Query, now_us: float) -> None:
        """A query was answered."""
        if query.deadline_us is not None:
            met = self._met.get(query.model_id, 1.0)
            self._met[query.model_id] = met = met + MEMORY * ((now_us <= query.deadline_us) - met)
            if met < GOAL:
                self._dear[query.model_id] = min(MOST, 1.0 + RISE * (GOAL - met))
            else:
                self._dear.pop(query.model_id, None)

    def appraise(self, works: list[Work]) -> None:
        """Set what each one's deadline is worth; 1 if its model reaches its goal."""
        if self._dear:
            for work in works:
                work.worth = self._dear.get(work.query.model_id, 1.0)


# Which stopped queries give up what they hold: leases and memory are for those that can be in time.
#
# A query that is stopped for a more urgent one may lose its deadline while it waits. In an overload most do, and then
# wait for long: the more of them, the fewer leases are left for those that come, in the end none.

STOPPED_PER_CORE: Final = 2  # late queries that may wait in the middle


def stopped_in_vain(works: Sequence[Work], core_count: int) -> list[Work]:
    """Return the stopped late queries beyond so many: those that have least to lose."""
    stopped = [
        work
        for work in works
        if work.tier == BEST_EFFORT and work.query.started and work.block is None and work.query.deadline_us is not None
    ]
    stopped.sort(key=lambda work: (_done_us(work), -work.query.query_id))
    return stopped[: max(0, len(stopped) - STOPPED_PER_CORE * core_count)]


def _done_us(work: Work) -> float:
    return work.outlook.whole_us[0] - work.remaining_us(1)


# For how long nobody who runs would make room for a newcomer with a deadline: what `worth_it` asks of a victim.


def rest_us(works: Sequence[Work]) -> float:
    """Return the time, 0 if somebody would yield at once. `works`: after `moves`.

    Best effort, and who was given up, may yield at once. Who will be in time yields only what it can spare, to a query
    as short as the shortest that is there. If it should run longer than predicted, it is given up when its slack is
    gone. Whoever is leaving anyway is not asked.
    """
    shortest_us = min(work.isolated_us for work in works)
    rest_us = INFINITE
    for work in works:
        if not work.cores or work.fixed:
            continue
        if work.tier != ON_TIME or can_spare(work, shortest_us, 0) or (work.cores > 1 and can_spare(work, 0.0, 1)):
            return 0.0
        rest_us = min(rest_us, work.slack_us - work.remaining_us(work.cores) * work.margin)
    return max(0.0, rest_us)


START_OVER = "too many that are late were stopped"


class Gangway(Policy):
    """How much and how long by VELTAIR's profile (ASPLOS 2022), who next by Layerweaver+'s slack (IEICE 2022)."""

    name = "gangway"
    batches = True
    fast_path = True
    brief_first = True

    def __init__(self) -> None:
        self._aging = Aging()
        self._brief = Brief()
        self._foresight = Foresight()
        self._worth = Worth()
        self._ordered: Sequence[Work] = ()  # as decided last

    def decide(self, snapshot: Snapshot) -> Sequence[Decision]:
        """Order all queries, share out the cores in this order, and move from what is to what should be."""
        self._ordered = ()
        if not snapshot.waiting and (not snapshot.free_cores or not snapshot.running):
            return ()
        waiting = candidates(snapshot.waiting, snapshot.now_us, snapshot.core_count, snapshot.models)
        works = [Work(query, None, snapshot) for query in waiting]
        works += [Work(block.query, block, snapshot) for block in snapshot.running]
        classify(works)
        self._foresight.give_up(works, snapshot)
        self._aging.promote(works, snapshot)
        any_brief = self._brief.promote(works, snapshot)
        over = stopped_in_vain(works, snapshot.core_count)
        if over:
            works = [work for work in works if work not in over]
        self._worth.appraise(works)
        for work in works:
            ask(work, snapshot)
        ordered = works
        if len(works) > 1:
            ordered = in_order(works, snapshot.core_count)
            pair(ordered)
        share_out(ordered, snapshot.core_count, snapshot.free_leases + len(over))
        self._ordered = ordered
        decisions = [StartOver(work.query.query_id, START_OVER) for work in over] + moves(ordered, snapshot)
        if any_brief:
            self._brief.charge(ordered, snapshot.core_count)
        return decisions

    def yields_from_us(self) -> float | None:
        """Return from when on one of those that run might make room for a newcomer with a deadline."""
        return self._ordered[0].now_us + rest_us(self._ordered) if self._ordered else None

    def arrived(self, query: Query) -> None:
        """Note how much is asked for."""
        self._foresight.arrived(query)

    def finished(self, query: Query, now_us: float) -> None:
        """Note whether a deadline was met."""
        self._worth.note(query, now_us)
