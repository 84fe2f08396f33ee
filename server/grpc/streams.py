"""All ModelStreamInfer calls of a front end: how many there may be, their threads, and the end of stalled ones.

A stream keeps one thread of the gRPC server, which has that many more, so that streams take none from other calls. It
also keeps one of the threads here, which waits for its next request. Each request that is executed needs a further one.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeAlias, TypeVar

import grpc
from google.protobuf.message import DecodeError

from gangway.protos import StatusCode
from gangway.protos import grpc_service_pb2 as pb
from gangway.server.errors import RequestError, unavailable
from gangway.server.models.sequences import ID, ID_KINDS, UINT64_MASK
from gangway.server.requests.contents import MalformedRequestError, Raws, length_prefix, split_contents, split_request
from gangway.server.threads import CountingPool, NoThreadError

_log = logging.getLogger(__name__)


class StreamContext(Protocol):
    """What a stream must know of its remote call (the part of grpc.ServicerContext it uses)."""

    def time_remaining(self) -> float | None:
        """Return the seconds until the client's deadline for the stream; None or a huge number without one."""

    def add_callback(self, callback: Callable[[], None]) -> bool:
        """Have `callback` called when the stream ends, for whatever reason; False if it has ended."""
        ...

    def cancel(self) -> object:
        """End the stream."""

    def invocation_metadata(self) -> Iterable[tuple[str, str | bytes]] | None:
        """Return the headers that the client has sent."""


class StreamedCall:
    """One request's call: it ends when gRPC has taken the answer, or when the stream ends. Safe for threads.

    Inference cancels what is still running when a call ends.
    """

    def __init__(
        self, context: StreamContext, respond: Callable[["StreamedCall", bytes], None] = lambda call, response: None
    ) -> None:
        """Make it. `respond` has a response sent that is not the last one."""
        self._context = context
        self._respond = respond
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], None]] | None = []

    def time_remaining(self) -> float | None:
        """Return the seconds until the deadline of the stream; what one request may take is in its parameters."""
        return self._context.time_remaining()

    def add_callback(self, callback: Callable[[], None]) -> bool:
        """Have `callback` called when the call ends; False if it has."""
        with self._lock:
            if self._callbacks is None:
                return False
            self._callbacks.append(callback)
            return True

    def respond(self, response: bytes) -> None:
        """Send a serialised response that is not the last one of the request."""
        self._respond(self, response)

    def invocation_metadata(self) -> Iterable[tuple[str, str | bytes]] | None:
        """Return the headers of the stream."""
        return self._context.invocation_metadata()

    def end(self) -> None:
        """Say that the call is over. Calling it again does nothing."""
        with self._lock:
            callbacks, self._callbacks = self._callbacks, None
        for callback in callbacks or ():
            callback()


class Sequenced(Protocol):
    """What may belong to a sequence."""

    @property
    def sequence(self) -> Hashable | None:
        """Return which; None: to none."""


Item = TypeVar("Item", bound=Sequenced)
Answer = TypeVar("Answer")


class SequenceQueues(Generic[Item]):
    """For each sequence that has a request under way, those that wait behind it. Not safe for threads."""

    def __init__(self) -> None:
        self._waiting: dict[Hashable, deque[Item]] = {}

    def enter(self, item: Item) -> bool:
        """Say whether the request may begin; if not, `leave` returns it when it may."""
        if item.sequence is None:
            return True
        waiting = self._waiting.get(item.sequence)
        if waiting is None:
            self._waiting[item.sequence] = deque()
            return True
        waiting.append(item)
        return False

    def leave(self, item: Item) -> Item | None:
        """Return the request that may begin now that this one has been answered."""
        if item.sequence is None or item.sequence not in self._waiting:
            return None
        waiting = self._waiting[item.sequence]
        if waiting:
            return waiting.popleft()
        del self._waiting[item.sequence]
        return None

    def clear(self) -> None:
        """Forget all that wait."""
        self._waiting.clear()


@dataclass(eq=False)
class OrderTicket(Generic[Answer]):
    """The place of a request in each of its lines; `answer` is there when it is known."""

    lines: Sequence[str]
    answer: Answer | None = None


