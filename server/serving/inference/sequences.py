"""All sequences of one front end: which of their requests may be executed, and how long the others wait."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

from gangway.base.logs import OFTEN
from gangway.executor.slots import SlotStatus
from gangway.protos import StatusCode
from gangway.server.errors import RequestError, invalid, unavailable
from gangway.server.models.python_settings import PythonSettings
from gangway.server.models.sequences import SequenceTensors
from gangway.server.models.served import ServedModel
from gangway.server.requests.codecs import AnswerSize, Codec, StateMemory
from gangway.server.requests.data_plane import DataPlane, RequestLayout
from gangway.server.requests.ensembles import EnsembleCodec
from gangway.server.requests.python_codec import PythonCodec, sequenced_python
from gangway.server.requests.states import CopiedStates, HeldStates, StateBudget, control_inputs
from gangway.server.requests.validation import RequestPlan
from gangway.server.serving.call import Call
from gangway.server.serving.inference.model_run import LIMIT_SLACK_NS, MAX_WAIT_NS, failure
from gangway.server.serving.inference.sequence_batcher import (
    BacklogFullError,
    ClosedError,
    NotStartedError,
    Sequence,
    SequenceBatcher,
    TurnChanges,
)
from gangway.server.serving.loop import ServingLoop
from gangway.server.serving.pending import Pending

_log = logging.getLogger(__name__)

NEVER_NS: Final = 1 << 62


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


@dataclass(eq=False)
class SequenceTurn:
    """A request of a sequence, which waits until it may be executed, and is left when it has been, or has failed.

    `plan`: the request's, and then what the sequence has made of it. `come` is settled when it may be executed, or when
    it never will be; `is_decided`: one of both is certain.
    """

    sequences: "Sequences"
    model: "_Model"
    plan: RequestPlan
    limits: WaitLimits
    sequence: "Sequence[SequenceTurn]" = field(init=False)
    is_decided: bool = False
    timer: asyncio.TimerHandle | None = None
    come: Pending[None] = field(default_factory=Pending)

    def decide(self, refusal: RequestError | None = None) -> None:
        """Let it be executed, or never: soon, as what lets it is at something, and many may follow one another."""
        self.is_decided = True
        if self.timer is not None:
            self.timer.cancel()
        self.sequences.loop.call_soon(self.come.settle, None, refusal)

    def leave(self) -> None:
        """The request has been executed, or has failed; once."""
        self.sequences.leave(self)


STATE_SHARE: Final = 4  # states may have a quarter of the front end's shared memory
WAITING_SHARE: Final = 2  # half of the requests that a front end may have: each that waits keeps its tensors


@dataclass(eq=False)
class _Model:
    """The sequences of one loaded model. `layout`: of a compiled one, whose states have places; others are copied.

    `instances`: how many a Python model has; `homes`: which of them has which sequence, as it keeps what it knows.
    """

    name: str
    batcher: SequenceBatcher[SequenceTurn]
    tensors: SequenceTensors
    layout: RequestLayout | None
    instances: int
    answer_size: AnswerSize = field(default_factory=lambda: AnswerSize(0))
    memories: dict[Sequence[SequenceTurn], StateMemory] = field(default_factory=dict)
    homes: dict[Sequence[SequenceTurn], int] = field(default_factory=dict)

    def memory(self, sequence: Sequence[SequenceTurn], plane: DataPlane, budget: StateBudget) -> StateMemory:
        """Return the states of a sequence, which may not have begun."""
        if sequence not in self.memories:
            states = self.tensors.states
            held = HeldStates(plane, budget, self.layout, states) if self.layout is not None else None
            self.memories[sequence] = held or CopiedStates(budget, states)
        return self.memories[sequence]

    def instance_of(self, sequence: Sequence[SequenceTurn]) -> int:
        """Return the number of a sequence's instance; of a new one that which has the fewest."""
        if sequence not in self.homes:
            taken = Counter(self.homes.values())
            self.homes[sequence] = min(range(self.instances), key=lambda number: taken[number])
        return self.homes[sequence]


