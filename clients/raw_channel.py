"""Unary gRPC calls on serialised messages over one HTTP/2 connection, at a fraction of what grpcio costs a client.

A load generator shares the machine with the server that it measures, so what it saves the server gets (docs/perf.md
has figures). It does what that needs and no more: no TLS, no compression, and answers are not read.
"""

import select
import socket
import struct
import time
from collections import deque
from dataclasses import dataclass, field
from types import TracebackType
from typing import NamedTuple, Self
from urllib.parse import unquote

import grpc
from gangway.clients.errors import UnreachableError
from gangway.clients.http2_frames import (
    ACK,
    CANCEL,
    CONTINUATION,
    DATA,
    ENABLE_PUSH,
    END_HEADERS,
    END_STREAM,
    FIRST_WINDOW,
    GOAWAY,
    HEADER_TABLE_SIZE,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    LARGEST_WINDOW,
    LONGEST_FRAME,
    MAX_CONCURRENT_STREAMS,
    MAX_FRAME_SIZE,
    PING,
    PREFACE,
    REFUSED_STREAM,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    Buffer,
    Frame,
    FrameReader,
    ProtocolError,
    frame,
    frame_header,
    header_block,
    header_fragment,
    read_headers,
    read_settings,
    settings_frame,
    window_update,
)

RECEIVE_BYTES = 1 << 18
BUFFERS_AT_ONCE = 512  # to sendmsg; Linux takes 1024
STATUS_NAMES = {str(code.value[0]): code.name for code in grpc.StatusCode}
# gRPC over HTTP/2 (PROTOCOL-HTTP2.md): what an error code of RST_STREAM means as a status.
RESET_STATUS = {8: "CANCELLED", 11: "RESOURCE_EXHAUSTED", 12: "PERMISSION_DENIED"}
OUR_SETTINGS = {
    HEADER_TABLE_SIZE: 0,
    ENABLE_PUSH: 0,
    INITIAL_WINDOW_SIZE: LARGEST_WINDOW,
    MAX_FRAME_SIZE: LONGEST_FRAME,
}


class Ended(NamedTuple):
    """A call that has ended. `status` is "OK" or a gRPC status, `message` what the server said about an error."""

    call: int
    status: str
    message: str


@dataclass(slots=True)
class _Stream:
    call: int
    body: memoryview
    window: int
    sent: int = 0
    block: bytes = b""  # of headers, so far
    ends: bool = False  # with that block


@dataclass(slots=True)
class _Peer:
    """What the server's settings and window updates allow."""

    window: int = FIRST_WINDOW
    stream_window: int = FIRST_WINDOW
    frame_bytes: int = 16_384
    streams: int = LARGEST_WINDOW


@dataclass(slots=True)
class _Calls:
    streams: dict[int, _Stream] = field(default_factory=dict)
    numbers: dict[int, int] = field(default_factory=dict)  # of streams, by call
    unsent: deque[int] = field(default_factory=deque)  # streams that still have something to send
    unopened: deque[tuple[int, Buffer]] = field(default_factory=deque)  # calls beyond the server's limit


def message_body(message: bytes) -> bytes:
    """Return a serialised message as it travels: with gRPC's prefix (not compressed, length)."""
    return struct.pack(">BI", 0, len(message)) + message


