"""A connection: uvicorn's, with bounds. A client that stalls, floods or only listens holds no thread, and little
memory.
"""

import asyncio
import socket
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gangway.executor.memory_budget import MemoryFullError, memory_budget
from gangway.server.access import HTTP2_PREFACE, Ports
from gangway.server.descriptors import borrowed_socket
from gangway.server.http.replies import error_text
from gangway.server.serving.limits import ConnectionLimit, Phase

if TYPE_CHECKING:
    from gangway.server.grpc_refusal import GrpcRefusal


def without_offer(method: bytes, target: bytes, version: str, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Return the head of a request without its offer of another protocol, which a server may ignore.

    Java's HTTP client and `curl --http2` make such offers. Names of headers are lower-case.
    """
    lines = [b"%b %b HTTP/%b" % (method, target, version.encode())]
    lines += [b"%b: %b" % header for header in headers if header[0] != b"upgrade"]
    return b"\r\n".join([*lines, b"", b""])


MAX_HEAD_BYTES: Final = 64 * 1024  # request line and headers; also of what brings no body: trailers, empty chunks
MAX_HEADERS: Final = 256  # of a request, trailers included
PIECE_BYTES: Final = 1024 * 1024  # of a body
IDLE_SECONDS: Final = 600  # between two requests
STALL_SECONDS: Final = 30  # for the headers; for a body or an answer besides what its size takes; without a byte of it
MIN_BYTES_PER_SECOND: Final = 4096  # of a body that comes, of an answer that is taken
GONE_SECONDS: Final = 0.5  # whether a client that has closed its sending side is still there
MEMORY_FULL: Final = "gangway.memory_full"  # in the state of a request: why no more of its body is taken

FOR_HEALTH: Final = "reserved"  # in the state of a connection: whether it is there for health alone
TRANSPORT: Final = "gangway.transport"  # in the state of every connection
_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
_TCP_CLOSE: Final = 7  # of Linux's states: the other end has answered with a reset
_REASONS: Final = {
    400: b"Bad Request",
    408: b"Request Timeout",
    431: b"Request Header Fields Too Large",
    501: b"Not Implemented",
    503: b"Service Unavailable",
}


class _RefusedError(Exception):
    """Ends the parser: what follows cannot be understood."""


class BoundedConnection(HttpToolsProtocol):
    """Counts what a client sends without getting ahead, and how long it takes for it. `limit`: of all connections.

    `ports`: where a client of gRPC is sent.
    """

    def __init__(self, limit: ConnectionLimit, ports: Ports, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.phase = Phase.SILENT
        self.since_s = self.loop.time()
        self._limit = limit
        self._ports = ports
        self._other: GrpcRefusal | None = None  # the client speaks HTTP/2
        self._open = False  # a request has begun and is not complete
        self._in_head = False  # its headers are not complete
        self._offered: bytes | None = None  # the head of a request that offers another protocol, without the offer
        self._coding = b""  # the values of Transfer-Encoding
        self._progress = 0
        self._fruitless_bytes = 0
        self._body_bytes = 0  # that have come since _begun_s
        self._begun_s = self._arrived_s = 0.0  # headers or body; the last bytes
        self._stall_timer: asyncio.TimerHandle | None = None
        self._unsent_bytes = 0
        self._unread_timer: asyncio.TimerHandle | None = None
        self._half_closed = False  # the client sends nothing more

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Refuse what is too much, at once."""
        super().connection_made(transport)
        self.app_state: dict[str, Any] = {TRANSPORT: transport}
        if not self._limit.admit(self, self.since_s):
            self._refuse(503, f"more than {self._limit.limit} connections")
            return
        self.timeout_keep_alive_task = self.loop.call_later(IDLE_SECONDS, self.timeout_keep_alive_handler)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._unset_keepalive_if_required()
        self._stop_timer()
        self._limit.leave(self)
        super().connection_lost(exc)

    def give_way(self) -> None:
        """Close in favour of another connection."""
        if self.transport.get_write_buffer_size():  # a client that takes no answer
            self.transport.abort()
        elif self._open:
            self._refuse(408, "there are too many connections, and this one was slow")
        else:
            self.transport.close()

    def data_received(self, data: bytes) -> None:
        """Feed the parser."""
        if self._other is not None or (self.phase is Phase.SILENT and data.startswith(HTTP2_PREFACE)):
            self._refuse_grpc(data)
            return
        before = self._progress
        self._feed(data)
        if self.transport.is_closing():
            return
        if self._progress != before:
            self._fruitless_bytes = 0
        else:
            self._fruitless_bytes += len(data)
            if self._fruitless_bytes > MAX_HEAD_BYTES:
                self._refuse(431, f"more than {MAX_HEAD_BYTES} bytes of headers")
                return
        if self._open:
            self._arrived_s = self.loop.time()
            if self._stall_timer is None:
                self._begun_s, self._body_bytes = self._arrived_s, 0
                self._stall_timer = self.loop.call_later(STALL_SECONDS, self._stalled)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Go on with what is complete: a client may close its sending side and wait for the answer."""
        if self._open or self.cycle is None or (self.cycle.response_complete and not self.pipeline):
            return False
        self._half_closed = True
        if self.parser.get_http_version() == "1.1":  # a client of HTTP/1.0 may not be sent an interim response
            self.loop.call_later(GONE_SECONDS, self._find_out, False)
        return True

    def on_message_begin(self) -> None:
        """Note that a request begins."""
        self._open = self._in_head = True
        self._coding = b""
        self._stop_timer()
        if self.phase is not Phase.ANSWERING:
            self.since_s = self.loop.time()
            self._limit.enter(self, Phase.RECEIVING)
        self.app_state[FOR_HEALTH] = self._limit.is_reserved(self)
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header as uvicorn does, but without blanks around its value, which are no part of it."""
        if len(self.headers) >= MAX_HEADERS:
            self._refuse(431, f"more than {MAX_HEADERS} headers")
            raise _RefusedError
        name, value = name.lower(), value.strip(b" \t")
        if name == b"transfer-encoding":
            self._coding += value.lower() + b","
        elif name == b"expect" and value.lower() == b"100-continue":
            self.expect_100_continue = True
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        """Note that its headers are complete."""
        self._progress += 1
        self._in_head = False
        self._stop_timer()
        if self._coding not in (b"", b"chunked,"):
            # A proxy may see the end of such a body elsewhere, and take a part of it for a request.
            self._refuse(501, "only chunked is supported as Transfer-Encoding", begun=False)
            raise _RefusedError
        method = self.parser.get_method()
        if self.parser.should_upgrade() and method != b"CONNECT":
            self._offered = without_offer(method, self.url, self.parser.get_http_version(), self.headers)
        else:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Note that some of its body is here.

        uvicorn would have the application called for each piece of 64 KiB, and stop reading meanwhile. It is called
        when the body is complete, or for much larger pieces, which costs less.
        """
        self._progress += 1
        self._body_bytes += len(body)
        if not self.cycle.response_complete:
            try:
                memory_budget().take(len(body))
            except MemoryFullError as error:
                scope: Any = self.cycle.scope
                scope["state"][MEMORY_FULL] = str(error)
                self.cycle.message_event.set()
                return
            self.cycle.body += body
            if len(self.cycle.body) >= PIECE_BYTES:
                self.flow.pause_reading()
                self.cycle.message_event.set()

    def on_message_complete(self) -> None:
        """Note that it is complete."""
        if self._offered is None:
            self._progress += 1
            self._open = False
            self._stop_timer()
            self._limit.enter(self, Phase.IDLE if self.cycle.response_complete else Phase.ANSWERING)
            super().on_message_complete()

    def on_response_complete(self) -> None:
        """Note that an answer is complete."""
        if not self.pipeline:
            self.since_s = self.loop.time()
            self._limit.enter(self, Phase.RECEIVING if self._open else Phase.IDLE)
            if self._half_closed:
                self.transport.close()
        super().on_response_complete()

    def pause_writing(self) -> None:
        """Watch a client that does not take its answer as fast as it comes."""
        super().pause_writing()
        self._unsent_bytes = self.transport.get_write_buffer_size()
        self._unread_timer = self.loop.call_later(STALL_SECONDS, self._unread)

    def resume_writing(self) -> None:
        """Note that the answer has been taken but for a little."""
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP."""
        self._refuse(400, msg)

    def _feed(self, data: bytes) -> None:
        """Feed the parser as uvicorn does, but ignore an offer, behind which it reads nothing more."""
        self._unset_keepalive_if_required()
        while True:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                if self._offered is None:
                    return
                data, self._offered = self._offered + data[upgrade.args[0] :], None
                self.parser = httptools.HttpRequestParser(self)
            except httptools.HttpParserError:
                self.send_400_response("Invalid HTTP request received.")
                return
            else:
                return

    def _refuse_grpc(self, data: bytes) -> None:
        """Tell a client of gRPC that this is not its port."""
        if self._other is None:
            from gangway.server.grpc_refusal import GrpcRefusal  # noqa: PLC0415 - few clients ask the wrong port

            self._other = GrpcRefusal(f"this port speaks HTTP/1.1, not gRPC: {self._ports.text}")
            self._unset_keepalive_if_required()
            self.timeout_keep_alive_task = self.loop.call_later(STALL_SECONDS, self.transport.close)
        answer, ends = self._other.receive(data)
        self.transport.write(answer)
        if ends:
            self.transport.close()

    def _stop_timer(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def _stalled(self) -> None:
        """Look whether what is coming has taken too long: by its size, or since its last byte."""
        now_s = self.loop.time()
        if self.flow.read_paused or self.pipeline:  # the server does not read
            self._begun_s = self._arrived_s = now_s
            self._body_bytes = 0
        end_s = self._begun_s + STALL_SECONDS
        if not self._in_head:
            end_s = min(end_s + self._body_bytes / MIN_BYTES_PER_SECOND, self._arrived_s + STALL_SECONDS)
        if end_s > now_s:
            self._stall_timer = self.loop.call_later(end_s - now_s, self._stalled)
        else:
            self._stall_timer = None
            rate = f"{STALL_SECONDS} s and a second for each {MIN_BYTES_PER_SECOND} bytes"
            self._refuse(408, f"the request comes too slowly: it has {rate}, or no byte came for {STALL_SECONDS} s")

    def _unread(self) -> None:
        """Look whether the client has taken enough of its answer."""
        before, self._unsent_bytes = self._unsent_bytes, self.transport.get_write_buffer_size()
        if before - self._unsent_bytes < MIN_BYTES_PER_SECOND * STALL_SECONDS:
            self.transport.abort()
        else:
            self._unread_timer = self.loop.call_later(STALL_SECONDS, self._unread)

    def _find_out(self, asked: bool) -> None:
        """Find out whether a client that sends nothing more has gone: who has answers with a reset to what it is sent.

        It is sent what means nothing to who is still there.
        """
        if self.transport.is_closing() or self.cycle.response_started:
            return
        if asked:
            with borrowed_socket(self.transport.get_extra_info("socket").fileno()) as own:
                if own.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _TCP_CLOSE:
                    self.transport.abort()
                    return
        elif not self.pipeline:  # nothing of an answer is under way
            self.transport.write(_CONTINUE)
            asked = True
        self.loop.call_later(GONE_SECONDS, self._find_out, asked)

    def _refuse(self, status: int, message: str, begun: bool = True) -> None:
        """Say why, unless an answer to another request is under way, and close. `begun`: the request is uvicorn's."""
        if self.transport.is_closing():
            return
        cycle = self.cycle
        idle = cycle is None or cycle.response_complete
        own = begun and self._open and not self._in_head and not self.pipeline
        if idle or (own and not cycle.response_started):
            body = error_text(message)
            head = (
                b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
            )
            self.transport.write(head % (status, _REASONS[status], len(body)) + body)
        self.transport.close()
