"""gRPC's messages as bytes: how they stand in a stream, how they are compressed, and what a call's headers say.

Pure: nothing here knows of connections, loops or threads. The texts of errors are those of gRPC's core.
"""

import binascii
import re
import struct
import zlib
from collections import deque
from collections.abc import Sequence
from typing import Final, Protocol, TypeAlias, cast
from urllib.parse import quote

import msgspec

from gangway.protos import StatusCode
from gangway.server.errors import RequestError
from gangway.server.options.endpoints import Compression

Header: TypeAlias = tuple[bytes, bytes]
Headers: TypeAlias = Sequence[Header]

JOIN_BYTES: Final = 16 * 1024
PREFIX_BYTES: Final = 5  # before each message: whether it is compressed, and its length
_LENGTH: Final = struct.Struct(">I")
WHOLE_BYTES: Final = (1 << 20) + 1  # messages of this length and above are written into their place as they come

MAX_METADATA_BYTES: Final = 16 * 1024  # of one call, as HTTP/2 counts them; traces and tokens fit
_FIELD_BYTES: Final = 32  # that HTTP/2 counts for each header besides name and value
_TYPE: Final = b"application/grpc"
IDENTITY, GZIP, DEFLATE = b"identity", b"gzip", b"deflate"
ENCODINGS: Final = b"identity, deflate, gzip"
_WINDOW_BITS: Final = {GZIP: 31, DEFLATE: 15}  # of zlib
_TIMEOUT: Final = re.compile(rb"(\d{1,18}) *([HMSmun])")
_UNITS_S: Final = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}
_UNESCAPED: Final = "".join(map(chr, range(0x20, 0x7F))).replace("%", "")  # in a status's message


def framed(*parts: bytes, is_compressed: bool = False) -> Sequence[bytes]:
    """Return a message of these parts as it stands in a stream: behind its prefix, in one piece if it is short."""
    size_bytes = sum(map(len, parts))
    prefix = b"\1" if is_compressed else b"\0"
    prefix += _LENGTH.pack(size_bytes)
    return (b"".join((prefix, *parts)),) if size_bytes <= JOIN_BYTES else (prefix, *parts)


def is_whole(data: bytes, limit: int) -> bool:
    """Whether these bytes are one message, which is not compressed and within the limit."""
    size = len(data) - PREFIX_BYTES
    return 0 <= size <= limit and not data[0] & 1 and size == _LENGTH.unpack_from(data, 1)[0]


def status_headers(code: StatusCode, message: str) -> list[Header]:
    """Return what ends a call."""
    number = code.value
    return [(b"grpc-status", b"%d" % number), (b"grpc-message", quote(message, safe=_UNESCAPED).encode())]


def too_large(kind: str, size: int, limit: int) -> RequestError:
    """Return the error for a message beyond the limit; `kind`: Received or Sent."""
    text = f"SERVER: {kind} message larger than max ({size} vs. {limit})"
    return RequestError(StatusCode.RESOURCE_EXHAUSTED, text)


class MessageBuffer(Protocol):
    """Where a long message goes while it comes."""

    @property
    def is_complete(self) -> bool:
        """Whether all of it is there."""
        ...

    def write(self, data: bytes) -> int:
        """Take bytes as far as they belong there; return how many."""
        ...

    def collected(self) -> bytes:
        """Return what has come of the message, in one piece."""
        ...

    def drop(self) -> None:
        """It comes no more, or not as it was expected."""


class Collected:
    """A message in one buffer, which takes no memory before it is written."""

    def __init__(self, size_bytes: int) -> None:
        import numpy as np  # noqa: PLC0415 - a front end need not wait for it: see `process.Listeners`

        self.message = np.empty(size_bytes, np.uint8).data
        self._at = 0

    @property
    def is_complete(self) -> bool:
        """Whether all of it is there."""
        return self._at == len(self.message)

    def write(self, data: bytes) -> int:
        """Take bytes of it; return how many."""
        end = min(self._at + len(data), len(self.message))
        taken = end - self._at
        self.message[self._at : end] = data[:taken]
        self._at = end
        return taken

    def collected(self) -> bytes:
        """Return what has come."""
        return bytes(self.message[: self._at])

    def drop(self) -> None:
        """It comes no more."""


