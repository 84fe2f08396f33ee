"""What an HTTP request is answered with, and which status each refusal has."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import grpc

from gangway.server.errors import RequestError
from gangway.server.http.json_text import dump

JSON: Final = b"application/json"
BINARY: Final = b"application/octet-stream"
EVENTS: Final = b"text/event-stream; charset=utf-8"

# Triton's, where it has one for the code.
STATUSES: Final[Mapping[grpc.StatusCode, int]] = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.FAILED_PRECONDITION: 400,
    grpc.StatusCode.OUT_OF_RANGE: 400,
    grpc.StatusCode.CANCELLED: 400,
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.PERMISSION_DENIED: 403,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.ALREADY_EXISTS: 400,
    grpc.StatusCode.ABORTED: 409,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 413,
    grpc.StatusCode.INTERNAL: 500,
    grpc.StatusCode.DATA_LOSS: 500,
    grpc.StatusCode.UNIMPLEMENTED: 501,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
}


@dataclass(frozen=True)
class Reply:
    """A response. The `parts` of the body follow each other.

    `json_bytes`: so many bytes of the body are JSON and tensors follow; None: no tensors. `encoding`: of the compressed
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
