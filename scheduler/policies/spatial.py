"""What VELTAIR's spatial policies share: units in order of arrival, conflicts, growing, and what is about to end."""

from abc import abstractmethod
from dataclasses import dataclass

from gangway.scheduler.blocks import Block, Demands, demands
from gangway.scheduler.model_profile import ModelProfile
from gangway.scheduler.policy import Policy, Query, Resize, RunningBlock, Snapshot, Start

# The paper gives the layers the whole target, though then every wait misses it. A tenth is left for waiting and for
# what is predicted wrongly, in all policies of this family alike (docs/fidelity.md has others).
TARGET_SHARE = 0.9
# What a unit takes beside its layers: from the decision to its first task, and until its cores can be used again. The
# paper's demands are measured in its own system, with whatever a unit costs there.
UNIT_US = 30.0
ABOUT_TO_END = 0.1  # of its time is left (section 4.3)


@dataclass(frozen=True, slots=True)
class Load:
    """What else runs: the level of interference that stays, and the sum of the queries' average demands."""

    level: float
    active_cores: float


class SpatialPolicy(Policy):
    """Ready units start in order of arrival, on as many free cores as they ask for.

    On a conflict, fewer are free, a unit starts with those and grows when cores come free: before any unit of a younger
    query starts. A subclass says which layers a unit has and what it asks for.
    """

    adapts_versions = False  # chooses versions, and knows demands, by the level of interference
    adapts_blocks = False  # needs the sum of the active queries' average demands

    def __init__(self) -> None:
        self._short: dict[int, int] = {}  # query -> cores asked for, of units that started with fewer

    @abstractmethod
    def unit(self, of: Demands, begin: int, core_count: int, active_cores: float) -> Block:
        """Return the unit of a query whose next layer is `begin`.

        `active_cores`: sum of the average demands of all queries that run, this one's included (if `adapts_blocks`).
        """

    def decide(self, snapshot: Snapshot) -> list[Start | Resize]:
        """Grow units in conflict and start waiting ones, from the oldest on, until no core is free."""
        short = self._units_in_conflict(snapshot)
        free = list(snapshot.free_cores)
        if not free or not (short or snapshot.waiting):
            return []
        decisions: list[Start | Resize] = []
        load = self._load(snapshot)
        active_cores, leases = load.active_cores, snapshot.free_leases
        for query in snapshot.waiting:
            while short and short[-1].query.query_id < query.query_id and free:
                decisions.append(self._grow(short.pop(), free))
            if not free:
                break
            if not query.started:
                if leases <= 0:
                    continue
                leases -= 1
            of = self.demands_of(snapshot.models[query.model_id], query, load.level)
            active_cores += of.average_cores
            block = self.unit(of, query.next_layer, snapshot.core_count, active_cores)
            decisions.append(self._start(query, block, of.versions, snapshot.core_count, free))
        while short and free:
            decisions.append(self._grow(short.pop(), free))
        return decisions

    def demands_of(self, profile: ModelProfile, query: Query, level: float) -> Demands:
        """Return what the query's model asks for; the level counts for policies that adapt versions."""
        adaptive = self.adapts_versions
        return demands(profile, level if adaptive else 0.0, query.rows, adaptive, TARGET_SHARE, UNIT_US)

    def _start(self, query: Query, block: Block, versions: tuple[int, ...], core_count: int, free: list[int]) -> Start:
        wanted = min(block.cores, core_count)
        cores = _take(free, wanted)
        if len(cores) < wanted:
            self._short[query.query_id] = wanted
        chosen = versions[block.begin : block.end]
        reason = f"layers {block.begin} to {block.end}: {len(cores)} of {wanted} cores"
        return Start(query.query_id, block.end, cores, chosen if any(chosen) else (), wanted, reason)

    def _grow(self, block: RunningBlock, free: list[int]) -> Resize:
        query_id = block.query.query_id
        wanted = self._short[query_id]
        cores = block.cores + _take(free, wanted - len(block.cores))
        if len(cores) >= wanted:
            del self._short[query_id]
        return Resize(query_id, cores, f"in conflict: {len(cores)} of {wanted} cores now")

    def _units_in_conflict(self, snapshot: Snapshot) -> list[RunningBlock]:
        """Return those that run on fewer cores than they asked for, the oldest last; forget those that ended."""
        if not self._short:
            return []
        short = [block for block in snapshot.running if block.query.query_id in self._short]
        self._short = {block.query.query_id: self._short[block.query.query_id] for block in short}
        growing = [
            block for block in short if not block.stopping and len(block.cores) < self._short[block.query.query_id]
        ]
        return sorted(growing, key=lambda block: -block.query.query_id)

    def _load(self, snapshot: Snapshot) -> Load:
        if not self.adapts_versions and not self.adapts_blocks:
            return Load(0.0, 0.0)
        busy = staying = 0
        blocks = []
        for block in snapshot.running:
            ends = about_to_end(block, snapshot)
            busy += len(block.cores)
            staying += 0 if ends else len(block.cores)
            if not ends or block.end_layer < snapshot.models[block.query.model_id].layers:
                blocks.append(block)
        level = snapshot.level * staying / busy if busy else 0.0
        if not self.adapts_blocks:
            return Load(level, 0.0)
        return Load(level, sum(self._average(block, snapshot, level) for block in blocks))

    def _average(self, block: RunningBlock, snapshot: Snapshot, level: float) -> float:
        return self.demands_of(snapshot.models[block.query.model_id], block.query, level).average_cores


def about_to_end(block: RunningBlock, snapshot: Snapshot) -> bool:
    """Tell whether less than a tenth of a unit's predicted time is left."""
    profile, query = snapshot.models[block.query.model_id], block.query
    level = snapshot.level
    time_us = profile.span_us(query.next_layer, block.end_layer, len(block.cores), query.rows, level)
    return snapshot.now_us - block.started_us > (1 - ABOUT_TO_END) * time_us


def _take(free: list[int], count: int) -> tuple[int, ...]:
    taken = tuple(free[:count])
    del free[:count]
    return taken
