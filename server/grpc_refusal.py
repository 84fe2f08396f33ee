"""The answer to a client that speaks gRPC with a port that has HTTP/1.1. Only such clients make it be imported.

A gRPC client shows no text of an answer in HTTP/1.1. So its HTTP/2 is understood as far as it takes to end each call
with a status and a message (RFC 9113; PROTOCOL-HTTP2.md of gRPC).
"""

from typing import Final
from urllib.parse import quote

import ngh2
from ngh2.events import GoAwayReceived, RequestReceived

MAX_REQUESTS: Final = 100  # of a connection, which then ends
UNIMPLEMENTED: Final = b"12"  # of gRPC: clients do not try again


class GrpcRefusal:
    """A connection on which every request is refused: a gRPC call, and what else HTTP/2 may carry.

    `reason` is what clients are told.
    """

    def __init__(self, reason: str) -> None:
        self._reason = reason
        self._requests = 0
        self._connection = ngh2.Connection(ngh2.Role.SERVER)
        self._connection.initiate_connection()

    def receive(self, data: bytes) -> tuple[bytes, bool]:
        """Take what a client has sent; return what it is to be sent, and whether the connection ends then."""
        ends = False
        try:
            self._connection.receive_data(data)
            for event in self._connection.events():
                if isinstance(event, RequestReceived):
                    self._refuse(event.stream_id, dict(event.headers))
                ends |= isinstance(event, GoAwayReceived)
            if self._requests >= MAX_REQUESTS:
                ends = True
                self._connection.send_goaway()
        except ngh2.NGH2Error:
            ends = True
        answer = self._connection.data_to_send()
        return answer, ends or not self._connection.want_read

    def _refuse(self, stream: int, headers: dict[bytes, bytes]) -> None:
        self._requests += 1
        kind = headers.get(b"content-type", b"")
        if kind.startswith(b"application/grpc"):
            message = quote(self._reason, safe=" !#$&'()*+,/:;=?@[]~").encode()
            status = [(b"content-type", b"application/grpc"), (b"grpc-status", UNIMPLEMENTED)]
            self._connection.send_response(
                stream, [(b":status", b"200"), *status, (b"grpc-message", message)], end_stream=True
            )
            return
        about = [(b":status", b"505"), (b"content-type", b"text/plain; charset=utf-8")]
        self._connection.send_response(stream, about)
        self._connection.send_data(stream, f"{self._reason}\n".encode(), end_stream=True)
