"""All sequences of one front end: which of their requests may be executed, and how long the others wait."""

import asyncio
import logging
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Final, Generic, TypeVar

from gangway.executor.logs import OFTEN
from gangway.executor.slots import SlotStatus
from gangway.protos import StatusCode
from gangway.server.errors import RequestError, invalid, unavailable
from gangway.server.models.python_settings import PythonSettings
from gangway.server.models.sequences import SequencePosition, SequenceTensors
from gangway.server.models.served import ServedModel
from gangway.server.requests.codecs import AnswerSize, Codec, StateMemory
from gangway.server.requests.data_plane import DataPlane, Layout
from gangway.server.requests.ensembles import EnsembleCodec
from gangway.server.requests.python_codec import PythonCodec, sequenced_python
from gangway.server.requests.states import CopiedStates, HeldStates, StateBudget, control_inputs
from gangway.server.requests.validation import RequestPlan
from gangway.server.serving.call import Call
from gangway.server.serving.inference.model_run import LIMIT_SLACK_NS, MAX_WAIT_NS, failure
from gangway.server.serving.loop import ServingLoop
from gangway.server.serving.pending import Pending

_log = logging.getLogger(__name__)

SequenceId = int | str
AnyTicket = TypeVar("AnyTicket")  # stands for one request


class NotStartedError(Exception):
    """There is no such sequence, and the request does not start one."""


class BacklogFullError(Exception):
    """The request would have to wait, and no further one may."""


class ClosedError(Exception):
    """The model has been replaced or unloaded."""


@dataclass(eq=False)
class Sequence(Generic[AnyTicket]):
    """One sequence. `ended`: nothing more can join it; what has joined is still executed, unless it is refused."""

    identity: SequenceId
    has_slot: bool = False
    running: AnyTicket | None = None
    waiting: deque[AnyTicket] = field(default_factory=deque)
    ended: bool = False

    @property
    def is_busy(self) -> bool:
        """Whether a further request has to wait."""
        return not self.has_slot or self.running is not None


@dataclass(frozen=True)
class TurnChanges(Generic[AnyTicket]):
    """What is to be done now: requests that begin, requests that will never begin, sequences that are over."""

    begin: list[AnyTicket] = field(default_factory=list)
    refused: list[AnyTicket] = field(default_factory=list)
    over: list[Sequence[AnyTicket]] = field(default_factory=list)


@dataclass(frozen=True)
class Entered(Generic[AnyTicket]):
    """A request has joined this sequence. `conflict`: it starts one, although that of its id has not ended."""

    sequence: Sequence[AnyTicket]
    conflict: bool
    changes: TurnChanges[AnyTicket]


