"""HTTP/1.1 as a state machine over bytes: connections that have bounds, and the calls that come over them.

httptools understands heads and chunks. The larger part of a body is received where it stays. A connection answers its
requests one after the other, in their order. While the client takes no answers, or sends ahead, nothing is read of it:
that is the backpressure. What is served is up to a `Site`. All of it runs in the event loop's thread, where connections
take turns: what one has sent is understood for SLICE_S at most, then the others have their turn.

A client that stalls, floods or only listens costs nothing but the connection, and has no more time than stated below.
"""

import asyncio
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from http import HTTPStatus
from threading import get_ident
from typing import Any, Final, cast

import httptools
import numpy as np

from gangway.server.access import HTTP2_PREFACE
from gangway.server.descriptors import borrowed_socket
from gangway.server.serving.access_log import CLIENT_CLOSED
from gangway.server.serving.http.call import Answering, HttpCall, Site
from gangway.server.serving.http.lingering import Lingering
from gangway.server.serving.http.replies import Reply
from gangway.server.serving.limits import Phase
from gangway.server.serving.loop import SLICE_S
from gangway.server.serving.tls import ArrivingConnection

MAX_HEAD_BYTES: Final = 64 * 1024  # request line and headers; also of what brings no body: trailers, empty chunks
MAX_HEADERS: Final = 256  # of a request, trailers included
IDLE_SECONDS: Final = 600  # between two requests
STALL_SECONDS: Final = 30  # for the headers; for a body or an answer besides what its size takes; without a byte of it
MIN_BYTES_PER_SECOND: Final = 4096  # of a body that comes, of an answer that is taken
GONE_SECONDS: Final = 0.5  # whether a client that has closed its sending side is still there
SOON_GONE_SECONDS: Final = 0.005  # the same where a Python model may ask for it

DIRECT_BYTES: Final = 16 * 1024  # of a body are missing: it is received where it stays from there on
READ_BYTES: Final = 256 * 1024  # of such a body are read in a turn
PIECE_BYTES: Final = 512  # of all else are understood at once: some ten requests, which a slice has time for
JOIN_BYTES: Final = 64 * 1024  # smaller answers are sent in one piece

COMMENT: Final = b":\n\n"  # of a stream of events
_CLOSE: Final = b"connection: close\r\n"
_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
_AT_ONCE: Final = b"x-accel-buffering: no\r\n"  # nginx speaks HTTP/1.0 to servers, and collects such an answer first
_TCP_CLOSE: Final = 7  # of Linux's states: the other end has answered with a reset
_VERSION: Final = b"HTTP/1.1 "  # with which all answers begin
_STATUS_LINES: Final = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}


class _RefusedError(Exception):
    """Ends the parser: what follows cannot be understood."""


