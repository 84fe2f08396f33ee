"""All sequences of one front end: the locks, waits and the clock around `batcher.py`."""

import logging
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Final

import grpc

from gangway.executor.log_limit import OFTEN
from gangway.server.calls import Room
from gangway.server.data_plane import DataPlane
from gangway.server.ensemble.call import EnsembleCall
from gangway.server.errors import RequestError, invalid, unavailable
from gangway.server.models import ServedModel
from gangway.server.plan import Plan
from gangway.server.sequence.batcher import (
    BacklogFullError,
    Changes,
    ClosedError,
    NotStartedError,
    Sequence,
    SequenceBatcher,
)
from gangway.server.sequence.calls import SequencedCall, controls, sequenced
from gangway.server.sequence.memory import Budget, CopiedStates, HeldPlaces, HeldStates, StateMemory
from gangway.server.sequence.step import SequenceStep
from gangway.server.sequence.tensors import SequenceTensors
from gangway.server.sequence.ticket import EndingCall, Patience, Ticket

STATE_SHARE: Final = 4  # states may have a quarter of the front end's shared memory
WAITING_SHARE: Final = 2  # half of the requests that a front end may have: each that waits keeps a thread
MAX_SLEEP_S: Final = 3600.0

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Model:
    """The sequences of one loaded model. `places`: None if its states are copied, or there are none."""

    name: str
    batcher: SequenceBatcher[Ticket]
    states: "_States"
    room: Room = field(default_factory=lambda: Room(0))
    memories: dict[Sequence[Ticket], StateMemory] = field(default_factory=dict)


@dataclass(frozen=True)
class _States:
    """How the states of a model's sequences are kept."""

    tensors: SequenceTensors
    places: HeldPlaces | None

    @classmethod
    def of(cls, model: ServedModel, tensors: SequenceTensors) -> "_States":
        compiled = model.compiled.get(())
        return cls(tensors, HeldPlaces.of(compiled.layout, tensors.states) if compiled and tensors.states else None)

    def memory(self, plane: DataPlane, budget: Budget) -> StateMemory:
        """Return that of one sequence, which has not begun."""
        if self.places is not None:
            return HeldStates(plane, budget, self.places)
        return CopiedStates(budget, self.tensors.states)


