"""ModelInfer calls on serialised messages over one HTTP/2 connection, in the caller's thread.

The library h2 speaks HTTP/2 (RFC 9113). This file has the socket, the queues of what waits for room, and gRPC's part of
the protocol (PROTOCOL-HTTP2.md): settings, request headers, message prefix, status. It does what a load generator needs
and no more: no compression, and answers are not read.

It exists beside grpcio's channel because it disturbs a server on the same cores least. grpcio's futures are punctual,
too, but cost 1.4 to 2.1 times the CPU for a call; asyncio's timers are too coarse (docs/measurements/front-end.md).
"""

import select
import socket
import struct
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from urllib.parse import unquote

import grpc
from h2.config import H2Configuration
from h2.connection import ConnectionInputs, H2Connection, H2ConnectionStateMachine
from h2.errors import ErrorCodes
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    Event,
    RemoteSettingsChanged,
    ResponseReceived,
    StreamEnded,
    StreamReset,
    TrailersReceived,
)
from h2.exceptions import ProtocolError, StreamClosedError
from h2.settings import SettingCodes

from gangway.clients.channel import INFER_METHOD, CallResult
from gangway.clients.connection import Tls, TlsSocket, UnreachableError

RECEIVE_BYTES = 1 << 18
FRAMED_BYTES = 1 << 17  # of bodies, made into frames ahead of the socket: at most so much of a cancelled call is sent
BUFFERS_AT_ONCE = 512  # to sendmsg; Linux takes 1024
GOAWAY_STATUS = ("UNAVAILABLE", "the server said goodbye")
DATA = 0x0  # a frame's type
CLEANUP_INTERVAL = 64  # opened streams
MAX_WINDOW = (1 << 31) - 1
LOCAL_SETTINGS: dict[SettingCodes | int, int] = {
    SettingCodes.ENABLE_PUSH: 0,
    SettingCodes.INITIAL_WINDOW_SIZE: MAX_WINDOW,
    SettingCodes.MAX_FRAME_SIZE: (1 << 24) - 1,
}
STATUS_NAMES = {str(code.value[0]): code.name for code in grpc.StatusCode}
RESET_STATUS = {8: "CANCELLED", 11: "RESOURCE_EXHAUSTED", 12: "PERMISSION_DENIED"}

Headers = list[tuple[bytes, bytes]]


@dataclass(slots=True)
class _Stream:
    call: int
    body: memoryview
    sent: int = 0


@dataclass(slots=True)
class _Calls:
    streams: dict[int, _Stream] = field(default_factory=dict)
    numbers: dict[int, int] = field(default_factory=dict)  # of streams, by call
    unsent: deque[int] = field(default_factory=deque)  # streams that still have something to send
    queued: deque[tuple[int, memoryview]] = field(default_factory=deque)  # calls beyond the server's limit


