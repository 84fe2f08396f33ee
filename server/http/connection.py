"""A connection: uvicorn's, with bounds. A client that stalls, floods or only listens holds nobody and little memory."""

import asyncio
from typing import Any, Final

import httptools
from gangway.server.http.replies import error_text
from gangway.server.http.upgrade import without_offer
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_CONNECTIONS: Final = 4096
MAX_HEAD_BYTES: Final = 64 * 1024  # request line and headers; also of what brings no body: trailers, empty chunks
PIECE_BYTES: Final = 1024 * 1024  # of a body
IDLE_SECONDS: Final = 600  # between two requests
STALL_SECONDS: Final = 30  # within a request, without a byte of it

_REASONS: Final = {
    400: b"Bad Request",
    408: b"Request Timeout",
    431: b"Request Header Fields Too Large",
    503: b"Service Unavailable",
}


class BoundedConnection(HttpToolsProtocol):
    """Counts what a client sends without getting ahead, and how long it takes for it."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._open = False  # a request has begun and is not complete
        self._in_head = False  # its headers are not complete
        self._offered: bytes | None = None  # the head of a request that offers another protocol, without the offer
        self._progress = 0
        self._fruitless_bytes = 0
        self._stall_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Refuse what is too much, at once."""
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS:
            self._refuse(503, f"more than {MAX_CONNECTIONS} connections")
        else:
            self.timeout_keep_alive_task = self.loop.call_later(IDLE_SECONDS, self.timeout_keep_alive_handler)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._unset_keepalive_if_required()
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Feed the parser."""
        before = self._progress
        self._feed(data)
        if self.transport.is_closing():
            return
        if self._progress != before:
            self._fruitless_bytes = 0
            self._stop_timer()
        else:
            self._fruitless_bytes += len(data)
            if self._fruitless_bytes > MAX_HEAD_BYTES:
                self._refuse(431, f"more than {MAX_HEAD_BYTES} bytes of headers")
                return
        if self._open and self._stall_timer is None:
            self._stall_timer = self.loop.call_later(STALL_SECONDS, self._stalled)

    def on_message_begin(self) -> None:
        """Note that a request begins."""
        self._open = self._in_head = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Note that its headers are complete."""
        self._progress += 1
        self._in_head = False
        method = self.parser.get_method()
        if self.parser.should_upgrade() and method != b"CONNECT":
            self._offered = without_offer(method, self.url, self.parser.get_http_version(), self.headers)
        else:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Note that some of its body is here.

        uvicorn would have the application called for each piece of 64 KiB, and stop reading meanwhile. It is called
        when the body is complete, or for much larger pieces: measured, a tenth of the cost of a 600 KB image.
        """
        self._progress += 1
        if not self.cycle.response_complete:
            self.cycle.body += body
            if len(self.cycle.body) >= PIECE_BYTES:
                self.flow.pause_reading()
                self.cycle.message_event.set()

    def on_message_complete(self) -> None:
        """Note that it is complete."""
        if self._offered is None:
            self._progress += 1
            self._open = False
            super().on_message_complete()

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

    def _stop_timer(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def _stalled(self) -> None:
        self._stall_timer = None
        if self.flow.read_paused or self.pipeline:  # it is we who do not read
            self._stall_timer = self.loop.call_later(STALL_SECONDS, self._stalled)
        else:
            self._refuse(408, f"no byte of the request for {STALL_SECONDS} s")

    def _refuse(self, status: int, message: str) -> None:
        """Say why, unless an answer to another request is under way, and close."""
        if self.transport.is_closing():
            return
        cycle = self.cycle
        idle = cycle is None or cycle.response_complete
        if idle or (self._open and not self._in_head and not self.pipeline and not cycle.response_started):
            body = error_text(message)
            head = (
                b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
            )
            self.transport.write(head % (status, _REASONS[status], len(body)) + body)
        self.transport.close()
