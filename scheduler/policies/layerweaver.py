"""layerweaver and layerweaver_plus: memory-bound beside compute-bound layers (HPCA 2021; IEICE E105-D, 2022).

The choice is `two_modes`'s. This is what the engines of the papers' accelerator are on a CPU:

- A core fetches and computes at the same time and cannot fetch for later, so what runs side by side should keep both
  engines busy. The load of an engine is the sum of m (or c) of the chunks that run. The engine with less of it is idle
  until the other one ends: a chunk's idle time is how far the two loads are apart with it.
- m and c are those of one core: whether a chunk is memory-bound does not depend on the number of cores.
- Two chunks share the machine, half of the cores each; alone, or urgent, a chunk has all that are free. Chunks are
  short, so nothing is preempted, as in the papers.
- The remaining time is the profile's on a whole gang: the paper's "Precise" variant. Its approximation, the sum of
  max(m, c), is for NPUs, where it is nearly exact; on gangs of cores it is off by their number.
- Best effort is due a second after its arrival.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

from gangway.scheduler.policies.base import Policy
from gangway.scheduler.policies.baselines import due_us
from gangway.scheduler.policy import Decision, Query, Resize, Snapshot, Start
from gangway.scheduler.profiles import ModelProfile

# Layerweaver+'s choice of the next layer (IEICE Transactions E105-D, 2022, Algorithm 1), for NPU and CPU alike.
#
# What the engines are is the caller's: it says for each candidate how long engines would be idle if it went next, and
# until when compute would be busy then.
#
# Loose ends. Line 12 takes the request with the least slack, not with the least slack over remaining time: so do we.
# Slack is compared after mode 1's choice has run (line 10 moves T_PE): the urgent one goes now if it could not wait
# for that. QoS-blind Layerweaver (HPCA 2021) is mode 1 alone, ties in order of arrival.


class LayerCandidate(NamedTuple):
    """The next layer, or chunk, of a request. Times are microseconds of one clock."""

    idle_us: float  # of both engines together, if it goes next
    end_us: float  # T_PE, if it goes next
    due_us: float  # arrival + QoS
    remaining_us: float  # of the request, alone: sum of max(m, c), or better


@dataclass(frozen=True, slots=True)
class LayerChoice:
    """Which of the candidates, and in which mode."""

    index: int
    urgent: bool = False


def least_idle(candidates: Sequence[LayerCandidate]) -> LayerChoice:
    """Return mode 1 without deadlines: the least idle time, then the first one. ValueError without candidates."""
    return LayerChoice(min(range(len(candidates)), key=lambda index: (round(candidates[index].idle_us, 3), index)))


def two_modes(candidates: Sequence[LayerCandidate]) -> LayerChoice:
    """Return the least idle time, ties by least slack; or the most urgent one if that would make it late.

    Raises ValueError without candidates.
    """
    indices = range(len(candidates))
    throughput = min(indices, key=lambda index: (round(candidates[index].idle_us, 3), candidates[index].due_us, index))
    urgent = min(indices, key=lambda index: (candidates[index].due_us, index))
    slack_us = candidates[urgent].due_us - candidates[throughput].end_us
    if slack_us > candidates[urgent].remaining_us:
        return LayerChoice(throughput)
    return LayerChoice(urgent, urgent=True)


# Chunks of models that are bound by memory or by compute: what Layerweaver and AI-MT schedule, on a CPU.
#
# The papers schedule single layers, on accelerators that take a layer from a queue. Here each chunk is a dispatch of
# some 10 us, and layers may be as short. So a chunk is a run of layers: it ends where the kind of layer changes once
# it is 300 us long, and at the next boundary whatever the kind once it is 2 ms long (times of one row on one core).

SHORTEST_US = 300.0
LONGEST_US = 2000.0


@dataclass(frozen=True, slots=True)
class Chunk:
    """Layers [begin, end) of one row, with the times that memory and arithmetic of one core are busy with them."""

    begin: int
    end: int
    memory_us: float
    compute_us: float

    @property
    def memory_bound(self) -> bool:
        """Whether memory is busy for longer."""
        return self.memory_us > self.compute_us


class Chunks:
    """The chunk that begins at a layer. Remembered, because each decision asks for those of all waiting queries."""

    def __init__(self) -> None:
        self._models: dict[int, tuple[ModelProfile, dict[int, Chunk]]] = {}

    def chunk(self, model: ModelProfile, begin: int, end: int | None = None) -> Chunk:
        """Return the chunk that begins at this layer; with `end` the layers up to there, whatever they are."""
        if end is not None:
            return _sum(model, begin, end)
        known = self._models.get(model.model_id)
        if known is None or known[0] is not model:
            known = self._models[model.model_id] = (model, {})
        if begin not in known[1]:
            known[1][begin] = _sum(model, begin, _end(model, begin))
        return known[1][begin]


def layer_times_us(model: ModelProfile, layer: int) -> tuple[float, float]:
    """Return Layerweaver+'s m and c of a layer; without them a layer is all compute."""
    if not model.memory_us or not model.compute_us:
        return 0.0, model.layer_us(layer, 1)
    return model.memory_us[layer], model.compute_us[layer]


