"""The answers to clients at the wrong port: of gRPC at one of HTTP/1.1, and of HTTP/1.1 at that of gRPC.

A gRPC client shows no text of an answer in HTTP/1.1. So its connection is handed over to HTTP/2 as it is, where each
call ends with a status and a message. A client of HTTP/1.1 shows nothing of HTTP/2, so it gets an answer in its own.
"""

import asyncio
import json
from collections.abc import Callable
from typing import Final

from gangway.protos import StatusCode
from gangway.server.errors import RequestError
from gangway.server.options.endpoints import KeepaliveOptions
from gangway.server.serving.grpc.call import refusal_headers
from gangway.server.serving.grpc.http2 import Connections, Headers, Http2Connection
from gangway.server.serving.grpc.messages import MAX_METADATA_BYTES
from gangway.server.serving.limits import ConnectionLimit
from gangway.server.serving.loop import LoopTurn

SECONDS: Final = 30.0  # after which a client is asked to go
GRPC: Final = b"application/grpc"  # and what may follow it


def http1_answer(reason: str) -> bytes:
    """Return the whole answer to a client of HTTP/1.1, as JSON: Triton's clients show its `error`."""
    body = json.dumps({"error": reason}).encode() + b"\n"
    head = "HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nconnection: close\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


class Refusal:
    """An application of HTTP/2 that refuses every request: a gRPC call, and what else HTTP/2 may carry."""

    def __init__(self, reason: Callable[[], str], limit: ConnectionLimit, loop: asyncio.AbstractEventLoop) -> None:
        """`reason`: what clients are told. `limit`: of the port."""
        self._reason = reason
        self._loop = loop
        self._connections = Connections(loop, LoopTurn(loop), self, limit, KeepaliveOptions(), MAX_METADATA_BYTES)

    def take(self, transport: asyncio.Transport, data: bytes) -> None:
        """Take a connection over, of which `data` has been read."""
        connection = self._connections.make()
        transport.pause_reading()
        transport.set_protocol(connection)
        connection.connection_made(transport)
        transport.resume_reading()
        connection.data_received(data)
        self._loop.call_later(SECONDS, connection.go_away)

    def close(self) -> None:
        """Close all connections."""
        for connection in tuple(self._connections.open):
            connection.end(0)

    def begin(self, connection: Http2Connection, stream: int, headers: Headers) -> None:
        """Refuse a request."""
        reason = self._reason()
        if dict(headers).get(b"content-type", b"").startswith(GRPC):
            error = RequestError(StatusCode.UNIMPLEMENTED, reason)  # clients do not try again
            connection.refuse(stream, refusal_headers(error))
        else:
            kind = (b"content-type", b"text/plain; charset=utf-8")
            connection.respond(stream, [(b":status", b"505"), kind], (f"{reason}\n".encode(),))