class AnswerOrder(Generic[Answer]):
    """Keeps answers back until those are there that were asked for earlier in the same line. Not safe for threads.

    Requests without an id stand in one line: their order is all that tells the client which answer is which. So do
    those for a model whose configuration says `preserve_ordering`. All others are answered as they end. A request may
    stand in several lines. Nothing waits for ever: of those that have no answer yet the one that came first holds up
    others and is held up by none.
    """

    def __init__(self) -> None:
        self._lines: dict[str, deque[OrderTicket[Answer]]] = {}

    def ticket(self, lines: Sequence[str]) -> OrderTicket[Answer]:
        """Let a further request stand in these lines."""
        ticket: OrderTicket[Answer] = OrderTicket(lines)
        for line in lines:
            self._lines.setdefault(line, deque()).append(ticket)
        return ticket

    def put(self, ticket: OrderTicket[Answer], answer: Answer) -> list[Answer]:
        """Return what can be sent now, in order."""
        ticket.answer = answer
        ready: list[Answer] = []
        candidates = [ticket]
        while candidates:
            first = candidates.pop()
            if first.answer is not None and self._is_first(first):
                ready.append(first.answer)
                candidates += self._leave(first)
        return ready

    def clear(self) -> None:
        """Forget what is kept."""
        self._lines.clear()

    def _is_first(self, ticket: OrderTicket[Answer]) -> bool:
        return all(line in self._lines and self._lines[line][0] is ticket for line in ticket.lines)

    def _leave(self, ticket: OrderTicket[Answer]) -> list[OrderTicket[Answer]]:
        """Take a ticket out of its lines, return those that are the first of one now."""
        followers = []
        for line in ticket.lines:
            waiting = self._lines[line]
            waiting.popleft()
            if waiting:
                followers.append(waiting[0])
            else:
                del self._lines[line]
        return followers


FINAL_PARAMETER = "triton_final_response"

SequenceKey: TypeAlias = tuple[str, int | str]  # model and id: two models do not share ids

_INFER_RESPONSE = pb.ModelStreamInferResponse.INFER_RESPONSE_FIELD_NUMBER
_MARK = ID.encode()  # most headers need no second look


def _final(is_final: bool) -> bytes:
    message = pb.ModelInferResponse()
    message.parameters[FINAL_PARAMETER].bool_param = is_final
    return message.SerializeToString()


_FINAL, _NOT_FINAL = (
    _final(True),
    _final(False),
)  # to be appended to a response: one field after the other is one message


@dataclass(frozen=True)
class StreamedRequest:
    """One ModelInferRequest of a stream: what inference needs of it, and where it stands among the others.

    Requests with the same `sequence` (None: none) are answered one after the other.
    """

    header: bytes
    request_id: bytes
    raws: Raws
    sequence: SequenceKey | None
    size_bytes: int

    @classmethod
    def of(cls, message: bytes) -> "StreamedRequest":
        """Take a message apart. Raises MalformedRequestError."""
        header, request_id, raws = split_contents(split_request(message))
        return cls(header, request_id, raws, sequence_of(header), len(message))


def sequence_of(header: bytes) -> SequenceKey | None:
    """Return which sequence a request belongs to; None also if the header is unparsable; the planner reports that."""
    if _MARK not in header:
        return None
    try:
        request = pb.ModelInferRequest.FromString(header)
    except DecodeError:
        return None
    if ID not in request.parameters:
        return None
    parameter = request.parameters[ID]
    choice = parameter.WhichOneof("parameter_choice")
    if choice not in ID_KINDS:
        return None
    found: int | str = getattr(parameter, choice)
    identity = found & UINT64_MASK if isinstance(found, int) else found
    return (request.model_name, identity) if identity else None


def success(response: bytes, is_final: bool = True) -> bytes:
    """Return the answer with a serialised ModelInferResponse in it, and whether it is the request's last."""
    end = _FINAL if is_final else _NOT_FINAL
    return b"".join((length_prefix(_INFER_RESPONSE, len(response) + len(end)), response, end))


def failure(reason: str, request_id: bytes) -> bytes:
    """Return the answer to a request that was refused or failed."""
    response = pb.ModelInferResponse(id=request_id.decode())
    return pb.ModelStreamInferResponse(error_message=reason, infer_response=response).SerializeToString()


WITHOUT_ID = ""  # the line of such requests; others have names of models
STATUS_HEADER = ("triton_grpc_error", "true")  # the first error shall end the stream, as its status