class MessageReader:
    """Takes the bytes of a stream, of which messages come out: `feed`, then `has_head`, `collect` and `take` by turns.

    `due_bytes`: the length of the message that is coming, -1: it is not known yet. Bytes are kept as they come until
    the message has a place; they are `kept_bytes`.
    """

    __slots__ = ("_at", "_kept", "_limit", "_place", "due_bytes", "is_compressed", "kept_bytes")

    def __init__(self, limit: int) -> None:
        """Make it. `limit`: the longest message."""
        self._limit = limit
        self._kept: deque[bytes] = deque()
        self.kept_bytes = self._at = 0  # `_at`: so much of the first piece is taken
        self._place: MessageBuffer | None = None
        self.is_compressed = False
        self.due_bytes = -1

    @property
    def needs_bytes(self) -> int:
        """How much memory the message that is coming may take; 0 if it has its place."""
        if self._place is not None:
            return 0
        return self._limit if self.is_compressed else self.due_bytes

    def feed(self, data: bytes) -> bool:
        """Take further bytes; return whether they are more than a piece of a message that has its place."""
        place = self._place
        if place is not None:
            taken = place.write(data)
            if taken == len(data):
                return place.is_complete
            if place.is_complete:
                data = data[taken:]
            else:  # it is not as it was expected, so it is collected from its begin
                self._place, data = None, place.collected() + data[taken:]
                place.drop()
        if data:
            self._kept.append(data)
            self.kept_bytes += len(data)
        return True

    def has_head(self) -> bool:
        """Whether the length of the next message is known. Raises RequestError if it is beyond the limit."""
        if self.due_bytes >= 0:
            return True
        if self.kept_bytes < PREFIX_BYTES:
            return False
        head = self._cut(PREFIX_BYTES)
        (length,) = _LENGTH.unpack_from(head, 1)
        if length > self._limit:
            raise too_large("Received", length, self._limit)
        self.is_compressed = head[0] & 1 == 1
        self.due_bytes = length
        return True

    def begin(self) -> bytes:
        """Return what is kept of the coming message, in one piece."""
        if len(self._kept) != 1 or self._at:
            pieces = [self._cut(self.kept_bytes)] if self.kept_bytes else []
            self._kept, self.kept_bytes, self._at = deque(pieces), sum(map(len, pieces)), 0
        return self._kept[0][: self.due_bytes] if self._kept else b""

    def place(self, place: MessageBuffer, known_bytes: int = 0) -> None:
        """Have the message written there, but for `known_bytes` of its begin, which are kept."""
        kept = self._cut(self.kept_bytes) if self.kept_bytes else b""
        self._place = place
        self.feed(kept[known_bytes:])

    def collect(self) -> None:
        """Have a long message that has no place collected in one buffer."""
        if self.due_bytes >= WHOLE_BYTES and self._place is None:
            self.place(Collected(self.due_bytes))

    def take(self) -> tuple[bool, bytes | MessageBuffer] | None:
        """Return whether the message is compressed, and the message; None if it is not complete.

        One that was collected is a memoryview, which is used like bytes, but for keys of dictionaries. One that has
        another place is what was given to `place`.
        """
        message: bytes | MessageBuffer
        if self._place is not None:
            if not self._place.is_complete:
                return None
            message = cast("bytes", self._place.message) if isinstance(self._place, Collected) else self._place
        elif self.kept_bytes < self.due_bytes:
            return None
        else:
            message = self._cut(self.due_bytes)
        self._place, self.due_bytes = None, -1
        return self.is_compressed, message

    def drop(self) -> None:
        """Nothing more comes."""
        if self._place is not None:
            self._place.drop()
            self._place = None

    def _cut(self, size: int) -> bytes:
        """Take so many of the kept bytes, which are there."""
        self.kept_bytes -= size
        parts = []
        while size > 0:
            part = self._kept[0][self._at : self._at + size]
            parts.append(part)
            size -= len(part)
            self._at += len(part)
            if self._at == len(self._kept[0]):
                self._kept.popleft()
                self._at = 0
        return parts[0] if len(parts) == 1 else b"".join(parts)


def inflate(message: bytes, encoding: bytes, limit: int) -> bytes:
    """Return a compressed message as it was, which has `limit` bytes at most. Raises RequestError, as core words it."""
    if encoding not in _WINDOW_BITS:
        raise RequestError(StatusCode.INTERNAL, "Compression bit set but no encoding configured")
    stream = zlib.decompressobj(_WINDOW_BITS[encoding])
    try:
        inflated = stream.decompress(message, limit + 1)
    except zlib.error:
        raise _broken("zlib error") from None
    if len(inflated) > limit:
        raise RequestError(StatusCode.RESOURCE_EXHAUSTED, "Decompressed message larger than max")
    if not stream.eof:
        raise _broken("data error")
    if stream.unused_data:
        raise _broken("not all input consumed")
    return inflated