class RawChannel:
    """A `Channel` of our own. Lost connections raise ConnectionError, whatever is not HTTP/2 h2's ProtocolError."""

    def __init__(
        self, url: str, requests: Sequence[bytes], timeout_s: float, connect_timeout_s: float, tls: Tls | None = None
    ) -> None:
        """Connect within `connect_timeout_s`; the server is told that calls of these `requests` have `timeout_s`.

        Raises UnreachableError; InputError for unusable TLS files.
        """
        host, _, port = url.rpartition(":")
        try:
            plain = socket.create_connection((host.strip("[]"), int(port)), connect_timeout_s)
        except (OSError, ValueError) as error:
            raise UnreachableError(f"no server answers at {url} ({error})") from error
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket: socket.socket | TlsSocket = _secured(plain, tls, url) if tls else plain
        if tls is None:
            plain.setblocking(False)
        self._headers = request_headers(url, INFER_METHOD, timeout_s, "https" if tls else "http")
        self._bodies = [memoryview(message_body(request)) for request in requests]
        self._buffer = memoryview(bytearray(RECEIVE_BYTES))
        self._out: deque[memoryview] = deque()
        self._calls = _Calls()
        self._draining = False
        self._has_settings = False  # the server's
        self._http = client_connection()
        try:
            self._await_settings(time.monotonic() + connect_timeout_s)
        except (OSError, ProtocolError) as error:
            self._socket.close()
            raise UnreachableError(f"what answers at {url} does not speak HTTP/2 ({error})") from error

    def fileno(self) -> int:
        """Return the socket's file descriptor."""
        return self._socket.fileno()

    @property
    def wants_write(self) -> bool:
        """Whether something waits for room in the socket."""
        return bool(self._out)

    @property
    def usable(self) -> bool:
        """Whether new calls may begin: false after a GOAWAY frame, or when stream numbers have run out."""
        return not self._draining and self._http.highest_outbound_stream_id + 2 <= self._http.HIGHEST_ALLOWED_STREAM_ID

    def start(self, call: int, request: int) -> None:
        """Start a call with a number of the caller's choice. `request` indexes the requests of the constructor."""
        self._calls.queued.append((call, self._bodies[request]))
        self._open_calls()
        self.flush()

    def cancel(self, call: int) -> None:
        """Drop a call and tell the server."""
        number = self._calls.numbers.get(call)
        if number is None:
            self._calls.queued = deque(item for item in self._calls.queued if item[0] != call)
            return
        self._remove_stream(number)
        self._http.reset_stream(number, ErrorCodes.CANCEL)
        self._open_calls()
        self.flush()

    def flush(self) -> None:
        """Send what the socket takes and the server's windows allow."""
        out = self._out
        self._frame_bodies()
        while out:
            try:
                sent = self._socket.sendmsg([out[index] for index in range(min(len(out), BUFFERS_AT_ONCE))])
            except BlockingIOError:
                return
            while out and sent >= len(out[0]):
                sent -= len(out.popleft())
            if sent:
                out[0] = out[0][sent:]
            elif not out:
                self._frame_bodies()

    def receive(self) -> list[CallResult]:
        """Take what has arrived; return the calls that ended."""
        ended: list[CallResult] = []
        while True:
            try:
                count = self._socket.recv_into(self._buffer)
            except BlockingIOError:
                break
            if count == 0:
                raise ConnectionResetError("the server closed the connection")
            for event in self._http.receive_data(self._buffer[:count]):
                self._handle(event, ended)
            if count < RECEIVE_BYTES:
                break
        self._open_calls()
        self.flush()
        return ended

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def _await_settings(self, until_s: float) -> None:
        """Wait for the limits that calls must keep. Raises OSError, ProtocolError."""
        self.flush()
        while not self._has_settings:
            left_s = until_s - time.monotonic()
            if left_s <= 0 or not select.select([self._socket], [], [], left_s)[0]:
                raise TimeoutError("no settings in time")
            self.receive()

    def _handle(self, event: Event, ended: list[CallResult]) -> None:
        if isinstance(event, DataReceived):
            self._http.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        elif isinstance(event, TrailersReceived) or (isinstance(event, ResponseReceived) and event.stream_ended):
            self._end(event.stream_id, *status_of_headers(event.headers), ended)
        elif isinstance(event, StreamEnded):
            self._end(event.stream_id, "INTERNAL", "the answer ended without a status", ended)
        elif isinstance(event, StreamReset):
            self._handle_reset(event.stream_id, int(event.error_code), ended)
        elif isinstance(event, RemoteSettingsChanged):
            self._has_settings = True
        elif isinstance(event, ConnectionTerminated):
            self._handle_goaway(event.last_stream_id or 0, ended)

    def _handle_reset(self, number: int, code: int, ended: list[CallResult]) -> None:
        if (stream := self._calls.streams.get(number)) is None:
            return
        self._remove_stream(number)
        if code == ErrorCodes.REFUSED_STREAM and not self._draining:  # not processed: gRPC clients retry transparently
            self._calls.queued.append((stream.call, stream.body))
        else:
            ended.append(CallResult(stream.call, *status_of_reset(code), time.monotonic_ns()))

    def _handle_goaway(self, last_stream: int, ended: list[CallResult]) -> None:
        self._draining = True
        for number in [number for number in self._calls.streams if number > last_stream]:
            self._end(number, *GOAWAY_STATUS, ended)
        ended += [CallResult(call, *GOAWAY_STATUS, time.monotonic_ns()) for call, _ in self._calls.queued]
        self._calls.queued.clear()

    def _end(self, number: int, status: str, message: str, ended: list[CallResult]) -> None:
        if (stream := self._calls.streams.get(number)) is None:
            return
        self._remove_stream(number)
        if stream.sent < len(stream.body):  # the server ended the call before it had the whole body
            with suppress(StreamClosedError):  # the server's own reset came with its answer
                self._http.reset_stream(number, ErrorCodes.CANCEL)
        ended.append(CallResult(stream.call, status, message, time.monotonic_ns()))

    def _remove_stream(self, number: int) -> None:
        del self._calls.numbers[self._calls.streams.pop(number).call]

    def _open_calls(self) -> None:
        """Start queued calls, as far as the server's limit of streams allows."""
        calls, http = self._calls, self._http
        while calls.queued and len(calls.streams) < http.remote_settings.max_concurrent_streams:
            call, body = calls.queued.popleft()
            number = http.get_next_available_stream_id()
            http.send_headers(number, self._headers)
            calls.streams[number] = _Stream(call, body)
            calls.numbers[call] = number
            calls.unsent.append(number)

    def _frame_bodies(self) -> None:
        """Cut bodies into frames, first come, first served, as far as the windows go, and a little at once."""
        unsent, blocked, room = self._calls.unsent, [], FRAMED_BYTES
        self._queue_frames()
        while unsent and room > 0 and self._http.outbound_flow_control_window > 0:
            number = unsent.popleft()
            if (stream := self._calls.streams.get(number)) is not None:
                room -= self._frame_body(number, stream, room)
                if stream.sent < len(stream.body):
                    blocked.append(number)
        unsent.extendleft(reversed(blocked))

    def _frame_body(self, number: int, stream: _Stream, room: int) -> int:
        """Make at most `room` bytes into frames; return how many.

        h2 makes the last frame, which ends the stream. Of the others it learns only what they take of the windows: it
        would copy each four times.
        """
        http, size, begin = self._http, len(stream.body), stream.sent
        most = min(size, begin + min(room, http.local_flow_control_window(number)))
        largest = http.max_outbound_frame_size
        end = most if most < size else begin + (size - begin - 1) // largest * largest
        self._out.extend(data_frames(number, stream.body[begin:end], largest))
        http.outbound_flow_control_window -= end - begin
        http.streams[number].outbound_flow_control_window -= end - begin
        if end < most:
            http.send_data(number, stream.body[end:], end_stream=True)
            self._queue_frames()
        stream.sent = most
        return most - begin

    def _queue_frames(self) -> None:
        if frames := self._http.data_to_send():
            self._out.append(memoryview(frames))


