"""Admission: who is refused, and when. (A front end that cannot read all calls has a rule of its own.)

| rule | who is refused | when |
|---|---|---|
| full queue | the newcomer | as many requests of its model and class wait as its queue policy allows |
| queue's end | a request that has not begun | it has waited as long as its queue policy allows |
| certainly late | a request that `rejects_late` | now > its deadline - the least time that its rest takes |
| crowded | certainly late ones, then best effort | waiting requests take more than 7/8 of a front end's slots |
| late backlog | late ones, and best effort beside them | more late work waits than the machine does in two seconds |

Of late ones the oldest go first, of best effort the newest, so that the old ones are answered; lower classes go before
higher ones. No request that has begun is refused, but by the third rule. Times are microseconds.

The least time is an estimate. Where it is all that speaks against requests, and none of the model has run for a while,
one of them is served all the same: runs correct the estimate.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from gangway.executor.slots import SlotStatus
from gangway.scheduler.apply import Execution
from gangway.scheduler.models import ModelState
from gangway.scheduler.policy import Query
from gangway.scheduler.policy_config import DEFAULT, Shedding
from gangway.scheduler.profiles import ModelProfile
from gangway.scheduler.requests import Request
from gangway.scheduler.state import SchedulerState
from gangway.scheduler.units import Piece, Unit
from gangway.scheduler.waiting import WaitingGroup, earlier

PROBE_US: Final = 5e6  # an estimate that refuses is trusted for so long without a run


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


def crowded_out(
    waiting: Sequence[Query], models: Mapping[int, ModelProfile], now_us: float, core_count: int, count: int
) -> list[int]:
    """Return the numbers of up to `count` waiting queries, given in order of arrival, that make room for others.

    None that has begun, and none that may be in time: in an overload the queue fills with queries that cannot be in
    time any more, which would keep out new ones that can.
    """
    late, best_effort = [], []
    for query in waiting:
        if query.started or query.model_id not in models:
            continue
        if query.deadline_us is None:
            best_effort.append(query)
        elif certain_to_be_late(query, query.profile(models), now_us, core_count):
            late.append(query)
    late.sort(key=lambda query: -query.priority)
    best_effort.sort(key=lambda query: (-query.priority, -query.arrival_us))
    return [query.query_id for query in (*late, *best_effort)[:count]]


def excess(
    groups: Iterable[WaitingGroup],
    models: Mapping[int, ModelProfile],
    now_us: float,
    core_count: int,
    config: Shedding = DEFAULT.shedding,
) -> list[int]:
    """Return the numbers of the waiting queries to refuse because too much late work waits, none that has begun.

    Late queries are served with what others leave, and in an overload that is next to nothing: without a bound there
    would be ever more of them, with the memory of their tensors, until no request slot is left. Late work whose time is
    not known does not count. Best effort of no higher class would wait as long, so only some of it may.
    """
    fresh = [group for group in groups if not group.started]
    late = [(group, model) for group in fresh if group.late(now_us) and (model := _known(group, models))]
    waiting_us = sum(group.late(now_us) * model.work_us(group.rows) / core_count / len(group) for group, model in late)
    if waiting_us <= config.max_late_us or not config.enabled:
        return []
    first = min(group.priority for group, _ in late)
    chosen = _newest([group for group in fresh if group.priority >= first], config.min_waiting)
    return chosen + _oldest(late, now_us, core_count, waiting_us - (1 - config.room_share) * config.max_late_us)


def _oldest(
    groups: Iterable[tuple[WaitingGroup, ModelProfile]], now_us: float, core_count: int, least_us: float
) -> list[int]:
    """Return late queries of so much work at least, the oldest of the lowest class."""
    late = [(query, model) for group, model in groups for query in group.late_ones(now_us)]
    late.sort(key=lambda one: (-one[0].priority, one[0].arrival_us))
    chosen = []
    for query, model in late:
        if least_us <= 0:
            break
        least_us -= model.work_us(query.rows) / core_count
        chosen.append(query.query_id)
    return chosen


def _newest(groups: Iterable[WaitingGroup], most: int) -> list[int]:
    """Return the best-effort queries beyond so many, the newest of the lowest class."""
    queries = [query for group in groups for query in group.best_effort()]
    queries.sort(key=lambda query: (query.priority, query.arrival_us))
    return [query.query_id for query in queries[most:]]


def _known(group: WaitingGroup, models: Mapping[int, ModelProfile]) -> ModelProfile | None:
    if group.model_id not in models:
        return None
    model = models[group.model_id].at(group.precision)
    return model if (model.measured or model.isolated_us > 0) and not model.varies else None


class Admission:
    """Applies the rules to the requests of a server. Times are on CLOCK_MONOTONIC."""

    def __init__(self, state: SchedulerState, execution: Execution) -> None:
        self._drop = execution.drop
        self._gangs = execution.gangs
        self._requests = state.requests
        self._workers = state.workers
        self._models = state.models
        self._config = state.policy.config
        self._trusted_us: dict[int, float] = {}  # by artifact: since when its estimate refuses, or when it was probed

    @property
    def next_us(self) -> float | None:
        """When `refuse_late` or `end_waiting` has something to do, at the earliest."""
        return earlier(self._requests.late.next_us, self._requests.queue_ends.next_us)

    def arrived(self, request: Request) -> None:
        """A request has just been queued: refuse it if its queue was full, or others if slots run out."""
        if request.max_queue and self._requests.queued_like(request) > request.max_queue:
            self._drop(request, SlotStatus.QUEUE_FULL)
        self._make_room(request.front_end)

    def _make_room(self, front_end: int) -> None:
        crowding = self._config.crowding
        slots = self._requests.slots(front_end)
        if not crowding.enabled or self._requests.queued_count(front_end) <= crowding.max_waiting_share * slots:
            return
        queries = [request.query for request in self._requests.queued_of(front_end)]
        now_us = time.monotonic_ns() / 1e3
        count = int(crowding.room_share * slots)
        for number in crowded_out(queries, self._models.profiles, now_us, self._workers.in_service, count):
            request = self._requests.get(number)
            if request is not None:
                self._drop(request, SlotStatus.CROWDED)

    def shed(self, now_us: float) -> None:
        """Refuse requests of late work that is too much, and best effort beside it."""
        queries = self._requests.queries
        if len(queries) < self._config.shedding.min_waiting:
            return
        profiles, in_service = self._models.profiles, self._workers.in_service
        for number in excess(queries.groups, profiles, now_us, in_service, self._config.shedding):
            unit = self._requests.waiting.get(number)
            for request in self._requests.of(unit) if unit is not None else ():
                if not request.running:  # another part of it may be under way
                    self._drop(request, SlotStatus.CROWDED)

    def watch(self, request: Request) -> None:
        """Refuse the request as soon as it is certain to be late, if that is its policy."""
        if request.query.rejects_late:
            at_us = self._certain_from_us(request)
            if at_us is not None:
                self._requests.late.set(request.query.query_id, at_us)

    def end_waiting(self, now_us: float) -> None:
        """Refuse what has waited in the queue for as long as its policy allows, or let it wait behind others.

        What waits for an idle model to be loaded does not wait in a queue: a model that is asked now and then, each
        time when it is idle, would never answer.
        """
        for number in self._requests.queue_ends.due(now_us):
            request = self._requests.get(number)
            if request is None or request.dropped or request.running:
                continue
            model = self._models.get(request.query.model_id)
            if model is not None and model.state is ModelState.LOADING and model.is_waited_for:
                continue
            if request.delays:
                self._requests.delay(request, now_us)
            else:
                self._drop(request, SlotStatus.LATE)

    def refuse_late(self, now_us: float) -> None:
        """Refuse what is certain to be late by now, waiting or running; look again later at what has got further."""
        for number in self._requests.late.due(now_us):
            request = self._requests.get(number)
            if request is None or request.dropped:
                continue
            at_us = self._certain_from_us(request)
            if at_us is not None and now_us > at_us:
                if not self._is_probe(request, now_us):
                    self._drop(request, SlotStatus.LATE)
            elif at_us is not None:
                self._requests.late.set(number, at_us)

    def _is_probe(self, request: Request, now_us: float) -> bool:
        """Whether to serve a request that only an estimate says is late."""
        deadline_us = request.query.deadline_us
        if request.running or deadline_us is None or now_us > deadline_us:
            return False
        artifact_id = self._models.artifact_id(request.query)
        since_us = max(self._trusted_us.setdefault(artifact_id, now_us), self._models.ran_us(artifact_id))
        if now_us - since_us < PROBE_US:
            return False
        self._trusted_us[artifact_id] = now_us
        return True

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
        gang = self._gangs.of_query(unit.query.query_id)
        artifact_id = self._models.artifact_id(unit.query) if gang is None else gang.artifact_id
        profile = self._models.tables.get(artifact_id)
        if profile is None:  # it is being loaded again, or unloaded
            return request.deadline_us
        query = replace(request, rows=piece.rows, next_layer=unit.query.next_layer)
        layer = gang.shared.position()[1] if gang is not None and gang.outstanding else None
        at_us = certain_from_us(query, profile, self._workers.in_service, layer)
        assert at_us is not None
        share = self._models.least_share(artifact_id, self._workers.in_service)
        return request.deadline_us - share * (request.deadline_us - at_us)
