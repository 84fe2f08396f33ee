"""ModelStreamInfer: many requests at a time in one call, each answered as soon as it is done. On the event loop.

While `in_flight` of a client's requests, or `held_bytes`, are under way or unsent, nothing more is read. Then HTTP/2's
flow control makes the client wait.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeAlias

from gangway.protos import StatusCode
from gangway.server.errors import RequestError, unavailable
from gangway.server.requests.contents import MalformedRequestError
from gangway.server.serving.call import Begin, Call
from gangway.server.serving.grpc.call import GrpcCall
from gangway.server.serving.grpc.stream_messages import HasSequences, SequenceKey, StreamedRequest, failure, success
from gangway.server.serving.grpc.stream_order import AnswerOrder, OrderTicket, SequenceQueues

_log = logging.getLogger(__name__)

PERIOD_S: Final = 1.0
SEND_BYTES: Final = 64 << 10  # of answers are sent at once
WORTH_BYTES: Final = 1 << 20  # a stream that holds less is not ended for its memory
WITHOUT_ID: Final = ""  # the line of such requests; others have names of models
STATUS_HEADER: Final = ("triton_grpc_error", "true")  # the first error shall end the stream, as its status
OrderOf: TypeAlias = Callable[[bytes], str | None]  # `Inference.order_of`


@dataclass(frozen=True)
class StreamLimits:
    """What one stream may hold, and all of them.

    `in_flight` and `held_bytes` are for each stream. Requests count from being read until they are answered, answers
    until they are sent. The last request that is read may exceed the bytes. `streams` are open at a time. Beyond
    `unsent_bytes` of answers, all streams together, the one that has most is ended. So is one whose client takes longer
    for an answer than `stall_seconds` and another second for each `slow_bytes`. `message_bytes`: of one answer.
    """

    streams: int = 1024
    in_flight: int = 64
    held_bytes: int = 64 << 20
    unsent_bytes: int = 1 << 30
    stall_seconds: float = 60.0
    slow_bytes: int = 1 << 20
    message_bytes: int = 256 << 20


class StreamedCall(Call):
    """One request's call: it ends when the answer has been sent, or when the stream ends. For the loop's thread."""

    takes_many = True

    def __init__(
        self,
        stream: GrpcCall,
        answered: Callable[[bytes | RequestError], None],
        respond: Callable[[bytes | RequestError], None],
    ) -> None:
        self._stream = stream
        self._answered, self._respond = answered, respond

    def time_remaining(self) -> float | None:
        """Return the seconds until the deadline of the stream; what one request may take is in its parameters."""
        return self._stream.time_remaining()

    def invocation_metadata(self) -> Sequence[tuple[str, str | bytes]]:
        """Return the headers of the stream."""
        return self._stream.invocation_metadata()

    def answer(self, result: bytes | RequestError) -> None:
        """Have the last response sent, or why there is none; empty: all have been sent."""
        self._answered(result)

    def respond(self, response: bytes | RequestError) -> None:
        """Have a response sent that is not the last one, or an error in its place."""
        self._respond(response)

    def end(self) -> None:
        """Say that the call is over. Calling it again does nothing."""
        self._answered = self._respond = _ignore  # which held the request, and so its tensors
        super().end()


def _ignore(_answer: bytes | RequestError) -> None:
    """Drop an answer that comes after the call's end."""


@dataclass(eq=False)
class _Pending:
    """A request that has been read. `ticket`: where it stands among those whose answers are kept in order."""

    request: StreamedRequest
    arrival_ns: int
    ticket: OrderTicket["_Answer"]
    call: StreamedCall | None = None

    @property
    def sequence(self) -> SequenceKey | None:
        return self.request.sequence


@dataclass(frozen=True, eq=False)
class _Answer:
    """`error` is also in the message. Nothing is sent of one without `parts`. `is_last`: of its request."""

    parts: tuple[bytes, ...]
    call: StreamedCall
    error: RequestError | None = None
    is_last: bool = True

    @property
    def size_bytes(self) -> int:
        """How long the message is."""
        return sum(map(len, self.parts))


