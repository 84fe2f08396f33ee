"""ModelInfer in two halves: a request is handed to the scheduler at once, and answered by another thread.

For plain requests only: small ones, of a form that has been seen before, with all tensors in the messages. What else
there is, and whatever is wrong, goes the ordinary way (`Inference.infer`), with a thread that may wait.
"""

import logging
import time
from dataclasses import dataclass
from typing import Protocol

import grpc
from gangway.executor.log_limit import OFTEN
from gangway.executor.slots import SlotStatus
from gangway.server.calls import TensorCall
from gangway.server.data_plane import PoolExhaustedError, Request
from gangway.server.errors import RequestError
from gangway.server.failures import failure
from gangway.server.grpc_gate import FOLLOWED_BYTES
from gangway.server.inference import Call, Inference, count
from gangway.server.plan import Plan
from gangway.server.request_clock import RequestClock
from gangway.server.threadless.answering import Answering
from gangway.server.wire import MalformedRequestError, split_request

MAX_MESSAGE_BYTES = 1 << 20  # all other calls wait while gRPC's thread copies a tensor

_log = logging.getLogger(__name__)


class AnsweredCall(Call, Protocol):
    """A remote call that waits for its answer without a thread."""

    def answer(self, result: bytes | RequestError) -> None:
        """Send the answer, or why there is none; once, from any thread."""


@dataclass(slots=True)
class Pending:
    """A request that the scheduler has, or is about to have."""

    plan: Plan
    way: TensorCall
    request_id: bytes
    request: Request
    clock: RequestClock
    call: AnsweredCall
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
        self._answering: Answering[Pending] = Answering(inference.plane, self._ended, self._given_up)
        self.start, self.stop = self._answering.start, self._answering.stop

    def begin(self, message: bytes, call: AnsweredCall) -> bool:
        """Hand a request to the scheduler; `call.answer` is called later, by another thread, with what the client gets.

        False: nothing has been done, the request is one for the ordinary way.
        """
        arrival_ns = time.monotonic_ns()
        if len(message) > MAX_MESSAGE_BYTES:
            return False
        try:
            header, request_id, raws = split_request(message)
        except MalformedRequestError:
            return False
        plan = self._inference.take_plain(header, bool(raws))
        if plan is None:
            return False
        begun = False
        try:
            begun = self._begin(plan, request_id, raws, call, arrival_ns)
        except (RequestError, PoolExhaustedError):
            pass  # the ordinary way finds the same, and says so
        finally:
            if not begun:
                plan.model.uses.end()
        return begun

    def _begin(
        self, plan: Plan, request_id: bytes, raws: list[memoryview], call: AnsweredCall, arrival_ns: int
    ) -> bool:
        way, rows = plan.plain_call, plan.shapes.rows
        if way is None or way.answer_bytes(rows) >= FOLLOWED_BYTES:
            return False  # the gate sees to it that such answers are taken
        if tuple(map(len, raws)) != plan.input_sizes:
            return False
        clock = RequestClock.of(plan.terms.target_us, call.time_remaining(), arrival_ns)
        request = self._inference.plane.open(way.memory, rows)
        pending = Pending(plan, way, request_id, request, clock, call)
        self._answering.add(request.slot, pending)
        try:
            way.write_raws(request, raws)
            pending.submitted_ns = time.monotonic_ns()
            self._inference.submit(plan, request, call, clock, by_bell=True)
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
            _log.exception("a request failed unexpectedly", extra=OFTEN)
            self._fail(pending, RequestError(grpc.StatusCode.INTERNAL, "internal error, see the server's log"))
        else:
            pending.plan.model.uses.end()
            pending.call.answer(response)

    def _response(self, pending: Pending) -> bytes:
        """Return the answer and count it. Raises RequestError."""
        plan, clock, finished_ns = pending.plan, pending.clock, time.monotonic_ns()
        with pending.request as request:
            outcome = request.outcome()
            self._inference.plane.last_wait_ns[pending.model_id] = finished_ns - pending.submitted_ns
            response = pending.way.answer(pending.request_id, request) if outcome.status is SlotStatus.OK else None
        if response is None:
            status = clock.status_of(outcome.status, finished_ns)
            raise failure(plan.model.name, status, plan.terms.max_queue)
        count(plan, clock, pending.submitted_ns, finished_ns, outcome)
        return response

    def _given_up(self, pending: Pending) -> None:
        """Answer a request that has not ended in its time; what it holds follows later."""
        pending.request.close()
        plan = pending.plan
        self._fail(pending, failure(plan.model.name, pending.clock.status_at_end, plan.terms.max_queue))

    def _fail(self, pending: Pending, error: RequestError) -> None:
        plan = pending.plan
        total_ns = time.monotonic_ns() - pending.clock.arrival_ns
        plan.model.statistics.failed(total_ns, error.code, plan.terms.target_us > 0)
        plan.model.uses.end()
        pending.call.answer(error)
