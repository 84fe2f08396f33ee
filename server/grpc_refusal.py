"""The answer to a client that speaks gRPC with a port that has HTTP/1.1. Only such clients make it be imported.

A gRPC client shows no text of an answer in HTTP/1.1. So its HTTP/2 is understood as far as it takes to end each call
with a status and a message (RFC 9113; PROTOCOL-HTTP2.md of gRPC).
"""

from typing import Final
from urllib.parse import quote

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import ConnectionTerminated, RequestReceived
from h2.exceptions import ProtocolError

MAX_REQUESTS: Final = 100  # of a connection, which then ends
UNIMPLEMENTED: Final = "12"  # of gRPC: clients do not try again


class GrpcRefusal:
    """A connection on which every request is refused: a gRPC call, and what else HTTP/2 may carry.

    `reason` is what clients are told.
    """

    def __init__(self, reason: str) -> None:
        self._reason = reason
        self._requests = 0
        self._connection = H2Connection(H2Configuration(client_side=False))
        self._connection.initiate_connection()

    def receive(self, data: bytes) -> tuple[bytes, bool]:
        """Take what a client has sent; return what it is to be sent, and whether the connection ends then."""
        try:
            events = self._connection.receive_data(data)
            for event in events:
                if isinstance(event, RequestReceived):
                    self._refuse(event.stream_id, dict(event.headers))
            ends = self._requests >= MAX_REQUESTS
            if ends:
                self._connection.close_connection()
        except ProtocolError:
            return self._connection.data_to_send(), True
        ends = ends or any(isinstance(event, ConnectionTerminated) for event in events)
        return self._connection.data_to_send(), ends

    def _refuse(self, stream: int, headers: dict[bytes, bytes]) -> None:
        self._requests += 1
        kind = headers.get(b"content-type", b"")
        if kind.startswith(b"application/grpc"):
            message = quote(self._reason, safe=" !#$&'()*+,/:;=?@[]~")
            status = [("content-type", "application/grpc"), ("grpc-status", UNIMPLEMENTED), ("grpc-message", message)]
            self._connection.send_headers(stream, [(":status", "200"), *status], end_stream=True)
            return
        self._connection.send_headers(stream, [(":status", "505"), ("content-type", "text/plain; charset=utf-8")])
        self._connection.send_data(stream, f"{self._reason}\n".encode(), end_stream=True)
