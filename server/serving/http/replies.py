"""What an HTTP request is answered with, compressed if wanted, and which status each refusal has."""

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from gangway.base.memory_budget import MemoryFullError, memory_budget
from gangway.protos import StatusCode
from gangway.server.errors import RequestError
from gangway.server.serving.http.json_text import dump

JSON: Final = b"application/json"
BINARY: Final = b"application/octet-stream"
EVENTS: Final = b"text/event-stream; charset=utf-8"

# Triton's, where it has one for the code.
STATUSES: Final[Mapping[StatusCode, int]] = {
    StatusCode.INVALID_ARGUMENT: 400,
    StatusCode.FAILED_PRECONDITION: 400,
    StatusCode.OUT_OF_RANGE: 400,
    StatusCode.CANCELLED: 400,
    StatusCode.UNAUTHENTICATED: 401,
    StatusCode.PERMISSION_DENIED: 403,
    StatusCode.NOT_FOUND: 404,
    StatusCode.ALREADY_EXISTS: 400,
    StatusCode.ABORTED: 409,
    StatusCode.RESOURCE_EXHAUSTED: 413,
    StatusCode.INTERNAL: 500,
    StatusCode.DATA_LOSS: 500,
    StatusCode.UNIMPLEMENTED: 501,
    StatusCode.UNAVAILABLE: 503,
    StatusCode.DEADLINE_EXCEEDED: 504,
}


@dataclass(frozen=True)
class Reply:
    """A response. The `parts` of the body follow each other.

    `json_bytes`: bytes of JSON before the tensors; None: no tensors. `encoding`: of the compressed
    body. `allow`: the methods that the path has, for a 405. `closes`: the connection ends with it.
    """

    status: int
    parts: tuple[bytes | memoryview, ...] = ()
    content_type: bytes = JSON
    json_bytes: int | None = None
    encoding: str = ""
    allow: str = ""
    closes: bool = False

    @property
    def size_bytes(self) -> int:
        """The length of the body."""
        return sum(map(len, self.parts))


class HttpError(Exception):
    """A request is refused for a reason that only HTTP knows; `reply` is the answer."""

    def __init__(self, status: int, message: str, *, allow: str = "", closes: bool = False) -> None:
        super().__init__(message)
        self.reply = Reply(status, (error_text(message),), allow=allow, closes=closes)


def error_text(message: str) -> bytes:
    """Return the body of every refusal."""
    return dump({"error": message.encode(errors="replace").decode()})


def refusal(error: RequestError) -> Reply:
    """Return how a refused request is answered."""
    return Reply(STATUSES.get(error.code, 500), (error_text(error.message),))


def json_reply(content: Any) -> Reply:
    """Answer with JSON."""
    return Reply(200, (dump(content),))


MIN_BYTES: Final = 1024  # smaller answers would hardly be smaller
LEVEL: Final = 1  # the others cost much more than they save
MAX_RATIO: Final = 100  # a bomb has up to 1032
ALWAYS_BYTES: Final = 16 * 1024 * 1024  # a body of zeros may grow so large in any case
MAX_MEMBERS: Final = 1024  # each costs as much as thousands of bytes
_STEP_BYTES: Final = 64 * 1024
_GZIP: Final = 31  # window bits of zlib that mean: gzip's header
_ZLIB: Final = 15
_RAW: Final = -15
_WINDOW_BITS: Final = {"gzip": _GZIP, "deflate": _ZLIB}


def inflate(body: bytes | memoryview, encoding: str, max_bytes: int) -> bytes | memoryview:
    """Return a body as it was before its compression by gzip or deflate. zlib lets other threads run meanwhile.

    Raises HttpError: 415 unknown encoding, 413 too large, 400 damaged, 503 no memory.
    """
    if encoding in ("", "identity"):
        return body
    if encoding == "x-gzip":
        encoding = "gzip"
    if encoding not in _WINDOW_BITS:
        raise HttpError(415, f"Content-Encoding '{encoding[:40]}' is not supported, only gzip and deflate")
    if not body:
        return body
    bits = _WINDOW_BITS[encoding]
    if encoding == "deflate" and not _has_zlib_header(body):
        bits = _RAW  # what some clients call deflate
    limit = min(max_bytes, max(ALWAYS_BYTES, len(body) * MAX_RATIO))
    stream, members = zlib.decompressobj(wbits=bits), 1
    pieces, size, at, view = [], 0, 0, memoryview(body)
    try:
        while at < len(body) or not stream.eof:
            if stream.eof:  # a further member (RFC 1952, 2.2)
                if members == MAX_MEMBERS:
                    raise HttpError(400, f"the {encoding} body has more than {MAX_MEMBERS} members")
                stream, members = zlib.decompressobj(wbits=bits), members + 1
            memory_budget().take(_STEP_BYTES)
            part = view[at : at + _STEP_BYTES]  # of both sides: what zlib leaves of it is copied
            piece = stream.decompress(part, _STEP_BYTES)
            at += len(part) - len(stream.unconsumed_tail) - len(stream.unused_data)
            size += len(piece)
            if size > limit:
                raise HttpError(413, f"the body has more than {limit} bytes when it is inflated")
            if not (piece or part or stream.eof):
                cut_off = f"the {encoding} body is cut off"
                raise HttpError(400, cut_off if members == 1 else f"bytes follow the {encoding} body")
            pieces.append(piece)
    except zlib.error as error:
        fault = f"bytes follow the {encoding} body" if members > 1 else f"the body is no {encoding}"
        raise HttpError(400, f"{fault}: {error}") from None
    except MemoryFullError as error:
        raise HttpError(503, str(error)) from None
    return b"".join(pieces)


def _has_zlib_header(body: bytes | memoryview) -> bool:
    return len(body) >= 2 and body[0] & 0x0F == 8 and (body[0] << 8 | body[1]) % 31 == 0


def accepted(header: str) -> str:
    """Return the encoding for an answer to a request with this Accept-Encoding: gzip, deflate, or "" for none."""
    best, best_weight = "", 0.0
    for item in header.lower().split(","):
        name, _, options = item.partition(";")
        name, options = name.strip(), options.replace(" ", "")
        try:
            weight = float(options.removeprefix("q=")) if options.startswith("q=") else 1.0
        except ValueError:
            weight = 0.0
        if name in _WINDOW_BITS and weight > best_weight:
            best, best_weight = name, weight
    return best


def deflate(reply: Reply, encoding: str) -> Reply:
    """Return the reply with its body compressed."""
    stream = zlib.compressobj(LEVEL, wbits=_WINDOW_BITS[encoding])
    pieces = [stream.compress(part) for part in reply.parts]
    body = b"".join((*pieces, stream.flush()))
    return replace(reply, parts=(body,), encoding=encoding)