class SequenceBatcher(Generic[AnyTicket]):
    """The sequences of one loaded model. Deterministic: the clock is passed in, and no call waits. Not safe for
    threads.

    A sequence begins with a request that says so. It gets a slot, or a place in the backlog until a slot is free. A
    sequence with a slot has one request executed at a time, in the order in which they came. It ends, and frees its
    slot, when its last request has been executed, or when it was idle for too long. Times are microseconds and never go
    back.
    """

    def __init__(self, slots: int, idle_us: int) -> None:
        """`slots`: sequences at a time. A sequence without requests ends after `idle_us`."""
        self._free_slots = slots
        self._idle_us = idle_us
        self._open: dict[SequenceId, Sequence[AnyTicket]] = {}  # those that can be joined
        self._backlog: OrderedDict[Sequence[AnyTicket], None] = OrderedDict()
        self._idle: OrderedDict[Sequence[AnyTicket], int] = OrderedDict()  # since when; the first for the longest time
        self._closed = False
        self.waiting = 0  # requests that cannot be executed yet
        self.sequences = 0  # that are not over

    def enter(
        self, ticket: AnyTicket, identity: SequenceId, start: bool, end: bool, now_us: int, room: int
    ) -> Entered[AnyTicket]:
        """Add a request. `room`: how many more may wait. Call `end_idle` for the same instant before.

        A start within a sequence that is open goes on in its place, and begins with new state.
        Raises NotStartedError, BacklogFullError or ClosedError; then the request has no effect.
        """
        if self._closed:
            raise ClosedError
        sequence = self._open.get(identity)
        if sequence is None and not start:
            raise NotStartedError
        if room <= 0 and (sequence.is_busy if sequence is not None else not self._free_slots):
            raise BacklogFullError
        conflict = sequence is not None and start
        if sequence is None:
            sequence = self._begin(identity)
        self._idle.pop(sequence, None)
        sequence.waiting.append(ticket)
        self.waiting += 1
        if end:
            self._close_to_others(sequence)
        changes: TurnChanges[AnyTicket] = TurnChanges()
        self._advance(sequence, now_us, changes)
        return Entered(sequence, conflict, changes)

    def leave(self, sequence: Sequence[AnyTicket], now_us: int) -> TurnChanges[AnyTicket]:
        """The sequence's running request has been executed, or has failed: both are the same to its order."""
        changes: TurnChanges[AnyTicket] = TurnChanges()
        sequence.running = None
        self._advance(sequence, now_us, changes)
        return changes

    def withdraw(self, sequence: Sequence[AnyTicket], ticket: AnyTicket, now_us: int) -> TurnChanges[AnyTicket]:
        """End a sequence because a request of it, which has not begun, is given up.

        What came before it is executed, if the sequence has a slot; all else is refused, but for `ticket` itself.
        """
        changes: TurnChanges[AnyTicket] = TurnChanges()
        kept = sequence.waiting.index(ticket) if sequence.has_slot else 0
        dropped = [sequence.waiting.pop() for _ in range(len(sequence.waiting) - kept)]
        self.waiting -= len(dropped)
        changes.refused.extend(other for other in reversed(dropped) if other is not ticket)
        self._close_to_others(sequence)
        if sequence.has_slot:
            self._advance(sequence, now_us, changes)
        else:
            del self._backlog[sequence]
            self._forget(sequence, changes)
        return changes

    def in_backlog(self, sequence: Sequence[AnyTicket]) -> bool:
        """Whether it waits for a slot."""
        return sequence in self._backlog

    def end_idle(self, now_us: int) -> TurnChanges[AnyTicket]:
        """End the sequences for which nothing has happened for too long."""
        changes: TurnChanges[AnyTicket] = TurnChanges()
        while (next_us := self.next_idle_us()) is not None and next_us <= now_us:
            sequence, _ = self._idle.popitem(last=False)
            self._close_to_others(sequence)
            self._advance(sequence, now_us, changes)
        return changes

    def next_idle_us(self) -> int | None:
        """Return when the next sequence will have been idle for too long, unless something happens; None: never."""
        return next(iter(self._idle.values())) + self._idle_us if self._idle else None

    def refuse_backlog(self) -> TurnChanges[AnyTicket]:
        """Let no sequence get a slot any more that has none."""
        changes: TurnChanges[AnyTicket] = TurnChanges()
        while self._backlog:
            sequence, _ = self._backlog.popitem(last=False)
            changes.refused.extend(sequence.waiting)
            self.waiting -= len(sequence.waiting)
            sequence.waiting.clear()
            self._close_to_others(sequence)
            self._forget(sequence, changes)
        return changes

    def close(self, now_us: int) -> TurnChanges[AnyTicket]:
        """End all sequences. Requests of those that have a slot are still executed."""
        self._closed = True
        changes = self.refuse_backlog()
        for sequence in list(self._open.values()):
            self._close_to_others(sequence)
            if self._idle.pop(sequence, None) is not None:
                self._advance(sequence, now_us, changes)
        return changes

    def _begin(self, identity: SequenceId) -> Sequence[AnyTicket]:
        sequence: Sequence[AnyTicket] = Sequence(identity, has_slot=self._free_slots > 0)
        self._open[identity] = sequence
        self.sequences += 1
        if sequence.has_slot:
            self._free_slots -= 1
        else:
            self._backlog[sequence] = None
        return sequence

    def _close_to_others(self, sequence: Sequence[AnyTicket]) -> None:
        """Let nothing join the sequence any more; another one may get its id."""
        sequence.ended = True
        if self._open.get(sequence.identity) is sequence:
            del self._open[sequence.identity]

    def _advance(self, sequence: Sequence[AnyTicket], now_us: int, changes: TurnChanges[AnyTicket]) -> None:
        """Have the sequence's next request executed, if there is one and none is; else it is idle, or over."""
        if sequence.is_busy:
            return
        if sequence.waiting:
            sequence.running = sequence.waiting.popleft()
            self.waiting -= 1
            changes.begin.append(sequence.running)
        elif not sequence.ended:
            self._idle[sequence] = now_us
        else:
            self._forget(sequence, changes)
            self._give_slot(sequence, now_us, changes)

    def _forget(self, sequence: Sequence[AnyTicket], changes: TurnChanges[AnyTicket]) -> None:
        self.sequences -= 1
        changes.over.append(sequence)

    def _give_slot(self, sequence: Sequence[AnyTicket], now_us: int, changes: TurnChanges[AnyTicket]) -> None:
        """Give the slot of a sequence that is over to the one that has waited for the longest time."""
        sequence.has_slot = False
        if not self._backlog:
            self._free_slots += 1
            return
        successor, _ = self._backlog.popitem(last=False)
        successor.has_slot = True
        self._advance(successor, now_us, changes)


