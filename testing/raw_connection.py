"""One HTTP/2 connection to a gRPC server, every byte under control: for clients that stall, and for many idle ones."""

import socket
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from h2.connection import H2Connection
from h2.events import DataReceived, Event, ResponseReceived, StreamEnded, StreamReset, TrailersReceived
from h2.exceptions import ProtocolError
from h2.settings import SettingCodes

from gangway.clients.connection import SERVICE
from gangway.clients.raw_channel import request_headers

READ_BYTES = 1 << 16
TIMEOUT_S = 30.0

ENDS = (StreamEnded, StreamReset)


class RawConnection:
    """Connects and says hello. With `window_bytes` the server may send so much of each answer, and no more.

    Raises OSError when nobody listens, TimeoutError when the server says nothing for too long.
    """

    def __init__(self, address: str, window_bytes: int | None = None) -> None:
        host, _, port = address.rpartition(":")
        self._address = address
        self.socket = socket.create_connection((host, int(port)), TIMEOUT_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.http = H2Connection()
        self.http.initiate_connection()
        if window_bytes is not None:
            self.http.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: window_bytes})
        self.events: list[Event] = []
        self._flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.socket.close()

    def begin(
        self, method: str, metadata: Mapping[str, str] | None = None, timeout_s: float = 600, flush: bool = True
    ) -> int:
        """Send the headers of a call of ModelInfer or another method, or of "/service/method"; return its stream.

        `flush` False: with what is sent next.
        """
        path = method if method.startswith("/") else SERVICE + method
        stream = self.http.get_next_available_stream_id()
        headers = request_headers(self._address, path, timeout_s)
        headers += [(name.encode(), value.encode()) for name, value in (metadata or {}).items()]
        self.http.send_headers(stream, headers)
        if flush:
            self._flush()
        return stream

    def call(self, method: str, message: bytes, timeout_s: float = 600) -> int:
        """Send a whole call with a small message at once, so that it comes at once; return its stream."""
        stream = self.begin(method, timeout_s=timeout_s, flush=False)
        self.send(stream, bytes(1) + len(message).to_bytes(4) + message, end=True)
        return stream

    def send(self, stream: int, data: bytes, end: bool = False) -> None:
        """Send bytes of a message, prefix included; no more than the server's window has room for."""
        size = self.http.max_outbound_frame_size
        for at in range(0, len(data), size):
            self.http.send_data(stream, data[at : at + size])
        if end:
            self.http.end_stream(stream)
        self._flush()

    def send_message(self, stream: int, data: bytes, end: bool = True) -> None:
        """Send all of a message, as the server makes room, and end our side; stop if the server ends the call first."""
        try:
            while data:
                if any(isinstance(event, ENDS) and event.stream_id == stream for event in self.events):
                    return
                room = self.http.local_flow_control_window(stream)
                if room:
                    self.send(stream, data[:room])
                    data = data[room:]
                else:
                    self.read()
            self.send(stream, b"", end=end)
        except ProtocolError:
            return  # what the server has said is in `events`

    def reset(self, stream: int) -> None:
        """Give a call up."""
        self.http.reset_stream(stream)
        self._flush()

    def answer(self, stream: int) -> tuple[dict[str, str], bytes]:
        """Wait until a call has ended; return all headers and trailers, and the bytes of its answer."""
        headers: dict[str, str] = {}
        body = b""
        while True:
            for event in self._take(stream):
                if isinstance(event, (ResponseReceived, TrailersReceived)):
                    headers |= {_text(name): _text(value) for name, value in event.headers or ()}
                elif isinstance(event, DataReceived):
                    body += event.data or b""
                    self.http.acknowledge_received_data(event.flow_controlled_length, stream)
                elif isinstance(event, StreamReset):
                    return headers | {"reset": str(event.error_code)}, body
                elif isinstance(event, StreamEnded):
                    return headers, body
            self._flush()  # room for more
            self.read()

    def read(self) -> None:
        """Wait for bytes and keep what they mean in `events`. Raises ConnectionError when the server has closed."""
        data = self.socket.recv(READ_BYTES)
        if not data:
            raise ConnectionError("the server has closed the connection")
        self.events += self.http.receive_data(data)
        self._flush()

    def _take(self, stream: int) -> list[Event]:
        taken = [event for event in self.events if getattr(event, "stream_id", None) == stream]
        self.events = [event for event in self.events if event not in taken]
        return taken

    def _flush(self) -> None:
        if data := self.http.data_to_send():
            self.socket.sendall(data)


def _text(value: bytes | str) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
