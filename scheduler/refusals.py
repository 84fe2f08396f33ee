"""Refusing what queue policies give up: requests beyond a full queue, and those that are certain to be late."""

import time

from gangway.executor.slots import SlotStatus
from gangway.scheduler.apply import Execution
from gangway.scheduler.crowding import crowded_out
from gangway.scheduler.gangs import Gang
from gangway.scheduler.lateness import certain_from_us
from gangway.scheduler.models import ModelTable
from gangway.scheduler.requests import Request, RequestBook
from gangway.scheduler.workers import WorkerTable

MOST_WAITING = 7 / 8  # of a front end's slots; the others are for newcomers
ROOM = 1 / 16  # of them is made at once


class Refusals:
    """Sees every request once, and one that `rejects_late` again when it may have become certain that it will be late.

    Times are microseconds on CLOCK_MONOTONIC.
    """

    def __init__(self, execution: Execution, requests: RequestBook, workers: WorkerTable, models: ModelTable) -> None:
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
            self._execution.end(request, SlotStatus.QUEUE_FULL)

    def make_room(self, front_end: int) -> None:
        """Refuse some of the hopeless where so many requests of a front end wait that its slots run out."""
        slots = self._requests.slots(front_end)
        if self._requests.waiting_count(front_end) <= MOST_WAITING * slots:
            return
        queries = [request.query for request in self._requests.waiting_of(front_end)]
        now_us = time.monotonic_ns() / 1e3
        count = int(ROOM * slots)
        for query_id in crowded_out(queries, self._models.profiles, now_us, self._workers.in_service, count):
            request = self._requests.get_waiting(query_id)
            if request is not None:
                self._execution.end(request, SlotStatus.QUEUE_FULL)

    def watch(self, request: Request) -> None:
        """Refuse the request as soon as it is certain to be late, if that is its policy."""
        at_us = self._certain_from_us(request, None)
        if request.query.rejects_late and at_us is not None:
            self._requests.late.set(request.query.query_id, at_us)

    def act(self, now_us: float) -> None:
        """Refuse what is certain to be late by now, waiting or running; look again later at what has got further."""
        for query_id in self._requests.late.due(now_us):
            gang = self._execution.gangs.of_query(query_id)
            request = gang.request if gang is not None else self._requests.get_waiting(query_id)
            if request is None or request.dropped:
                continue
            at_us = self._certain_from_us(request, gang)
            if at_us is not None and now_us > at_us:
                self._execution.drop(request, SlotStatus.LATE)
            elif at_us is not None:
                self._requests.late.set(query_id, at_us)

    def _certain_from_us(self, request: Request, gang: Gang | None) -> float | None:
        query = request.query
        profile = self._models.profiles.get(query.model_id)
        if profile is None:  # it is being loaded again, or unloaded
            return query.deadline_us
        layer = gang.shared.position()[1] if gang is not None and gang.outstanding else None
        return certain_from_us(query, profile, self._workers.in_service, layer)