class Stream:
    """The messages of one call."""

    def __init__(
        self, call: GrpcCall, begin: Begin, order_of: OrderOf, has_sequences: HasSequences, limits: StreamLimits
    ) -> None:
        self._call = call
        self._execute = begin
        self._order_of = order_of
        self._has_sequences = has_sequences
        self._limits = limits
        self._errors_end_it = STATUS_HEADER in call.invocation_metadata()
        self._calls: set[StreamedCall] = set()  # of requests that were read and whose answers are not sent
        self._sequences: SequenceQueues[_Pending] = SequenceQueues()
        self._begins: deque[_Pending] = deque()  # whose turn has come in their sequence
        self._is_beginning = False
        self._order: AnswerOrder[_Answer] = AnswerOrder()
        self._ready: deque[_Answer] = deque()
        self._sending: list[_Answer] = []
        self._half_closed = False  # the client sends nothing more
        self._ended = False
        self._sends_late = False  # what is ready, at the end of the loop's turn
        self._refusal: RequestError | None = None  # how the stream ends when what is under way has been answered
        self._give_up_s = 0.0  # when the answers that are being sent must have been taken, 0: none are
        self.held_bytes = 0
        self.unsent_bytes = 0

    @property
    def wants(self) -> bool:
        """Whether a further request may come."""
        is_open = not (self._half_closed or self._ended or self._refusal is not None)
        return is_open and len(self._calls) < self._limits.in_flight and self.held_bytes < self._limits.held_bytes

    def take(self, message: bytes) -> None:
        """Have a request executed."""
        arrival_ns, problem = time.monotonic_ns(), ""
        try:
            request = StreamedRequest.of(message, self._has_sequences)
        except MalformedRequestError as error:
            request, problem = StreamedRequest(b"", b"", [], None, len(message)), str(error)
        work = _Pending(request, arrival_ns, self._order.ticket(self._lines_of(request)))
        work.call = StreamedCall(self._call, partial(self._answered, work), partial(self._responded, work))
        work.call.access = access = self._call.begin_access()
        if access is not None:
            access.bytes_in = len(message)
        self._calls.add(work.call)
        self.held_bytes += request.size_bytes
        begins = self._sequences.enter(work)
        if problem:
            work.call.answer(RequestError(StatusCode.INVALID_ARGUMENT, problem))
        elif begins:
            self._begin(work)

    def half_closed(self) -> None:
        """The client sends no further request."""
        self._half_closed = True
        self._send()

    def refuse(self, error: RequestError) -> None:
        """Read nothing more; when what is under way has been answered, end with this error."""
        self._refusal = error
        self._send()

    def progressed(self) -> None:
        """Send on, if what has been sent has left."""
        if self._sending and not self._call.unsent_bytes:
            sent, self._sending, self._give_up_s = self._sending, [], 0.0
            for answer in sent:
                self._sent(answer)
            self._send()
            self._call.read_on()

    def end(self) -> None:
        """Cancel everything that is under way, because the call is over."""
        self._ended = True
        calls, self._calls = self._calls, set()
        self._sequences.clear()
        self._begins.clear()
        self._order.clear()
        self._ready.clear()
        self._sending = []
        self._give_up_s = 0.0
        self.unsent_bytes = self.held_bytes = 0
        for call in calls:
            if call.access is not None:
                call.access.end("CANCELLED")  # unless it has been answered
            call.end()

    def cancel(self) -> None:
        """Have the call end."""
        self._call.cancel()

    def stalled(self, now_s: float) -> bool:
        """Whether answers have been waiting for too long to be taken by the client (CLOCK_MONOTONIC)."""
        return 0 < self._give_up_s < now_s

    # -- requests

    def _lines_of(self, request: StreamedRequest) -> list[str]:
        """Return the lines of requests that are answered in order which this one stands in."""
        model = self._order_of(request.header)
        lines = [] if request.request_id else [WITHOUT_ID]
        return lines if model is None else [*lines, model]

    def _begin(self, work: _Pending) -> None:
        call, request = work.call, work.request
        assert call is not None, "made with it"
        try:
            self._execute(request.header, request.request_id, request.raws, call, work.arrival_ns)
        except RequestError as error:
            call.answer(error)
        except Exception:
            _log.exception("a request of a stream failed by a fault of the server; its client is told INTERNAL")
            call.answer(RequestError(StatusCode.INTERNAL, "internal error, see the server's log"))

    def _begin_following(self) -> None:
        """Begin those whose turn has come. One that fails at once lets the next one in; a loop needs no deep stack."""
        if self._is_beginning:
            return
        self._is_beginning = True
        while self._begins:
            self._begin(self._begins.popleft())
        self._is_beginning = False

    def _answered(self, work: _Pending, result: bytes | RequestError) -> None:
        """A request has its last response; the next one of its sequence may begin."""
        call = work.call
        if call not in self._calls or call is None:
            return
        answer = self._answer_of(work, call, result, is_last=True)
        self.held_bytes += answer.size_bytes - work.request.size_bytes
        self.unsent_bytes += answer.size_bytes
        if call.access is not None:
            call.access.bytes_out += answer.size_bytes
            call.access.end("OK" if answer.error is None else answer.error.code.name)
        self._ready.extend(self._order.put(work.ticket, answer))
        following = self._sequences.leave(work)
        self._send()
        if following is not None:
            self._begins.append(following)
            self._begin_following()
        work.call = None  # which refers to it
        self._call.read_on()

    def _answer_of(self, work: _Pending, call: StreamedCall, result: bytes | RequestError, is_last: bool) -> _Answer:
        """Return what the client gets of a response, or of the error in its place."""
        if isinstance(result, bytes):
            answer, limit = (
                _Answer(success(result, is_last) if result else (), call, is_last=is_last),
                self._limits.message_bytes,
            )
            if answer.size_bytes <= limit:
                return answer
            text = f"the answer has {answer.size_bytes} bytes, {limit} are possible"
            result = RequestError(StatusCode.RESOURCE_EXHAUSTED, text)
        message = failure(result.message, work.request.request_id, call.model, is_last)
        return _Answer((message,), call, result.without_traceback(), is_last)

    def _responded(self, work: _Pending, response: bytes | RequestError) -> None:
        """A response is there that is not the last one of its request, or an error in its place."""
        call = work.call
        if call is not None and call in self._calls:
            answer = self._answer_of(work, call, response, is_last=False)
            self.held_bytes += answer.size_bytes
            self.unsent_bytes += answer.size_bytes
            if call.access is not None:
                call.access.bytes_out += answer.size_bytes
            self._ready.append(answer)
            if not self._sends_late:
                self._sends_late = True
                self._call.at_end_of_turn(self._send_late)

    # -- answers

    def _send_late(self) -> None:
        """Send the responses that have come together."""
        self._sends_late = False
        self._send()

    def _send(self) -> None:
        """Send what is ready, if nothing is on its way; end the call after the last one."""
        if self._ended or self._sending:
            return
        messages: list[Sequence[bytes]] = []
        size_bytes = 0
        while self._ready and size_bytes < SEND_BYTES:
            answer = self._ready.popleft()
            if answer.error is not None and self._ends_with(answer.error):
                self._call.send(messages)
                self._call.finish(answer.error)
                return
            if answer.parts:
                messages.append(answer.parts)
                size_bytes += answer.size_bytes
                self._sending.append(answer)
            else:
                self._sent(answer)
        if messages:
            self._give_up_s = time.monotonic() + self._limits.stall_seconds + size_bytes / self._limits.slow_bytes
            self._call.send(messages)
        elif not self._calls and (self._half_closed or self._refusal is not None):
            self._call.finish(self._refusal)

    def _ends_with(self, error: RequestError) -> bool:
        """Whether the error is one of the whole stream. Only the stream has a deadline that can pass."""
        return self._errors_end_it or error.code is StatusCode.DEADLINE_EXCEEDED

    def _sent(self, answer: _Answer) -> None:
        self.held_bytes -= answer.size_bytes
        self.unsent_bytes -= answer.size_bytes
        if answer.is_last:
            self._calls.discard(answer.call)
            answer.call.end()


