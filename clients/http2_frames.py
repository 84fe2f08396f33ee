"""HTTP/2 frames (RFC 9113) as far as a client of unary gRPC calls needs them. Pure.

Header blocks are stateless here, both ways: ours use no table, and the settings we send allow the server none. So equal
blocks mean equal headers, and the block that ends nearly every call is decoded once.
"""

import struct
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from hpack import Decoder
from hpack.exceptions import HPACKError

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
END_STREAM, ACK, END_HEADERS, PADDED, PRIORITY = 0x1, 0x1, 0x4, 0x8, 0x20
HEADER_TABLE_SIZE, ENABLE_PUSH, MAX_CONCURRENT_STREAMS, INITIAL_WINDOW_SIZE, MAX_FRAME_SIZE = 1, 2, 3, 4, 5
REFUSED_STREAM, CANCEL = 7, 8  # error codes
FRAME_HEADER_BYTES = 9
LONGEST_FRAME = (1 << 24) - 1
LARGEST_WINDOW = (1 << 31) - 1
FIRST_WINDOW = 65_535  # of a connection, and of a stream until settings say otherwise
LONGEST_CONTROL_FRAME = 1 << 20  # nobody sends such headers or settings: what claims to be longer is not HTTP/2

Buffer = bytes | memoryview


class ProtocolError(Exception):
    """What came is not the HTTP/2 that we can follow; the connection is of no more use."""


class Frame(NamedTuple):
    """A frame. Of DATA `payload` is empty, and `length` says how long it was."""

    kind: int
    flags: int
    stream: int
    length: int
    payload: bytes


def frame_header(length: int, kind: int, flags: int, stream: int) -> bytes:
    """Return the nine bytes before a payload."""
    return struct.pack(">HBBBI", length >> 8, length & 0xFF, kind, flags, stream)


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """Return a whole frame."""
    return frame_header(len(payload), kind, flags, stream) + payload


def settings_frame(settings: dict[int, int]) -> bytes:
    """Return a SETTINGS frame."""
    return frame(SETTINGS, 0, 0, b"".join(struct.pack(">HI", *setting) for setting in settings.items()))


def read_settings(payload: bytes) -> dict[int, int]:
    """Return the settings in a SETTINGS frame. Raises ProtocolError."""
    if len(payload) % 6:
        raise ProtocolError("a SETTINGS frame of broken length")
    return dict(struct.iter_unpack(">HI", payload))


def window_update(stream: int, increment: int) -> bytes:
    """Return a WINDOW_UPDATE frame; stream 0 is the connection."""
    return frame(WINDOW_UPDATE, 0, stream, struct.pack(">I", increment))


def header_block(headers: Sequence[tuple[str, str]]) -> bytes:
    """Encode headers as literals that enter no table (RFC 7541, 6.2.2)."""
    return b"".join(b"\x00" + _string(name) + _string(value) for name, value in headers)


@lru_cache(maxsize=256)
def read_headers(block: bytes) -> dict[str, str]:
    """Decode a header block that refers to no dynamic table. Raises ProtocolError."""
    try:
        return {str(name): str(value) for name, value in Decoder().decode(block)}
    except (HPACKError, UnicodeDecodeError) as error:
        raise ProtocolError(f"a header block that cannot be read: {error}") from error


def header_fragment(received: Frame) -> bytes:
    """Return the part of a header block that a HEADERS or CONTINUATION frame carries, without padding and priority."""
    payload = received.payload
    if received.kind == HEADERS:
        padding = payload[0] if received.flags & PADDED and payload else 0
        begin = (1 if received.flags & PADDED else 0) + (5 if received.flags & PRIORITY else 0)
        payload = payload[begin : len(payload) - padding]
    return payload


class FrameReader:
    """Cuts what a socket delivers into frames. Contents of DATA frames are dropped unread."""

    def __init__(self) -> None:
        self._rest = b""  # the beginning of a frame that is not DATA
        self._data: Frame | None = None  # being dropped
        self._missing = 0  # bytes of it still to come

    def feed(self, received: Buffer) -> Iterator[Frame]:
        """Yield the frames that these bytes complete. Raises ProtocolError."""
        buffer = self._rest + bytes(received) if self._rest else received
        position, end = 0, len(buffer)
        while True:
            if self._data is not None:
                dropped = min(self._missing, end - position)
                position, self._missing = position + dropped, self._missing - dropped
                if self._missing:
                    break
                complete, self._data = self._data, None
                yield complete
            if end - position < FRAME_HEADER_BYTES:
                break
            high, low, kind, flags, stream = struct.unpack_from(">HBBBI", buffer, position)
            length, stream = (high << 8) | low, stream & LARGEST_WINDOW
            if kind == DATA:
                self._data, self._missing = Frame(kind, flags, stream, length, b""), length
                position += FRAME_HEADER_BYTES
                continue
            if length > LONGEST_CONTROL_FRAME:
                raise ProtocolError(f"a frame of kind {kind} and {length} bytes")
            begin = position + FRAME_HEADER_BYTES
            if end < begin + length:
                break
            position = begin + length
            yield Frame(kind, flags, stream, length, bytes(buffer[begin:position]))
        self._rest = bytes(buffer[position:])


def _string(text: str) -> bytes:
    """Encode a string without Huffman code: its length as an integer of 7 bits and more, then its bytes."""
    raw = text.encode("ascii")
    if len(raw) < 127:
        return bytes((len(raw),)) + raw
    length, rest = bytearray((127,)), len(raw) - 127
    while rest >= 128:
        length.append(rest % 128 + 128)
        rest //= 128
    length.append(rest)
    return bytes(length) + raw
