"""ai_mt: memory blocks fetched early beside compute blocks (AI-MT, ISCA 2020, section IV), as read for a CPU.

The paper cuts layers into memory blocks (fetch weights) and compute blocks, and fetches the memory block of another
network while the arrays compute. A core cannot fetch for another one, so here a piece of layers that is bound by memory
(`kinds`) is the memory block, and one bound by compute the compute block: at most one of either kind runs. Early fetch:
a memory-bound piece does not wait for the compute-bound one that has the machine; that gives it a quarter of the cores.
Deadlines and priorities are not looked at; of each kind the oldest query goes first (the paper goes round networks in
turn). Merging and eviction of blocks manage the paper's on-chip buffer, and have no counterpart here.
"""

from gangway.scheduler.policies.kinds import Piece, Pieces
from gangway.scheduler.policy import Decision, Policy, Query, Resize, Snapshot, Start


class AiMt(Policy):
    """One memory-bound and one compute-bound piece side by side."""

    name = "ai_mt"

    def __init__(self) -> None:
        self._pieces = Pieces()

    def decide(self, snapshot: Snapshot) -> list[Decision]:
        """Start the oldest piece of each kind that does not run yet, and make room for a memory-bound one."""
        running = self._running(snapshot)
        ready = self._ready(running, snapshot)
        decisions: list[Decision] = []
        free = snapshot.free_cores
        for memory_bound, (query, piece) in ready.items():
            beside_other = (not memory_bound) in ready or (not memory_bound) in running
            most = min(snapshot.models[query.model_id].max_ranks, self._cores(memory_bound, beside_other, snapshot))
            gang = free[:most]
            if gang:
                free = free[most:]
                kind = "memory" if memory_bound else "compute"
                decisions.append(Start(query.query_id, piece.end, gang, wanted=most, reason=f"oldest {kind}-bound"))
            elif memory_bound:
                decisions += self._make_room(snapshot)
        return decisions

    def _cores(self, memory_bound: bool, beside_other: bool, snapshot: Snapshot) -> int:
        if not beside_other:
            return snapshot.core_count
        fetching = max(1, snapshot.core_count // 4)
        return fetching if memory_bound else max(1, snapshot.core_count - fetching)

    def _running(self, snapshot: Snapshot) -> set[bool]:
        return {
            self._pieces.piece(
                snapshot.models[block.query.model_id], block.query.next_layer, block.end_layer
            ).memory_bound
            for block in snapshot.running
        }

    def _ready(self, running: set[bool], snapshot: Snapshot) -> dict[bool, tuple[Query, Piece]]:
        """Return the oldest of each kind that does not run, memory-bound first: it takes the fewer cores."""
        ready: dict[bool, tuple[Query, Piece]] = {}
        leases = snapshot.free_leases
        for query in snapshot.waiting:
            piece = self._pieces.piece(snapshot.models[query.model_id], query.next_layer)
            if piece.memory_bound in running or piece.memory_bound in ready or (not query.started and leases == 0):
                continue
            leases -= not query.started
            ready[piece.memory_bound] = (query, piece)
            if len(ready) == 2:
                break
        return dict(sorted(ready.items(), reverse=True))

    def _make_room(self, snapshot: Snapshot) -> list[Resize]:
        """Shrink the compute-bound piece that has the machine."""
        keep = self._cores(memory_bound=False, beside_other=True, snapshot=snapshot)
        for block in snapshot.running:
            if not block.stopping and len(block.cores) > keep:
                return [Resize(block.query.query_id, block.cores[:keep], "room for a memory-bound piece")]
        return []
