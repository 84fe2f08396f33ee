"""Requests as units of batches, which the live server's `BatchFormer` forms (docs/explanation/batching.md).

The former sees what waits at every decision. When the policy starts one unit of a batch, the whole batch begins: its
requests leave the queue, and its other units wait in their place. A request is answered when its last unit has ended.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count

from gangway.scheduler.batching.former import BatchFormer
from gangway.scheduler.messages import LoadModel
from gangway.scheduler.policy import Query, RunningBlock
from gangway.scheduler.profiles import ModelProfile
from gangway.scheduler.timeline import BatchPart
from gangway.scheduler.units import Unit
from gangway.scheduler.waiting import WaitingQueries
from gangway.simulator.results import SimulationCounters


@dataclass(frozen=True)
class Batching:
    """What may be joined: up to `max_rows` rows in one batch, of requests that wait for `max_delay_us` at most.

    `max_delay_us` None: as long as it is predicted to pay. `preferred_rows`: the only sizes of batches; empty: any.
    """

    max_rows: int
    max_delay_us: float | None = None
    preferred_rows: tuple[int, ...] = ()


class Singles:
    """The engine's requests where every request is a query of its own."""

    wake_us: float | None = None  # when to look again, though nothing has happened

    def arrived(self, request: Query) -> None:
        """A request has come."""

    def form(
        self, waiting: WaitingQueries, now_us: float, free_cores: int, running: Sequence[RunningBlock]
    ) -> Sequence[Query]:
        """Return what the policy shall see of what waits."""
        return waiting.in_order

    def begin(self, query_id: int, waiting: WaitingQueries) -> None:
        """The policy starts this query: if it is one of a batch, the whole batch begins."""

    def members(self, query: Query) -> Sequence[Query]:
        """Return the requests that a waiting or running query has rows of."""
        return (query,)

    def batch_part(self, query: Query) -> BatchPart:
        """Return what a waiting or running query is, for timelines."""
        return BatchPart(query.rows)

    def queries(self, request_id: int) -> Sequence[int]:
        """Return the queries that have rows of a request."""
        return (request_id,)

    def end(self, query: Query, whole: bool) -> Sequence[tuple[Query, bool]]:
        """A query has left for good, `whole` or given up; return the requests that are over, and if each is whole."""
        return ((query, whole),)


class Batches(Singles):
    """Requests are known by their numbers, units by those of their queries, from `first_id` on."""

    def __init__(
        self,
        batching: Batching,
        models: Mapping[int, ModelProfile],
        core_count: int,
        first_id: int,
        counters: SimulationCounters,
    ) -> None:
        self._former = BatchFormer(count(first_id).__next__)
        for model in models.values():
            self._former.add(spec(model, batching))
        self._models = models
        self._core_count = core_count
        self._counters = counters
        self._shown: Mapping[int, Unit] = {}  # units of batches that the policy may begin
        self._units: dict[int, Unit] = {}  # those of batches that have begun
        self._requests: dict[int, Query] = {}  # those in batches that have begun,
        self._units_of: dict[int, list[int]] = {}  # and the units that have rows of each
        self._lost: set[int] = set()  # requests of which rows were given up

    def arrived(self, request: Query) -> None:
        """The former learns rates."""
        self._former.arrived(request)

    def form(
        self, waiting: WaitingQueries, now_us: float, free_cores: int, running: Sequence[RunningBlock]
    ) -> Sequence[Query]:
        """Return what waits, joined and cut."""
        formed = self._former.form(waiting, now_us, self._models, self._core_count, free_cores, running)
        self._shown = formed.units
        self.wake_us = formed.wake_us
        return formed.queries

    def begin(self, query_id: int, waiting: WaitingQueries) -> None:
        """Requests leave the queue, and units take their places, unless the query is a request or has begun already."""
        chosen = self._shown.get(query_id)
        if chosen is None or chosen.batch is None or query_id in self._units:
            return
        batch = chosen.batch
        for request in batch.requests:
            self._requests[request.query_id] = waiting.take(request.query_id)
            self._units_of[request.query_id] = []
        for unit in batch.begin():
            self._units[unit.query.query_id] = unit
            for piece in unit.pieces:
                self._units_of[piece.request_id].append(unit.query.query_id)
            waiting.add(unit.query)
        self._counters.batches += 1
        self._counters.batch_rows += batch.rows
        self._counters.batch_units += batch.size

    def members(self, query: Query) -> Sequence[Query]:
        """Return the requests of a unit."""
        unit = self._units.get(query.query_id)
        return (query,) if unit is None else [self._requests[piece.request_id] for piece in unit.pieces]

    def batch_part(self, query: Query) -> BatchPart:
        """Return which part of which batch a query is."""
        unit = self._units.get(query.query_id)
        return super().batch_part(query) if unit is None else unit.batch_part

    def queries(self, request_id: int) -> Sequence[int]:
        """Return the units that have rows of a request, or itself."""
        return self._units_of.get(request_id, (request_id,))

    def end(self, query: Query, whole: bool) -> Sequence[tuple[Query, bool]]:
        """Return the requests of which this was the last unit."""
        unit = self._units.pop(query.query_id, None)
        if unit is None:
            return ((query, whole),)
        over = []
        for piece in unit.pieces:
            number = piece.request_id
            if not whole:
                self._lost.add(number)
            self._units_of[number].remove(query.query_id)
            if not self._units_of[number]:
                del self._units_of[number]
                over.append((self._requests.pop(number), number not in self._lost))
                self._lost.discard(number)
        return over


def spec(model: ModelProfile, batching: Batching) -> LoadModel:
    """Return what a server would tell of a model whose requests may be joined."""
    return LoadModel(
        model_id=model.model_id,
        name=model.name,
        key="",
        layers=model.layers,
        max_ranks=model.max_ranks,
        arena_bytes=0,
        max_rows=batching.max_rows,
        joins=batching.max_rows > 1,
        preferred_rows=batching.preferred_rows,
        max_delay_us=batching.max_delay_us,
    )