class RawChannel:
    """A connection that calls one method. Not for several threads.

    The owner waits until `fileno()` is readable or, while `wants_write`, writable, then calls `receive` or `flush`.
    Lost connections raise ConnectionError, whatever is not HTTP/2 ProtocolError; all calls under way are lost then.
    """

    def __init__(self, url: str, method: str, timeout_s: float, patience_s: float) -> None:
        """Connect within `patience_s`; `timeout_s` is what the server is told of calls. Raises UnreachableError."""
        host, _, port = url.rpartition(":")
        try:
            self._socket = socket.create_connection((host.strip("[]"), int(port)), patience_s)
        except (OSError, ValueError) as error:
            raise UnreachableError(f"no server answers at {url} ({error})") from error
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.setblocking(False)
        self._headers = header_block(_request_headers(url, method, timeout_s))
        self._reader = FrameReader()
        self._buffer = memoryview(bytearray(RECEIVE_BYTES))
        self._out: deque[Buffer] = deque()
        self._peer = _Peer()
        self._calls = _Calls()
        self._next_stream = 1
        self._credit = 0  # bytes received since the connection's window was opened again
        self._draining = False
        self._greeted = False  # the server's settings have come
        self._write(PREFACE, settings_frame(OUR_SETTINGS), window_update(0, LARGEST_WINDOW - FIRST_WINDOW))
        try:
            self._await_settings(time.monotonic() + patience_s)
        except (OSError, ProtocolError) as error:
            self._socket.close()
            raise UnreachableError(f"what answers at {url} does not speak HTTP/2 ({error})") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()

    def fileno(self) -> int:
        """Return the socket's file descriptor."""
        return self._socket.fileno()

    @property
    def wants_write(self) -> bool:
        """Whether something waits for room in the socket."""
        return bool(self._out)

    @property
    def usable(self) -> bool:
        """Whether new calls may begin: false when the server has said goodbye, or stream numbers have run out."""
        return not self._draining and self._next_stream < LARGEST_WINDOW

    def start(self, call: int, body: bytes) -> None:
        """Begin a call with a number of the caller's choice; `body` comes from `message_body`."""
        if len(self._calls.streams) >= self._peer.streams:
            self._calls.unopened.append((call, body))
        else:
            self._open(call, body)
            self._send_bodies()
        self.flush()

    def cancel(self, call: int) -> None:
        """Forget a call and tell the server."""
        number = self._calls.numbers.get(call)
        if number is None:
            self._calls.unopened = deque(item for item in self._calls.unopened if item[0] != call)
            return
        self._reset(number)
        self._open_more()
        self.flush()

    def flush(self) -> None:
        """Send what the socket takes."""
        out = self._out
        while out:
            try:
                sent = self._socket.sendmsg([out[index] for index in range(min(len(out), BUFFERS_AT_ONCE))])
            except BlockingIOError:
                return
            while out and sent >= len(out[0]):
                sent -= len(out.popleft())
            if sent:
                out[0] = memoryview(out[0])[sent:]

    def receive(self) -> list[Ended]:
        """Take what has arrived; return the calls that ended."""
        ended: list[Ended] = []
        while True:
            try:
                count = self._socket.recv_into(self._buffer)
            except BlockingIOError:
                break
            if count == 0:
                raise ConnectionResetError("the server closed the connection")
            for received in self._reader.feed(self._buffer[:count]):
                self._handle(received, ended)
            if count < RECEIVE_BYTES:
                break
        self._open_more()
        self.flush()
        return ended

    def _await_settings(self, until_s: float) -> None:
        """Wait for the limits that calls must keep. Raises OSError, ProtocolError."""
        self.flush()
        while not self._greeted:
            left_s = until_s - time.monotonic()
            if left_s <= 0 or not select.select([self._socket], [], [], left_s)[0]:
                raise TimeoutError("no settings in time")
            self.receive()

    def _handle(self, received: Frame, ended: list[Ended]) -> None:
        kind, stream = received.kind, self._calls.streams.get(received.stream)
        if kind == DATA:
            self._replenish(received.length)
            if stream is not None and received.flags & END_STREAM:
                self._end(received.stream, "INTERNAL", "the answer ended without a status", ended)
        elif kind in (HEADERS, CONTINUATION):
            if stream is not None:
                self._take_headers(received, stream, ended)
        elif kind == WINDOW_UPDATE:
            self._widen(received, stream)
        elif kind == SETTINGS and not received.flags & ACK:
            self._apply(read_settings(received.payload))
        elif kind == PING and not received.flags & ACK:
            self._write(frame(PING, ACK, 0, received.payload))
        elif kind == RST_STREAM and stream is not None:
            code = _number(received.payload, 0)
            if code == REFUSED_STREAM:  # the server has not looked at it: gRPC clients try again, unseen
                self._forget(received.stream)
                self._calls.unopened.append((stream.call, stream.body))
                return
            self._end(received.stream, RESET_STATUS.get(code, "INTERNAL"), f"stream reset, error {code}", ended)
        elif kind == GOAWAY:
            self._say_goodbye(_number(received.payload, 0) & LARGEST_WINDOW, ended)

    def _take_headers(self, received: Frame, stream: _Stream, ended: list[Ended]) -> None:
        stream.block += header_fragment(received)
        stream.ends |= received.kind == HEADERS and bool(received.flags & END_STREAM)
        if not received.flags & END_HEADERS:
            return
        block, stream.block = stream.block, b""
        if stream.ends:  # headers that end nothing announce an answer, and say nothing of how it ends
            headers = read_headers(block)
            code = headers.get("grpc-status", f"HTTP {headers.get(':status', '?')}")
            status = STATUS_NAMES.get(code, "UNKNOWN")
            self._end(received.stream, status, unquote(headers.get("grpc-message", "")), ended)

    def _widen(self, received: Frame, stream: _Stream | None) -> None:
        increment = _number(received.payload, 0) & LARGEST_WINDOW
        if received.stream == 0:
            self._peer.window += increment
        elif stream is not None:
            stream.window += increment
        self._send_bodies()

    def _apply(self, settings: dict[int, int]) -> None:
        self._greeted = True
        peer = self._peer
        peer.frame_bytes = settings.get(MAX_FRAME_SIZE, peer.frame_bytes)
        peer.streams = settings.get(MAX_CONCURRENT_STREAMS, peer.streams)
        wider = settings.get(INITIAL_WINDOW_SIZE, peer.stream_window) - peer.stream_window
        peer.stream_window += wider
        for stream in self._calls.streams.values():
            stream.window += wider
        self._write(frame(SETTINGS, ACK, 0))
        self._send_bodies()

    def _say_goodbye(self, last_stream: int, ended: list[Ended]) -> None:
        self._draining = True
        for number in [number for number in self._calls.streams if number > last_stream]:
            self._end(number, "UNAVAILABLE", "the server said goodbye", ended)
        ended += [Ended(call, "UNAVAILABLE", "the server said goodbye") for call, _ in self._calls.unopened]
        self._calls.unopened.clear()

    def _end(self, number: int, status: str, message: str, ended: list[Ended]) -> None:
        stream = self._calls.streams[number]
        if stream.sent < len(stream.body):  # refused before it had all of it
            self._reset(number)
        else:
            self._forget(number)
        ended.append(Ended(stream.call, status, message))

    def _reset(self, number: int) -> None:
        self._forget(number)
        self._write(frame(RST_STREAM, 0, number, struct.pack(">I", CANCEL)))

    def _forget(self, number: int) -> None:
        del self._calls.numbers[self._calls.streams.pop(number).call]

    def _open_more(self) -> None:
        calls = self._calls
        if not calls.unopened:
            return
        while calls.unopened and len(calls.streams) < self._peer.streams:
            self._open(*calls.unopened.popleft())
        self._send_bodies()

    def _open(self, call: int, body: Buffer) -> None:
        number, self._next_stream = self._next_stream, self._next_stream + 2
        self._calls.streams[number] = _Stream(call, memoryview(body), self._peer.stream_window)
        self._calls.numbers[call] = number
        self._calls.unsent.append(number)
        self._write(frame(HEADERS, END_HEADERS, number, self._headers))

    def _send_bodies(self) -> None:
        """Cut bodies into DATA frames, first come, first served, as far as the windows go."""
        unsent, blocked = self._calls.unsent, []
        while unsent and self._peer.window > 0:
            number = unsent.popleft()
            stream = self._calls.streams.get(number)
            if stream is not None and not self._send_body(number, stream):
                blocked.append(number)
        unsent.extendleft(reversed(blocked))

    def _send_body(self, number: int, stream: _Stream) -> bool:
        """Return whether all of it is on its way."""
        size, peer = len(stream.body), self._peer
        allowed = min(size - stream.sent, stream.window, peer.window)
        if allowed > 0:
            end = stream.sent + allowed
            stream.window -= allowed
            peer.window -= allowed
            for begin in range(stream.sent, end, peer.frame_bytes):
                chunk = stream.body[begin : min(begin + peer.frame_bytes, end)]
                flags = END_STREAM if begin + len(chunk) == size else 0
                self._write(frame_header(len(chunk), DATA, flags, number), chunk)
            stream.sent = end
        return stream.sent == size

    def _replenish(self, count: int) -> None:
        """Open the connection's window again before a long run has used it up."""
        self._credit += count
        if self._credit > LARGEST_WINDOW // 2:
            self._write(window_update(0, self._credit))
            self._credit = 0

    def _write(self, *buffers: Buffer) -> None:
        self._out.extend(buffers)


def _request_headers(url: str, method: str, timeout_s: float) -> list[tuple[str, str]]:
    return [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", method),
        (":authority", url),
        ("te", "trailers"),
        ("grpc-timeout", f"{max(1, round(timeout_s * 1000))}m"),
        ("content-type", "application/grpc"),
        ("user-agent", "gangway-perf"),
    ]


def _number(payload: bytes, offset: int) -> int:
    if len(payload) < offset + 4:
        raise ProtocolError("a frame that is too short")
    return int(struct.unpack_from(">I", payload, offset)[0])
