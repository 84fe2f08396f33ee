"""The default policy: gangs that grow and yield, by deadlines. docs/explanation/scheduling.md explains it.

How many cores and for how long follows VELTAIR's profile (ASPLOS 2022), who goes next Layerweaver+'s slack (IEICE
2022). A decision goes through the parts in this order, each in a file of its own:

1. `prediction.Work`: how much longer each query runs, on how many cores;
2. `gangway_order`: who goes first, and who is given up so that the others are in time;
   `gangway_overload`: who is given up for those to come, whose deadlines weigh more, who starts over;
   `gangway_budgets`: who goes before all others, for a bounded share of the time;
3. `gangway_shares`: how many cores each shall have;
4. `gangway_moves`: what starts, stops, grows and shrinks for that.
"""

from collections.abc import Sequence

from gangway.scheduler.policies.gangway_budgets import Aging, Brief
from gangway.scheduler.policies.gangway_moves import moves, yields_in_us
from gangway.scheduler.policies.gangway_order import candidates, classify, in_order
from gangway.scheduler.policies.gangway_overload import FairnessWeights, Foresight, excess_stopped
from gangway.scheduler.policies.gangway_shares import ask, share_out
from gangway.scheduler.policy import Decision, Policy, Query, Snapshot, StartOver
from gangway.scheduler.policy_config import DEFAULT, PolicyConfig
from gangway.scheduler.prediction import Work

START_OVER = "too many that are late were stopped"


class Gangway(Policy):
    """Orders all queries, shares out the cores in this order, and moves from what is to what should be."""

    name = "gangway"
    batches = True
    fast_path = True

    def __init__(self, config: PolicyConfig = DEFAULT) -> None:
        self.config = config
        self.brief_first = config.brief.enabled
        self._aging = Aging(config.aging)
        self._brief = Brief(config.brief)
        self._foresight = Foresight(config)
        self._fairness = FairnessWeights(config.fairness)
        self._ordered: Sequence[Work] = ()  # as decided last

    def decide(self, snapshot: Snapshot) -> Sequence[Decision]:
        """Return how to get from what is to what should be."""
        self._ordered = ()
        if not snapshot.waiting and (not snapshot.free_cores or not snapshot.running):
            return ()
        config = self.config
        waiting = candidates(snapshot.waiting, snapshot.now_us, snapshot.core_count, snapshot.models, config.planning)
        works = [Work(query, None, snapshot, config) for query in waiting]
        works += [Work(block.query, block, snapshot, config) for block in snapshot.running]
        classify(works, config.virtual_deadlines)
        self._foresight.give_up(works, snapshot)
        self._aging.promote(works, snapshot)
        any_brief = self._brief.promote(works, snapshot)
        over = excess_stopped(works, snapshot.core_count, config.restarts)
        if over:
            works = [work for work in works if work not in over]
        self._fairness.weigh(works)
        for work in works:
            ask(work, snapshot, config)
        ordered = works
        if len(works) > 1:
            ordered = in_order(works, snapshot.core_count, config)
        share_out(ordered, snapshot.core_count, snapshot.free_leases + len(over), config)
        self._ordered = ordered
        decisions: list[Decision] = [StartOver(work.query.query_id, START_OVER) for work in over]
        decisions += moves(ordered, snapshot, config)
        if any_brief:
            self._brief.charge(ordered, snapshot.core_count)
        return decisions

    def yields_from_us(self) -> float | None:
        """Return from when on one of those that run might make room for a newcomer with a deadline."""
        return self._ordered[0].now_us + yields_in_us(self._ordered) if self._ordered else None

    def arrived(self, query: Query) -> None:
        """Note how much is asked for."""
        self._foresight.arrived(query)

    def finished(self, query: Query, now_us: float) -> None:
        """Note whether a deadline was met."""
        self._fairness.note(query, now_us)
