"""The scheduler's index of the requests in the slot tables. The tables are the truth; a successor builds this again."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import count

from gangway.executor.slots import SlotCounts, SlotStatus, SlotTable
from gangway.scheduler.policy import Query
from gangway.scheduler.timers import Timers

MAX_ATTEMPTS = 3  # a request whose gang was lost this often is answered UNAVAILABLE: it may be what kills workers


@dataclass(slots=True, eq=False)
class Request:
    """A request that waits or runs. `dropped`: it is to end, as `drop_status` says, and gets no core any more.

    After `limit_us` nobody waits for the answer. It is refused if `max_queue` others like it wait (0: any number may).
    """

    query: Query
    front_end: int
    slot: int
    sequence: int
    limit_us: float | None = None
    max_queue: int = 0
    started: bool = False
    dropped: bool = False
    drop_status: SlotStatus = SlotStatus.CANCELLED


class RequestBook:
    """Requests by (front end, slot, sequence), and the waiting ones in order of arrival."""

    def __init__(self, tables: Sequence[SlotTable]) -> None:
        self._tables = tables
        self._known: dict[tuple[int, int, int], Request] = {}
        self._waiting: dict[int, Request] = {}  # by query id
        self._order: list[tuple[float, int]] = []  # the keys of `queries`
        self._queries: list[Query] = []
        self._limits = Timers()  # when nobody waits for an answer any more
        self.late = Timers()  # when to look whether a query has become certain to be late
        self._unstarted: Counter[tuple[int, int]] = Counter()  # waiting, by model and priority
        self._by_front_end: Counter[int] = Counter()  # waiting
        self._ids = count(1)

    @property
    def waiting(self) -> Iterable[Request]:
        """The waiting requests, in no particular order."""
        return self._waiting.values()

    @property
    def queries(self) -> Sequence[Query]:
        """The waiting queries in order of arrival. It changes with the queue."""
        return self._queries

    def admit(self, front_end: int, slot: int, sequence: int) -> Request | None:
        """Queue what a slot holds; None when the message is stale or a double, or nobody wants the answer any more."""
        table = self._tables[front_end]
        key = (front_end, slot, sequence)
        if not table.is_submitted(slot, sequence) or key in self._known:
            return None
        if table.cancelled(slot):
            table.finish(slot, sequence, SlotStatus.CANCELLED)
            return None
        fields = table.terms(slot)
        query = Query(
            query_id=next(self._ids),
            model_id=fields.model_id,
            rows=fields.rows,
            arrival_us=fields.arrival_ns / 1e3,
            deadline_us=fields.deadline_ns / 1e3 if fields.deadline_ns else None,
            priority=fields.priority,
            rejects_late=fields.rejects_late,
        )
        limit_us = fields.limit_ns / 1e3 if fields.limit_ns else None
        request = Request(query, front_end, slot, sequence, limit_us, fields.max_queue)
        self._known[key] = request
        self._queue(request)
        return request

    def recover(self) -> int:
        """Queue every request that the tables hold, in order of arrival; return how many. Nobody may be running one."""
        found = []
        for front_end, table in enumerate(self._tables):
            for entry in table.scan():
                found.append((table.terms(entry.slot).arrival_ns, front_end, entry.slot, entry.sequence))
        for _, front_end, slot, sequence in sorted(found):
            if self._revive(front_end, slot, sequence):
                self.admit(front_end, slot, sequence)
        return len(self._waiting)

    def find(self, front_end: int, slot: int, sequence: int) -> Request | None:
        """Return the request that waits or runs under this name."""
        return self._known.get((front_end, slot, sequence))

    def queued_like(self, request: Request) -> int:
        """Return how many requests of its model and priority wait and have not begun, itself included."""
        return self._unstarted[_kind(request)]

    def slots(self, front_end: int) -> int:
        """Return how many requests a front end can have in flight."""
        return self._tables[front_end].slots

    def waiting_count(self, front_end: int) -> int:
        """Return how many requests of a front end wait."""
        return self._by_front_end[front_end]

    def waiting_of(self, front_end: int) -> Iterable[Request]:
        """Return the waiting requests of a front end, oldest first."""
        return (request for query in self._queries if (request := self._waiting[query.query_id]).front_end == front_end)

    def of_front_end(self, front_end: int) -> list[Request]:
        """Return the waiting and running requests of a front end."""
        return [request for request in self._known.values() if request.front_end == front_end]

    def is_waiting(self, request: Request) -> bool:
        """Whether it is in the queue."""
        return request.query.query_id in self._waiting

    def get_waiting(self, query_id: int) -> Request | None:
        """Return a waiting request by its query's number, None if none waits under that."""
        return self._waiting.get(query_id)

    def start(self, request: Request) -> bool:
        """Take it out of the queue to be run; False if its slot has moved on (it is forgotten then)."""
        self._unqueue(request)
        if not request.started and not self._tables[request.front_end].start(request.slot, request.sequence):
            self._forget(request)
            return False
        request.started = True
        return True

    def count(self, request: Request, counts: SlotCounts) -> None:
        """Tell the front end what has been counted so far. No rank may be working on it."""
        self._tables[request.front_end].count(request.slot, counts)

    def pause(self, request: Request, next_layer: int, ran_us: float) -> None:
        """Queue a started request again, to go on with `next_layer`, after so long on cores; it keeps its place."""
        query = request.query
        request.query = replace(query, next_layer=next_layer, started=True, ran_us=query.ran_us + ran_us)
        self._queue(request)

    def answered(self, request: Request) -> None:
        """Forget a request that a worker has answered."""
        self._forget(request)

    def run_again(self, request: Request) -> None:
        """Its gang was lost: queue it again from its first layer, or answer UNAVAILABLE when that happens too often."""
        if not self._revive(request.front_end, request.slot, request.sequence):
            self._forget(request)
            return
        request.started = False
        request.query = replace(request.query, next_layer=0, started=False, ran_us=0.0)
        self._queue(request)

    def finish(self, request: Request, status: SlotStatus) -> bool:
        """Answer it and forget it; False if a worker has answered. No rank may be working on it."""
        if self.is_waiting(request):
            self._unqueue(request)
        self._forget(request)
        return self._tables[request.front_end].finish(request.slot, request.sequence, status)

    def expire(self, now_us: float, end: Callable[[Request, SlotStatus], None]) -> None:
        """Call `end` for every waiting request whose client is gone by now. (The front end cancels one that runs.)"""
        for query_id in self._limits.due(now_us):
            if query_id in self._waiting:
                end(self._waiting[query_id], SlotStatus.DEADLINE)

    def next_limit_us(self) -> float | None:
        """When `expire` has something to do, at the earliest."""
        return self._limits.next_us

    def _queue(self, request: Request) -> None:
        query = request.query
        self._waiting[query.query_id] = request
        key = (query.arrival_us, query.query_id)
        place = bisect_left(self._order, key)
        self._order.insert(place, key)
        self._queries.insert(place, query)
        self._unstarted[_kind(request)] += not request.started
        self._by_front_end[request.front_end] += 1
        if request.limit_us is not None:
            self._limits.set(query.query_id, request.limit_us)

    def _unqueue(self, request: Request) -> None:
        query = request.query
        del self._waiting[query.query_id]
        place = bisect_left(self._order, (query.arrival_us, query.query_id))
        del self._order[place]
        del self._queries[place]
        self._unstarted[_kind(request)] -= not request.started
        self._by_front_end[request.front_end] -= 1

    def _revive(self, front_end: int, slot: int, sequence: int) -> bool:
        """Make the slot SUBMITTED if it is not; False if it is answered."""
        table = self._tables[front_end]
        if table.attempts(slot) >= MAX_ATTEMPTS:
            table.finish(slot, sequence, SlotStatus.UNAVAILABLE)
            return False
        table.requeue(slot, sequence)
        return table.is_submitted(slot, sequence)

    def _forget(self, request: Request) -> None:
        self._known.pop((request.front_end, request.slot, request.sequence), None)
        self._limits.discard(request.query.query_id)
        self.late.discard(request.query.query_id)


def _kind(request: Request) -> tuple[int, int]:
    return request.query.model_id, request.query.priority
