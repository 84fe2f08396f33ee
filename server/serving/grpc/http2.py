"""HTTP/2 of a server, as a state machine over bytes: connections, streams, flow control, keepalive, bounds.

This is the only file that knows ngh2, which is nghttp2 without sockets. What a stream means is up to its user.
All of it runs in the event loop's thread.

Flow control is the backpressure. A client may send `WINDOW_BYTES` of a stream; further bytes are asked for as the user
acknowledges what has come. Answers leave as the client's windows and the transport have room.

Connections take turns. What one of them has sent is dealt with for SLICE_S at most, then the others have their turn.
Nothing is read of it until that is done.

Bounds for hostile peers stand below, each as a constant. A peer beyond one of them loses its connection, nobody else
notices.
"""

import asyncio
import logging
import math
import re
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeAlias, cast

import ngh2
from ngh2 import events as h2
from ngh2.enums import ErrorCode, Setting

from gangway.server.options.endpoints import KeepaliveOptions
from gangway.server.serving.limits import ConnectionLimit, Phase
from gangway.server.serving.loop import SLICE_S, LoopTurn
from gangway.server.serving.tls import ArrivingConnection

_log = logging.getLogger(__name__)

Header: TypeAlias = tuple[bytes, bytes]
Headers: TypeAlias = Sequence[Header]

MAX_STREAMS: Final = 1024  # of a connection at a time, as many as request slots
TABLE_BYTES: Final = 4096  # of headers that the client may refer to, and the server: HTTP/2's own
FRAME_BYTES: Final = 65536  # an image comes in ten steps, not in forty; freed memory of longer ones costs page faults
WINDOW_BYTES: Final = 4 << 20  # of a stream may come unasked
CONNECTION_WINDOW_BYTES: Final = 16 << 20  # of all streams of a connection, until the server has acknowledged them
READ_BYTES: Final = 256 << 10  # of a connection are read in a turn
PIECE_BYTES: Final = (1 << 10, 64 << 10)  # of them are understood at once: some tens of calls; of a long message, more
FEW_EVENTS: Final = 8  # are dealt with at once, and a longer piece is understood next
WRITE_BYTES: Final = 256 << 10  # are given to the transport at once,
TURN_BYTES: Final = 512 << 10  # and so many in a turn
BUFFER_BYTES: Final = 1 << 20  # of a transport that the client's socket does not take

MAX_EXPANDED_BYTES: Final = 256 * 1024  # of headers, unpacked, that are read at all
MAX_EXPANDED_HEADERS: Final = 8192
MAX_CONTINUATIONS: Final = 16  # frames of one header block
RESETS: Final = (2000, 1000)  # streams that a client may reset at once, and in a second
GLITCHES: Final = (10_000, 330)  # frames that make no sense, but do no harm: at once, and in a second
MAX_UNSENT_ACKS: Final = 1000  # of pings and settings, to a client that does not read
MAX_SETTINGS: Final = 32  # in one frame
MAX_FRUITLESS: Final = 10_000  # frames in a row without a request, bytes of a message, or room for an answer
SETTINGS_TIMEOUT_S: Final = 20.0  # for the client's hello, and to acknowledge ours
STALL_S: Final = 60.0  # a client that takes no byte for so long, while the transport has some for it, counts as gone
CLOSE_S: Final = 5.0  # for a client to take what is sent last
RESET_S: Final = 1.0  # after an answer, for a client to say that it sends nothing more
INTERNAL_ERROR: Final = ErrorCode.INTERNAL_ERROR
UNCALLED_PING_S: Final = 7200.0  # between pings of clients without calls, unless they may

