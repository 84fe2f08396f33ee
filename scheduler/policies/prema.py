"""prema: token-based temporal multitasking with preemption (PREMA, HPCA 2020, section V, Algorithms 2 and 3).

One query has the machine at a time. A query earns tokens with its priority and its slowdown so far; those whose tokens
reach a threshold are candidates; the candidate with the shortest estimated time goes next.

Loose ends. The paper adds `priority x slowdown` at each call of its scheduler; we read it as the total that does not
depend on how often it is called: `tokens = priority x (1 + time waited / isolated time)`, where waiting is all time
off the cores. Priorities are the paper's 9, 3 and 1 for numbers below, at and above 0. The threshold is the largest
number of tokens, rounded down to one of 9, 3, 1. Its CHECKPOINT costs time, ours is a stop at a layer boundary; its
KILL, which throws work away, is left out. DRAIN or CHECKPOINT is decided as in Algorithm 3: whoever would lose more,
relative to its isolated time, by waiting for the other. Tokens grow while nothing happens, so the policy looks again
every 2.5 ms, ten times the paper's quota, because layers take that much longer here.
"""

from gangway.scheduler.policies.sharing import Work, query_of, share_out, work
from gangway.scheduler.policy import Decision, Policy, Query, RunningBlock, Snapshot, Wake

LEVELS = (9.0, 3.0, 1.0)  # tokens of high, medium and low priority
QUOTA_US = 2500.0


class Prema(Policy):
    """Tokens decide who may, the shortest of those does."""

    name = "prema"

    def decide(self, snapshot: Snapshot) -> list[Decision]:
        """Give the machine to the shortest candidate, unless the one that runs had better end first."""
        ranking = self._ranking(work(snapshot, snapshot.waiting), snapshot)
        decisions = share_out(snapshot, ranking, at_most=1, reason="shortest of those with tokens")
        if snapshot.waiting:
            decisions.append(Wake(snapshot.now_us + QUOTA_US))
        return decisions

    def _ranking(self, items: list[Work], snapshot: Snapshot) -> list[Work]:
        tokens = {query_of(item).query_id: _tokens(item, snapshot) for item in items}
        threshold = next((level for level in LEVELS if level <= max(tokens.values(), default=0)), 0.0)

        def order(item: Work) -> tuple[bool, float, int]:
            query = query_of(item)
            return tokens[query.query_id] < threshold, _remaining_us(item, snapshot), query.query_id

        ranking = sorted(items, key=order)
        running = next((item for item in ranking if isinstance(item, RunningBlock)), None)
        if running is not None and _drains(running, ranking[0], snapshot):
            ranking.remove(running)
            ranking.insert(0, running)
        return ranking


def _tokens(item: Work, snapshot: Snapshot) -> float:
    query = query_of(item)
    on_cores_us = query.ran_us + (snapshot.now_us - item.started_us if isinstance(item, RunningBlock) else 0.0)
    waited_us = max(0.0, snapshot.now_us - query.arrival_us - on_cores_us)
    level = LEVELS[(query.priority > 0) - (query.priority < 0) + 1]
    return level * (1 + waited_us / _isolated_us(query, snapshot))


def _drains(running: RunningBlock, candidate: Work, snapshot: Snapshot) -> bool:
    """Say whether the candidate loses less by waiting than the running query would."""
    running_loses = _remaining_us(candidate, snapshot) / _isolated_us(running.query, snapshot)
    candidate_loses = _remaining_us(running, snapshot) / _isolated_us(query_of(candidate), snapshot)
    return running_loses > candidate_loses


def _remaining_us(item: Work, snapshot: Snapshot) -> float:
    query = query_of(item)
    layer = item.layer if isinstance(item, RunningBlock) else query.next_layer
    model = snapshot.models[query.model_id]
    return model.remaining_us(layer, _gang(query, snapshot), query.rows)


def _isolated_us(query: Query, snapshot: Snapshot) -> float:
    model = snapshot.models[query.model_id]
    return max(model.remaining_us(0, _gang(query, snapshot), query.rows), 1e-3)


def _gang(query: Query, snapshot: Snapshot) -> int:
    return min(snapshot.core_count, snapshot.models[query.model_id].max_ranks)