class Infer(Protocol):
    """`Inference.infer_parts`."""

    def __call__(self, header: bytes, request_id: bytes, raws: Raws, call: StreamedCall, arrival_ns: int) -> bytes:
        """Return the serialised ModelInferResponse. Raises RequestError."""
        ...


OrderOf = Callable[[bytes], str | None]  # `Inference.order_of`


@dataclass(frozen=True)
class StreamLimits:
    """What one stream may hold, and all of them.

    `in_flight` and `held_bytes` are for each stream. Requests count from being read until they are answered, answers
    until they are sent. The last request that is read may exceed the bytes. `streams` are open at a time. Beyond
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
class _Pending:
    """A request that has been read. `ticket`: where it stands among those whose answers are kept in order."""

    request: StreamedRequest
    arrival_ns: int
    call: StreamedCall
    ticket: OrderTicket["_Answer"]

    @property
    def sequence(self) -> SequenceKey | None:
        return self.request.sequence


@dataclass(frozen=True, eq=False)
class _Answer:
    """`error` is also in the message. Nothing is sent of an empty one. `is_last`: of its request."""

    message: bytes
    call: StreamedCall
    error: RequestError | None = None
    is_last: bool = True


class Stream:
    """One ModelStreamInfer call: many requests at a time, each answered as soon as it is done.

    At most one thread waits for the client's next request. When it has got one, another thread waits for the next, and
    this one executes the request, so no request changes threads. gRPC's thread of the call sends the answers. While
    `in_flight` of a client's requests, or `held_bytes`, are under way or unsent, nothing more is read. Then HTTP/2's
    flow control makes the client wait. `start` has a function called by some other thread, or raises NoThreadError.
    """

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
        self._sequences: SequenceQueues[_Pending] = SequenceQueues()
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
            if not answer.message:
                self._sent(answer)
                continue
            allowed_s = self._limits.stall_seconds + len(answer.message) / self._limits.slow_bytes
            self._give_up_s = time.monotonic() + allowed_s
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
        return self._errors_end_it or error.code is StatusCode.DEADLINE_EXCEEDED

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
            if answer.is_last:
                self._calls.discard(answer.call)
            self.held_bytes -= size_bytes
            self.unsent_bytes -= size_bytes
            self._read_on()
        if answer.is_last:
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
                self._reading, self._refusal = False, RequestError(StatusCode.UNAVAILABLE, str(error))
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
        call = StreamedCall(self._context, self._respond)
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
            work = _Pending(request, arrival_ns, call, self._order.ticket(lines))
            self._calls.add(call)
            self.held_bytes += request.size_bytes
            begins = self._sequences.enter(work)
            self._read_on()
        if problem:
            self._put(work, _refused(work, RequestError(StatusCode.INVALID_ARGUMENT, problem)))
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
        except RequestError as error:  # what follows such a message cannot be understood
            self.refuse(error)
            return None
        except Exception:
            _log.exception("a stream failed by a fault of the server; its client is told INTERNAL")
            self.refuse(RequestError(StatusCode.INTERNAL, "internal error, see the server's log"))
            return None

    def _work_off(self, work: _Pending) -> None:
        """Execute a request, and then those of its sequence that have come meanwhile."""
        following: _Pending | None = work
        while following is not None:
            self._put(following, self._execute(following))
            with self._changed:
                following = self._sequences.leave(following)

    def _execute(self, work: _Pending) -> _Answer:
        request = work.request
        try:
            response = self._infer(request.header, request.request_id, request.raws, work.call, work.arrival_ns)
        except RequestError as error:
            return _refused(work, error)
        except Exception:
            _log.exception("a request of a stream failed by a fault of the server; its client is told INTERNAL")
            message = "internal error, see the server's log"
            return _refused(work, RequestError(StatusCode.INTERNAL, message))
        if not response:
            return _Answer(b"", work.call)  # all responses are sent
        answer = _Answer(success(response), work.call)
        if len(answer.message) > self._limits.message_bytes:
            message = f"the answer has {len(answer.message)} bytes, {self._limits.message_bytes} are possible"
            return _refused(work, RequestError(StatusCode.RESOURCE_EXHAUSTED, message))
        return answer

    def _respond(self, call: StreamedCall, response: bytes) -> None:
        """Have a response sent that is not the last one of its request."""
        answer = _Answer(success(response, is_final=False), call, is_last=False)
        with self._changed:
            if call in self._calls:
                self.held_bytes += len(answer.message)
                self.unsent_bytes += len(answer.message)
                self._ready.append(answer)
                self._changed.notify_all()

    def _put(self, work: _Pending, answer: _Answer) -> None:
        """Have an answer sent, when it is its turn."""
        with self._changed:
            if self._ended:
                return
            self.held_bytes += len(answer.message) - work.request.size_bytes
            self.unsent_bytes += len(answer.message)
            self._ready.extend(self._order.put(work.ticket, answer))
            self._changed.notify_all()


def _refused(work: _Pending, error: RequestError) -> _Answer:
    return _Answer(failure(error.message, work.request.request_id), work.call, error)


PERIOD_S = 1.0
READY_THREADS = 4  # are started before the first stream
WORTH_BYTES = 1 << 20  # a stream that holds less is not ended for its memory


class Streams:
    """Safe for threads. `max_in_flight`: how many requests can be executed at a time."""

    def __init__(self, infer: Infer, order_of: OrderOf, max_in_flight: int, limits: StreamLimits) -> None:
        self.limits = limits
        self._infer = infer
        self._order_of = order_of
        self._threads = CountingPool(limits.streams + max_in_flight, "stream", READY_THREADS)
        self._lock = threading.Lock()
        self._streams: set[Stream] = set()
        self._refusal = ""

    def serve(self, messages: Iterator[bytes], context: StreamContext) -> Iterator[bytes]:
        """Answer one call's requests. Raises RequestError (UNAVAILABLE) for one stream too many."""
        stream = Stream(messages, context, self._infer, self._order_of, self._threads.submit, self.limits)
        with self._lock:
            if self._refusal:
                unavailable(self._refusal)
            if len(self._streams) >= self.limits.streams:
                unavailable(f"{self.limits.streams} streams are open already")
            self._streams.add(stream)
        if not context.add_callback(lambda: self._over(stream)):
            self._over(stream)
        return stream.answers()

    def refuse(self, reason: str) -> None:
        """Accept no further stream and no further request; end the streams when what is under way is answered."""
        with self._lock:
            self._refusal = reason
            streams = list(self._streams)
        for stream in streams:
            stream.refuse(RequestError(StatusCode.UNAVAILABLE, reason))

    @property
    def count(self) -> int:
        """How many streams are open."""
        return len(self._streams)

    @property
    def unsent_bytes(self) -> int:
        """How many bytes of answers of all streams wait to be sent."""
        return sum(stream.unsent_bytes for stream in self._snapshot())

    @property
    def idle(self) -> bool:
        """Whether there is no stream any more, so that every answer has been sent."""
        return not self._streams

    def look(self) -> None:
        """Look after the streams; every PERIOD_S."""
        self.end_stalled()
        self.bound_unsent()

    def end_stalled(self) -> int:
        """End the streams whose clients do not take their answers; return how many."""
        now_s = time.monotonic()
        stalled = [stream for stream in self._snapshot() if stream.stalled(now_s)]
        for stream in stalled:
            _log.info("a stream is ended, because its client has read no answer for %.0f s", self.limits.stall_seconds)
            stream.cancel()
        return len(stalled)

    def bound_unsent(self) -> bool:
        """End the stream with most unsent answers if there are too many of them altogether; say whether it was so."""
        streams = self._snapshot()
        if sum(stream.unsent_bytes for stream in streams) <= self.limits.unsent_bytes:
            return False
        largest = max(streams, key=lambda stream: stream.unsent_bytes)
        _log.warning(
            "a stream is ended, because its client does not read answers: %d bytes wait to be sent",
            largest.unsent_bytes,
        )
        largest.cancel()
        return True

    def end_largest(self) -> bool:
        """End the stream that holds most, because memory is full; False if none holds much."""
        largest = max(self._snapshot(), key=lambda stream: stream.held_bytes, default=None)
        if largest is None or largest.held_bytes < WORTH_BYTES:
            return False
        _log.warning("a stream is ended, because memory is full and it holds %d bytes", largest.held_bytes)
        largest.cancel()
        return True

    def _snapshot(self) -> list[Stream]:
        with self._lock:
            return list(self._streams)

    def _over(self, stream: Stream) -> None:
        with self._lock:
            self._streams.discard(stream)
        stream.end()
