"""One ModelStreamInfer call: many requests at a time, each answered as soon as it is done.

At most one thread waits for the client's next request. When it has got one, another thread is asked to wait for the
next, and this one executes the request: so a request is not handed from thread to thread. Answers are sent by the
thread that gRPC has given to the call.

A client that does not take its answers is not listened to: as long as `in_flight` of its requests, or `held_bytes`, are
under way or unsent, nothing more is read, and HTTP/2's flow control makes the client wait.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import grpc

from gangway.server.counting_pool import NoThreadError
from gangway.server.errors import RequestError
from gangway.server.stream_call import StreamContext, StreamedCall
from gangway.server.stream_messages import SequenceKey, StreamedRequest, failure, success
from gangway.server.stream_order import AnswerOrder, SequenceQueues, Ticket
from gangway.server.wire import MalformedRequestError, Raws

WITHOUT_ID = ""  # the line of such requests; others have names of models
STATUS_HEADER = ("triton_grpc_error", "true")  # the first error shall end the stream, as its status

_log = logging.getLogger(__name__)


class Infer(Protocol):
    """`Inference.infer_parts`."""

    def __call__(self, header: bytes, request_id: bytes, raws: Raws, call: StreamedCall, arrival_ns: int) -> bytes:
        """Return the serialised ModelInferResponse. Raises RequestError."""


OrderOf = Callable[[bytes], str | None]  # `Inference.order_of`


@dataclass(frozen=True)
class StreamLimits:
    """What one stream may hold, and all of them.

    `in_flight` and `held_bytes` are for each stream: requests count from being read until they are answered, answers
    until they are sent; the last request that is read may exceed the bytes. `streams` are open at a time. Beyond
    `unsent_bytes` of answers, all streams together, the one that has most is ended. So is one whose client takes longer
    for an answer than `stall_seconds` and another second for each `slow_bytes`. `message_bytes`: of one answer.
    """

    streams: int = 128
    in_flight: int = 64
    held_bytes: int = 64 << 20
    unsent_bytes: int = 1 << 30
    stall_seconds: float = 60.0
    slow_bytes: int = 1 << 20
    message_bytes: int = 256 << 20


@dataclass(frozen=True, eq=False)
class _Work:
    """A request that has been read. `ticket`: where it stands among those whose answers are kept in order."""

    request: StreamedRequest
    arrival_ns: int
    call: StreamedCall
    ticket: Ticket["_Answer"]

    @property
    def sequence(self) -> SequenceKey | None:
        return self.request.sequence


@dataclass(frozen=True, eq=False)
class _Answer:
    """`error` is also in the message."""

    message: bytes
    call: StreamedCall
    error: RequestError | None = None


class Stream:
    """Reads requests, has them executed, yields their answers. `start` has a function called by some other
    thread, or raises NoThreadError."""

    def __init__(
        self,
        messages: Iterator[bytes],
        context: StreamContext,
        infer: Infer,
        order_of: OrderOf,
        start: Callable[[Callable[[], None]], object],
        limits: StreamLimits,
    ) -> None:
        self._messages = messages
        self._context = context
        self._infer = infer
        self._order_of = order_of
        self._start = start
        self._limits = limits
        self._errors_end_it = STATUS_HEADER in tuple(context.invocation_metadata() or ())
        self._changed = threading.Condition(threading.Lock())  # guards what follows; only the sender waits on it
        self._calls: set[StreamedCall] = set()  # of requests that were read and whose answers are not sent
        self._sequences: SequenceQueues[_Work] = SequenceQueues()
        self._order: AnswerOrder[_Answer] = AnswerOrder()
        self._ready: deque[_Answer] = deque()
        self.held_bytes = 0
        self._reading = False
        self._half_closed = False  # the client sends nothing more
        self._ended = False
        self._refusal: RequestError | None = None  # how the stream ends when what is under way has been answered
        self._give_up_s = 0.0  # when the answer that is being sent must have been taken, 0: none is
        self.unsent_bytes = 0

    def answers(self) -> Iterator[bytes]:
        """Yield answers until the last one. Raises RequestError if the stream shall end with an error."""
        with self._changed:
            self._read_on()
        while (answer := self._next_answer()) is not None:
            if answer.error is not None and self._ends_with(answer.error):
                raise answer.error
            patience_s = self._limits.stall_seconds + len(answer.message) / self._limits.slow_bytes
            self._give_up_s = time.monotonic() + patience_s
            yield answer.message  # returns when gRPC has taken it
            self._sent(answer)
        if self._refusal is not None:
            raise self._refusal

    def refuse(self, error: RequestError) -> None:
        """Read nothing more; when what is under way has been answered, end with this error."""
        with self._changed:
            self._refusal = error
            self._changed.notify_all()

    def end(self) -> None:
        """Cancel everything that is under way, because the remote call is over."""
        with self._changed:
            self._ended = True
            calls = list(self._calls)
            self._calls.clear()
            self._sequences.clear()
            self._order.clear()
            self._ready.clear()
            self.unsent_bytes = self.held_bytes = 0
            self._changed.notify_all()
        for call in calls:
            call.end()

    def cancel(self) -> None:
        """Have gRPC end the call, which then calls `end`."""
        self._context.cancel()

    def stalled(self, now_s: float) -> bool:
        """Whether an answer has been waiting for too long to be taken by the client (CLOCK_MONOTONIC)."""
        return 0 < self._give_up_s < now_s

    # -- the thread that sends

    def _ends_with(self, error: RequestError) -> bool:
        """Whether the error is one of the whole stream. Only the stream has a deadline that can pass."""
        return self._errors_end_it or error.code is grpc.StatusCode.DEADLINE_EXCEEDED

    def _next_answer(self) -> _Answer | None:
        with self._changed:
            while not (self._ready or self._finished()):
                self._changed.wait()
            return self._ready.popleft() if self._ready else None

    def _finished(self) -> bool:
        return self._ended or (not self._calls and (self._half_closed or self._refusal is not None))

    def _sent(self, answer: _Answer) -> None:
        size_bytes = len(answer.message)
        with self._changed:
            self._give_up_s = 0.0
            if self._ended:
                return
            self._calls.discard(answer.call)
            self.held_bytes -= size_bytes
            self.unsent_bytes -= size_bytes
            self._read_on()
        answer.call.end()

    # -- threads that read and execute

    def _read_on(self) -> None:
        """Have a thread wait for the next request, if there may be one. The caller holds the lock."""
        closed = self._reading or self._half_closed or self._ended or self._refusal is not None
        if not closed and len(self._calls) < self._limits.in_flight and self.held_bytes < self._limits.held_bytes:
            self._reading = True
            try:
                self._start(self._take)
            except NoThreadError as error:
                self._reading, self._refusal = False, RequestError(grpc.StatusCode.UNAVAILABLE, str(error))
                self._changed.notify_all()

    def _take(self) -> None:
        """Wait for one request, let another thread wait for the next one, execute this one."""
        message = self._receive()
        if message is None:
            with self._changed:
                self._reading, self._half_closed = False, True
                self._changed.notify_all()
            return
        arrival_ns = time.monotonic_ns()
        call = StreamedCall(self._context)
        try:
            request = StreamedRequest.of(message)
        except MalformedRequestError as error:
            request, problem = StreamedRequest(b"", b"", [], None, len(message)), str(error)
        else:
            problem = ""
        del message
        lines = self._lines_of(request)
        with self._changed:
            self._reading = False
            if self._ended:
                return
            work = _Work(request, arrival_ns, call, self._order.ticket(lines))
            self._calls.add(call)
            self.held_bytes += request.size_bytes
            begins = self._sequences.enter(work)
            self._read_on()
        if problem:
            self._put(work, _refused(work, RequestError(grpc.StatusCode.INVALID_ARGUMENT, problem)))
        elif begins:
            self._work_off(work)

    def _lines_of(self, request: StreamedRequest) -> list[str]:
        """Return the lines of requests that are answered in order which this one stands in."""
        model = self._order_of(request.header)
        lines = [] if request.request_id else [WITHOUT_ID]
        return lines if model is None else [*lines, model]

    def _receive(self) -> bytes | None:
        """Return the next message, None if there is none: the client has finished, or the call is over."""
        try:
            return next(self._messages, None)
        except grpc.RpcError:
            return None
        except RequestError as error:  # what comes after such a message is anybody's guess
            self.refuse(error)
            return None
        except Exception:
            _log.exception("a stream cannot be read")
            self.refuse(RequestError(grpc.StatusCode.INTERNAL, "internal error, see the server's log"))
            return None

    def _work_off(self, work: _Work) -> None:
        """Execute a request, and then those of its sequence that have come meanwhile."""
        following: _Work | None = work
        while following is not None:
            self._put(following, self._execute(following))
            with self._changed:
                following = self._sequences.leave(following)

    def _execute(self, work: _Work) -> _Answer:
        request = work.request
        try:
            response = self._infer(request.header, request.request_id, request.raws, work.call, work.arrival_ns)
        except RequestError as error:
            return _refused(work, error)
        except Exception:
            _log.exception("a request of a stream failed unexpectedly")
            message = "internal error, see the server's log"
            return _refused(work, RequestError(grpc.StatusCode.INTERNAL, message))
        answer = _Answer(success(response), work.call)
        if len(answer.message) > self._limits.message_bytes:
            message = f"the answer has {len(answer.message)} bytes, {self._limits.message_bytes} are possible"
            return _refused(work, RequestError(grpc.StatusCode.RESOURCE_EXHAUSTED, message))
        return answer

    def _put(self, work: _Work, answer: _Answer) -> None:
        """Have an answer sent, when it is its turn."""
        with self._changed:
            if self._ended:
                return
            self.held_bytes += len(answer.message) - work.request.size_bytes
            self.unsent_bytes += len(answer.message)
            self._ready.extend(self._order.put(work.ticket, answer))
            self._changed.notify_all()


def _refused(work: _Work, error: RequestError) -> _Answer:
    return _Answer(failure(error.message, work.request.request_id), work.call, error)