class HttpConnection(Answering, ArrivingConnection, asyncio.BufferedProtocol):
    """A client's connection to a site."""

    __slots__ = (
        "_arrived_s", "_arriving", "_at", "_begun_s", "_behind", "_body", "_body_bytes", "_coding", "_coming",
        "_current", "_fruitless_bytes", "_header_count", "_in_head", "_is_advancing", "_is_full", "_is_half_closed",
        "_is_left", "_is_paused", "_loop", "_offered", "_parser", "_progress", "_rest_bytes", "_site", "_timer",
        "_told_bytes", "_unfed", "_unread_s", "_unsent_bytes", "_url", "phase", "since_s", "transport",
    )  # fmt: skip

    def __init__(self, site: Site, loop: asyncio.AbstractEventLoop) -> None:
        self.phase = Phase.SILENT
        self.since_s = loop.time()
        self.transport: asyncio.Transport = cast("asyncio.Transport", None)
        self._arriving: socket.socket | None = None  # until the TLS handshake is over
        self._site = site
        self._loop = loop
        self._parser: httptools.HttpRequestParser | None = None  # while there is a request, and for a while after it
        # Requests: the one that comes; the one that is to be answered first, if its head is complete; those behind it.
        self._coming: HttpCall | None = None
        self._current: HttpCall | None = None
        self._behind: list[HttpCall] = []
        self._is_advancing = False
        self._in_head = False  # the headers of `_coming` are not complete
        self._url = self._coding = b""  # of `_coming`; the values of Transfer-Encoding
        self._offered: bytes | None = None  # the head of a request that offers another protocol, without the offer
        # Its body, past the parser: so many bytes are missing; they go there from `_at` on, if they are of any use.
        self._rest_bytes = self._at = 0
        self._body: memoryview | None = None
        self._header_count = self._progress = self._fruitless_bytes = 0
        self._body_bytes = 0  # that have come since _begun_s
        self._begun_s = self._arrived_s = 0.0  # headers or body; the last bytes
        self._timer: asyncio.TimerHandle | None = None
        self._is_paused = False  # nothing is read
        self._unfed = b""  # what has been read, and is to be understood in the next turn
        self._is_full = False  # the client does not take its answers as fast as they come
        self._unsent_bytes, self._unread_s = 0, 0.0  # how many there were, and when to look again
        self._is_half_closed = False  # the client sends nothing more
        self._told_bytes = 0  # of the next answer's status line: all begin so
        self._is_left = False  # the last answer has been sent, and who drops what still comes has the connection

    # -- the transport's side

    def arrive(self, own: socket.socket) -> bool:
        """A client has connected, and its TLS handshake begins; False: there is no room for it."""
        self._arriving = own
        if self._site.limit.admit(self, self.since_s):
            return True
        self._site.limit.leave(self)
        return False

    def depart(self) -> None:
        """The handshake has failed."""
        self._site.limit.leave(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Refuse what is too much, at once."""
        self.transport = cast("asyncio.Transport", transport)
        self._site.transports.add(self.transport)
        self._timer = self._loop.call_later(min(IDLE_SECONDS, STALL_SECONDS), self._poll)
        if self._arriving is not None:
            self._arriving = None
        elif not self._site.limit.admit(self, self.since_s):
            self._refuse(503, f"more than {self._site.limit.limit} connections", lingers=False)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection, and cancel what is under way for it."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._parser = self._body = None
        self._site.transports.discard(self.transport)
        self._site.limit.leave(self)
        calls = {call: None for call in (self._current, *self._behind, self._coming) if call is not None}
        self._current, self._coming, self._behind = None, None, []
        for call in calls:
            call.is_answered = True
            if call.access is not None:
                call.access.bytes_in = call.received_bytes
                call.access.end(CLIENT_CLOSED)
            self._site.release(call)
            call.end()

    def give_way(self) -> None:
        """Close in favour of another connection."""
        if self._arriving is not None:
            with suppress(OSError):
                self._arriving.shutdown(socket.SHUT_RDWR)
        elif self.transport.get_write_buffer_size():  # a client that takes no answer
            self.transport.abort()
        elif self._coming is not None:
            self._refuse(408, "there are too many connections, and this one was slow", lingers=False)
        else:
            self.transport.close()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return where the next bytes go."""
        if not self._rest_bytes:
            return self._site.scratch
        if self._body is None:
            return self._site.scratch[: self._rest_bytes]
        return self._body[self._at : self._at + READ_BYTES]

    def buffer_updated(self, nbytes: int) -> None:
        """Understand them."""
        if self._is_over():
            return
        if self._rest_bytes:
            has_more = nbytes == len(self.get_buffer(nbytes))
            self._receive_body(nbytes)
            if has_more and self._rest_bytes:
                self._wait_for_turn()
            return
        data = self._site.scratch[:nbytes]
        if self.phase is Phase.SILENT and bytes(data[: len(HTTP2_PREFACE)]) == HTTP2_PREFACE:
            self._hand_over(bytes(data))
            return
        self._understand(data)

    def _understand(self, data: memoryview) -> None:
        """Feed the parser as long as the turn lasts."""
        at, end_s = 0, time.monotonic() + SLICE_S
        while at < len(data):
            if at and time.monotonic() >= end_s:
                self._unfed = bytes(data[at:])
                self._wait_for_turn()
                return
            size_bytes, call = PIECE_BYTES, self._coming
            if call is not None and not self._in_head:
                size_bytes = max(size_bytes, call.length - call.received_bytes)
            before, piece = self._progress, data[at : at + size_bytes]
            at += size_bytes
            self._feed(piece)
            if self._is_over():
                return
            if self._progress != before:
                self._fruitless_bytes = 0
            else:
                self._fruitless_bytes += len(piece)
                if self._fruitless_bytes > MAX_HEAD_BYTES:
                    self._refuse(431, f"more than {MAX_HEAD_BYTES} bytes of headers")
                    return
        self._receive_where_it_stays()

    def _wait_for_turn(self) -> None:
        """Read nothing until the others have had their turn."""
        if not self._is_over():
            self.transport.pause_reading()
            self._loop.call_soon(self._take_turn)

    def _take_turn(self) -> None:
        """Go on."""
        if self._is_over():
            return
        unfed, self._unfed = self._unfed, b""
        if not self._is_paused:
            self.transport.resume_reading()
        if unfed:
            self._understand(memoryview(unfed))

    def _receive_where_it_stays(self) -> None:
        """Receive the larger part of a body past the parser, if one comes."""
        if (call := self._coming) is not None:
            self._arrived_s = self._loop.time()
            missing_bytes = call.length - call.received_bytes
            if missing_bytes > DIRECT_BYTES and call is self._current and not call.is_answered:
                self._rest_bytes, self._at = missing_bytes, call.received_bytes
                self._body = np.empty(call.length, np.uint8).data  # which takes no memory before it is written
                self._body[: self._at] = call.body
                call.drop()

    def eof_received(self) -> bool:
        """Go on with what is complete: a client may close its sending side and wait for the answer."""
        if self._coming is not None or self._current is None or self.transport.get_extra_info("ssl_object"):
            return False
        self._is_half_closed = True
        self._loop.call_later(SOON_GONE_SECONDS, self._find_out, False, SOON_GONE_SECONDS)
        return True

    def pause_writing(self) -> None:
        """Begin nothing more, and watch a client that does not take its answer as fast as it comes."""
        self._is_full = True
        self._unsent_bytes = self.transport.get_write_buffer_size()
        self._unread_s = self._loop.time() + STALL_SECONDS

    def resume_writing(self) -> None:
        """Go on: the answer has been taken but for a little."""
        self._is_full = False
        if self._current is None:
            self._advance()

    # -- the parser's side

    def on_message_begin(self) -> None:
        """Note that a request begins."""
        self._coming = HttpCall(self)
        self._in_head = True
        self._url = self._coding = b""
        self._header_count = 0
        self._begun_s = now_s = self._loop.time()
        if self._current is None:
            self.since_s = now_s
            self._site.limit.enter(self, Phase.RECEIVING)

    def on_url(self, url: bytes) -> None:
        """Take its target, or a part of it."""
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header, without blanks around its value, which are no part of it. Trailers are only counted."""
        self._header_count += 1
        if self._header_count > MAX_HEADERS:
            self._refuse(431, f"more than {MAX_HEADERS} headers")
            raise _RefusedError
        if self._in_head and self._coming is not None:
            spelled, name, value = name, name.lower(), value.strip(b" \t")
            if name == b"transfer-encoding":
                self._coding += value.lower() + b","
            self._coming.headers[name], self._coming.spelled[name] = value, spelled

    def on_headers_complete(self) -> None:
        """See whether its body is wanted, if its turn has come."""
        call, parser = self._coming, self._parser
        assert call is not None and parser is not None, "begun"
        self._progress += 1
        self._in_head = False
        self._begun_s, self._body_bytes = self._loop.time(), 0
        if self._coding not in (b"", b"chunked,"):
            # A proxy may see the end of such a body elsewhere, and take a part of it for a request.
            self._refuse(501, "only chunked is supported as Transfer-Encoding")
            raise _RefusedError
        method, version = parser.get_method(), parser.get_http_version()
        if parser.should_upgrade() and method != b"CONNECT":
            self._offered = without_offer(method, self._url, version, call.headers.items())
            return
        call.method, call.path, call.is_modern = method.decode(), path_of(self._url), version == "1.1"
        call.keeps_alive = method != b"CONNECT" and parser.should_keep_alive()
        call.length = 0 if self._coding else int(call.headers.get(b"content-length", b"0"))
        if self._current is None and not self._is_full:
            self._current = call
            self._open(call)
        else:
            self._behind.append(call)
            self._pause()

    def on_body(self, body: bytes) -> None:
        """Take some of its body."""
        call = self._coming
        assert call is not None, "begun"
        self._progress += 1
        self._note_body(call, len(body))
        if not call.is_answered and call.refusal is None:
            call.add(body)

    def on_message_complete(self) -> None:
        """Have it answered, if its turn has come."""
        call = self._coming
        if self._offered is not None or call is None:
            return
        self._progress += 1
        self._coming = None
        call.is_complete = True
        if self._current is None and not self._behind:  # its body was not wanted
            self.since_s = self._loop.time()
            self._site.limit.enter(self, Phase.IDLE)
        else:
            self._site.limit.enter(self, Phase.ANSWERING)
            if call is self._current:
                self._site.begin(call)

    # -- the site's side

    def tell(self, function: Callable[..., object], *arguments: Any) -> None:
        """Call it, on the event loop. From any thread."""
        if get_ident() == self._site.thread:
            function(*arguments)
        else:
            self._loop.call_soon_threadsafe(function, *arguments)

    def finish(self, call: HttpCall, reply: Reply) -> None:
        """Answer the request whose turn it is, and go on with the next one."""
        if call.is_answered:
            return
        closes = reply.closes or not call.keeps_alive or call.is_streaming
        if call.access is not None and not call.is_streaming:
            call.access.status, call.access.bytes_out = reply.status, reply.size_bytes
        if not (call.is_streaming or self._is_over()):
            kept = b"" if call.is_modern else b"connection: keep-alive\r\n"  # else a client of HTTP/1.0 expects the end
            self._write(reply, _CLOSE if closes else kept, has_body=call.method != "HEAD")
        self._end(call, closes)

    def begin_stream(self, call: HttpCall, content_type: bytes, status: int, closes: bool) -> asyncio.Transport:
        """Begin an answer of pieces; return where they go. `closes`: the connection ends with it."""
        call.is_streaming = True
        if call.access is not None:
            call.access.status = status
        call.keeps_alive = call.keeps_alive and call.is_modern and not closes
        coding = b"transfer-encoding: chunked\r\n" if call.is_modern else b""
        ending = b"" if call.keeps_alive else _CLOSE
        if not self._is_over():
            head = b"%bcontent-type: %b\r\ncache-control: no-store\r\n%b%b%b\r\n"
            self.transport.write(head % (self._status_line(status), content_type, _AT_ONCE, coding, ending))
        return self.transport

    def send(self, call: HttpCall, pieces: Sequence[bytes]) -> None:
        """Send pieces; an empty one ends the call, and the connection unless it is kept."""
        if call.is_answered:
            return
        if call.access is not None:
            call.access.bytes_out += sum(map(len, pieces))
        if not self._is_over():
            chunks = (b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
            self.transport.write(b"".join(chunks if call.is_modern else pieces))
        if not pieces[-1]:
            self._end(call, closes=not call.keeps_alive)

    # -- in between

    def _feed(self, data: bytes | memoryview) -> None:
        """Feed the parser, but ignore an offer of another protocol, behind which it reads nothing more."""
        while True:
            if self._parser is None:
                self._parser = httptools.HttpRequestParser(self)
                self._parser.set_dangerous_leniencies(lenient_data_after_close=True)
            try:
                self._parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                if self._offered is None:
                    return
                data, self._offered = self._offered + bytes(data[upgrade.args[0] :]), None
                self._parser = None
            except httptools.HttpParserInvalidMethodError:
                self._refuse(self._site.unknown_method, "Invalid HTTP request received.")
                return
            except httptools.HttpParserError:
                self._refuse(400, "Invalid HTTP request received.")
                return
            else:
                return

    def _receive_body(self, nbytes: int) -> None:
        """Some of a body has come past the parser."""
        call = self._coming
        assert call is not None, "begun"
        self._arrived_s = self._loop.time()
        self._rest_bytes -= nbytes
        self._at += nbytes
        self._note_body(call, nbytes)
        if not self._rest_bytes:
            if self._body is not None:
                call.add(self._body)
                self._body = None
            self._parser = None  # which waits for the body
            self.on_message_complete()

    def _note_body(self, call: HttpCall, size_bytes: int) -> None:
        """Count what has come of a body, and refuse what is too much. What is not wanted is dropped as it comes."""
        self._body_bytes += size_bytes
        if call.is_answered or call.refusal is not None:
            return
        call.received_bytes += size_bytes
        refusal = self._site.take(call, size_bytes)
        if refusal is not None:
            if call is self._current:
                self.finish(call, refusal)
            else:
                call.refusal = refusal
                call.drop()

    def _end(self, call: HttpCall, closes: bool) -> None:
        """The request whose turn it was has been answered."""
        call.is_answered = True
        if call.access is not None:
            call.access.bytes_in = call.received_bytes
            call.access.end(call.access.status)
        call.drop()
        self._body = None
        self._site.release(call)
        call.end()
        self._current = None
        if closes and call.is_complete:
            self.transport.close()
        elif closes:
            self._linger()
        elif not self._is_advancing:
            self._advance()

    def _open(self, call: HttpCall) -> None:
        """A request's turn has come, and its head is complete."""
        refusal, expects = call.refusal or self._site.open(call), b"expect" in call.headers
        if refusal is not None:
            # A client that asks first may never send the body, so where its next request begins is unknown.
            self.finish(call, replace(refusal, closes=True) if expects else refusal)
        elif expects and call.headers[b"expect"].lower() == b"100-continue":
            self.transport.write(_CONTINUE)

    def _advance(self) -> None:
        """Go on with the requests behind the one that has been answered."""
        self._is_advancing = True
        while self._behind and self._current is None and not self._is_full and not self._is_over():
            self._current = call = self._behind.pop(0)
            self._open(call)
            if call.is_complete and not call.is_answered:
                self._site.begin(call)
        self._is_advancing = False
        if self._is_over():
            return
        if self._current is None and not self._behind:
            self.since_s = self._loop.time()
            self._site.limit.enter(self, Phase.IDLE if self._coming is None else Phase.RECEIVING)
            if self._is_half_closed:
                self.transport.close()
        if self._is_paused and not self._behind:
            self._is_paused = False
            self._begun_s = self._arrived_s = self._loop.time()
            self._body_bytes = 0
            if not self._unfed:  # else in the next turn
                self.transport.resume_reading()

    def _pause(self) -> None:
        if not self._is_paused:
            self._is_paused = True
            self.transport.pause_reading()

    def _status_line(self, status: int) -> bytes:
        """Return what is to be sent of an answer's first line."""
        line, self._told_bytes = _STATUS_LINES[status][self._told_bytes :], 0
        return line

    def _write(self, reply: Reply, connection: bytes, has_body: bool = True) -> None:
        """Send an answer. `connection`: the header that says whether the connection ends, if one does."""
        size_bytes = reply.size_bytes
        head = b"%bcontent-length: %d\r\n" % (self._status_line(reply.status), size_bytes)
        if reply.parts:
            head += b"content-type: %b\r\n" % reply.content_type
        if reply.json_bytes is not None:
            head += b"inference-header-content-length: %d\r\n" % reply.json_bytes
        if reply.encoding:
            head += b"content-encoding: %b\r\n" % reply.encoding.encode()
        if reply.allow:
            head += b"allow: %b\r\n" % reply.allow.encode()
        head += b"%b\r\n" % connection
        if not has_body:
            self.transport.write(head)
        elif size_bytes <= JOIN_BYTES:
            self.transport.write(b"".join((head, *reply.parts)))
        else:
            self.transport.writelines((head, *reply.parts))

    def _refuse(self, status: int, message: str, lingers: bool = True) -> None:
        """Say why, unless an answer to another request is under way, and close."""
        if self._is_over():
            return
        if self._current is None or self._current is self._coming:
            coming = self._coming
            if coming is not None and coming.access is not None:
                coming.access.end(status)
            if coming is None or not coming.is_answered:
                self._write(self._site.refusal(status, message), _CLOSE)
            if lingers:
                self._linger()
                return
        self._unread()
        self.transport.close()

    def _is_over(self) -> bool:
        """Whether nothing more is to be said or understood."""
        return self._is_left or self.transport.is_closing()

    def _linger(self) -> None:
        """Leave the connection to who drops what the client is still sending."""
        self._is_left = True
        self.connection_lost(None)
        Lingering(self._site, self._loop, self.transport)

    def _unread(self) -> bytes:
        """Read what has come already: to a close before that the system adds a reset, which can cost the answer."""
        if not self.transport.get_extra_info("ssl_object"):
            with suppress(OSError), borrowed_socket(self.transport.get_extra_info("socket").fileno()) as own:
                return own.recv(READ_BYTES, socket.MSG_DONTWAIT)
        return b""

    def _hand_over(self, data: bytes) -> None:
        """Leave a client of HTTP/2 to those who tell it that this is not its port."""
        if self._timer is not None:
            self._timer.cancel()
        self._site.transports.discard(self.transport)
        self._site.limit.leave(self)
        self._site.refuse_grpc(self.transport, data + self._unread())

    # -- time

    def _poll(self) -> None:
        """Look whether the client has had its time; one timer sees to everything, and no request touches it."""
        now_s = self._loop.time()
        next_s = now_s + STALL_SECONDS
        if self._is_full:
            if now_s >= self._unread_s:
                before, self._unsent_bytes = self._unsent_bytes, self.transport.get_write_buffer_size()
                if before - self._unsent_bytes < MIN_BYTES_PER_SECOND * STALL_SECONDS:
                    self.transport.abort()
                    return
                self._unread_s = next_s
            next_s = min(next_s, self._unread_s)
        if self.phase in (Phase.SILENT, Phase.IDLE):
            end_s = self.since_s + IDLE_SECONDS
            if now_s >= end_s:
                self.transport.close()
                return
            next_s = min(next_s, end_s)
            self._parser = None  # one that is idle costs less without
        elif self._coming is not None and not self._is_paused:
            end_s = self._begun_s + STALL_SECONDS
            if not self._in_head:
                end_s = min(end_s + self._body_bytes / MIN_BYTES_PER_SECOND, self._arrived_s + STALL_SECONDS)
            if now_s >= end_s:
                rate = f"{STALL_SECONDS} s and a second for each {MIN_BYTES_PER_SECOND} bytes"
                slow = f"the request comes too slowly: it has {rate}, or no byte came for {STALL_SECONDS} s"
                self._refuse(408, slow, lingers=False)
                return
            next_s = min(next_s, end_s)
        self._timer = self._loop.call_later(next_s - now_s, self._poll)

    def _find_out(self, asked: bool, seconds: float) -> None:
        """Find out whether a client that sends nothing more has gone: who has answers with a reset to what it is sent.

        It is sent what the answer begins with, whatever comes. `seconds`: since it was looked before.
        """
        call = self._current
        if self._is_over() or call is None:
            return
        if asked:
            with borrowed_socket(self.transport.get_extra_info("socket").fileno()) as own:
                if own.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _TCP_CLOSE:
                    self.transport.abort()
                    return
        elif not self._is_full and (call.flag is not None or seconds >= GONE_SECONDS):
            if call.is_streaming:
                self.send(call, (COMMENT,))
            else:
                self.transport.write(_VERSION)
                self._told_bytes = len(_VERSION)
            asked = True
        seconds = min(2 * seconds, GONE_SECONDS)
        self._loop.call_later(seconds, self._find_out, asked, seconds)


def path_of(target: bytes) -> bytes:
    """Return the path of a request's target. Raises HttpParserInvalidURLError or ValueError if it is none."""
    if not target.isascii():
        raise ValueError("a target is ASCII")
    if not target.startswith(b"/"):
        return bytes(httptools.parse_url(target).path or b"")
    return target.partition(b"?")[0].partition(b"#")[0]


def without_offer(method: bytes, target: bytes, version: str, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Return the head of a request without its offer of another protocol, which a server may ignore.

    Java's HTTP client and `curl --http2` make such offers. Names of headers are lower-case.
    """
    lines = [b"%b %b HTTP/%b" % (method, target, version.encode())]
    lines += [b"%b: %b" % header for header in headers if header[0] != b"upgrade"]
    return b"\r\n".join([*lines, b"", b""])
