"""A client of our own server: gRPC on one connection, one call at a time, which blocks."""

import socket
from typing import Final, TypeVar
from urllib.parse import unquote

import ngh2
from google.protobuf.message import Message
from ngh2.events import DataReceived, ResponseReceived, StreamClosed, TrailersReceived

from gangway.protos import StatusCode
from gangway.server.errors import RequestError

SERVICE: Final = "/inference.GRPCInferenceService/"
RECEIVE_BYTES: Final = 1 << 16
PREFIX_BYTES: Final = 5  # of a message: whether it is compressed, which none is, and its length
Response = TypeVar("Response", bound=Message)


class OwnClient:
    """Calls over a connected socket, whose timeout holds for each wait."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._http = ngh2.Connection(ngh2.Role.CLIENT)
        self._http.initiate_connection()

    def call(self, method: str, request: Message, response: type[Response]) -> Response:
        """Return the answer to a call. Raises OSError if the connection is lost, RequestError for another answer."""
        try:
            headers, body = self._exchange(method, request.SerializeToString())
        except ngh2.NGH2Error as error:
            raise ConnectionAbortedError(f"the server does not keep to HTTP/2: {error}") from error
        status = StatusCode(int(headers.get(b"grpc-status", StatusCode.UNKNOWN)))
        if status is not StatusCode.OK:
            raise RequestError(status, unquote(headers.get(b"grpc-message", b"").decode()))
        return response.FromString(body[PREFIX_BYTES:])

    def _exchange(self, method: str, message: bytes) -> tuple[dict[bytes, bytes], bytes]:
        """Make one call; return the headers and trailers of its answer, and the body."""
        http, headers, body, ended = self._http, dict[bytes, bytes](), bytearray(), False
        stream = http.send_request(_headers(method))
        http.send_data(stream, b"\0" + len(message).to_bytes(4, "big") + message, end_stream=True)
        while not ended:
            self._connection.sendall(http.data_to_send())
            data = self._connection.recv(RECEIVE_BYTES)
            if not data:
                raise ConnectionResetError("the front end has closed the connection")
            http.receive_data(data)
            for event in http.events():
                match event:
                    case ResponseReceived() | TrailersReceived():
                        headers |= dict(event.headers)
                    case DataReceived():
                        body += event.data
                    case StreamClosed():
                        ended = True
        self._connection.sendall(http.data_to_send())
        return headers, bytes(body)


def _headers(method: str) -> list[tuple[bytes, bytes]]:
    return [
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", f"{SERVICE}{method}".encode()),
        (b":authority", b"localhost"),
        (b"te", b"trailers"),
        (b"content-type", b"application/grpc"),
    ]
