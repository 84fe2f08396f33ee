"""ModelInfer in two halves: a request is handed to the scheduler at once, and answered by another thread.

For plain requests only: small ones, of a form that has been seen before. Their tensors are in the messages, or in the
clients' shared memory. What else there is, and whatever is wrong, goes the blocking way (`Inference.infer`), with a
thread that may wait.
"""

import logging
import threading
import time
from collections.abc import Callable
from typing import Final, Protocol, cast

import grpc

from gangway.executor.logs import OFTEN
from gangway.server.errors import RequestError
from gangway.server.front_end.model_run import ClientCall
from gangway.server.front_end.request import ClientRequest, Resources
from gangway.server.grpc.gate import FOLLOWED_BYTES
from gangway.server.requests.data_plane import DataPlane
from gangway.server.requests.validation import RequestPlan
from gangway.server.requests.wire import MalformedRequestError, split_request
from gangway.server.thread_pool import NO_THREAD

# One thread that waits for the answers of many requests, and has each dealt with as it comes.

LOOK_NS = 10**9  # how often requests are looked for that nobody shall wait for any longer

_log = logging.getLogger(__name__)


class Answering:
    """Calls `ended` with each request that has ended, and `given_up` with those whose time is over; in its thread.

    The requests are in slots of `plane`, and their answers are told by its bell.
    """

    def __init__(
        self, plane: DataPlane, ended: Callable[[ClientRequest], None], given_up: Callable[[ClientRequest], None]
    ) -> None:
        self._plane = plane
        self._ended = ended
        self._given_up = given_up
        # By slot. Single operations on it are atomic, so requests need no lock here.
        self._waiting: dict[int, ClientRequest] = {}
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

    def add(self, slot: int, request: ClientRequest) -> None:
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
        return self._plane.spin_for(waiting[0].model.model_id) if len(waiting) == 1 else 0

    def _give_up(self, now_ns: int) -> None:
        for slot, request in list(self._waiting.items()):
            if request.clock.end_ns < now_ns:
                self._deal_with(slot, self._given_up)

    def _deal_with(self, slot: int, how: Callable[[ClientRequest], None]) -> None:
        request = self._waiting.pop(slot, None)
        if request is not None:
            try:
                how(request)
            except Exception:  # the others' answers must not be lost by it
                _log.exception("a finished request could not be answered: a fault of the server", extra=OFTEN)


MAX_MESSAGE_BYTES = 1 << 20  # all other calls wait while gRPC's thread copies a tensor

_INTERNAL: Final = RequestError(grpc.StatusCode.INTERNAL, "internal error, see the server's log")


class NonBlockingCall(ClientCall, Protocol):
    """A remote call that waits for its answer without a thread."""

    def answer(self, result: bytes | RequestError) -> None:
        """Send the answer, or why there is none; once, from any thread."""


class NonBlockingInference:
    """Safe for threads. `take_plain`: `Inference.take_plain`."""

    def __init__(self, resources: Resources, take_plain: Callable[[bytes, bool], RequestPlan | None]) -> None:
        self._resources = resources
        self._take_plain = take_plain
        self._answering = Answering(resources.plane, self._ended, self._expired)
        self.start, self.stop = self._answering.start, self._answering.stop

    def begin(self, message: bytes, call: NonBlockingCall) -> bool:
        """Hand a request to the scheduler; `call.answer` is called later, by another thread, with what the client gets.

        False: nothing has been done, the request is one for the blocking way.
        """
        arrival_ns = time.monotonic_ns()
        if len(message) > MAX_MESSAGE_BYTES:
            return False
        try:
            header, request_id, raws = split_request(message)
        except MalformedRequestError:
            return False
        plan = self._take_plain(header, bool(raws))
        if plan is None:
            return False
        begun = False
        request = ClientRequest(self._resources, plan, request_id, call, arrival_ns)
        try:
            begun = self._begin(request, raws)
        except RequestError:
            pass  # the blocking way finds the same, and says so
        finally:
            if not begun:
                request.close()
        return begun

    def _begin(self, request: ClientRequest, raws: list[memoryview]) -> bool:
        """Copy the contents and hand the request over. Raises RequestError, and nothing is left of it then."""
        plan = request.plan
        codec, sizes = plan.plain_codec, plan.input_sizes
        if codec is None or codec.answer_bytes(plan.shapes.rows) >= FOLLOWED_BYTES:
            return False  # the gate sees to it that such answers are taken
        if plan.regions:
            request.contents = contents = request.contents_of(raws)
        elif tuple(map(len, raws)) == sizes:
            contents = raws  # which the request does not keep: many that wait would hold their tensors twice
        else:
            return False
        submission = request.open(contents)
        if plan.regions:
            mapped = submission.external.inputs
            copied = sum(size for place, size in zip(codec.places, sizes, strict=True) if place not in mapped)
            if copied > MAX_MESSAGE_BYTES:
                submission.close()
                return False
        self._answering.add(submission.slot, request)
        try:
            request.submit(contents, by_bell=True)
        except Exception:
            if not self._answering.discard(submission.slot):
                return True  # it is being answered: UNAVAILABLE
            submission.close()
            raise
        return True

    def _ended(self, request: ClientRequest) -> None:
        """Answer a request that has ended; in the thread for that."""
        self._settle(request, self._finish)

    def _finish(self, request: ClientRequest) -> bytes | None:
        """Return as `ClientRequest.finish` does, and note how long the answer was waited for. Raises RequestError."""
        assert request.submission is not None, "opened"
        outcome = request.submission.outcome()
        wait_ns = time.monotonic_ns() - request.submitted_ns
        self._resources.plane.last_wait_ns[request.model.model_id] = wait_ns
        return request.finish(outcome)

    def _settle(self, request: ClientRequest, response_of: Callable[[ClientRequest], bytes | None]) -> None:
        """Answer with the response, or with the error that is raised; without a response another attempt follows."""
        try:
            response = response_of(request)
        except RequestError as error:
            self._fail(request, error)
        except Exception:
            _log.exception("a request failed by a fault of the server; its client is told INTERNAL", extra=OFTEN)
            self._fail(request, _INTERNAL)
        else:
            if response is None:
                self._start_again(request)
            else:
                request.close()
                _call_of(request).answer(response)

    def _start_again(self, request: ClientRequest) -> None:
        """Go on in the blocking way, in a thread of its own: it finds out what is wrong with a region."""
        again = (request, lambda request: request.answer(request.contents))
        try:
            threading.Thread(target=self._settle, args=again, name="again", daemon=True).start()
        except RuntimeError:
            self._fail(request, RequestError(grpc.StatusCode.UNAVAILABLE, NO_THREAD))

    def _expired(self, request: ClientRequest) -> None:
        """Answer a request that has not ended in its time; what it holds follows later."""
        assert request.submission is not None, "opened"
        request.submission.close()
        self._fail(request, request.expired())

    def _fail(self, request: ClientRequest, error: RequestError) -> None:
        request.fail(error)
        request.close()
        _call_of(request).answer(error)


def _call_of(request: ClientRequest) -> NonBlockingCall:
    return cast("NonBlockingCall", request.call)