NEVER_NS: Final = 1 << 62


@dataclass(eq=False)
class SequenceTicket:
    """One request of a sequence while it waits for its turn.

    `begun`: it may be executed. `refusal`: it never will be. `gone`: the client does not wait for the answer any more.
    """

    loop: asyncio.AbstractEventLoop
    sequence: "Sequence[SequenceTicket]" = field(init=False)
    begun: bool = False
    refusal: RequestError | None = None
    gone: bool = False
    woken: Pending[None] | None = None  # while it waits

    def begin(self) -> None:
        """Let it be executed."""
        self.begun = True
        self.wake()

    def refuse(self, refusal: RequestError) -> None:
        """Never let it be executed."""
        self.refusal = refusal
        self.wake()

    def give_up(self) -> None:
        """Say that its call has ended. At any time."""
        self.gone = True
        self.wake()

    def wake(self) -> None:
        """Have it look again, soon: what has woken it is at something, and many may be woken one by the other."""
        if self.woken is not None:
            self.loop.call_soon(self.woken.settle, None)


@dataclass(frozen=True)
class WaitLimits:
    """How long a request waits: for a slot, for its turn, at all. Instants are CLOCK_MONOTONIC."""

    model: str
    slot_ns: int
    late_ns: int
    end_ns: int

    @classmethod
    def of(cls, plan: RequestPlan, arrival_ns: int) -> "WaitLimits":
        """Return what a request's parameters and its model's queue policy say."""
        timeout_us = plan.sequence.timeout_us if plan.sequence else 0
        late_us = plan.terms.target_us if plan.refuses_late else 0
        return cls(
            plan.model.name,
            arrival_ns + timeout_us * 1000 if timeout_us else NEVER_NS,
            arrival_ns + int(late_us * 1000) if late_us else NEVER_NS,
            arrival_ns + MAX_WAIT_NS,
        )

    def ends_ns(self, in_backlog: bool) -> int:
        """Return until when it waits."""
        return min(self.late_ns, self.end_ns, self.slot_ns if in_backlog else NEVER_NS)

    def refusal(self, now_ns: int, in_backlog: bool) -> RequestError | None:
        """Return what the client is told now; None: to wait on."""
        if in_backlog and now_ns >= self.slot_ns:
            message = f"timeout of the corresponding sequence has been expired for model '{self.model}'"
            return RequestError(StatusCode.UNAVAILABLE, message)
        if now_ns >= self.late_ns:
            return failure(self.model, SlotStatus.LATE, 0)
        return failure(self.model, SlotStatus.UNAVAILABLE, 0) if now_ns >= self.end_ns else None

    def given_up(self, call: Call) -> RequestError:
        """Return how a request ends whose call has ended before it began."""
        remaining_s = call.time_remaining()
        is_late = remaining_s is not None and remaining_s * 1e9 <= LIMIT_SLACK_NS
        return failure(self.model, SlotStatus.DEADLINE if is_late else SlotStatus.CANCELLED, 0)

    def ended_with_it(self) -> RequestError:
        """Return what those are told that wait behind a request that was given up."""
        message = f"the sequence of the request for model '{self.model}' has ended: an earlier request was cancelled"
        return RequestError(StatusCode.CANCELLED, message)


