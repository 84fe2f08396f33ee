"""ModelInfer in two halves: a request is handed to the scheduler at once, and answered by another thread.

For plain requests only: small ones, of a form that has been seen before. Their tensors are in the messages, or in the
clients' shared memory. What else there is, and whatever is wrong, goes the ordinary way (`Inference.infer`), with a
thread that may wait.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Generic, Protocol, TypeVar

import grpc

from gangway.executor.logs import OFTEN
from gangway.executor.slots import SlotStatus
from gangway.server.errors import RequestError
from gangway.server.front_end.inference import COMPUTED, Call, Inference
from gangway.server.front_end.outcomes import RequestClock, failure
from gangway.server.grpc.gate import FOLLOWED_BYTES
from gangway.server.requests.calls import Contents, TensorCall
from gangway.server.requests.data_plane import NO_EXTERNAL, DataPlane, PoolExhaustedError, Request
from gangway.server.requests.regions import NO_REGIONS, Region
from gangway.server.requests.validation import Plan
from gangway.server.requests.wire import MalformedRequestError, SplitRequest, split_request
from gangway.server.thread_pool import NO_THREAD

# One thread that waits for the answers of many requests, and has each dealt with as it comes.

LOOK_NS = 10**9  # how often requests are looked for that nobody shall wait for any longer

_log = logging.getLogger(__name__)


class Waiting(Protocol):
    """What must be known of a request."""

    @property
    def model_id(self) -> int:
        """Of the model that it is for."""

    @property
    def until_ns(self) -> int:
        """When waiting ends at the latest, CLOCK_MONOTONIC."""


WaitingT = TypeVar("WaitingT", bound=Waiting)


class Answering(Generic[WaitingT]):
    """Calls `ended` with each request that has ended, and `given_up` with those whose time is over; in its thread.

    The requests are in slots of `plane`, and their answers are told by its bell.
    """

    def __init__(
        self, plane: DataPlane, ended: Callable[[WaitingT], None], given_up: Callable[[WaitingT], None]
    ) -> None:
        self._plane = plane
        self._ended = ended
        self._given_up = given_up
        # By slot. Single operations on it are atomic, so requests need no lock here.
        self._waiting: dict[int, WaitingT] = {}
        self._look_ns = 0
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="answers", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End, whatever still waits; return when the thread has."""
        self._stopping = True
        self._plane.slots.bell.ring()
        if self._thread.is_alive():
            self._thread.join()

    def add(self, slot: int, request: WaitingT) -> None:
        """Wait for this slot's answer, too. To be called before it is submitted."""
        self._waiting[slot] = request

    def discard(self, slot: int) -> bool:
        """Wait for it no more; False if it is being dealt with already."""
        return self._waiting.pop(slot, None) is not None

    def _run(self) -> None:
        bell = self._plane.slots.bell
        while not self._stopping:
            seen = bell.seen()
            slots = self._plane.answered(self._waiting)
            for slot in slots:
                self._deal_with(slot, self._ended)
            if not slots:
                bell.wait(seen, self._spin_us(), LOOK_NS // 1000)
            if (now_ns := time.monotonic_ns()) >= self._look_ns:
                self._look_ns = now_ns + LOOK_NS
                self._give_up(now_ns)

    def _spin_us(self) -> int:
        """Return how long to wait awake: see `DataPlane.spin_for`."""
        waiting = list(self._waiting.values())
        return self._plane.spin_for(waiting[0].model_id) if len(waiting) == 1 else 0

    def _give_up(self, now_ns: int) -> None:
        for slot, request in list(self._waiting.items()):
            if request.until_ns < now_ns:
                self._deal_with(slot, self._given_up)

    def _deal_with(self, slot: int, how: Callable[[WaitingT], None]) -> None:
        request = self._waiting.pop(slot, None)
        if request is not None:
            try:
                how(request)
            except Exception:  # the others' answers must not be lost by it
                _log.exception("a finished request could not be answered: a fault of the server", extra=OFTEN)


MAX_MESSAGE_BYTES = 1 << 20  # all other calls wait while gRPC's thread copies a tensor

_INTERNAL: Final = RequestError(grpc.StatusCode.INTERNAL, "internal error, see the server's log")


class AnsweredCall(Call, Protocol):
    """A remote call that waits for its answer without a thread."""

    def answer(self, result: bytes | RequestError) -> None:
        """Send the answer, or why there is none; once, from any thread."""


@dataclass(slots=True)
class Pending:
    """A request that the scheduler has, or is about to have."""

    plan: Plan
    way: TensorCall
    parts: SplitRequest
    request: Request
    clock: RequestClock
    call: AnsweredCall
    regions: Mapping[str, Region]  # held until it is answered
    submitted_ns: int = 0

    @property
    def model_id(self) -> int:
        """Of the model that it is for."""
        return self.plan.model.model_id

    @property
    def until_ns(self) -> int:
        """When waiting ends at the latest, CLOCK_MONOTONIC."""
        return self.clock.end_ns


class ThreadlessInference:
    """Safe for threads."""

    def __init__(self, inference: Inference) -> None:
        self._inference = inference
        self._execution = inference.execution
        self._answering: Answering[Pending] = Answering(inference.execution.plane, self._ended, self._given_up)
        self.start, self.stop = self._answering.start, self._answering.stop

    def begin(self, message: bytes, call: AnsweredCall) -> bool:
        """Hand a request to the scheduler; `call.answer` is called later, by another thread, with what the client gets.

        False: nothing has been done, the request is one for the ordinary way.
        """
        arrival_ns = time.monotonic_ns()
        if len(message) > MAX_MESSAGE_BYTES:
            return False
        try:
            parts = split_request(message)
        except MalformedRequestError:
            return False
        plan = self._inference.take_plain(parts.header, bool(parts.raws))
        if plan is None:
            return False
        begun = False
        try:
            begin = self._begin_in_regions if plan.regions else self._begin
            begun = begin(plan, parts, call, arrival_ns)
        except (RequestError, PoolExhaustedError):
            pass  # the ordinary way finds the same, and says so
        finally:
            if not begun:
                plan.model.uses.end()
        return begun

    def _begin(self, plan: Plan, parts: SplitRequest, call: AnsweredCall, arrival_ns: int) -> bool:
        way, rows = plan.plain_call, plan.shapes.rows
        if way is None or way.answer_bytes(rows) >= FOLLOWED_BYTES:
            return False  # the gate sees to it that such answers are taken
        if tuple(map(len, parts.raws)) != plan.input_sizes:
            return False
        clock = RequestClock.of(plan.terms.target_us, call.time_remaining(), arrival_ns)
        request = self._execution.plane.open(way.memory, rows)
        return self._submit(Pending(plan, way, parts, request, clock, call, NO_REGIONS), parts.raws)

    def _begin_in_regions(self, plan: Plan, parts: SplitRequest, call: AnsweredCall, arrival_ns: int) -> bool:
        """Do the same with a request that has tensors in the clients' shared memory."""
        way, rows, begun = plan.plain_call, plan.shapes.rows, False
        if way is None or way.answer_bytes(rows) >= FOLLOWED_BYTES:
            return False
        regions = self._inference.regions.hold(plan.regions)
        try:
            contents = plan.contents(parts.raws, regions)
            placed = self._execution.choose(plan, contents, regions)
            copied = [
                size for place, size in zip(way.places, plan.input_sizes, strict=True) if place not in placed.inputs
            ]
            if sum(copied) > MAX_MESSAGE_BYTES:
                placed.let_go()
                return False
            clock = RequestClock.of(plan.terms.target_us, call.time_remaining(), arrival_ns)
            try:
                request = self._execution.plane.open(way.memory, rows, placed)
            except PoolExhaustedError:
                placed.let_go()
                raise
            begun = self._submit(Pending(plan, way, parts, request, clock, call, regions), contents)
        finally:
            if not begun:
                self._inference.regions.release(regions)
        return begun

    def _submit(self, pending: Pending, contents: Contents) -> bool:
        """Copy the contents and hand the request over. Raises RequestError, and nothing is left of it then."""
        request = pending.request
        self._answering.add(request.slot, pending)
        try:
            pending.way.write(request, contents)
            if not pending.regions:
                pending.parts = pending.parts._replace(raws=[])  # has been copied; many that wait would hold it twice
            pending.submitted_ns = time.monotonic_ns()
            self._execution.submit(pending.plan, request, pending.call, pending.clock, by_bell=True)
        except Exception:
            if not self._answering.discard(request.slot):
                return True  # it is being answered: UNAVAILABLE
            request.close()
            raise
        return True

    def _ended(self, pending: Pending) -> None:
        """Answer a request that has ended; in the thread for that."""
        try:
            response = self._response(pending)
        except RequestError as error:
            self._fail(pending, error)
        except Exception:
            _log.exception("a request failed by a fault of the server; its client is told INTERNAL", extra=OFTEN)
            self._fail(pending, _INTERNAL)
        else:
            self._let_go(pending)
            if response is None:
                self._start_again(pending)
            else:
                pending.call.answer(response)

    def _response(self, pending: Pending) -> bytes | None:
        """Return the answer and count it; None if memory of a region was missing. Raises RequestError."""
        plan, clock, finished_ns = pending.plan, pending.clock, time.monotonic_ns()
        response = None
        with pending.request as request:
            outcome = request.outcome()
            self._execution.plane.last_wait_ns[pending.model_id] = finished_ns - pending.submitted_ns
            if request.elsewhere is not NO_EXTERNAL and outcome.status in COMPUTED and request.elsewhere.spoiled():
                return None
            if outcome.status is SlotStatus.OK:
                response = pending.way.answer(pending.parts.request_id, request, pending.regions)
        if response is None:
            status = clock.status_of(outcome.status, finished_ns)
            raise failure(plan.model.name, status, plan.terms.max_queue, outcome.reason)
        request_id, submitted_ns = pending.parts.request_id, pending.submitted_ns
        # Without the contents: what is traced with its tensors goes the ordinary way.
        self._execution.note(plan, request_id, (), pending.call, clock, submitted_ns, finished_ns, outcome, response)
        return response

    def _start_again(self, pending: Pending) -> None:
        try:
            threading.Thread(target=self._again, args=(pending,), name="again", daemon=True).start()
        except RuntimeError:
            pending.call.answer(RequestError(grpc.StatusCode.UNAVAILABLE, NO_THREAD))

    def _again(self, pending: Pending) -> None:
        """Carry a request out in the ordinary way, in a thread of its own: it finds out what is wrong with a region."""
        header, request_id, raws = pending.parts
        try:
            arrival_ns = pending.clock.arrival_ns
            result: bytes | RequestError = self._inference.infer_parts(
                header, request_id, raws, pending.call, arrival_ns
            )
        except RequestError as error:
            result = error
        except Exception:
            _log.exception("a request failed by a fault of the server; its client is told INTERNAL", extra=OFTEN)
            result = _INTERNAL
        pending.call.answer(result)

    def _given_up(self, pending: Pending) -> None:
        """Answer a request that has not ended in its time; what it holds follows later."""
        pending.request.close()
        plan = pending.plan
        self._fail(pending, failure(plan.model.name, pending.clock.status_at_end, plan.terms.max_queue))

    def _fail(self, pending: Pending, error: RequestError) -> None:
        request_id, arrival_ns = pending.parts.request_id, pending.clock.arrival_ns
        self._inference.note_failure(pending.plan, request_id, pending.call, arrival_ns, error)
        self._let_go(pending)
        pending.call.answer(error)

    def _let_go(self, pending: Pending) -> None:
        pending.plan.model.uses.end()
        if pending.regions:
            self._inference.regions.release(pending.regions)