_CONFIGURATION: Final = ngh2.Configuration(
    auto_window_update=False,
    max_deflate_dynamic_table_size=TABLE_BYTES,
    max_outbound_ack=MAX_UNSENT_ACKS,
    max_settings=MAX_SETTINGS,
    stream_reset_rate_limit=RESETS,
    glitch_rate_limit=GLITCHES,
    max_continuations=MAX_CONTINUATIONS,
    max_inbound_header_list_size=MAX_EXPANDED_BYTES,
    max_inbound_header_count=MAX_EXPANDED_HEADERS,
)
_SETTINGS: Final = {
    Setting.MAX_CONCURRENT_STREAMS: MAX_STREAMS,
    Setting.MAX_FRAME_SIZE: FRAME_BYTES,
    Setting.HEADER_TABLE_SIZE: TABLE_BYTES,
}
_HTTP1: Final = re.compile(rb"(?!PRI )[A-Z]{3,16} [!-~]")  # how a request begins; "PRI * HTTP/2.0" is HTTP/2's
_GOAWAY: Final = struct.Struct(">BHBBIII")  # length (3 bytes), type, flags, stream, last stream, code
_GOAWAY_TYPE: Final = 7
_PING: Final = b"gangway!"
_SILENT, _IDLE, _RECEIVING, _ANSWERING = Phase  # an attribute of an Enum takes longer
_ANY_STREAM: Final = (1 << 31) - 1  # may have been dealt with, so the client repeats none by itself


def _note_late(error: ngh2.NGH2Error) -> None:
    """Something was to be sent on a stream, or a connection, that has ended meanwhile: nobody waits for it."""
    _log.debug("something cannot be sent any more: %s", error)


class StreamUser(Protocol):
    """What a stream is used for, such as a call of gRPC."""

    def receive(self, data: bytes, ended: bool) -> None:
        """Bytes have come, which are to be acknowledged; `ended`: they are the last ones."""

    def progressed(self) -> None:
        """Something has been sent. Only who has asked `watch` for it is told."""

    def closed(self) -> None:
        """The stream is over: all has been sent, or the client has given it up, or the connection is lost."""


class Application(Protocol):
    """What connections serve."""

    def begin(self, connection: "Http2Connection", stream: int, headers: Headers) -> StreamUser | None:
        """Return who uses a stream that begins; None: it has been dealt with."""
        ...


@dataclass
class Connections:
    """What the connections of a server share. For one event loop's thread, whose turns are `turn`.

    `header_bytes`: of a stream, that clients are asked not to exceed. `window_bytes`: see WINDOW_BYTES. `http1_answer`:
    what a client of HTTP/1.1 is sent, if anything.
    """

    loop: asyncio.AbstractEventLoop
    turn: LoopTurn
    application: Application
    limit: ConnectionLimit
    keepalive: KeepaliveOptions
    header_bytes: int
    window_bytes: int = WINDOW_BYTES
    http1_answer: Callable[[], bytes] | None = None

    def __post_init__(self) -> None:
        self.open: set[Http2Connection] = set()
        self.scratch = memoryview(bytearray(READ_BYTES))  # what any connection has sent, until it is understood

    def make(self) -> "Http2Connection":
        """Return the protocol of a further connection."""
        return Http2Connection(self)

    @property
    def idle(self) -> bool:
        """Whether the system has every byte of every answer."""
        return all(connection.idle for connection in self.open)