STATE_SHARE: Final = 4  # states may have a quarter of the front end's shared memory
WAITING_SHARE: Final = 2  # half of the requests that a front end may have: each that waits keeps its tensors


@dataclass(eq=False)
class _Model:
    """The sequences of one loaded model. `layout`: of a compiled one, whose states have places; others are copied."""

    name: str
    batcher: SequenceBatcher[SequenceTicket]
    tensors: SequenceTensors
    layout: Layout | None
    answer_size: AnswerSize = field(default_factory=lambda: AnswerSize(0))
    memories: dict[Sequence[SequenceTicket], StateMemory] = field(default_factory=dict)
    instances: "_Instances | None" = None  # of a Python model

    def memory(self, sequence: Sequence[SequenceTicket], plane: DataPlane, budget: StateBudget) -> StateMemory:
        """Return the states of a sequence, which may not have begun."""
        if sequence not in self.memories:
            states = self.tensors.states
            held = HeldStates(plane, budget, self.layout, states) if self.layout is not None else None
            self.memories[sequence] = held or CopiedStates(budget, states)
        return self.memories[sequence]


class _Instances:
    """Which instance of a Python model has which sequence: it keeps what it knows of them."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._of: dict[Sequence[SequenceTicket], int] = {}

    def of(self, sequence: Sequence[SequenceTicket]) -> int:
        """Return the number of a sequence's instance; of a new one that which has the fewest."""
        if sequence not in self._of:
            taken = Counter(self._of.values())
            self._of[sequence] = min(range(self._count), key=lambda number: taken[number])
        return self._of[sequence]

    def drop(self, sequence: Sequence[SequenceTicket]) -> None:
        """A sequence is over."""
        self._of.pop(sequence, None)


