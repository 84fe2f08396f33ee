"""ModelInfer calls on serialised messages over one HTTP/2 connection, in the caller's thread.

The library ngh2, which is nghttp2 without sockets, speaks HTTP/2 (RFC 9113); only this file of `gangway perf` knows it.
This file has the socket and gRPC's part of the protocol (PROTOCOL-HTTP2.md): settings, request headers, message prefix,
status. It does what a load generator needs and no more: no compression, and answers are not read.

It exists beside grpcio's channel because it disturbs a server on the same cores least; asyncio's timers are too coarse
(docs/measurements/front-end.md).
"""

import select
import socket
import struct
import time
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Final, NamedTuple
from urllib.parse import unquote

import ngh2
from ngh2 import events as http2
from ngh2.enums import ErrorCode, Setting

from gangway.clients.channel import INFER_METHOD, CallResult, ready_of
from gangway.clients.errors import UnreachableError
from gangway.clients.tls import Tls, TlsSocket
from gangway.protos import StatusCode

RECEIVE_BYTES: Final = 1 << 18
PIECE_BYTES: Final = 1 << 14  # made by nghttp2 at once; the system gives larger ones fresh memory each time
PIECES: Final = 8  # to the socket at once: at most so much of a cancelled call is sent
GOAWAY_STATUS: Final = ("UNAVAILABLE", "the server said goodbye")
MAX_WINDOW: Final = (1 << 31) - 1
SETTINGS: Final = {
    Setting.ENABLE_PUSH: 0,
    Setting.INITIAL_WINDOW_SIZE: MAX_WINDOW,
    Setting.MAX_FRAME_SIZE: (1 << 24) - 1,
}
# Answers to cancelled calls are no reason to hang up, however many they are.
CONFIGURATION: Final = ngh2.Configuration(glitch_rate_limit=(1 << 62, 1 << 62))
STATUS_NAMES: Final = {str(code.value): code.name for code in StatusCode}
RESET_STATUS: Final = {8: "CANCELLED", 11: "RESOURCE_EXHAUSTED", 12: "PERMISSION_DENIED"}

Headers = list[tuple[bytes, bytes]]


class _Call(NamedTuple):
    number: int
    body: bytes


class RawChannel:
    """A `Channel` of our own. Lost connections, and whatever is not HTTP/2, raise ConnectionError."""

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
        self._bodies = [message_body(request) for request in requests]
        self._buffer = memoryview(bytearray(RECEIVE_BYTES))
        self._out: deque[memoryview] = deque()
        self._calls: dict[int, _Call] = {}  # by stream
        self._streams: dict[int, int] = {}  # by call
        self._queued: deque[_Call] = deque()  # beyond the server's limit
        self._limit: int | None = None  # of streams at a time, once the server has said it
        self._draining = False
        self._http = ngh2.Connection(ngh2.Role.CLIENT, CONFIGURATION)
        self._http.initiate_connection(SETTINGS)
        self._http.set_local_window_size(MAX_WINDOW)
        try:
            self._await_settings(time.monotonic() + connect_timeout_s)
        except OSError as error:
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
        return not self._draining and self._http.can_send_request

    def start(self, call: int, request: int) -> None:
        """Start a call with a number of the caller's choice. `request` indexes the requests of the constructor."""
        self._queued.append(_Call(call, self._bodies[request]))
        self._open_calls()
        self.flush()

    def cancel(self, call: int) -> None:
        """Drop a call and tell the server."""
        stream = self._streams.get(call)
        if stream is None:
            self._queued = deque(item for item in self._queued if item.number != call)
            return
        self._remove(stream)
        self._http.reset_stream(stream, ErrorCode.CANCEL)
        self._open_calls()
        self.flush()

    def flush(self) -> None:
        """Send what the socket takes and the server's windows allow."""
        out, made = self._out, self._http.data_to_send
        while True:
            while len(out) < PIECES and (piece := made(PIECE_BYTES)):
                out.append(memoryview(piece))
            if not out:
                return
            try:
                sent = self._socket.sendmsg(out)
            except BlockingIOError:
                return
            while out and sent >= len(out[0]):
                sent -= len(out.popleft())
            if sent:
                out[0] = out[0][sent:]

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
            try:
                self._http.receive_data(self._buffer[:count])
            except ngh2.NGH2Error as error:
                raise ConnectionAbortedError(f"the server does not keep to HTTP/2: {error}") from error
            for event in self._http.events():
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
        """Wait for the limits that calls must keep. Raises OSError."""
        self.flush()
        while self._limit is None:
            left_s = until_s - time.monotonic()
            if left_s <= 0 or not ready_of({self.fileno(): select.POLLIN}, left_s):
                raise TimeoutError("no settings in time")
            self.receive()

    def _handle(self, event: http2.Event, ended: list[CallResult]) -> None:
        match event:
            case http2.TrailersReceived() | http2.ResponseReceived(end_stream=True):
                self._end(event.stream_id, *status_of_headers(event.headers), ended)
            case http2.DataReceived(end_stream=True):
                self._end(event.stream_id, "INTERNAL", "the answer ended without a status", ended)
            case http2.StreamClosed():
                self._handle_reset(event.stream_id, event.error_code, ended)
            case http2.SettingsReceived():
                self._limit = self._http.remote_settings[Setting.MAX_CONCURRENT_STREAMS]
            case http2.GoAwayReceived():  # which closes the streams that the server does not answer
                self._draining = True
                ended += [CallResult(call.number, *GOAWAY_STATUS, time.monotonic_ns()) for call in self._queued]
                self._queued.clear()

    def _handle_reset(self, stream: int, code: int, ended: list[CallResult]) -> None:
        if (call := self._calls.get(stream)) is None:
            return
        if code != ErrorCode.REFUSED_STREAM:
            self._end(stream, *status_of_reset(code), ended)
        elif self._draining:
            self._end(stream, *GOAWAY_STATUS, ended)
        else:  # not processed: gRPC clients retry transparently
            self._remove(stream)
            self._queued.append(call)

    def _end(self, stream: int, status: str, message: str, ended: list[CallResult]) -> None:
        if (call := self._calls.get(stream)) is None:
            return
        self._remove(stream)
        ended.append(CallResult(call.number, status, message, time.monotonic_ns()))
        with suppress(ngh2.NGH2Error):  # it is closed
            if self._http.queued_body_size(stream):  # the server has ended the call before it had the whole body
                self._http.reset_stream(stream, ErrorCode.CANCEL)

    def _remove(self, stream: int) -> None:
        del self._streams[self._calls.pop(stream).number]

    def _open_calls(self) -> None:
        """Start queued calls, as far as the server's limit of streams allows. Raises ConnectionError."""
        queued, calls, http = self._queued, self._calls, self._http
        try:
            while queued and len(calls) < (self._limit or 0):
                call = queued.popleft()
                stream = http.send_request(self._headers)
                http.send_data(stream, call.body, end_stream=True)
                calls[stream] = call
                self._streams[call.number] = stream
        except ngh2.NGH2Error as error:
            raise ConnectionAbortedError(f"the connection takes no further call: {error}") from error


def _secured(plain: socket.socket, tls: Tls, url: str) -> TlsSocket:
    try:
        return TlsSocket(plain, tls, url.rpartition(":")[0].strip("[]"))
    except OSError as error:
        plain.close()
        raise UnreachableError(f"what answers at {url} does not speak TLS as expected ({error})") from error


def message_body(message: bytes) -> bytes:
    """Return a serialised message as it travels: with gRPC's prefix (not compressed, length)."""
    return struct.pack(">BI", 0, len(message)) + message


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