def _end(model: ModelProfile, begin: int) -> int:
    if model.indivisible:
        return model.layers
    time_us = chunk_memory_us = chunk_compute_us = 0.0
    for layer in range(begin, model.layers):
        memory_us, compute_us = layer_times_us(model, layer)
        changes = (memory_us > compute_us) != (chunk_memory_us > chunk_compute_us)
        if time_us >= LONGEST_US or (changes and time_us >= SHORTEST_US):
            return layer
        time_us += max(memory_us, compute_us)
        chunk_memory_us += memory_us
        chunk_compute_us += compute_us
    return model.layers


def _sum(model: ModelProfile, begin: int, end: int) -> Chunk:
    times = [layer_times_us(model, layer) for layer in range(begin, end)]
    return Chunk(begin, end, sum(time[0] for time in times), sum(time[1] for time in times))


# ai_mt: memory blocks fetched early beside compute blocks (AI-MT, ISCA 2020, section IV), as read for a CPU.
#
# The paper cuts layers into memory blocks (fetch weights) and compute blocks, and fetches the memory block of another
# network while the arrays compute. A core cannot fetch for another one, so here a chunk of layers that is bound by
# memory is the memory block, and one bound by compute the compute block: at most one of either kind runs.
# Early fetch: a memory-bound chunk does not wait for the compute-bound one that has the machine; that gives it a
# quarter of the cores. Deadlines and priorities are not looked at; of each kind the oldest query goes first (the paper
# goes round networks in turn). Merging and eviction of blocks manage the paper's on-chip buffer, and have no
# counterpart here.


class AiMt(Policy):
    """One memory-bound and one compute-bound chunk side by side."""

    name = "ai_mt"

    def __init__(self) -> None:
        self._chunks = Chunks()

    def decide(self, snapshot: Snapshot) -> list[Decision]:
        """Start the oldest chunk of each kind that does not run yet, and make room for a memory-bound one."""
        running = self._running(snapshot)
        ready = self._ready(running, snapshot)
        decisions: list[Decision] = []
        free = snapshot.free_cores
        for memory_bound, (query, chunk) in ready.items():
            beside_other = (not memory_bound) in ready or (not memory_bound) in running
            most = min(query.profile(snapshot.models).max_ranks, self._cores(memory_bound, beside_other, snapshot))
            gang = free[:most]
            if gang:
                free = free[most:]
                kind = "memory" if memory_bound else "compute"
                decisions.append(Start(query.query_id, chunk.end, gang, wanted=most, reason=f"oldest {kind}-bound"))
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
            self._chunks.chunk(
                block.query.profile(snapshot.models), block.query.next_layer, block.end_layer
            ).memory_bound
            for block in snapshot.running
        }

    def _ready(self, running: set[bool], snapshot: Snapshot) -> dict[bool, tuple[Query, Chunk]]:
        """Return the oldest of each kind that does not run, memory-bound first: it takes the fewer cores."""
        ready: dict[bool, tuple[Query, Chunk]] = {}
        leases = snapshot.free_leases
        for query in snapshot.waiting:
            chunk = self._chunks.chunk(query.profile(snapshot.models), query.next_layer)
            if chunk.memory_bound in running or chunk.memory_bound in ready or (not query.started and leases == 0):
                continue
            leases -= not query.started
            ready[chunk.memory_bound] = (query, chunk)
            if len(ready) == 2:
                break
        return dict(sorted(ready.items(), reverse=True))

    def _make_room(self, snapshot: Snapshot) -> list[Resize]:
        """Shrink the compute-bound chunk that has the machine."""
        keep = self._cores(memory_bound=False, beside_other=True, snapshot=snapshot)
        for block in snapshot.running:
            if not block.stopping and len(block.cores) > keep:
                return [Resize(block.query.query_id, block.cores[:keep], "room for a memory-bound chunk")]
        return []


