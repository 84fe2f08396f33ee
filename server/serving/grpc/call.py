"""One call of gRPC on a connection of HTTP/2, from its headers to its end.

A call takes its messages, has its method deal with them, and is answered once. All of it happens in the event loop's
thread.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, cast

import msgspec

from gangway.base.logs import OFTEN
from gangway.base.memory_budget import SMALL_BYTES, MemoryBudget
from gangway.protos import StatusCode
from gangway.server.access import Restriction
from gangway.server.errors import RequestError
from gangway.server.options.endpoints import Compression
from gangway.server.requests.admission import AdmissionController
from gangway.server.serving.access_log import Access, AccessLog
from gangway.server.serving.call import Call
from gangway.server.serving.grpc.http2 import Http2Connection
from gangway.server.serving.grpc.messages import (
    ENCODINGS,
    IDENTITY,
    JOIN_BYTES,
    PREFIX_BYTES,
    CallHead,
    Header,
    MessageBuffer,
    MessageReader,
    compressed,
    encoding_for,
    framed,
    inflate,
    is_whole,
    status_headers,
    too_large,
)
from gangway.server.serving.limits import StalledCalls
from gangway.server.serving.loop import ServingLoop
from gangway.server.tracing.record import GRPC

_log = logging.getLogger(__name__)

LARGE_ANSWER_BYTES: Final = 64 * 1024  # of smaller answers the limit of streams of a connection is enough
HEAD_BYTES: Final = 16 * 1024  # of a message are waited for until it is known where the rest of it goes
AT_ONCE_BYTES: Final = 16 * 1024  # are compressed by the loop; a thread compresses longer answers
INTERNAL: Final = RequestError(StatusCode.INTERNAL, "internal error, see the server's log")
EXPIRED: Final = RequestError(StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
_BEGIN: Final[Sequence[Header]] = ((b":status", b"200"), (b"content-type", b"application/grpc"))
_ANSWER: Final[Sequence[Header]] = (*_BEGIN, (b"grpc-accept-encoding", ENCODINGS))
_OK: Final = status_headers(StatusCode.OK, "")
_NO_COMPRESSION: Final = Compression.NONE


def method_name(path: str) -> str:
    """Return the method of a path, "/SERVICE/METHOD", which may be any text."""
    return path.rpartition("/")[2]


def refusal_headers(error: RequestError) -> list[Header]:
    """Return an answer that is nothing but an error."""
    return [*_BEGIN, *status_headers(error.code, error.message)]


COPIES: Final = 2  # of a message: as it has come, and where it is used
SLOW_S: Final = 0.5  # a call that has its place for longer loses it; `MemoryGuard` watches what it takes
MAX_WAIT_S: Final = 1.0  # that a call waits for its place


class MessageArrivals:
    """Which long messages may come, where memory could not hold all that clients may send at once.

    A message's length comes before it. If the memory budget has no room for it, the call does not acknowledge what has
    come, so its client stops. Calls wait in their order. A slow client holds a place only as long as no other call
    needs it. For the loop's thread.
    """

    def __init__(self, budget: MemoryBudget) -> None:
        self._budget = budget
        self._begun: dict[GrpcCall, tuple[float, int]] = {}  # calls that have a place: since when, how many bytes
        self._waiting: dict[GrpcCall, tuple[float, int]] = {}  # in the order of their coming

    @property
    def waits(self) -> bool:
        """Whether any call waits for a place. For any thread."""
        return bool(self._waiting)

    def enter(self, call: "GrpcCall", size_bytes: int) -> bool:
        """Whether a message of so many bytes may come; if not, `call.let_in` is called when it may."""
        if self._waiting or not self._has_place(size_bytes):
            self._waiting[call] = time.monotonic(), size_bytes
            return False
        self._begun[call] = time.monotonic(), size_bytes
        return True

    def leave(self, call: "GrpcCall") -> None:
        """The message has come, or comes no more."""
        begun = self._begun.pop(call, None)
        if begun is not None:
            self._budget.note(begun[1])
        if self._waiting:
            self._waiting.pop(call, None)
            self._give_places()

    def poll(self, error: RequestError) -> None:
        """Take their places from slow calls, and end those with this error that have waited for too long for one."""
        now_s = time.monotonic()
        for call, (since_s, _) in list(self._begun.items()):
            if since_s + SLOW_S <= now_s:
                del self._begun[call]
        self._give_places()
        while self._waiting:
            call, (since_s, _) = next(iter(self._waiting.items()))
            if since_s + MAX_WAIT_S > now_s:
                return
            del self._waiting[call]
            call.answer(error)

    def _has_place(self, size_bytes: int) -> bool:
        """Whether there is room for one more. For the first one the reserve is enough."""
        begun_bytes = sum(each for _, each in self._begun.values())
        return self._budget.fits(COPIES * (begun_bytes + size_bytes) if self._begun else 0)

    def _give_places(self) -> None:
        while self._waiting:
            call, (_, size_bytes) = next(iter(self._waiting.items()))
            if not self._has_place(size_bytes):
                return
            del self._waiting[call]
            self._begun[call] = time.monotonic(), size_bytes
            call.let_in()


@dataclass
class Sharing:
    """What all calls of a server share."""

    serving: ServingLoop
    arrivals: MessageArrivals
    arriving: StalledCalls  # whose message has not come
    unread: StalledCalls  # whose answer has not been taken
    message_bytes: int
    compression: Compression
    access_log: AccessLog | None = None
    count: int = 0


class Messages(Protocol):
    """Deals with all messages of a call to a method that streams."""

    @property
    def wants(self) -> bool:
        """Whether a message may come. If that is so again, the call's `read_on` is called."""
        ...

    def take(self, message: bytes) -> None:
        """Take one."""

    def half_closed(self) -> None:
        """The client sends no further one."""

    def progressed(self) -> None:
        """Something has been sent."""

    def end(self) -> None:
        """The call is over."""