def _broken(reason: str) -> RequestError:
    return RequestError(StatusCode.INTERNAL, f"Decompression failed due to {reason}")


def encoding_for(level: Compression, accepted: Sequence[bytes]) -> bytes:
    """Return how to compress the answers to a client that accepts these encodings."""
    known = [each for each in (GZIP, DEFLATE) if each in accepted]
    if level is Compression.NONE or not known:
        return IDENTITY
    return known[{Compression.LOW: 0, Compression.MEDIUM: len(known) // 2}.get(level, -1)]


def compressed(message: bytes, encoding: bytes) -> Sequence[bytes]:
    """Return an answer as it stands in a stream: compressed, unless it would be longer."""
    stream = zlib.compressobj(wbits=_WINDOW_BITS[encoding])
    short = stream.compress(message) + stream.flush()
    return framed(short, is_compressed=True) if len(short) < len(message) else framed(message)


class CallHead(msgspec.Struct, frozen=True):
    """What the headers of a call say.

    `refusal`: the call cannot be taken. `is_http`: it is no call of gRPC at all. `resets`: its stream is reset.
    `timeout_s` None: the client waits for ever. `metadata`: all that are no headers of HTTP/2 or of gRPC's own.
    """

    path: str
    timeout_s: float | None
    encoding: bytes
    accepted: tuple[bytes, ...]
    metadata: tuple[tuple[str, str | bytes], ...]
    refusal: RequestError | None = None
    is_http: bool = False
    resets: bool = False

    @classmethod
    def of(cls, headers: Headers) -> "CallHead":
        """Read the headers. Never raises."""
        named = dict(headers)
        metadata: list[tuple[str, str | bytes]] = []
        refusal = None
        size_bytes = sum(len(name) + len(value) + _FIELD_BYTES for name, value in headers)
        if size_bytes > MAX_METADATA_BYTES:
            refusal = RequestError(
                StatusCode.RESOURCE_EXHAUSTED,
                f"received metadata size exceeds hard limit ({size_bytes} vs. {MAX_METADATA_BYTES})",
            )
        for name, value in () if refusal else headers:
            if name in _OWN or name[:1] == b":":
                continue
            text = name.decode("latin-1")
            if name.endswith(b"-bin"):
                try:
                    metadata += [(text, _binary(part)) for part in value.split(b",")]
                except ValueError:
                    refusal = refusal or _unparsable(text, ": illegal base64 encoding")
            else:
                metadata.append((text, value.decode("latin-1")))
        timeout_s = None
        if b"grpc-timeout" in named and not refusal:
            found = _TIMEOUT.fullmatch(named[b"grpc-timeout"])
            if found is None:
                refusal = _unparsable("grpc-timeout")
            else:
                timeout_s = int(found[1]) * _UNITS_S[found[2]]
        encoding = named.get(b"grpc-encoding", IDENTITY)
        if encoding not in (IDENTITY, GZIP, DEFLATE):
            refusal = refusal or _unparsable("grpc-encoding")
        if named.get(b":scheme") not in (b"http", b"https"):
            refusal = refusal or _unparsable(":scheme")
        if named.get(b":method") not in (b"POST", b"GET", b"PUT"):
            refusal = refusal or _unparsable(":method")
        accepted = tuple(map(bytes.strip, named.get(b"grpc-accept-encoding", b"").split(b",")))
        return cls(
            path=named.get(b":path", b"").decode("latin-1"),
            timeout_s=timeout_s,
            encoding=encoding,
            accepted=accepted,
            metadata=tuple(metadata),
            refusal=refusal,
            is_http=not named.get(b"content-type", _TYPE if b"te" in named else b"").startswith(_TYPE),
            resets=named.get(b":method") in (b"GET", b"PUT") or b"te" not in named,
        )


_OWN: Final = frozenset({
    b"te", b"content-type", b"grpc-timeout", b"grpc-encoding", b"grpc-accept-encoding", b"grpc-message", b"grpc-status",
})  # fmt: skip


def _binary(value: bytes) -> bytes:
    value = value.strip()
    return binascii.a2b_base64(value + b"=" * (-len(value) % 4), strict_mode=True)


def _unparsable(name: str, reason: str = "") -> RequestError:
    return RequestError(StatusCode.INTERNAL, f"Error parsing '{name}' metadata{reason}")
