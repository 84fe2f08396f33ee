"""A client of HTTP/2 that sends frames as it is told to, right or wrong, and sees what comes back frame by frame."""

import socket
import struct
import time
from collections.abc import Callable, Iterable, Mapping
from enum import IntEnum
from types import TracebackType
from typing import NamedTuple, Self

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SERVICE = "/inference.GRPCInferenceService/"
TIMEOUT_S = 10.0
END_STREAM, ACK, END_HEADERS, PADDED, PRIORITISED = 0x1, 0x1, 0x4, 0x8, 0x20
LIVE = bytes(5)  # the message of ServerLive
_HEAD = struct.Struct(">BHBBI")


class Kind(IntEnum):
    """Types of frames."""

    DATA = 0
    HEADERS = 1
    PRIORITY = 2
    RST_STREAM = 3
    SETTINGS = 4
    PUSH_PROMISE = 5
    PING = 6
    GOAWAY = 7
    WINDOW_UPDATE = 8
    CONTINUATION = 9


class Frame(NamedTuple):
    """A frame that has come."""

    kind: int
    flags: int
    stream: int
    payload: bytes

    @property
    def code(self) -> int:
        """The error code of GOAWAY or RST_STREAM."""
        at = 4 if self.kind == Kind.GOAWAY else 0
        return int(struct.unpack_from(">I", self.payload, at)[0])


def frame(kind: int, flags: int = 0, stream: int = 0, payload: bytes = b"", length: int | None = None) -> bytes:
    """Return a frame. `length`: what it says of its payload, if that is not true."""
    size = len(payload) if length is None else length
    return _HEAD.pack(size >> 16, size & 0xFFFF, kind, flags, stream) + payload


def settings(values: Iterable[tuple[int, int]] = (), flags: int = 0) -> bytes:
    """Return a frame with settings."""
    return frame(Kind.SETTINGS, flags, 0, b"".join(struct.pack(">HI", *pair) for pair in values))


def window(stream: int, size: int) -> bytes:
    """Return a frame that opens a window."""
    return frame(Kind.WINDOW_UPDATE, 0, stream, size.to_bytes(4))


def reset(stream: int, code: int = 8) -> bytes:
    """Return a frame that ends a stream."""
    return frame(Kind.RST_STREAM, 0, stream, code.to_bytes(4))


def _integer(value: int, bits: int, first: int) -> bytes:
    """Return a number as HPACK has it (RFC 7541, 5.1)."""
    most = (1 << bits) - 1
    if value < most:
        return bytes([first | value])
    found, value = [first | most], value - most
    while value >= 128:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes([*found, value])


def literal(name: str, value: str, first: int = 0x10) -> bytes:
    """Return a header that HPACK spells out. `first`: 0x10 never indexed, 0x40 put into the table."""
    text = b"".join(_integer(len(part), 7, 0) + part for part in (name.encode(), value.encode()))
    return bytes([first]) + text


def table_size(size: int) -> bytes:
    """Return what tells the decoder how large the sender's table is from now on."""
    return _integer(size, 5, 0x20)


def request_block(method: str, more: Mapping[str, str] | None = None) -> bytes:
    """Return the headers of a call."""
    headers = {":method": "POST", ":scheme": "http", ":path": SERVICE + method, ":authority": "localhost"}
    headers |= {"te": "trailers", "content-type": "application/grpc", **(more or {})}
    return b"".join(literal(name, value) for name, value in headers.items())


def headers(stream: int, method: str = "ServerLive", flags: int = END_HEADERS, more: bytes = b"") -> bytes:
    """Return the frame that begins a call. `more`: further headers."""
    return frame(Kind.HEADERS, flags, stream, request_block(method) + more)


def call(stream: int, method: str = "ServerLive", message: bytes = LIVE) -> bytes:
    """Return the frames of a whole call; `message` has its prefix."""
    pieces = [message[at : at + 16384] for at in range(0, len(message), 16384)]
    last = len(pieces) - 1
    data = [frame(Kind.DATA, END_STREAM * (place == last), stream, each) for place, each in enumerate(pieces)]
    return headers(stream, method) + b"".join(data)


class FrameClient:
    """One connection. `hello`: what is sent at first. `receive_bytes`: of the socket's buffer, if not the usual."""

    def __init__(self, address: str, hello: bytes | None = None, receive_bytes: int = 0) -> None:
        host, _, port = address.rpartition(":")
        self.socket = socket.socket()
        if receive_bytes:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        self.socket.settimeout(TIMEOUT_S)
        self.socket.connect((host, int(port)))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.frames: list[Frame] = []
        self.closed = False
        self._received = b""
        self.send(PREFACE + settings() if hello is None else hello)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.socket.close()

    def send(self, data: bytes) -> bool:
        """Send bytes; False if the server has closed the connection, or takes nothing more."""
        try:
            self.socket.sendall(data)
        except (ConnectionError, TimeoutError):
            return False
        return True

    def wait(self, condition: Callable[[Frame], bool], timeout_s: float = TIMEOUT_S) -> Frame | None:
        """Return the first frame that is so; None if the server closes, or says nothing of the kind in time."""
        end_s = time.monotonic() + timeout_s
        seen = 0
        while True:
            for each in self.frames[seen:]:
                if condition(each):
                    return each
            seen = len(self.frames)
            if self.closed or time.monotonic() > end_s:
                return None
            self.read(end_s - time.monotonic())

    def read(self, timeout_s: float = TIMEOUT_S, size: int = 1 << 16) -> None:
        """Take what has come, settings of the server included, which are acknowledged."""
        self.socket.settimeout(max(timeout_s, 0.001))
        try:
            data = self.socket.recv(size)
            self.closed = not data
        except TimeoutError:
            return
        except ConnectionError:
            data, self.closed = b"", True
        finally:
            self.socket.settimeout(TIMEOUT_S)
        self._received += data
        while len(self._received) >= _HEAD.size:
            high, low, kind, flags, stream = _HEAD.unpack_from(self._received)
            end = _HEAD.size + (high << 16 | low)
            if len(self._received) < end:
                break
            self.frames.append(Frame(kind, flags, stream, self._received[_HEAD.size : end]))
            self._received = self._received[end:]
            if kind == Kind.SETTINGS and not flags & ACK:
                self.send(settings(flags=ACK))

    def is_answered(self, stream: int, timeout_s: float = TIMEOUT_S) -> bool:
        """Whether a call ends as calls do, by trailers."""
        end = self.wait(lambda each: each.stream == stream and _ends(each), timeout_s)
        return end is not None and end.kind == Kind.HEADERS

    def reaction(self, stream: int, timeout_s: float = TIMEOUT_S) -> str:
        """Say how the server takes what was sent, having sent a call of this stream behind it.

        "goaway CODE" and "closed" end the connection, "reset CODE" another stream, "goes on" nothing.
        """
        self.send(call(stream))
        self.wait(lambda each: each.kind == Kind.GOAWAY or (each.stream == stream and _ends(each)), timeout_s)
        for each in self.frames:
            if each.kind == Kind.GOAWAY and each.code:
                return f"goaway {each.code}"
        for each in self.frames:
            if each.kind == Kind.RST_STREAM and each.code and each.stream != stream:
                return f"reset {each.code}"
        if self.closed:
            return "closed"
        return "goes on" if self.is_answered(stream, 0) else "waits"


def _ends(each: Frame) -> bool:
    return each.kind == Kind.RST_STREAM or (each.kind in (Kind.HEADERS, Kind.DATA) and bool(each.flags & END_STREAM))