class Arriving(MessageBuffer, Protocol):
    """Takes a message while it comes, but for `known_bytes` of its begin, and deals with it by `run`."""

    @property
    def known_bytes(self) -> int:
        """How many bytes are known."""
        ...

    def run(self, call: "GrpcCall") -> None:
        """Answer the call."""


class GrpcMethod(msgspec.Struct, frozen=True):
    """A method. `take` deals with the one message of a call, or `open` returns what deals with all of them.

    `arriving` returns what takes the rest of a long message while it comes, and deals with it then.
    `admission`: says which calls are received. `is_health`: it is served whatever is taken.
    """

    path: str
    take: Callable[["GrpcCall", bytes], None] | None = None
    open: Callable[["GrpcCall"], Messages] | None = None
    restriction: Restriction | None = None
    admission: AdmissionController | None = None
    is_health: bool = False
    arriving: Callable[[bytes, int], Arriving | None] | None = None


class GrpcCall(Call):
    """One call. It is used by its method and by what runs for it; `closed` and `receive` are for its connection."""

    _reader: MessageReader | None = None
    _messages: Messages | None = None
    _unacknowledged = 0
    _tried_bytes = 0  # of a long message's begin, when it was last looked where the rest goes
    _reads = True  # a message is due, and none is being inflated
    _is_reading = _half_closed = False
    _asked = _is_let_in = False  # for the place of a long message, and it has been granted
    _entered = _waits = _is_answered = _is_started = _is_over = _is_unread = False
    _encoding = IDENTITY
    _deadline_s = 0.0
    _timer: asyncio.TimerHandle | None = None

    def __init__(
        self, shared: Sharing, connection: Http2Connection, stream: int, head: CallHead, method: GrpcMethod
    ) -> None:
        self._shared = shared
        self._connection = connection
        self._stream = stream
        self._head = head
        self._method = method
        self._is_collected = method.arriving is None  # the message, before anything is made of it
        if shared.compression is not _NO_COMPRESSION:
            self._encoding = encoding_for(shared.compression, head.accepted)
        if shared.access_log is not None and method.take is not None:
            self.access = self.begin_access()
        shared.count += 1
        shared.arriving.enter(self)
        if head.timeout_s is not None:
            self._deadline_s = time.monotonic() + head.timeout_s
            self._timer = shared.serving.loop.call_later(head.timeout_s, self._expire)

    # -- for what runs for the call

    def time_remaining(self) -> float | None:
        """Return the seconds until the client's deadline; None: it has none."""
        return max(self._deadline_s - time.monotonic(), 0.0) if self._deadline_s else None

    def invocation_metadata(self) -> Sequence[tuple[str, str | bytes]]:
        """Return the call's headers."""
        return self._head.metadata

    def cancel(self) -> None:
        """End the call without an answer."""
        self._connection.reset(self._stream)

    def begin_access(self) -> Access | None:
        """Return what becomes the line of a request that has come by this call; None: it gets none."""
        log = self._shared.access_log
        return None if log is None else log.begin(GRPC, self._connection.peer, method_name(self._method.path))

    # -- for a method that streams

    def open(self, messages: Messages) -> None:
        """Have `messages` deal with what comes."""
        self._messages = messages
        self._wait()
        self._connection.watch(self)

    def read_on(self) -> None:
        """Go on with the next message, if it is wanted."""
        if not self._is_reading:
            self._read()

    def send(self, messages: Sequence[Sequence[bytes]]) -> None:
        """Send messages, in parts; `progressed` of the call's Messages is called when some bytes have been sent."""
        if self._is_over or self._is_answered:
            return
        self._start()
        parts = [part for message in messages for part in self._parts(message)]
        if len(parts) > 1 and sum(map(len, parts)) <= JOIN_BYTES:
            parts = [b"".join(parts)]
        self._connection.send(self._stream, parts)

    def at_end_of_turn(self, function: Callable[[], object]) -> None:
        """Have it called when all has been dealt with that has come together."""
        self._shared.serving.turn.at_end(function)

    @property
    def unsent_bytes(self) -> int:
        """How many bytes of messages have not been sent."""
        return self._connection.unsent_bytes(self._stream)

    def finish(self, error: RequestError | None = None) -> None:
        """End the call after what has been sent."""
        if self._is_over or self._is_answered:
            return
        self._is_answered = True
        if self.access is not None:
            self.access.end("OK" if error is None else error.code.name)
        self._leave(error is None)
        status = _OK if error is None else status_headers(error.code, error.message)
        if self._is_started:
            self._connection.finish(self._stream, status)
        else:
            self._connection.refuse(self._stream, [*_BEGIN, *status])

    # -- for the connection

    def receive(self, data: bytes, ended: bool) -> None:
        """Take bytes of messages."""
        reader, is_unary = self._reader, self._messages is None
        if is_unary and (self._is_answered or not self._reads):
            self._connection.acknowledge(self._stream, len(data))  # what follows is none of the call's
        elif is_unary and reader is None and is_whole(data, self._shared.message_bytes):
            self._connection.acknowledge(self._stream, len(data))
            self._reads = False
            self._arrived(data[PREFIX_BYTES:])
        else:
            if reader is None:
                reader = self._reader = MessageReader(self._shared.message_bytes)
            self._half_closed = self._half_closed or ended
            if reader.feed(data) or ended:
                self._unacknowledged += len(data)
                self.read_on()
            else:
                self._connection.acknowledge(self._stream, len(data))

    def progressed(self) -> None:
        """Something of an answer has been sent."""
        if self._messages is not None:
            self._messages.progressed()

    def closed(self) -> None:
        """The call is over."""
        self._is_over = True
        self._acknowledge()  # what is not counts against the whole connection
        shared = self._shared
        shared.count -= 1
        if not self._is_answered:
            self._leave(False)
            if self.access is not None:
                self.access.end("CANCELLED")
        if self._timer is not None:
            self._timer.cancel()
        if self._is_unread:
            shared.unread.leave(self)
        if self._reader is not None:
            self._reader.drop()
        self.end()
        if self._messages is not None:
            self._messages.end()

    # -- messages

    def let_in(self) -> None:
        """The coming message has got its place."""
        self._is_let_in = True
        self._read()

    def _read(self) -> None:
        """Take what has come, as far as it is wanted and there is memory for it."""
        self._is_reading = True
        try:
            while self._wants() and self._read_one():
                pass
        except RequestError as error:
            self.answer(error)
        finally:
            self._is_reading = False
        if self._half_closed and self._wants() and self._is_let_in == self._asked:
            self._has_ended()

    def _wants(self) -> bool:
        return self._reads and not self._is_answered and (self._messages is None or self._messages.wants)

    def _read_one(self) -> bool:
        """Take the next message; False if it is not there. Raises RequestError."""
        reader = self._reader
        if reader is None or not reader.has_head():
            self._acknowledge()
            return False
        if not self._is_collected and reader.needs_bytes > SMALL_BYTES and not self._place(reader):
            self._acknowledge()
            return False
        if not self._is_let_in and reader.needs_bytes > SMALL_BYTES:
            self._is_let_in = not self._asked and self._shared.arrivals.enter(self, reader.needs_bytes)
            self._asked = True
            if not self._is_let_in:
                return False
        reader.collect()
        self._acknowledge()
        found = reader.take()
        if found is None:
            return False
        if self._asked:
            self._leave_arrivals()
        is_compressed, message = found
        self._reads = self._messages is not None
        if not isinstance(message, bytes | memoryview):
            self._arrived(b"", cast("Arriving", message))
        elif not is_compressed or not message:
            self._arrived(message)
        elif self._head.encoding == IDENTITY:
            raise RequestError(StatusCode.INTERNAL, "Compression bit set but no encoding configured")
        else:
            self._reads = False
            self._aside(self._inflated, inflate, message, self._head.encoding, self._shared.message_bytes)
        return True

    def _place(self, reader: MessageReader) -> bool:
        """Have the message written where it is used, if that is known; False if it is not known yet.

        It is looked again when twice as much is there: a begin that comes byte by byte is read a few times only.
        """
        assert self._method.arriving is not None, "it is not collected"
        if not reader.is_compressed:
            if reader.kept_bytes < min(2 * self._tried_bytes, HEAD_BYTES):
                return False
            self._tried_bytes = reader.kept_bytes
            arriving = self._method.arriving(reader.begin(), reader.due_bytes)
            if arriving is not None:
                reader.place(arriving, arriving.known_bytes)
                if self.access is not None:
                    self.access.bytes_in = reader.due_bytes
            elif reader.kept_bytes < HEAD_BYTES:
                return False
        self._is_collected = True
        return True

    def _inflated(self, message: bytes) -> None:
        self._arrived(message)
        if self._messages is not None:
            self._reads = True
            self._read()

    def _arrived(self, message: bytes, arriving: Arriving | None = None) -> None:
        """A whole message is there, or `arriving` has it."""
        if self._is_over or self._is_answered:
            return
        method = self._method
        try:
            if self._messages is not None:
                self._messages.take(message)
                return
            self._wait()
            if self.access is not None:
                self.access.bytes_in = self.access.bytes_in or len(message)
            if method.admission is not None:
                method.admission.enter()
                self._entered = True
            if arriving is not None:
                arriving.run(self)
            else:
                assert method.take is not None, "it takes one message"
                method.take(self, message)
        except RequestError as error:
            self.answer(error)
        except Exception:
            _log.exception("a request failed by a fault of the server; its client is told INTERNAL", extra=OFTEN)
            self.answer(INTERNAL)
        finally:
            if arriving is not None:
                arriving.drop()  # unless it is under way

    def _has_ended(self) -> None:
        """The client sends nothing more."""
        self._reads = False
        if self._messages is not None:
            self._messages.half_closed()
        else:
            text = f'"{self._method.path}" requires exactly one request message.'
            self.answer(RequestError(StatusCode.UNIMPLEMENTED, text))

    def _acknowledge(self) -> None:
        if self._unacknowledged:
            size, self._unacknowledged = self._unacknowledged, 0
            self._connection.acknowledge(self._stream, size)

    # -- the answer

    def answer(self, result: bytes | RequestError) -> None:
        """Send the answer, or why there is none, unless the call is over."""
        if self._is_over or self._is_answered:
            return
        if isinstance(result, RequestError):
            _log.debug("refused: %s: %s", result.code.name, result.message, extra=OFTEN)
            self.finish(result)
            return
        size, limit = len(result), self._shared.message_bytes
        if size > limit:
            self.finish(too_large("Sent", size, limit))
            return
        self._is_answered = True
        if self.access is not None:
            self.access.bytes_out = size
            self.access.end("OK")
        self._leave(True)
        if self._encoding != IDENTITY and size > AT_ONCE_BYTES:
            self._aside(self._send_whole, compressed, result, self._encoding)
        elif self._encoding != IDENTITY:
            self._send_whole(compressed(result, self._encoding))
        else:
            self._respond(_ANSWER, framed(result), size)

    def _send_whole(self, parts: Sequence[bytes]) -> None:
        if not self._is_over:
            self._respond(self._answer_headers(), parts, sum(map(len, parts)))

    def _respond(self, headers: Sequence[Header], parts: Sequence[bytes], size_bytes: int) -> None:
        self._connection.respond(self._stream, headers, parts, _OK)
        if size_bytes >= LARGE_ANSWER_BYTES:
            self._is_unread = True
            self._shared.unread.enter(self, size_bytes)

    def _start(self) -> None:
        if not self._is_started:
            self._is_started = True
            self._connection.start(self._stream, self._answer_headers())

    def _answer_headers(self) -> Sequence[Header]:
        if self._encoding == IDENTITY:
            return _ANSWER
        return (*_BEGIN, (b"grpc-encoding", self._encoding), *_ANSWER[2:])

    def _parts(self, message: Sequence[bytes]) -> Sequence[bytes]:
        return framed(*message) if self._encoding == IDENTITY else compressed(b"".join(message), self._encoding)

    def _wait(self) -> None:
        """The call waits for the server."""
        if not self._waits:
            self._waits = True
            self._shared.arriving.leave(self)
            self._connection.waiting += 1

    def _leave(self, is_answered: bool) -> None:
        """The call waits for nothing more but to be sent its answer."""
        if self._waits:
            self._waits = False
            self._connection.waiting -= 1
        else:
            self._shared.arriving.leave(self)
        if self._asked:
            self._leave_arrivals()
        if self._entered:
            self._entered = False
            assert self._method.admission is not None
            self._method.admission.leave(is_answered)

    def _leave_arrivals(self) -> None:
        self._asked = self._is_let_in = False
        self._shared.arrivals.leave(self)

    def _expire(self) -> None:
        """The client's deadline has passed. An answer without messages, such as that of the request's end, goes out."""
        if self.unsent_bytes:
            self._connection.reset(self._stream)
        else:
            self.answer(EXPIRED)

    def _aside(self, then: Callable[..., None], work: Callable[..., object], *arguments: object) -> None:
        """Have a thread do the work, and the loop go on with its result."""
        self._shared.serving.aside(self._work_aside, then, work, *arguments)

    def _work_aside(self, then: Callable[..., None], work: Callable[..., object], *arguments: object) -> None:
        call = self._shared.serving.call
        try:
            call(then, work(*arguments))
        except RequestError as error:
            call(self.answer, error)
        except Exception:
            _log.exception("a message could not be compressed or inflated: a fault of the server", extra=OFTEN)
            call(self.answer, INTERNAL)
