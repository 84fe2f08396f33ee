"""Refusing requests: those beyond a full queue, those that are certain to be late, if that is their policy, and of very
many that are late already those that would wait in vain."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from gangway.executor.slots import SlotStatus
from gangway.scheduler.apply import Execution
from gangway.scheduler.models import ModelTable
from gangway.scheduler.policy import Query
from gangway.scheduler.profiles import ModelProfile
from gangway.scheduler.requests import Request, RequestTable
from gangway.scheduler.resources import WorkerTable
from gangway.scheduler.units import Piece, Unit

# When a query is certain to miss its deadline: even if it had every core to itself from now on. Pure.
#
# The live scheduler and the simulator refuse a query that `rejects_late` then, waiting or running, and not before.
# Policies may refuse a waiting one earlier, by a prediction.


def certain_from_us(query: Query, model: ModelProfile, core_count: int, layer: int | None = None) -> float | None:
    """Return from when on the query is certain to be late, if it gets no further until then; None without a deadline.

    `layer`: the one being executed, which may end at any moment; None: none is. What counts is the isolated time of the
    rest with the best version and number of cores of each layer; a model whose times are not known is late at its
    deadline.
    """
    if query.deadline_us is None:
        return None
    next_layer = query.next_layer if layer is None else min(layer + 1, model.layers)  # a gang at its end has no layer
    return query.deadline_us - model.fastest_us(next_layer, core_count, query.rows)


def certain_to_be_late(
    query: Query, model: ModelProfile, now_us: float, core_count: int, layer: int | None = None
) -> bool:
    """Return whether the query is certain to miss its deadline."""
    from_us = certain_from_us(query, model, core_count, layer)
    return from_us is not None and now_us > from_us


# Who is refused when so many queries wait that newcomers would find no request slot. Pure.
#
# In an overload the queue fills with queries that cannot be in time any more. Without this they would keep out new
# ones that can, and the server would be busy with answers that come too late.


def crowded_out(
    waiting: Sequence[Query], models: Mapping[int, ModelProfile], now_us: float, core_count: int, count: int
) -> list[int]:
    """Return the numbers of up to `count` waiting queries, given in order of arrival, that make room for others.

    First those that are certain to be late, the oldest first; then those without a deadline, the newest first, so that
    the old ones are answered at last. In each group lower classes come first. None that has begun, none with hope.
    """
    late, best_effort = [], []
    for query in waiting:
        model = models.get(query.model_id)
        if query.started or model is None:
            continue
        if query.deadline_us is None:
            best_effort.append(query)
        elif certain_to_be_late(query, model, now_us, core_count):
            late.append(query)
    late.sort(key=lambda query: -query.priority)
    best_effort.sort(key=lambda query: (-query.priority, -query.arrival_us))
    return [query.query_id for query in (*late, *best_effort)[:count]]


MOST_WAITING = 7 / 8  # of a front end's slots; the others are for newcomers
ROOM = 1 / 16  # of them is made at once
LEAST_CROWD = 32  # fewer waiting requests are no crowd, however long they take


class Refusals:
    """Sees every request once, and one that `rejects_late` again when it may have become certain that it will be late.

    Times are microseconds on CLOCK_MONOTONIC.
    """

    def __init__(self, execution: Execution, requests: RequestTable, workers: WorkerTable, models: ModelTable) -> None:
        self._execution = execution
        self._requests = requests
        self._workers = workers
        self._models = models

    @property
    def next_us(self) -> float | None:
        """When `act` has something to do, at the earliest."""
        return self._requests.late.next_us

    def refuse_if_full(self, request: Request) -> None:
        """A request has just been queued: refuse it if its queue was full."""
        if request.max_queue and self._requests.queued_like(request) > request.max_queue:
            self._execution.drop(request, SlotStatus.QUEUE_FULL)

    def make_room(self, front_end: int) -> None:
        """Refuse some of the hopeless where so many requests of a front end wait that its slots run out."""
        slots = self._requests.slots(front_end)
        if self._requests.queued_count(front_end) <= MOST_WAITING * slots:
            return
        queries = [request.query for request in self._requests.queued_of(front_end)]
        now_us = time.monotonic_ns() / 1e3
        count = int(ROOM * slots)
        for number in crowded_out(queries, self._models.profiles, now_us, self._workers.in_service, count):
            request = self._requests.get(number)
            if request is not None:
                self._execution.drop(request, SlotStatus.CROWDED)

    def shed(self, now_us: float) -> None:
        """Refuse requests whose turn would not come: of many that are late, and of best effort beside them."""
        queries = self._requests.queries
        if len(queries) < LEAST_CROWD:
            return
        backlog, in_service = self._execution.late_backlog, self._workers.in_service
        for number in backlog.excess(queries.groups, self._models.profiles, now_us, in_service):
            unit = self._requests.waiting.get(number)
            for request in self._requests.of(unit) if unit is not None else ():
                if not request.running:  # another part of it may be under way
                    self._execution.drop(request, SlotStatus.CROWDED)

    def watch(self, request: Request) -> None:
        """Refuse the request as soon as it is certain to be late, if that is its policy."""
        if request.query.rejects_late:
            at_us = self._certain_from_us(request)
            if at_us is not None:
                self._requests.late.set(request.query.query_id, at_us)

    def act(self, now_us: float) -> None:
        """Refuse what is certain to be late by now, waiting or running; look again later at what has got further."""
        for number in self._requests.late.due(now_us):
            request = self._requests.get(number)
            if request is None or request.dropped:
                continue
            at_us = self._certain_from_us(request)
            if at_us is not None and now_us > at_us:
                self._execution.drop(request, SlotStatus.LATE)
            elif at_us is not None:
                self._requests.late.set(number, at_us)

    def _certain_from_us(self, request: Request) -> float | None:
        """Return from when on one of its pieces is certain to be late; None without a deadline."""
        if request.query.deadline_us is None:
            return None
        pieces = [
            (unit, piece) for unit in request.units for piece in unit.pieces if piece.request_id == request.number
        ]
        return min([self._piece_certain_from_us(request.query, unit, piece) for unit, piece in pieces])

    def _piece_certain_from_us(self, request: Query, unit: Unit, piece: Piece) -> float:
        """As if it were alone, but with what its gang has done."""
        assert request.deadline_us is not None
        profile = self._models.profiles.get(request.model_id)
        if profile is None:  # it is being loaded again, or unloaded
            return request.deadline_us
        query = replace(request, rows=piece.rows, next_layer=unit.query.next_layer)
        gang = self._execution.gangs.of_query(unit.query.query_id)
        layer = gang.shared.position()[1] if gang is not None and gang.outstanding else None
        at_us = certain_from_us(query, profile, self._workers.in_service, layer)
        assert at_us is not None
        return at_us