class Streams:
    """All streams of a front end. Methods are for the loop's thread, properties for any.

    `order_of`, `has_sequences`: see Inference.
    """

    def __init__(self, order_of: OrderOf, has_sequences: HasSequences, limits: StreamLimits) -> None:
        self.limits = limits
        self._order_of = order_of
        self._has_sequences = has_sequences
        self._streams: set[Stream] = set()
        self._refusal = ""

    def open(self, call: GrpcCall, begin: Begin) -> Stream:
        """Return who deals with a call's requests. Raises RequestError (UNAVAILABLE) for one stream too many."""
        if self._refusal:
            unavailable(self._refusal)
        if len(self._streams) >= self.limits.streams:
            unavailable(f"{self.limits.streams} streams are open already")
        stream = Stream(call, begin, self._order_of, self._has_sequences, self.limits)
        self._streams.add(stream)
        call.add_callback(lambda: self._streams.discard(stream))
        return stream

    def refuse(self, reason: str) -> None:
        """Accept no further stream and no further request; end the streams when what is under way is answered."""
        self._refusal = reason
        for stream in tuple(self._streams):
            stream.refuse(RequestError(StatusCode.UNAVAILABLE, reason))

    @property
    def count(self) -> int:
        """How many streams are open."""
        return len(self._streams)

    @property
    def unsent_bytes(self) -> int:
        """How many bytes of answers of all streams wait to be sent."""
        return sum(stream.unsent_bytes for stream in tuple(self._streams))

    @property
    def idle(self) -> bool:
        """Whether there is no stream any more, so that every answer has been sent."""
        return not self._streams

    def poll(self) -> None:
        """Look after the streams. To be called every PERIOD_S."""
        self.end_stalled()
        self.bound_unsent()

    def end_stalled(self) -> int:
        """End the streams whose clients do not take their answers; return how many."""
        now_s = time.monotonic()
        stalled = [stream for stream in tuple(self._streams) if stream.stalled(now_s)]
        for stream in stalled:
            _log.info("a stream is ended, because its client has read no answer for %.0f s", self.limits.stall_seconds)
            stream.cancel()
        return len(stalled)

    def bound_unsent(self) -> bool:
        """End the stream with most unsent answers if there are too many of them altogether; say whether it was so."""
        if self.unsent_bytes <= self.limits.unsent_bytes:
            return False
        largest = max(tuple(self._streams), key=lambda stream: stream.unsent_bytes)
        _log.warning(
            "a stream is ended, because its client does not read answers: %d bytes wait to be sent",
            largest.unsent_bytes,
        )
        largest.cancel()
        return True

    def end_largest(self) -> bool:
        """End the stream that holds most, because memory is full; False if none holds much."""
        largest = max(tuple(self._streams), key=lambda stream: stream.held_bytes, default=None)
        if largest is None or largest.held_bytes < WORTH_BYTES:
            return False
        _log.warning("a stream is ended, because memory is full and it holds %d bytes", largest.held_bytes)
        largest.cancel()
        return True