class Sequences:
    """Those of all models that a front end serves. For the loop's thread, but for what says otherwise.

    A sequence lives in the front end that has got its first request. Its order, its slot and its state are known only
    there, and are lost with the process. So all requests of a sequence must come to the same front end.
    """

    def __init__(self, plane: DataPlane, serving: ServingLoop) -> None:
        self._plane = plane
        self._serving = serving
        self._max_waiting = plane.slots.slots // WAITING_SHARE
        self._budget = StateBudget(plane.heap.capacity_bytes // STATE_SHARE)
        self._timer: asyncio.TimerHandle | None = None  # for the first sequence that will have been idle for too long
        self._loads: Collection[int] = ()
        self._models: dict[int, _Model] = {}  # by load
        self._requests = 0

    @property
    def requests(self) -> int:
        """How many requests of sequences wait or are executed. From any thread."""
        return self._requests

    @property
    def open(self) -> int:
        """How many sequences there are at this moment. From any thread."""
        return sum(model.batcher.sequences for model in tuple(self._models.values()))

    @property
    def state_bytes(self) -> int:
        """How many bytes their states have. From any thread."""
        return self._budget.taken_bytes

    async def turn(self, plan: RequestPlan, call: Call, arrival_ns: int) -> "Turn":
        """Wait until a request may be executed; then it has its turn, which is to be left.

        Raises RequestError. INVALID_ARGUMENT: the sequence has not been started, or has ended. UNAVAILABLE: too many
        requests wait, or this one has waited too long. CANCELLED or DEADLINE_EXCEEDED: the client does not wait any
        more.
        """
        step, tensors = plan.sequence, plan.model.sequence
        assert step is not None and tensors is not None, "a model with sequences"
        begin_ns = time.monotonic_ns()
        model, ticket = self._enter(plan, step, tensors)
        turn = Turn(self, model, ticket)
        try:
            if not ticket.begun:
                await self._await(model, ticket, WaitLimits.of(plan, arrival_ns), call)
        except BaseException:
            self._requests -= 1
            raise
        try:
            own = self._call(model, ticket.sequence, plan, step)
        except BaseException:
            turn.leave()
            raise
        turn.plan = replace(plan, codec=own, fallback=None, waited_ns=time.monotonic_ns() - begin_ns)
        return turn

    def keep(self, loads: Collection[int]) -> None:
        """End the sequences of all models but those that were loaded under these numbers. From any thread.

        Their requests that have a slot are still executed, those in the backlog are refused.
        """
        self._loads = frozenset(loads)
        self._serving.call(self._close_replaced)

    def refuse(self, reason: str) -> None:
        """Refuse what has no slot, because the server is stopping. From any thread."""
        self._serving.call(self._refuse_backlogs, RequestError(StatusCode.UNAVAILABLE, reason))

    def leave(self, model: _Model, ticket: SequenceTicket) -> None:
        """A request has been executed, or has failed."""
        self._requests -= 1
        self._apply(model, model.batcher.leave(ticket.sequence, _now_us()))
        self._watch_idle(model)

    def _close_replaced(self) -> None:
        for load in [load for load in self._models if load not in self._loads]:
            model = self._models.pop(load)
            self._apply(model, model.batcher.close(_now_us()), _replaced(model.name))

    def _refuse_backlogs(self, refusal: RequestError) -> None:
        for model in self._models.values():
            self._apply(model, model.batcher.refuse_backlog(), refusal)

    def _watch_idle(self, model: _Model) -> None:
        """Have the clock looked at when the model's next sequence will have been idle for too long."""
        next_us, loop = model.batcher.next_idle_us(), self._serving.loop
        if next_us is None:
            return
        at_s = loop.time() + (next_us - _now_us()) / 1e6
        if self._timer is None or at_s < self._timer.when():
            if self._timer is not None:
                self._timer.cancel()
            self._timer = loop.call_at(at_s, self._end_idle)

    def _end_idle(self) -> None:
        """End what has been idle for too long."""
        self._timer = None
        for model in self._models.values():
            self._apply(model, model.batcher.end_idle(_now_us()))
        for model in self._models.values():
            self._watch_idle(model)

    # -- requests

    def _enter(
        self, plan: RequestPlan, step: SequencePosition, tensors: SequenceTensors
    ) -> tuple[_Model, SequenceTicket]:
        """Add a request to its sequence. Raises RequestError."""
        name = plan.model.name
        model = self._model(plan.model, tensors)
        try:
            now_us = _now_us()
            self._apply(model, model.batcher.end_idle(now_us))
            ticket = SequenceTicket(self._serving.loop)
            room = self._room(model, plan.terms.max_queue)
            entered = model.batcher.enter(ticket, step.identity, step.start, step.end, now_us, room)
        except NotStartedError:
            invalid(
                f"inference request for sequence {step.identity} to model '{name}' must specify the START flag on"
                " the first request of the sequence"
            )
        except BacklogFullError:
            waiting = model.batcher.waiting
            unavailable(f"Exceeds maximum queue size: {waiting} requests of sequences wait for model '{name}'")
        except ClosedError:
            raise _replaced(name) from None
        ticket.sequence = entered.sequence
        self._apply(model, entered.changes)
        self._requests += 1
        if entered.conflict:
            _log.warning(
                "%s: sequence %s starts again before it has ended; what it had is dropped",
                name,
                step.identity,
                extra=OFTEN,
            )
        return model, ticket

    async def _await(self, model: _Model, ticket: SequenceTicket, limits: WaitLimits, call: Call) -> None:
        """Return when a request may be executed. Raises RequestError when it never will be."""
        if not call.add_callback(ticket.give_up):
            ticket.give_up()
        in_backlog = True
        while True:
            wait_ns = limits.ends_ns(in_backlog) - time.monotonic_ns()
            timer = self._serving.loop.call_later(max(0, wait_ns) / 1e9, ticket.wake)
            ticket.woken = Pending()
            if not (ticket.gone or ticket.begun or ticket.refusal):
                await ticket.woken
            timer.cancel()
            if ticket.refusal is not None:
                raise ticket.refusal
            if ticket.begun:
                return
            in_backlog = model.batcher.in_backlog(ticket.sequence)
            refusal = limits.refusal(time.monotonic_ns(), in_backlog)
            others = refusal or limits.ended_with_it()
            if ticket.gone:
                refusal = limits.given_up(call)
            if refusal is not None:
                changes = model.batcher.withdraw(ticket.sequence, ticket, _now_us())
                self._apply(model, changes, others)
                raise refusal

    def _call(
        self, model: _Model, sequence: Sequence[SequenceTicket], plan: RequestPlan, step: SequencePosition
    ) -> Codec:
        """Return how the request is carried out. Only while it is the sequence's running one. Raises RequestError."""
        tensors = model.tensors
        assert not isinstance(plan.codec, EnsembleCodec), "a model of its own"
        hidden = control_inputs(tensors, step)
        if model.instances is not None:
            assert isinstance(plan.codec, PythonCodec), "of a Python model"
            return sequenced_python(plan.codec, hidden, step, model.instances.of(sequence))
        memory: StateMemory | None = None
        if tensors.states:
            memory = model.memory(sequence, self._plane, self._budget)
            if step.start or not memory.has_begun:
                memory.begin()
            hidden += memory.inputs()
        return plan.codec.sequenced(hidden, model.answer_size, memory)

    def _model(self, model: ServedModel, tensors: SequenceTensors) -> _Model:
        """Return a loaded model's sequences. Raises RequestError."""
        if model.load not in self._loads:
            raise _replaced(model.name)
        found = self._models.get(model.load)
        if found is None:
            batcher: SequenceBatcher[SequenceTicket] = SequenceBatcher(tensors.settings.slots, tensors.settings.idle_us)
            compiled = model.compiled.get(())
            layout = compiled.layout if compiled is not None and not compiled.tail else None
            found = self._models[model.load] = _Model(model.name, batcher, tensors, layout)
            if model.is_python:
                found.instances = _Instances(len(PythonSettings.of(model.config).kinds))
        return found

    def _room(self, model: _Model, max_queue: int) -> int:
        """Return how many requests more may wait for the model; `max_queue`: as its queue policy has it, 0 is any."""
        room = self._max_waiting - sum(other.batcher.waiting for other in self._models.values())
        return min(room, max_queue - model.batcher.waiting) if max_queue else room

    def _apply(self, model: _Model, changes: TurnChanges[SequenceTicket], refusal: RequestError | None = None) -> None:
        for ticket in changes.begin:
            ticket.begin()
        for ticket in changes.refused:
            ticket.refuse(refusal or _replaced(model.name))
        for sequence in changes.over:
            memory = model.memories.pop(sequence, None)
            if memory is not None:
                memory.close()
            if model.instances is not None:
                model.instances.drop(sequence)


class Turn:
    """A request of a sequence is executed. `plan`: with what the sequence adds to it."""

    plan: RequestPlan

    def __init__(self, sequences: Sequences, model: _Model, ticket: SequenceTicket) -> None:
        self._sequences, self._model, self._ticket = sequences, model, ticket

    def leave(self) -> None:
        """The request has been executed, or has failed; once."""
        self._sequences.leave(self._model, self._ticket)


def _replaced(name: str) -> RequestError:
    message = f"model '{name}' has been replaced or unloaded, which ends its sequences; start the sequence anew"
    return RequestError(StatusCode.UNAVAILABLE, message)


def _now_us() -> int:
    return time.monotonic_ns() // 1000