class Sequences:
    """Those of all models that a front end serves. For the loop's thread, but for what says otherwise.

    A sequence lives in the front end that has got its first request. Its order, its slot and its state are known only
    there, and are lost with the process. So all requests of a sequence must come to the same front end.
    """

    def __init__(self, plane: DataPlane, serving: ServingLoop) -> None:
        self._plane = plane
        self._serving = serving
        self.loop = serving.loop
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

    async def turn(self, plan: RequestPlan, call: Call, arrival_ns: int) -> SequenceTurn:
        """Wait until a request may be executed; then it has its turn, which is to be left.

        Raises RequestError. INVALID_ARGUMENT: the sequence has not been started, or has ended. UNAVAILABLE: too many
        requests wait, or this one has waited too long. CANCELLED or DEADLINE_EXCEEDED: the client does not wait any
        more.
        """
        begin_ns = time.monotonic_ns()
        turn = self._enter(plan, arrival_ns)
        try:
            if not turn.is_decided:
                await self._await(turn, call)
        except BaseException:
            self._requests -= 1
            raise
        try:
            codec = self._codec(turn)
        except BaseException:
            turn.leave()
            raise
        turn.plan = replace(plan, codec=codec, fallback=None, waited_ns=time.monotonic_ns() - begin_ns)
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

    def leave(self, turn: SequenceTurn) -> None:
        """A request has been executed, or has failed."""
        self._requests -= 1
        self._apply(turn.model, turn.model.batcher.leave(turn.sequence, _now_us()))
        self._watch_idle(turn.model)

    def _close_replaced(self) -> None:
        for load in [load for load in self._models if load not in self._loads]:
            model = self._models.pop(load)
            self._apply(model, model.batcher.close(_now_us()), _replaced(model.name))

    def _refuse_backlogs(self, refusal: RequestError) -> None:
        for model in self._models.values():
            self._apply(model, model.batcher.refuse_backlog(), refusal)

    def _watch_idle(self, model: _Model) -> None:
        """Have the clock looked at when the model's next sequence will have been idle for too long."""
        next_us, loop = model.batcher.next_idle_us(), self.loop
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

    def _enter(self, plan: RequestPlan, arrival_ns: int) -> SequenceTurn:
        """Add a request to its sequence. Raises RequestError."""
        step, name = plan.sequence, plan.model.name
        assert step is not None, "of a sequence"
        model = self._model(plan.model)
        turn = SequenceTurn(self, model, plan, WaitLimits.of(plan, arrival_ns))
        try:
            now_us = _now_us()
            self._apply(model, model.batcher.end_idle(now_us))
            room = self._room(model, plan.terms.max_queue)
            entered = model.batcher.enter(turn, step.identity, step.start, step.end, now_us, room)
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
        turn.sequence = entered.sequence
        self._apply(model, entered.changes)
        self._requests += 1
        if entered.conflict:
            _log.warning(
                "%s: sequence %s starts again before it has ended; what it had is dropped",
                name,
                step.identity,
                extra=OFTEN,
            )
        return turn

    async def _await(self, turn: SequenceTurn, call: Call) -> None:
        """Return when a request may be executed. Raises RequestError when it never will be."""
        give_up = partial(self._give_up, turn, call)
        if not call.add_callback(give_up):
            give_up()
        self._poll(turn)
        await turn.come

    def _poll(self, turn: SequenceTurn) -> None:
        """Refuse a request that has waited for too long; else look again when it will have."""
        if turn.is_decided:
            return
        in_backlog, now_ns = turn.model.batcher.in_backlog(turn.sequence), time.monotonic_ns()
        refusal = turn.limits.refusal(now_ns, in_backlog)
        if refusal is not None:
            self._withdraw(turn, refusal, refusal)
        else:
            wait_s = (turn.limits.ends_ns(in_backlog) - now_ns) / 1e9
            turn.timer = self.loop.call_later(wait_s, self._poll, turn)

    def _give_up(self, turn: SequenceTurn, call: Call) -> None:
        """The call of a request has ended."""
        if turn.is_decided:
            return
        remaining_s, name = call.time_remaining(), turn.model.name
        is_late = remaining_s is not None and remaining_s * 1e9 <= LIMIT_SLACK_NS
        refusal = failure(name, SlotStatus.DEADLINE if is_late else SlotStatus.CANCELLED, 0)
        in_backlog = turn.model.batcher.in_backlog(turn.sequence)
        message = f"the sequence of the request for model '{name}' has ended: an earlier request was cancelled"
        others = RequestError(StatusCode.CANCELLED, message)
        self._withdraw(turn, refusal, turn.limits.refusal(time.monotonic_ns(), in_backlog) or others)

    def _withdraw(self, turn: SequenceTurn, refusal: RequestError, others: RequestError) -> None:
        """End a sequence because a request of it that has not begun is refused. `others`: for those behind it."""
        self._apply(turn.model, turn.model.batcher.withdraw(turn.sequence, turn, _now_us()), others)
        turn.decide(refusal)

    def _codec(self, turn: SequenceTurn) -> Codec:
        """Return how the request is carried out. Only while it is the sequence's running one. Raises RequestError."""
        model, codec, step = turn.model, turn.plan.codec, turn.plan.sequence
        assert step is not None and not isinstance(codec, EnsembleCodec), "a model of its own"
        hidden = control_inputs(model.tensors, step)
        if isinstance(codec, PythonCodec):
            return sequenced_python(codec, hidden, step, model.instance_of(turn.sequence))
        memory: StateMemory | None = None
        if model.tensors.states:
            memory = model.memory(turn.sequence, self._plane, self._budget)
            if step.start or not memory.has_begun:
                memory.begin()
            hidden += memory.inputs()
        return codec.sequenced(hidden, model.answer_size, memory)

    def _model(self, model: ServedModel) -> _Model:
        """Return a loaded model's sequences. Raises RequestError."""
        if model.load not in self._loads:
            raise _replaced(model.name)
        found = self._models.get(model.load)
        if found is None:
            tensors, compiled = model.sequence, model.compiled.get(())
            assert tensors is not None, "a model with sequences"
            batcher: SequenceBatcher[SequenceTurn] = SequenceBatcher(tensors.settings.slots, tensors.settings.idle_us)
            layout = compiled.layout if compiled is not None and not compiled.tail else None
            instances = len(PythonSettings.of(model.config).kinds) if model.is_python else 0
            found = self._models[model.load] = _Model(model.name, batcher, tensors, layout, instances)
        return found

    def _room(self, model: _Model, max_queue: int) -> int:
        """Return how many requests more may wait for the model; `max_queue`: as its queue policy has it, 0 is any."""
        room = self._max_waiting - sum(other.batcher.waiting for other in self._models.values())
        return min(room, max_queue - model.batcher.waiting) if max_queue else room

    def _apply(self, model: _Model, changes: TurnChanges[SequenceTurn], refusal: RequestError | None = None) -> None:
        for turn in changes.begin:
            turn.decide()
        for turn in changes.refused:
            turn.decide(refusal or _replaced(model.name))
        for sequence in changes.over:
            memory = model.memories.pop(sequence, None)
            if memory is not None:
                memory.close()
            model.homes.pop(sequence, None)


def _replaced(name: str) -> RequestError:
    message = f"model '{name}' has been replaced or unloaded, which ends its sequences; start the sequence anew"
    return RequestError(StatusCode.UNAVAILABLE, message)


def _now_us() -> int:
    return time.monotonic_ns() // 1000
