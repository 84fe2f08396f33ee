"""layerweaver and layerweaver_plus: memory-bound beside compute-bound layers (HPCA 2021; IEICE E105-D, 2022).

The choice is `weaving`'s. This is what the engines of the papers' accelerator are on a CPU:

- A core fetches and computes at the same time and cannot fetch for later, so what runs side by side should keep both
  engines busy. The load of an engine is the sum of m (or c) of the pieces that run. The engine with less of it is idle
  until the other one ends: a piece's idle time is how far the two loads are apart with it.
- m and c are those of one core: whether a piece is memory-bound does not depend on the number of cores.
- Two pieces share the machine, half of the cores each; alone, or urgent, a piece has all that are free. Pieces are
  short (`kinds`), so nothing is preempted, as in the papers.
- The remaining time is the profile's on a whole gang: the paper's "Precise" variant. Its approximation, the sum of
  max(m, c), is for NPUs, where it is nearly exact; on gangs of cores it is off by their number.
- Best effort is due a second after its arrival (`urgency.due_us`).
"""

from collections.abc import Sequence
from math import ceil

from gangway.scheduler.policies.kinds import Piece, Pieces
from gangway.scheduler.policies.urgency import due_us
from gangway.scheduler.policies.weaving import Candidate, Choice, least_idle, two_modes
from gangway.scheduler.policy import Decision, Policy, Query, Snapshot, Start


class Layerweaver(Policy):
    """Whatever adds the least idle time goes next. Deadlines are not looked at."""

    name = "layerweaver"

    def __init__(self) -> None:
        self._pieces = Pieces()

    def decide(self, snapshot: Snapshot) -> list[Decision]:
        """Start pieces while there are cores."""
        free = snapshot.free_cores
        if not free:
            return []
        decisions: list[Decision] = []
        memory_us, compute_us = self._load(snapshot)
        lane = self._lane(snapshot)
        waiting = _startable(snapshot.waiting, snapshot.free_leases)
        while free and waiting:
            first = self._first_of_each(waiting)
            choice = self._choose([self._candidate(query, snapshot, memory_us, compute_us, lane) for query in first])
            query = first[choice.index]
            waiting.remove(query)
            model = snapshot.models[query.model_id]
            gang = free[: min(model.max_ranks, len(free) if choice.urgent else lane)]
            free = free[len(gang) :]
            piece = self._piece(query, snapshot)
            memory_us += piece.memory_us * query.rows
            compute_us += piece.compute_us * query.rows
            decisions.append(Start(query.query_id, piece.end, gang, reason=_reason(choice, piece)))
        return decisions

    def _choose(self, candidates: Sequence[Candidate]) -> Choice:
        return least_idle(candidates)

    def _first_of_each(self, waiting: Sequence[Query]) -> list[Query]:
        """Return one of those queries that differ in nothing but their deadlines: the first to choose."""
        first: dict[tuple[int, int, int], Query] = {}
        for query in waiting:
            first.setdefault((query.model_id, query.next_layer, query.rows), query)
        return list(first.values())

    def _load(self, snapshot: Snapshot) -> tuple[float, float]:
        memory_us = compute_us = 0.0
        for block in snapshot.running:
            piece = self._pieces.piece(snapshot.models[block.query.model_id], block.layer, block.end_layer)
            memory_us += piece.memory_us * block.query.rows
            compute_us += piece.compute_us * block.query.rows
        return memory_us, compute_us

    def _lane(self, snapshot: Snapshot) -> int:
        alone = len(snapshot.waiting) + len(snapshot.running) == 1
        return snapshot.core_count if alone else ceil(snapshot.core_count / 2)

    def _piece(self, query: Query, snapshot: Snapshot) -> Piece:
        return self._pieces.piece(snapshot.models[query.model_id], query.next_layer)

    def _candidate(self, query: Query, snapshot: Snapshot, memory_us: float, compute_us: float, lane: int) -> Candidate:
        model = snapshot.models[query.model_id]
        piece = self._piece(query, snapshot)
        widest = min(snapshot.core_count, model.max_ranks)
        return Candidate(
            idle_us=abs(memory_us + piece.memory_us * query.rows - compute_us - piece.compute_us * query.rows),
            end_us=snapshot.now_us + model.span_us(piece.begin, piece.end, min(lane, widest), query.rows),
            due_us=due_us(query),
            remaining_us=model.remaining_us(query.next_layer, widest, query.rows),
        )


class LayerweaverPlus(Layerweaver):
    """The same, but whoever would be late by waiting for that goes first."""

    name = "layerweaver_plus"

    def _choose(self, candidates: Sequence[Candidate]) -> Choice:
        return two_modes(candidates)

    def _first_of_each(self, waiting: Sequence[Query]) -> list[Query]:
        return super()._first_of_each(sorted(waiting, key=due_us))


def _startable(waiting: Sequence[Query], leases: int) -> list[Query]:
    """Return the queries that may be started: of the new ones, the oldest as many as there are leases."""
    fresh = 0
    startable = []
    for query in waiting:
        fresh += not query.started
        if query.started or fresh <= leases:
            startable.append(query)
    return startable


def _reason(choice: Choice, piece: Piece) -> str:
    if choice.urgent:
        return "urgent: would be late after anything else"
    return f"least idle time, {'memory' if piece.memory_bound else 'compute'}-bound"
