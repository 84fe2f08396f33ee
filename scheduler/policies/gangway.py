"""The default policy: gangs that grow and yield, by deadlines. docs/scheduling.md explains it."""

from collections.abc import Sequence

from gangway.scheduler.policies.gangway_aging import Aging
from gangway.scheduler.policies.gangway_brief import Brief
from gangway.scheduler.policies.gangway_foresight import Foresight
from gangway.scheduler.policies.gangway_moves import moves
from gangway.scheduler.policies.gangway_order import candidates, classify, in_order
from gangway.scheduler.policies.gangway_pairing import pair
from gangway.scheduler.policies.gangway_restarts import stopped_in_vain
from gangway.scheduler.policies.gangway_shares import ask, share_out
from gangway.scheduler.policies.gangway_worth import Worth
from gangway.scheduler.policies.gangway_yielding import rest_us
from gangway.scheduler.policy import Decision, Policy, Query, Snapshot, StartOver
from gangway.scheduler.prediction import Work

START_OVER = "too many that are late were stopped"


class Gangway(Policy):
    """How much and how long by VELTAIR's profile (ASPLOS 2022), who next by Layerweaver+'s slack (IEICE 2022)."""

    name = "gangway"
    batches = True
    walk_ins = True
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
