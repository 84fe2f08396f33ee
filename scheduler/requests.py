"""The scheduler's index of the requests in the slot tables. The tables are the truth; a successor builds this again."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from gangway.artifact.precision import BF16, DEADLINE, FP32
from gangway.executor.fast_path import InFlight
from gangway.executor.leases import Member
from gangway.executor.slots import NEVER_JOINED, SlotCounts, SlotStatus, SlotTable
from gangway.scheduler.policy import Query
from gangway.scheduler.units import Batch, Piece, Unit, UnitQueue, whole_request
from gangway.scheduler.waiting import Timers, WaitingQueries

MAX_ATTEMPTS = 3  # a request whose gang was lost this often is answered UNAVAILABLE
MAX_CRASHES = 2  # of workers; the first may have been of a batch with others, after which it is alone
FRONT_END_BITS = 16  # of a query's `compound`: front ends count theirs one by one
NOTHING = SlotCounts()
NO_MODELS: Mapping[int, int] = MappingProxyType({})


class Request:
    """A request that waits or runs. Its query is that of all its rows, as it came; its number is that of the query.

    `units`: those of it that have not ended. `piece_count`: of how many pieces it consists. `running`: its slot is
    RUNNING, else SUBMITTED. `dropped`: it is to end with `drop_status`; what has not begun of it is gone, what has
    begun ends with its unit. After `expires_us` nobody waits for the answer. It is refused if `max_queue` others like
    it wait (0: any number may). If it has not begun by the end of its queue's time, it is refused, or goes behind
    others (`delays`).
    `crashes`: workers that ended by what they computed of it, or of a batch with it.
    """

    __slots__ = (
        "batch", "counts", "crashes", "delays", "drop_status", "dropped", "expires_us", "front_end",
        "generation", "max_queue", "piece_count", "query", "running", "slot", "units",
    )  # fmt: skip

    def __init__(
        self,
        query: Query,
        front_end: int,
        slot: int,
        generation: int,
        expires_us: float | None,
        max_queue: int = 0,
        delays: bool = False,
        running: bool = False,
    ) -> None:
        self.query = query
        self.front_end = front_end
        self.slot = slot
        self.generation = generation
        self.expires_us = expires_us
        self.max_queue = max_queue
        self.delays = delays
        self.running = running
        self.units: list[Unit] = []
        self.piece_count = 1
        self.dropped = False
        self.drop_status = SlotStatus.CANCELLED
        self.counts = NOTHING  # of all its units
        self.crashes = 0
        self.batch: Batch | None = None

    @property
    def number(self) -> int:
        """The number of its query."""
        return self.query.query_id


class RequestTable:
    """Requests by (front end, slot, generation) and by number, and the units of them that wait.

    `in_bf16`: artifacts in bf16, and the model of each. The supervisor's trial requests name an artifact.
    """

    def __init__(self, tables: Sequence[SlotTable], in_bf16: Mapping[int, int] = NO_MODELS) -> None:
        self.tables = tables
        self._in_bf16 = in_bf16
        self.waiting = UnitQueue()
        self.late = Timers()  # when to look whether a request has become certain to be late
        self.queue_ends = Timers()  # when a request has waited long enough to begin
        self._expiries = Timers()  # when nobody waits for an answer any more
        self._by_slot: dict[tuple[int, int, int], Request] = {}
        self._by_number: dict[int, Request] = {}
        self._queued = QueuedCounts()
        self._next_id = 1

    def __len__(self) -> int:
        """Return how many requests wait or run."""
        return len(self._by_number)

    @property
    def queries(self) -> WaitingQueries:
        """The queries of the waiting units. It changes with the queue."""
        return self.waiting.queries

    def next_id(self, count: int = 1) -> int:
        """Return a number that no query has had, nor those that follow it, `count` in all."""
        number = self._next_id
        self._next_id += count
        return number

    # -- requests come

    def admit(self, front_end: int, slot: int, generation: int) -> Request | None:
        """Queue what a slot holds; None when the message is stale or a double, or nobody wants the answer any more."""
        table = self.tables[front_end]
        key = (front_end, slot, generation)
        if not table.see(slot, generation) or key in self._by_slot:
            return None
        terms = table.terms(slot)
        if terms.cancelled:
            table.finish(slot, generation, SlotStatus.CANCELLED)
            return None
        compound = terms.compound and not terms.attempts
        model_id = self._in_bf16.get(terms.model_id, terms.model_id)
        precision = FP32 if model_id == terms.model_id else BF16
        if terms.deadline_ns and not compound and terms.model_id in self._in_bf16.values():
            precision = DEADLINE
        query = Query(
            self.next_id(),
            model_id,
            terms.rows,
            terms.arrival_ns / 1e3,
            terms.deadline_ns / 1e3 if terms.deadline_ns else None,
            terms.priority,
            rejects_late=terms.rejects_late,
            join_key=terms.join_key | NEVER_JOINED if terms.attempts else terms.join_key,
            compound=terms.compound << FRONT_END_BITS | front_end if compound else 0,
            precision=precision,
        )
        expires_us = terms.limit_ns / 1e3 if terms.limit_ns else None
        queue_end_us = terms.queue_end_ns / 1e3 if terms.queue_end_ns and not terms.attempts else None
        request = Request(query, front_end, slot, generation, expires_us, terms.max_queue, terms.delays)
        self._enter(request)
        if queue_end_us is not None:
            self.queue_ends.set(request.number, queue_end_us)
        self._queue_whole(request)
        self._queued.add(request)
        self._watch_expiry(request)
        return request

    def take_over(self, in_flight: InFlight) -> Request:
        """Return a new request for what is under way already, in one unit, which does not wait."""
        query = Query(
            self.next_id(),
            in_flight.model_id,
            1,
            in_flight.arrival_ns / 1e3,
            in_flight.deadline_ns / 1e3 if in_flight.deadline_ns else None,
            in_flight.priority,
            join_key=in_flight.join_key,
        )
        expires_us = in_flight.limit_ns / 1e3 if in_flight.limit_ns else None
        slot, generation = in_flight.slot, in_flight.slot_generation
        request = Request(query, in_flight.front_end, slot, generation, expires_us, running=True)
        self._enter(request)
        request.units = [whole_request(query)]
        return request

    # -- requests are found

    def find(self, front_end: int, slot: int, generation: int) -> Request | None:
        """Return the request that waits or runs under this name."""
        return self._by_slot.get((front_end, slot, generation))

    def get(self, number: int) -> Request | None:
        """Return the request that waits or runs under this number."""
        return self._by_number.get(number)

    def of(self, unit: Unit) -> Sequence[Request]:
        """Return the requests of a unit, piece by piece. Each of them is known until its last unit has ended."""
        return [self._by_number[piece.request_id] for piece in unit.pieces]

    def is_dropped(self, unit: Unit) -> bool:
        """Whether nobody wants a unit any more."""
        return all(request.dropped for request in self.of(unit))

    def members(self, unit: Unit) -> tuple[Member, ...]:
        """Return the pieces of a unit as its lease has them."""
        members = []
        for request_id, first_row, rows, number in unit.pieces:
            request = self._by_number[request_id]
            members.append(Member(request.front_end, request.slot, request.generation, first_row, rows, number))
        return tuple(members)

    def of_front_end(self, front_end: int) -> list[Request]:
        """Return the waiting and running requests of a front end."""
        return [request for request in self._by_slot.values() if request.front_end == front_end]

    def slots(self, front_end: int) -> int:
        """Return how many requests a front end can have in flight."""
        return self.tables[front_end].slots

    def queued_like(self, request: Request) -> int:
        """Return how many requests of its model and priority are not running, itself included."""
        return self._queued.like(request)

    def queued_count(self, front_end: int) -> int:
        """Return how many requests of a front end are not running."""
        return self._queued.of_front_end(front_end)

    def queued_of(self, front_end: int) -> list[Request]:
        """Return the requests of a front end that are not running, oldest first."""
        queued = [request for request in self.of_front_end(front_end) if not request.running]
        return sorted(queued, key=lambda request: request.query.arrival_us)

    # -- requests run

    def form(self, batch: Batch) -> None:
        """Let the units of a batch wait in place of its requests, which wait and are whole."""
        for query in batch.requests:
            self.waiting.remove(self.waiting[query.query_id])
            request = self._by_number[query.query_id]
            request.batch = batch
            request.units = []
        for unit in batch.begin():
            for request in self.of(unit):
                request.units.append(unit)
                request.piece_count = len(request.units)
            self.waiting.add(unit)

    def choose(self, unit: Unit, precision: str) -> None:
        """Let a unit that begins, and those of its batch that wait, be in one precision.

        A piece that has to run again is so too, if others of its request may have been computed.
        """
        for each in (unit,) if unit.batch is None else unit.batch.units:
            if each in self.waiting and each.query.precision not in (FP32, precision):
                self.waiting.update(each, replace(each.query, precision=precision))

    def start(self, unit: Unit) -> bool:
        """Take it out of the queue to be run; False if all its slots have moved on (their requests are forgotten)."""
        if not unit.query.started:
            for request in self.of(unit):
                if not request.running and not self._run(request):
                    self.withdraw(request)
                    self._forget(request)
        if not unit.pieces:
            return False
        self.waiting.remove(unit)
        return True

    def count(self, requests: Sequence[Request]) -> None:
        """Tell the front ends what has been counted so far. No rank may be working on the unit of these requests."""
        for request in requests:
            self.tables[request.front_end].count(request.slot, request.counts)

    def pause(self, unit: Unit, next_layer: int, ran_us: float) -> None:
        """Queue a unit that has run, to go on with `next_layer`, after so long on cores; it keeps its place."""
        query = unit.query
        unit.query = replace(query, next_layer=next_layer, started=True, ran_us=query.ran_us + ran_us)
        self.waiting.add(unit)
        for request in self.of(unit):
            self._watch_expiry(request)

    def run_again(self, piece: Piece, unit: Unit) -> bool:
        """Queue a piece again, from the first layer and for itself: the gang of its unit was lost.

        Nothing happens if a rank had done it before. False if it has been begun too often: it is to be given up.
        """
        request = self._by_number[piece.request_id]
        table = self.tables[request.front_end]
        if table.part_done(request.slot, request.generation, piece.number):
            if not request.units:
                self._forget(request)
        elif request.crashes >= MAX_CRASHES or table.attempts(request.slot) >= MAX_ATTEMPTS:
            return False
        else:
            if request.piece_count > 1:
                table.count_attempt(request.slot)
            else:
                self._requeue(request)
            self._queue_piece(request, piece, unit)
            self._watch_expiry(request)
        return True

    def start_over(self, unit: Unit) -> Sequence[Request]:
        """Let the pieces of a stopped unit wait one by one, from the first layer; it counts as no attempt.

        Return its requests that were dropped and of which nothing is left.
        """
        self.waiting.remove(unit)
        requests = self.of(unit)
        for piece, request in zip(unit.pieces, requests, strict=True):
            request.units.remove(unit)
            if request.dropped:
                continue
            if request.piece_count == 1:
                self._requeue(request)
                self.tables[request.front_end].count_attempt(request.slot, -1)
            self._queue_piece(request, piece, unit)
            self._watch_expiry(request)
        return [request for request in requests if request.dropped and not request.units]

    def break_up(self, unit: Unit) -> None:
        """Let the pieces of a waiting unit wait one by one. Other units may have pieces of the same requests."""
        if unit.query.precision == DEADLINE:
            self.choose(unit, BF16)
        self.waiting.remove(unit)
        for piece, request in zip(unit.pieces, self.of(unit), strict=True):
            request.units.remove(unit)
            self._queue_piece(request, piece, unit)

    # -- requests end

    def leave_batch(self, request: Request) -> None:
        """Take a request out of its batch, since it will not be answered with it.

        If the request stands for the batch in statistics, another one that will be answered with the batch takes its
        place: one that runs, or else the next one that does. If all others have been answered, the batch is not
        counted.
        """
        batch, request.batch = request.batch, None
        if batch is None or batch.leader_id != request.number:
            return
        batch.leader_id = None
        self.tables[request.front_end].lead(request.slot, request.generation, False)
        for query in batch.requests:
            other = self._by_number.get(query.query_id)
            if other is None or other.batch is not batch or not other.running:
                continue
            if self.tables[other.front_end].lead(other.slot, other.generation):
                batch.leader_id = other.number
                return

    def withdraw(self, request: Request) -> bool:
        """Take out of the queue what has not begun of a request; return whether nothing else is left of it."""
        for unit in tuple(request.units):
            if unit in self.waiting and not unit.query.started:
                request.units.remove(unit)
                if len(unit.pieces) > 1:
                    unit.pieces = tuple([piece for piece in unit.pieces if piece.request_id != request.number])
                    self.waiting.update(unit, self._query_of_rest(unit))
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
        for number in self._expiries.due(now_us):
            request = self._by_number.get(number)
            if request is not None and any(unit in self.waiting for unit in request.units):
                end(request, SlotStatus.DEADLINE)

    def next_expiry_us(self) -> float | None:
        """Return when `expire` has something to do, at the earliest."""
        return self._expiries.next_us

    # -- steps of these

    def _enter(self, request: Request) -> None:
        self._by_slot[(request.front_end, request.slot, request.generation)] = request
        self._by_number[request.number] = request

    def _queue_whole(self, request: Request) -> None:
        """Let a request wait in one unit of its own."""
        unit = whole_request(request.query)
        request.piece_count = 1
        request.batch = None
        request.units = [unit]
        self.waiting.add(unit)

    def delay(self, request: Request, now_us: float) -> None:
        """Let a request that has not begun go behind those that are in time: it counts as late from now on."""
        request.query = replace(request.query, deadline_us=now_us)
        for unit in request.units:
            if unit in self.waiting and not unit.query.formed:
                self.waiting.update(unit, replace(unit.query, deadline_us=now_us))

    def _queue_piece(self, request: Request, piece: Piece, unit: Unit) -> None:
        """Let a piece of a unit wait for itself. A request that is whole may be split now, but not joined again."""
        if request.piece_count == 1:
            request.query = replace(request.query, join_key=request.query.join_key | NEVER_JOINED, compound=0)
            self._queue_whole(request)
            return
        old = unit.query
        query = replace(
            request.query,
            precision=old.precision,
            query_id=self.next_id(),
            rows=piece.rows,
            cores=old.cores,
            formed=True,
            batch=old.batch,
            round=old.round,
        )
        made = Unit(query, (piece,), unit.batch, unit.index)
        request.units.append(made)
        self.waiting.add(made)

    def _query_of_rest(self, unit: Unit) -> Query:
        """Return the query of a unit that a request has left."""
        deadlines_us = [request.query.deadline_us for request in self.of(unit)]
        return replace(
            unit.query,
            rows=sum(piece.rows for piece in unit.pieces),
            deadline_us=min((at_us for at_us in deadlines_us if at_us is not None), default=None),
        )

    def _run(self, request: Request) -> bool:
        """Make its slot RUNNING; False if that has moved on."""
        table, batch = self.tables[request.front_end], request.batch
        if batch is None:
            running = table.start(request.slot, request.generation)
        else:
            leads = batch.leader_id is None
            running = table.start(request.slot, request.generation, request.piece_count, batch.rows, leads)
        if running:
            if batch is not None and batch.leader_id is None:
                batch.leader_id = request.number
            request.running = True
            self.queue_ends.discard(request.number)
            self._queued.remove(request)
        return running

    def _requeue(self, request: Request) -> None:
        """Let a request of one piece that runs be as one that does not."""
        self.leave_batch(request)
        self.tables[request.front_end].requeue(request.slot, request.generation)
        request.running = False
        request.counts = NOTHING
        self._queued.add(request)

    def _watch_expiry(self, request: Request) -> None:
        if request.expires_us is not None:
            self._expiries.set(request.number, request.expires_us)

    def _forget(self, request: Request) -> None:
        if self._by_slot.pop((request.front_end, request.slot, request.generation), None) is None:
            return
        number = request.number
        del self._by_number[number]
        self._expiries.discard(number)
        self.late.discard(number)
        self.queue_ends.discard(number)
        if not request.running:
            self._queued.remove(request)


class QueuedCounts:
    """How many requests are not running: by front end, and by model and priority, as full queues are judged."""

    def __init__(self) -> None:
        self._by_kind: Counter[tuple[int, int]] = Counter()
        self._by_front_end: Counter[int] = Counter()

    def like(self, request: Request) -> int:
        """Return how many there are of its model and priority."""
        return self._by_kind[request.query.model_id, request.query.priority]

    def of_front_end(self, front_end: int) -> int:
        """Return how many there are of a front end."""
        return self._by_front_end[front_end]

    def add(self, request: Request, count: int = 1) -> None:
        """Count a request that is not running."""
        self._by_kind[request.query.model_id, request.query.priority] += count
        self._by_front_end[request.front_end] += count

    def remove(self, request: Request) -> None:
        """Count it no more: it runs, or is forgotten."""
        self.add(request, -1)
