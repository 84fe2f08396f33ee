"""The scheduler's index of the requests in the slot tables. The tables are the truth; a successor builds this again."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count

from gangway.executor.fast_path import InFlight
from gangway.executor.slots import NEVER_JOINED, SlotStatus, SlotTable
from gangway.scheduler.batching.former import FormedUnit
from gangway.scheduler.policy import Query
from gangway.scheduler.units import NOTHING, Piece, Request, Unit, UnitQueue, make_batch, separate, whole
from gangway.scheduler.waiting import Timers, WaitingQueries

# How many requests have not begun: by front end, and by model and priority, as full queues are judged.


class FreshCounts:
    """Requests that were added and not removed."""

    def __init__(self) -> None:
        self._like: Counter[tuple[int, int]] = Counter()
        self._of: Counter[int] = Counter()

    def like(self, request: Request) -> int:
        """Return how many there are of its model and priority."""
        return self._like[request.query.model_id, request.query.priority]

    def of_front_end(self, front_end: int) -> int:
        """Return how many there are of a front end."""
        return self._of[front_end]

    def add(self, request: Request, count: int = 1) -> None:
        """A request waits that has not begun."""
        self._like[request.query.model_id, request.query.priority] += count
        self._of[request.front_end] += count

    def remove(self, request: Request) -> None:
        """It begins, or is forgotten."""
        self.add(request, -1)


MAX_ATTEMPTS = 3  # a request whose gang was lost this often is answered UNAVAILABLE
MAX_CRASHES = 2  # of workers; the first may have been of a batch with others, after which it is alone


class RequestTable:
    """Requests by (front end, slot, generation) and by number, and the units of them that wait."""

    def __init__(self, tables: Sequence[SlotTable]) -> None:
        self.tables = tables
        self._known: dict[tuple[int, int, int], Request] = {}
        self._numbered: dict[int, Request] = {}
        self.waiting = UnitQueue()
        self._limits = Timers()  # when nobody waits for an answer any more
        self.late = Timers()  # when to look whether a request has become certain to be late
        self._fresh = FreshCounts()
        self._ids = count(1)

    @property
    def queries(self) -> WaitingQueries:
        """The queries of the waiting units. It changes with the queue."""
        return self.waiting.queries

    def next_id(self) -> int:
        """Return a number that no query has had."""
        return next(self._ids)

    # -- coming

    def admit(self, front_end: int, slot: int, generation: int) -> Request | None:
        """Queue what a slot holds; None when the message is stale or a double, or nobody wants the answer any more."""
        table = self.tables[front_end]
        key = (front_end, slot, generation)
        if not table.is_submitted(slot, generation) or key in self._known:
            return None
        terms = table.terms(slot)
        if terms.cancelled:
            table.finish(slot, generation, SlotStatus.CANCELLED)
            return None
        query = Query(
            next(self._ids),
            terms.model_id,
            terms.rows,
            terms.arrival_ns / 1e3,
            terms.deadline_ns / 1e3 if terms.deadline_ns else None,
            terms.priority,
            rejects_late=terms.rejects_late,
            join_key=terms.join_key | NEVER_JOINED if terms.attempts else terms.join_key,
        )
        limit_us = terms.limit_ns / 1e3 if terms.limit_ns else None
        request = self._enter(Request(query, front_end, slot, generation, limit_us, terms.max_queue))
        self.waiting.add(whole(request))
        self._fresh.add(request)
        self._watch_limit(request)
        return request

    def take_over(self, present: InFlight) -> Request:
        """Return a new request for what is under way already, in one unit, which does not wait."""
        query = Query(
            next(self._ids),
            present.model_id,
            1,
            present.arrival_ns / 1e3,
            present.deadline_ns / 1e3 if present.deadline_ns else None,
            present.priority,
            join_key=present.join_key,
        )
        limit_us = present.limit_ns / 1e3 if present.limit_ns else None
        request = self._enter(
            Request(query, present.front_end, present.slot, present.slot_generation, limit_us, begun=True)
        )
        whole(request)
        return request

    # -- looking

    def find(self, front_end: int, slot: int, generation: int) -> Request | None:
        """Return the request that waits or runs under this name."""
        return self._known.get((front_end, slot, generation))

    def get(self, number: int) -> Request | None:
        """Return the request that waits or runs under this number."""
        return self._numbered.get(number)

    def fresh_like(self, request: Request) -> int:
        """Return how many requests of its model and priority have not begun, itself included."""
        return self._fresh.like(request)

    def slots(self, front_end: int) -> int:
        """Return how many requests a front end can have in flight."""
        return self.tables[front_end].slots

    def fresh_count(self, front_end: int) -> int:
        """Return how many requests of a front end have not begun."""
        return self._fresh.of_front_end(front_end)

    def fresh_of(self, front_end: int) -> list[Request]:
        """Return the requests of a front end that have not begun, oldest first."""
        fresh = [request for request in self.of_front_end(front_end) if not request.begun]
        return sorted(fresh, key=lambda request: request.query.arrival_us)

    def of_front_end(self, front_end: int) -> list[Request]:
        """Return the waiting and running requests of a front end."""
        return [request for request in self._known.values() if request.front_end == front_end]

    # -- going

    def form(self, batch: Sequence[FormedUnit]) -> None:
        """Let the units of a batch wait, instead of the requests that they are made of. These wait and are whole."""
        requests: dict[int, Request] = {}
        for formed in batch:
            for piece in formed.pieces:
                if piece.query_id not in requests:
                    self.waiting.remove(unit := self.waiting[piece.query_id])
                    requests[piece.query_id] = unit.pieces[0].request
        for made in make_batch(batch, requests):
            self.waiting.add(made)

    def start(self, unit: Unit) -> bool:
        """Take it out of the queue to be run; False if all its slots have moved on (their requests are forgotten)."""
        if not unit.query.started:
            for piece in unit.pieces:
                if not piece.request.begun and not self._begin(piece.request):
                    self.withdraw(piece.request)
                    self._forget(piece.request)
        if not unit.pieces:
            return False
        self.waiting.remove(unit)
        return True

    def count(self, unit: Unit) -> None:
        """Tell the front ends what has been counted so far. No rank may be working on the unit."""
        for piece in unit.pieces:
            request = piece.request
            self.tables[request.front_end].count(request.slot, request.counts)

    def pause(self, unit: Unit, next_layer: int, ran_us: float) -> None:
        """Queue a unit that has begun again, to go on with `next_layer`, after so long on cores; it keeps its place."""
        query = unit.query
        unit.query = replace(query, next_layer=next_layer, started=True, ran_us=query.ran_us + ran_us)
        self.waiting.add(unit)
        for piece in unit.pieces:
            self._watch_limit(piece.request)

    def run_again(self, piece: Piece, unit: Unit) -> bool:
        """The gang of its unit was lost: queue the piece again, from the first layer and for itself.

        Nothing happens if a rank had done it before. False if it has been begun too often: it is to be given up.
        """
        request = piece.request
        table = self.tables[request.front_end]
        if table.part_done(request.slot, request.generation, piece.part):
            if not request.units:
                self._forget(request)
        elif request.crashes >= MAX_CRASHES or table.attempts(request.slot) >= MAX_ATTEMPTS:
            return False
        else:
            if request.parts > 1:
                table.count_attempt(request.slot)
            else:
                self._requeue(request)
            self._queue_piece(piece, unit)
            self._watch_limit(request)
        return True

    def start_over(self, unit: Unit) -> Sequence[Request]:
        """Let the pieces of a stopped unit wait one by one, from the first layer; it counts as no attempt.

        Return its requests that were dropped and of which nothing is left.
        """
        self.waiting.remove(unit)
        for piece in unit.pieces:
            request = piece.request
            request.units.remove(unit)
            if request.dropped:
                continue
            if request.parts == 1:
                self._requeue(request)
                self.tables[request.front_end].count_attempt(request.slot, -1)
            self._queue_piece(piece, unit)
            self._watch_limit(request)
        return [piece.request for piece in unit.pieces if piece.request.dropped and not piece.request.units]

    def break_up(self, unit: Unit) -> None:
        """Let the pieces of a waiting unit wait one by one."""
        self.waiting.remove(unit)
        for piece in unit.pieces:
            piece.request.units.remove(unit)
            self._queue_piece(piece, unit)

    # -- ending

    def leave_batch(self, request: Request) -> None:
        """It will not be answered with its batch. If it stands for that in statistics, another one shall that will be.

        If none has begun, the next one that does. If all the others have been answered, the batch is not counted.
        """
        batch, request.batch = request.batch, None
        if batch is None or batch.leader is not request:
            return
        batch.leader = None
        self.tables[request.front_end].lead(request.slot, request.generation, False)
        for other in batch.requests:
            if other.batch is batch and other.begun and self.tables[other.front_end].lead(other.slot, other.generation):
                batch.leader = other
                return

    def withdraw(self, request: Request) -> bool:
        """Take out of the queue what has not begun of it; return whether nothing else is left of it."""
        for unit in tuple(request.units):
            if unit in self.waiting and not unit.query.started:
                request.units.remove(unit)
                if len(unit.pieces) > 1:
                    self.waiting.update(unit, unit.without(request))
                else:
                    self.waiting.remove(unit)
                    unit.pieces = ()
        return not request.units

    def answered(self, request: Request) -> None:
        """Forget a request that a worker has answered."""
        self._forget(request)

    def finish(self, request: Request, status: SlotStatus) -> bool:
        """Answer and forget a request of which no unit is left; False if a worker has answered."""
        self._forget(request)
        return self.tables[request.front_end].finish(request.slot, request.generation, status)

    def expire(self, now_us: float, end: Callable[[Request, SlotStatus], None]) -> None:
        """Call `end` for every waiting request whose client is gone by now. (The front end cancels one that runs.)"""
        for number in self._limits.due(now_us):
            request = self._numbered.get(number)
            if request is not None and any(unit in self.waiting for unit in request.units):
                end(request, SlotStatus.DEADLINE)

    def next_limit_us(self) -> float | None:
        """When `expire` has something to do, at the earliest."""
        return self._limits.next_us

    def _enter(self, request: Request) -> Request:
        self._known[(request.front_end, request.slot, request.generation)] = request
        self._numbered[request.query.query_id] = request
        return request

    def _requeue(self, request: Request) -> None:
        """Let a request of one part that has begun be as one that has not."""
        self.leave_batch(request)
        self.tables[request.front_end].requeue(request.slot, request.generation)
        request.begun = False
        request.counts = NOTHING
        self._fresh.add(request)

    def _queue_piece(self, piece: Piece, unit: Unit) -> None:
        """Let a piece of a unit wait for itself. A request that is whole may be split now, but not joined again."""
        request = piece.request
        if request.parts > 1:
            self.waiting.add(separate(piece, next(self._ids), unit))
        else:
            request.query = replace(request.query, join_key=request.query.join_key | NEVER_JOINED)
            self.waiting.add(whole(request))

    def _begin(self, request: Request) -> bool:
        """Let its slot be RUNNING; False if that has moved on."""
        table, batch = self.tables[request.front_end], request.batch
        if batch is None:
            begun = table.start(request.slot, request.generation)
        else:
            begun = table.start(request.slot, request.generation, request.parts, batch.rows, batch.leader is None)
        if begun:
            if batch is not None and batch.leader is None:
                batch.leader = request
            request.begun = True
            self._fresh.remove(request)
        return begun

    def _watch_limit(self, request: Request) -> None:
        if request.limit_us is not None:
            self._limits.set(request.query.query_id, request.limit_us)

    def _forget(self, request: Request) -> None:
        if self._known.pop((request.front_end, request.slot, request.generation), None) is None:
            return
        del self._numbered[request.query.query_id]
        self._limits.discard(request.query.query_id)
        self.late.discard(request.query.query_id)
        if not request.begun:
            self._fresh.remove(request)