class Sequences:
    """Those of all models that a front end serves. Safe for threads; `run` watches the clock.

    A sequence lives in the front end that has got its first request: its order, its slot and its state are known here
    and nowhere else, and are lost with the process. So all requests of a sequence must come to the same front end.
    """

    def __init__(self, plane: DataPlane) -> None:
        self._plane = plane
        self._max_waiting = plane.slots.slots // WAITING_SHARE
        self._budget = Budget(plane.heap.capacity_bytes // STATE_SHARE)
        self._lock = threading.Lock()
        self._earlier = threading.Condition(self._lock)  # there is something to do earlier than was thought
        self._wake_us: int | None = None  # when the clock is looked at next
        self._loads: Collection[int] = ()
        self._models: dict[int, _Model] = {}  # by load
        self._requests = 0

    @property
    def idle(self) -> bool:
        """Whether no request of a sequence waits or is executed."""
        return not self._requests

    @property
    def open(self) -> int:
        """How many sequences there are at this moment."""
        with self._lock:
            return sum(model.batcher.sequences for model in self._models.values())

    @property
    def state_bytes(self) -> int:
        """How many bytes their states have."""
        return self._budget.taken_bytes

    @contextmanager
    def turn(self, plan: Plan, call: EndingCall, arrival_ns: int) -> Iterator[Plan]:
        """Wait until a request may be executed; yield its plan with what its sequence adds to it.

        Raises RequestError: INVALID_ARGUMENT for a sequence that has not been started or has ended, UNAVAILABLE where
        too many wait or it waits for too long, CANCELLED or DEADLINE_EXCEEDED if the client does not wait any more.
        """
        step, tensors = plan.sequence, plan.model.sequence
        assert step is not None and tensors is not None, "a model with sequences"
        begin_ns = time.monotonic_ns()
        model, ticket = self._enter(plan, step, tensors)
        try:
            if not ticket.begun:
                self._await(model, ticket, Patience.of(plan, arrival_ns), call)
            waited_ns = time.monotonic_ns() - begin_ns
            try:
                own = self._call(model, ticket.sequence, plan, step)
                yield replace(plan, call=own, spare=None, waited_ns=waited_ns)
            finally:
                self._leave(model, ticket)
        finally:
            with self._lock:
                self._requests -= 1

    def keep(self, loads: Collection[int]) -> None:
        """End the sequences of all models but those that were loaded under these numbers.

        Their requests that have a slot are still executed, those in the backlog are refused.
        """
        with self._lock:
            self._loads = frozenset(loads)
            for load in [load for load in self._models if load not in self._loads]:
                model = self._models.pop(load)
                self._apply(model, model.batcher.close(_now_us()), _replaced(model.name))

    def refuse(self, reason: str) -> None:
        """Refuse what has no slot, because the server is stopping."""
        with self._lock:
            for model in self._models.values():
                refusal = RequestError(grpc.StatusCode.UNAVAILABLE, reason)
                self._apply(model, model.batcher.refuse_backlog(), refusal)

    def run(self) -> None:
        """End sequences that are idle for too long. Never returns."""
        while True:
            with self._lock:
                now_us = self._end_idle()
                times_us = [model.batcher.next_idle_us() for model in self._models.values()]
                self._wake_us = min((time_us for time_us in times_us if time_us is not None), default=None)
                sleep_s = MAX_SLEEP_S if self._wake_us is None else (self._wake_us - now_us) / 1e6
                self._earlier.wait(min(sleep_s, MAX_SLEEP_S))

    # -- what follows is called by the threads of requests

    def _enter(self, plan: Plan, step: SequenceStep, tensors: SequenceTensors) -> tuple[_Model, Ticket]:
        """Add a request to its sequence. Raises RequestError."""
        name = plan.model.name
        with self._lock:
            try:
                model = self._model(plan.model, tensors)
                now_us = _now_us()
                self._apply(model, model.batcher.end_idle(now_us))
                ticket = Ticket()
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
            _log.warning("sequence %s of model %s starts anew before it has ended", step.identity, name, extra=OFTEN)
        return model, ticket

    def _await(self, model: _Model, ticket: Ticket, patience: Patience, call: EndingCall) -> None:
        """Return when a request may be executed. Raises RequestError when it never will be."""
        if not call.add_callback(ticket.give_up):
            ticket.give_up()
        in_backlog = True
        while True:
            wait_ns = patience.ends_ns(in_backlog) - time.monotonic_ns()
            ticket.woken.wait(max(0, wait_ns) / 1e9)
            with self._lock:
                if ticket.refusal is not None:
                    raise ticket.refusal
                if ticket.begun:
                    return
                in_backlog = model.batcher.in_backlog(ticket.sequence)
                refusal = patience.refusal(time.monotonic_ns(), in_backlog)
                others = refusal or patience.ended_with_it()
                if ticket.gone:
                    refusal = patience.given_up(call)
                if refusal is not None:
                    changes = model.batcher.withdraw(ticket.sequence, ticket, _now_us())
                    self._apply(model, changes, others)
                    raise refusal

    def _call(self, model: _Model, sequence: Sequence[Ticket], plan: Plan, step: SequenceStep) -> SequencedCall:
        """Return how the request is carried out. Only while it is the sequence's running one. Raises RequestError."""
        tensors = model.states.tensors
        assert not isinstance(plan.call, EnsembleCall), "a model of its own"
        hidden = controls(tensors, step)
        memory: StateMemory | None = None
        if tensors.states:
            memory = model.memories.get(sequence)
            if memory is None:
                memory = model.memories[sequence] = model.states.memory(self._plane, self._budget)
            if step.start or not memory.has_begun:
                memory.begin()
            hidden += memory.inputs()
        return sequenced(plan.call, hidden, model.room, memory)

    def _leave(self, model: _Model, ticket: Ticket) -> None:
        """A request has been executed, or has failed."""
        with self._lock:
            self._apply(model, model.batcher.leave(ticket.sequence, _now_us()))
            next_us = model.batcher.next_idle_us()
            if next_us is not None and (self._wake_us is None or next_us < self._wake_us):
                self._wake_us = next_us
                self._earlier.notify()

    # -- the caller of what follows holds the lock

    def _model(self, model: ServedModel, tensors: SequenceTensors) -> _Model:
        """Return a loaded model's sequences. Raises ClosedError."""
        if model.load not in self._loads:
            raise ClosedError
        found = self._models.get(model.load)
        if found is None:
            batcher: SequenceBatcher[Ticket] = SequenceBatcher(tensors.settings.slots, tensors.settings.idle_us)
            found = self._models[model.load] = _Model(model.name, batcher, _States.of(model, tensors))
        return found

    def _room(self, model: _Model, max_queue: int) -> int:
        """Return how many requests more may wait for the model; `max_queue`: as its queue policy has it, 0 is any."""
        room = self._max_waiting - sum(other.batcher.waiting for other in self._models.values())
        return min(room, max_queue - model.batcher.waiting) if max_queue else room

    def _end_idle(self) -> int:
        """End what has been idle for too long; return the instant that counted, in microseconds."""
        now_us = _now_us()
        for model in self._models.values():
            self._apply(model, model.batcher.end_idle(now_us))
        return now_us

    def _apply(self, model: _Model, changes: Changes[Ticket], refusal: RequestError | None = None) -> None:
        for ticket in changes.begin:
            ticket.begin()
        for ticket in changes.refused:
            ticket.refuse(refusal or _replaced(model.name))
        for sequence in changes.over:
            memory = model.memories.pop(sequence, None)
            if memory is not None:
                memory.close()


def _replaced(name: str) -> RequestError:
    message = f"model '{name}' has been replaced or unloaded, which ends its sequences; start the sequence anew"
    return RequestError(grpc.StatusCode.UNAVAILABLE, message)


def _now_us() -> int:
    return time.monotonic_ns() // 1000