def _secured(plain: socket.socket, tls: Tls, url: str) -> TlsSocket:
    try:
        return TlsSocket(plain, tls, url.rpartition(":")[0].strip("[]"))
    except OSError as error:
        plain.close()
        raise UnreachableError(f"what answers at {url} does not speak TLS as expected ({error})") from error


def message_body(message: bytes) -> bytes:
    """Return a serialised message as it travels: with gRPC's prefix (not compressed, length)."""
    return struct.pack(">BI", 0, len(message)) + message


def data_frames(stream: int, body: memoryview, largest_bytes: int) -> Iterator[memoryview]:
    """Yield DATA frames (RFC 9113, 6.1) that do not end the stream: for each its header, and its part of the body."""
    for begin in range(0, len(body), largest_bytes):
        part = body[begin : begin + largest_bytes]
        yield memoryview(struct.pack(">BHBBI", len(part) >> 16, len(part) & 0xFFFF, DATA, 0, stream))
        yield part


def request_headers(url: str, method: str, timeout_s: float, scheme: str = "http") -> Headers:
    """Return the headers that begin a call."""
    headers = {
        ":method": "POST",
        ":scheme": scheme,
        ":path": method,
        ":authority": url,
        "te": "trailers",
        "grpc-timeout": f"{max(1, round(timeout_s * 1000))}m",
        "content-type": "application/grpc",
        "user-agent": "gangway-perf",
    }
    return [(name.encode(), value.encode()) for name, value in headers.items()]


def status_of_headers(raw: Iterable[tuple[bytes, bytes]]) -> tuple[str, str]:
    """Return "OK" or a gRPC status, and the message, of the headers that end a call."""
    headers = {bytes(name): bytes(value).decode(errors="replace") for name, value in raw}
    code = headers.get(b"grpc-status", f"HTTP {headers.get(b':status', '?')}")
    return STATUS_NAMES.get(code, "UNKNOWN"), unquote(headers.get(b"grpc-message", ""))


def status_of_reset(code: int) -> tuple[str, str]:
    """Return the gRPC status and a message of a stream that the server reset with this error code."""
    return RESET_STATUS.get(code, "INTERNAL"), f"stream reset, error {code}"


def client_connection() -> H2Connection:
    """Return a connection that has sent its settings, the largest windows. Headers are not checked: they are ours."""
    unchecked = H2Configuration(
        validate_outbound_headers=False,
        normalize_outbound_headers=False,
        validate_inbound_headers=False,
        normalize_inbound_headers=False,
    )
    http = _Connection(unchecked)
    http.state_machine = _StateMachine()
    http.initiate_connection()
    http.update_settings(LOCAL_SETTINGS)
    http.increment_flow_control_window(MAX_WINDOW - http.inbound_flow_control_window)
    return http


class _StateMachine(H2ConnectionStateMachine):
    """Lets running calls end after a GOAWAY frame (RFC 9113, 6.8), where h2 closes the connection."""

    def process_input(self, input_: ConnectionInputs) -> list[Event]:
        return [] if input_ is ConnectionInputs.RECV_GOAWAY else super().process_input(input_)


class _Connection(H2Connection):
    """Does not count its open streams each time that it opens one: the owner keeps the server's limit.

    Counting visits every open stream, which is expensive with hundreds of them.
    """

    @property
    def open_outbound_streams(self) -> int:
        """Count for one of `CLEANUP_INTERVAL` streams only, which makes h2 forget the closed ones; else say 0."""
        opened = (self.highest_outbound_stream_id + 1) // 2
        return super().open_outbound_streams if opened % CLEANUP_INTERVAL == 0 else 0