class Layerweaver(Policy):
    """Whatever adds the least idle time goes next. Deadlines are not looked at."""

    name = "layerweaver"

    def __init__(self) -> None:
        self._chunks = Chunks()

    def decide(self, snapshot: Snapshot) -> list[Decision]:
        """Start chunks while there are cores."""
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
            model = query.profile(snapshot.models)
            gang = free[: min(model.max_ranks, len(free) if choice.urgent else lane)]
            free = free[len(gang) :]
            chunk = self._chunk(query, snapshot)
            memory_us += chunk.memory_us * query.rows
            compute_us += chunk.compute_us * query.rows
            decisions.append(Start(query.query_id, chunk.end, gang, reason=_reason(choice, chunk)))
        return decisions

    def _choose(self, candidates: Sequence[LayerCandidate]) -> LayerChoice:
        return least_idle(candidates)

    def _first_of_each(self, waiting: Sequence[Query]) -> list[Query]:
        """Return one of those queries that differ in nothing but their deadlines: the first to choose."""
        first: dict[tuple[int, str, int, int], Query] = {}
        for query in waiting:
            first.setdefault((query.model_id, query.precision, query.next_layer, query.rows), query)
        return list(first.values())

    def _load(self, snapshot: Snapshot) -> tuple[float, float]:
        memory_us = compute_us = 0.0
        for block in snapshot.running:
            chunk = self._chunks.chunk(block.query.profile(snapshot.models), block.layer, block.end_layer)
            memory_us += chunk.memory_us * block.query.rows
            compute_us += chunk.compute_us * block.query.rows
        return memory_us, compute_us

    def _lane(self, snapshot: Snapshot) -> int:
        alone = len(snapshot.waiting) + len(snapshot.running) == 1
        return snapshot.core_count if alone else ceil(snapshot.core_count / 2)

    def _chunk(self, query: Query, snapshot: Snapshot) -> Chunk:
        return self._chunks.chunk(query.profile(snapshot.models), query.next_layer)

    def _candidate(
        self, query: Query, snapshot: Snapshot, memory_us: float, compute_us: float, lane: int
    ) -> LayerCandidate:
        model = query.profile(snapshot.models)
        chunk = self._chunk(query, snapshot)
        widest = min(snapshot.core_count, model.max_ranks)
        return LayerCandidate(
            idle_us=abs(memory_us + chunk.memory_us * query.rows - compute_us - chunk.compute_us * query.rows),
            end_us=snapshot.now_us + model.span_us(chunk.begin, chunk.end, min(lane, widest), query.rows),
            due_us=due_us(query),
            remaining_us=model.remaining_us(query.next_layer, widest, query.rows),
        )


class LayerweaverPlus(Layerweaver):
    """The same, but whoever would be late by waiting for that goes first."""

    name = "layerweaver_plus"

    def _choose(self, candidates: Sequence[LayerCandidate]) -> LayerChoice:
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


def _reason(choice: LayerChoice, chunk: Chunk) -> str:
    if choice.urgent:
        return "urgent: would be late after anything else"
    return f"least idle time, {'memory' if chunk.memory_bound else 'compute'}-bound"