class Http2Connection(ArrivingConnection, asyncio.BufferedProtocol):
    """One connection. Its `streams` are used by what the application returns for each.

    `waiting`: how many streams wait for the server, as their users say; the connection of none may give way.
    """

    __slots__ = (
        "_age_timer", "_arriving", "_due", "_ends", "_fruitless", "_has_begun", "_has_sent", "_http",
        "_is_acknowledged", "_is_paused", "_is_waiting", "_last_ping_s", "_piece_bytes", "_pinged_s", "_pings",
        "_received_s", "_receiving", "_rest", "_shared", "_stall_timer", "_strikes", "_taken", "_timer", "_to_reset",
        "_transport", "_unsent_bytes", "_watching", "_will_flush", "is_for_health", "phase", "since_s", "streams",
        "waiting",
    )  # fmt: skip

    def __init__(self, shared: Connections) -> None:
        self._shared = shared
        self._http = ngh2.Connection(ngh2.Role.SERVER, _CONFIGURATION)
        self._transport: asyncio.Transport = cast("asyncio.Transport", None)
        self._arriving: socket.socket | None = None  # until the TLS handshake is over
        self.streams: dict[int, StreamUser] = {}
        self._receiving: set[int] = set()  # streams of which the client may send more
        self.waiting = 0
        self.phase = _SILENT
        self.since_s = self._received_s = shared.loop.time()
        self.is_for_health = False
        self._timer: asyncio.TimerHandle | None = None
        self._age_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self._has_begun = self._is_acknowledged = self._is_paused = self._will_flush = self._ends = False
        self._has_sent = False  # something of an answer since the client's last ping
        self._unsent_bytes = 0  # of answers, when that ping came
        self._fruitless = self._strikes = self._pings = 0
        self._last_ping_s = -math.inf
        self._pinged_s = 0.0  # when the ping was sent that is not answered; 0: there is none
        self._to_reset: list[int] = []
        self._due: deque[h2.Event] = deque()  # what has come, and is to be dealt with
        self._rest = memoryview(b"")  # of what has come, and is to be understood
        self._is_waiting = False  # for its turn; nothing is read
        self._piece_bytes = PIECE_BYTES[0]
        self._taken: dict[int, int] = {}  # bytes by stream that the client is to be told of
        self._watching: set[StreamUser] = set()

    @property
    def peer(self) -> Any:
        """The client's address, as a socket has it."""
        return self._transport.get_extra_info("peername")

    # -- the transport's side

    def arrive(self, own: socket.socket) -> bool:
        """A client has connected, and its TLS handshake begins; False: there is no room for it."""
        self._arriving = own
        if self._shared.limit.admit(self, self.since_s):
            return True
        self._shared.limit.leave(self)
        return False

    def depart(self) -> None:
        """The handshake has failed."""
        self._shared.limit.leave(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Refuse what is too much. The server's hello leaves with the first turn: a client may speak HTTP/1.1."""
        self._transport = cast("asyncio.Transport", transport)
        shared = self._shared
        if self._arriving is None and not shared.limit.admit(self, self.since_s):
            self._transport.abort()
            return
        self._arriving = None
        shared.open.add(self)
        self._transport.set_write_buffer_limits(high=BUFFER_BYTES)
        own = {Setting.INITIAL_WINDOW_SIZE: shared.window_bytes, Setting.MAX_HEADER_LIST_SIZE: shared.header_bytes}
        self._http.initiate_connection({**_SETTINGS, **own})
        self._http.set_local_window_size(CONNECTION_WINDOW_BYTES)
        self._timer = shared.loop.call_later(SETTINGS_TIMEOUT_S, self._poll)
        if (age_ms := shared.keepalive.max_connection_age_ms) is not None:
            self._age_timer = shared.loop.call_later(age_ms / 1000, self._grow_old)

    def connection_lost(self, exc: Exception | None) -> None:
        """End what is under way."""
        self._ends = True
        self._shared.open.discard(self)
        self._shared.limit.leave(self)
        for timer in (self._timer, self._age_timer, self._stall_timer):
            if timer is not None:
                timer.cancel()
        self._timer = self._age_timer = self._stall_timer = None
        users, self.streams = self.streams, {}
        for user in users.values():
            user.closed()

    def give_way(self) -> None:
        """Close in favour of another connection."""
        if self._arriving is not None:
            try:
                self._arriving.shutdown(socket.SHUT_RDWR)
            except OSError:
                _log.debug("a connection that is to give way is gone")
        elif self._transport.get_write_buffer_size():
            self._transport.abort()
        else:
            self.end(ErrorCode.NO_ERROR)

    def abort(self) -> None:
        """Close at once."""
        self._transport.abort()

    def pause_writing(self) -> None:
        """Keep what is to be sent, and see whether the client takes what the transport has."""
        self._is_paused = True
        size_bytes = self._transport.get_write_buffer_size()
        self._stall_timer = self._shared.loop.call_later(STALL_S, self._poll_stall, size_bytes)

    def resume_writing(self) -> None:
        """Send on."""
        self._is_paused = False
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None
        self.flush()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return where the next bytes go."""
        return self._shared.scratch

    def buffer_updated(self, nbytes: int) -> None:
        """Do what they mean."""
        self.data_received(self._shared.scratch[:nbytes])

    def data_received(self, data: bytes | memoryview) -> None:
        """Do what the bytes mean, in this turn of the loop or in the next ones."""
        if self._ends:  # a client of HTTP/1.1 may still be sending
            return
        self._received_s = self._shared.loop.time()
        if not self._has_begun:
            self._has_begun = True
            if self._shared.http1_answer is not None and _HTTP1.match(data):
                self._answer_http1(self._shared.http1_answer())
                return
        self._rest = memoryview(b"".join((self._rest, data)) if self._rest else data)
        self._go_on(more=len(data) == READ_BYTES)
        if self._rest:
            self._rest = memoryview(bytes(self._rest))  # others need the scratch memory

    def _go_on(self, more: bool = False) -> None:
        """Do what is to be done of what has come, as long as the turn lasts. `more`: there is more to be read."""
        if self._ends:
            return
        shared, http, due = self._shared, self._http, self._due
        end_s = time.monotonic() + SLICE_S if due else 0.0
        self._will_flush = True  # all that is answered at once leaves together
        shared.turn.begin()
        try:
            while not self._ends and (due or self._rest):
                if due:
                    self._handle((due.popleft(),))
                else:
                    self._understand_piece()
                if not (due or self._rest):
                    break
                if not end_s:
                    end_s = time.monotonic() + SLICE_S
                elif time.monotonic() >= end_s:
                    more = True
                    break
            if more or self._is_waiting:
                self._take_turns(more)
            if self._taken:
                self._tell_taken()
            if http.want_write or not http.want_read:
                self.flush()
            else:
                self._will_flush = False
            self._note_phase()
        except ngh2.NGH2Error as error:  # too much, or no HTTP/2 at all: nghttp2 says nothing more itself
            _log.debug("a connection is ended: %s", error)
            denied = isinstance(error, ngh2.DenialOfServiceError)
            self._break_off(ErrorCode.ENHANCE_YOUR_CALM if denied else ErrorCode.PROTOCOL_ERROR)
        finally:
            shared.turn.end()

    def _understand_piece(self) -> None:
        """Understand some of what has come, and deal with it if that is little."""
        size_bytes, (least_bytes, most_bytes) = self._piece_bytes, PIECE_BYTES
        piece, self._rest = self._rest[:size_bytes], self._rest[size_bytes:]
        self._http.receive_data(piece)
        events = self._http.events()
        if len(events) > FEW_EVENTS:
            self._piece_bytes = least_bytes
            self._due.extend(events)
            return
        if len(piece) == size_bytes < most_bytes:
            self._piece_bytes *= 4
        self._handle(events)

    def _take_turns(self, more: bool) -> None:
        """Read nothing until the next turn if there is `more` to do, and then read on."""
        if self._ends or self._transport.is_closing():
            return
        if more != self._is_waiting:
            self._is_waiting = more
            if more:
                self._transport.pause_reading()
            else:
                self._transport.resume_reading()
        if more:
            self._shared.loop.call_soon(self._go_on)

    # -- the users' side

    @property
    def idle(self) -> bool:
        """Whether the system has every byte of every answer that has ended."""
        return self._transport.get_write_buffer_size() == 0

    def acknowledge(self, stream: int, size: int) -> None:
        """The user has taken so many bytes: the client may send as many more."""
        if size:
            self._taken[stream] = self._taken.get(stream, 0) + size
            if not self._will_flush:
                self._flush_soon()

    def watch(self, user: StreamUser) -> None:
        """Tell a user from now on when something has been sent."""
        self._watching.add(user)

    def start(self, stream: int, headers: Headers) -> None:
        """Begin an answer, of which something follows at once."""
        try:
            self._http.send_response(stream, headers)
        except ngh2.NGH2Error as error:
            _note_late(error)

    def send(self, stream: int, parts: Iterable[bytes]) -> None:
        """Send bytes of an answer that has begun."""
        try:
            for part in parts:
                self._http.send_data(stream, part)
            self._sent()
        except ngh2.NGH2Error as error:
            _note_late(error)

    def finish(self, stream: int, trailers: Headers) -> None:
        """End an answer that has begun."""
        try:
            self._http.send_trailers(stream, trailers)
            self._sent(stream)
        except ngh2.NGH2Error as error:
            _note_late(error)

    def respond(self, stream: int, headers: Headers, parts: Iterable[bytes], trailers: Headers = ()) -> None:
        """Send a whole answer."""
        http = self._http
        try:
            http.send_response(stream, headers)
            for part in parts:
                http.send_data(stream, part)
            if trailers:
                http.send_trailers(stream, trailers)
            else:
                http.end_stream(stream)
            self._sent(stream)
        except ngh2.NGH2Error as error:
            _note_late(error)

    def refuse(self, stream: int, headers: Headers) -> None:
        """Send an answer that has no body."""
        try:
            self._http.send_response(stream, headers, end_stream=True)
            self._sent(stream)
        except ngh2.NGH2Error as error:
            _note_late(error)

    def reset(self, stream: int, code: int = ErrorCode.CANCEL) -> None:
        """Give a stream up."""
        try:
            self._http.reset_stream(stream, code)
            self._sent()
        except ngh2.NGH2Error as error:
            _note_late(error)

    def unsent_bytes(self, stream: int) -> int:
        """Return how many bytes of an answer wait for the client's window, or for the transport."""
        try:
            return self._http.queued_body_size(stream)
        except ngh2.NGH2Error:
            return 0

    def flush(self) -> None:
        """Give the transport what there is to send."""
        self._will_flush = False
        if self._ends:
            return
        http, transport = self._http, self._transport
        try:
            if self._taken:
                self._tell_taken()
            left_bytes = TURN_BYTES
            while not self._is_paused and (out := http.data_to_send(WRITE_BYTES)):
                transport.write(out)
                left_bytes -= len(out)
                if left_bytes <= 0:  # a socket may take megabytes
                    self._will_flush = True
                    self._shared.loop.call_soon(self._flush_late)
                    break
            events = http.events()
            if self._due:
                self._due.extend(events)  # in their order
            elif events:
                self._handle(events)
            if self._to_reset:
                self._settle_answered()
            if self._watching:
                for user in tuple(self._watching):
                    user.progressed()
            if not http.want_read and not http.want_write:
                self._close()
        except ngh2.NGH2Error as error:
            _log.debug("a connection is ended: %s", error)
            self._break_off(ErrorCode.INTERNAL_ERROR)

    def end(self, code: int, reason: bytes = b"") -> None:
        """Say that the connection ends, and why, and close it."""
        if not self._ends:
            try:
                self._http.send_goaway(code, debug_data=reason)
                self._transport.write(self._http.data_to_send())
            except ngh2.NGH2Error as error:
                _note_late(error)
            self._close()

    def _tell_taken(self) -> None:
        """Tell the client what has been taken."""
        taken, self._taken = self._taken, {}
        for stream, size in taken.items():
            try:
                self._http.acknowledge_received_data(size, stream)
            except ngh2.NGH2Error as error:
                _note_late(error)

    # -- what has come

    def _handle(self, events: Iterable[h2.Event]) -> None:
        for event in events:
            _HANDLERS.get(type(event), _OTHER)(self, event)

    def _request(self, event: h2.RequestReceived) -> None:
        self._fruitless = 0
        stream = event.stream_id
        if self.phase is _SILENT or self.is_for_health:
            self.is_for_health = self._shared.limit.is_reserved(self)
            self._shared.limit.enter(self, _RECEIVING)  # also if it is answered before anybody looks
        if not event.end_stream:
            self._receiving.add(stream)
        user = self._shared.application.begin(self, stream, event.headers)
        if user is not None:
            self.streams[stream] = user
            if event.end_stream:
                user.receive(b"", True)

    def _data(self, event: h2.DataReceived) -> None:
        data, stream, ended = event.data, event.stream_id, event.end_stream
        if data:
            self._fruitless = 0
        if ended:
            self._receiving.discard(stream)
        user = self.streams.get(stream)
        if user is not None:
            user.receive(data, ended)
        else:
            self.acknowledge(stream, len(data))

    def _stream_closed(self, event: h2.StreamClosed) -> None:
        self._receiving.discard(event.stream_id)
        user = self.streams.pop(event.stream_id, None)
        if user is not None:
            self._watching.discard(user)
            user.closed()

    def _other(self, event: h2.Event) -> None:
        """Frames that ask for nothing. Too many of them in a row are all that a client wants."""
        if isinstance(event, h2.WindowUpdated) and self.streams:
            return
        self._fruitless += 1
        if self._fruitless > MAX_FRUITLESS:
            self.end(ErrorCode.ENHANCE_YOUR_CALM, b"too many frames without a request")
        elif isinstance(event, h2.PingReceived):
            self._judge_ping()
        elif isinstance(event, h2.SettingsAcknowledged | h2.PingAcknowledged):
            if not self._is_acknowledged or self._pinged_s:
                self._is_acknowledged, self._pinged_s = True, 0.0
                if self._timer is not None:
                    self._timer.cancel()
                    self._poll()
        elif isinstance(event, h2.TrailersReceived):
            self._receiving.discard(event.stream_id)
            user = self.streams.get(event.stream_id)
            if user is not None:
                user.receive(b"", True)

    def _judge_ping(self) -> None:
        """Send a client away that pings too often without anything being sent to it, as gRPC's core does."""
        keepalive, now_s = self._shared.keepalive, self._shared.loop.time()
        least_s = keepalive.min_recv_ping_interval_without_data_ms / 1000
        if not self.streams and not keepalive.permit_without_calls:
            least_s = UNCALLED_PING_S
        unsent_bytes = sum(map(self.unsent_bytes, self.streams))
        if self._has_sent or unsent_bytes < self._unsent_bytes:  # a long answer goes on
            self._strikes = 0
        elif now_s < self._last_ping_s + least_s:
            self._strikes += 1
        self._last_ping_s, self._has_sent, self._unsent_bytes = now_s, False, unsent_bytes
        if self._strikes > keepalive.max_ping_strikes > 0:
            self.end(ErrorCode.ENHANCE_YOUR_CALM, b"too_many_pings")

    # -- what is sent

    def _sent(self, answered: int = 0) -> None:
        """Something of an answer is on its way; all of the answer to this stream, if it is one."""
        if answered in self._receiving:
            self._to_reset.append(answered)
        self._has_sent = True
        self._pings = self._fruitless = 0
        if not self._will_flush:
            self._flush_soon()

    def _flush_soon(self) -> None:
        """Send, together with what else is answered in the same turn of the loop."""
        self._will_flush = True
        self._shared.turn.at_end(self._flush_late)

    def _flush_late(self) -> None:
        self.flush()
        self._note_phase()

    def _settle_answered(self) -> None:
        """Leave it to clients to end what they are still sending: some lose an answer that a reset comes with."""
        open_streams = [stream for stream in self._to_reset if stream in self._receiving and stream in self.streams]
        self._to_reset = []
        if open_streams:
            self._shared.loop.call_later(RESET_S, self._reset_answered, open_streams)

    def _reset_answered(self, streams: Sequence[int]) -> None:
        """End streams that are answered, but whose client has not said that it sends nothing more."""
        if self._ends:
            return
        for stream in streams:
            if stream not in self._receiving or stream not in self.streams:
                continue
            if self.unsent_bytes(stream):
                self._to_reset.append(stream)
            else:
                self._http.reset_stream(stream, ErrorCode.NO_ERROR)
        self.flush()

    def _note_phase(self) -> None:
        """Say what the connection is doing."""
        phase = _ANSWERING if self.waiting else _RECEIVING if self.streams else _IDLE
        if phase is not self.phase and not (phase is _IDLE and self.phase is _SILENT):
            self.since_s = self._shared.loop.time()
            self._shared.limit.enter(self, phase)

    def _break_off(self, code: int) -> None:
        """End a connection of which nghttp2 wants to know nothing more."""
        if not self._ends:
            self._transport.write(_GOAWAY.pack(0, 8, _GOAWAY_TYPE, 0, 0, _ANY_STREAM, code))
            self._close()

    def _answer_http1(self, answer: bytes) -> None:
        """Send what a client of HTTP/1.1 reads; a close while it is still sending would overtake that."""
        self._transport.write(answer)
        if not self._transport.can_write_eof():  # TLS has no such thing
            self._close()
            return
        self._transport.write_eof()
        self._abort_late()

    def _close(self) -> None:
        self._transport.close()
        self._abort_late()

    def _abort_late(self) -> None:
        """Do nothing more, and lose the connection after a while."""
        self._ends = True
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._shared.loop.call_later(CLOSE_S, self._transport.abort)

    # -- time

    def _poll(self) -> None:
        """Look whether the client is there: by its hello at first, by pings later."""
        shared, now_s = self._shared, self._shared.loop.time()
        if not self._is_acknowledged:
            self._break_off(ErrorCode.SETTINGS_TIMEOUT)
            return
        keepalive = shared.keepalive
        if self._pinged_s and self._received_s <= self._pinged_s:
            self._transport.abort()
            return
        self._pinged_s = 0.0
        next_s = self._received_s + keepalive.time_ms / 1000
        if next_s <= now_s:
            next_s = now_s + keepalive.time_ms / 1000
            may_ping = self._pings < keepalive.max_pings_without_data or not keepalive.max_pings_without_data
            if may_ping and (self.streams or keepalive.permit_without_calls):
                self._pings += 1
                self._pinged_s, next_s = now_s, now_s + keepalive.timeout_ms / 1000
                self._http.ping(_PING)
                self.flush()
        if not self._ends:
            self._timer = shared.loop.call_later(next_s - now_s, self._poll)

    def _poll_stall(self, before_bytes: int) -> None:
        """Look whether the client has taken anything of what the transport has for it."""
        size_bytes = self._transport.get_write_buffer_size()
        if size_bytes >= before_bytes:
            self._transport.abort()
        else:
            self._stall_timer = self._shared.loop.call_later(STALL_S, self._poll_stall, size_bytes)

    def _grow_old(self) -> None:
        """Ask the client to connect anew; calls that are under way may go on for the grace time."""
        grace_ms = self._shared.keepalive.max_connection_age_grace_ms
        self._age_timer = None
        if grace_ms is not None:
            self._age_timer = self._shared.loop.call_later(grace_ms / 1000, self._transport.abort)
        self.go_away()

    def go_away(self) -> None:
        """Take no further stream, and close when those that there are have ended."""
        if not self._ends:
            try:
                self._http.send_goaway(ErrorCode.NO_ERROR)
            except ngh2.NGH2Error as error:
                _note_late(error)
            self.flush()


_HANDLERS: Final[dict[type[h2.Event], Callable[[Http2Connection, Any], None]]] = {
    h2.DataReceived: Http2Connection._data,
    h2.RequestReceived: Http2Connection._request,
    h2.StreamClosed: Http2Connection._stream_closed,
}
_OTHER: Final = Http2Connection._other
