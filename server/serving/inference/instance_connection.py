"""A connection to an instance of a Python model, on the loop (the messages: `python_backend/messages.py`)."""

import json
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any, Final

from gangway.python_backend.messages import (
    MAX_HEADER_BYTES,
    PREFIX,
    Buffer,
    Message,
    PayloadTooLargeError,
    is_same_user,
)
from gangway.server.serving.loop import ServingLoop

CONNECT_TIMEOUT_S: Final = 30.0
CONNECT_AGAIN_S: Final = 0.002  # after so many others that the instance has accepted none of the last ones
TURN_BYTES: Final = 1 << 20  # are read before others on the loop have their turn
READ_BYTES: Final = 2 << 10  # of short messages are: some tens, each of which is some work
MOST_IDLE: Final = 4  # connections to one instance
MOST_PARTS: Final = 64  # of a message are sent at once


_scratch: Final = memoryview(bytearray(READ_BYTES))  # what any instance has sent, until it is understood


class InstanceConnection:
    """Sends and receives messages. For the loop's thread.

    `received` is called with each message, several in one turn; what it raises ends the connection, too. Equal headers
    may be one object. `lost` is called once if the connection ends by itself, with the reason; also while it is made.
    `most_bytes`: of a payload that it receives. `hello`: the header of the first message, when that has come.
    """

    def __init__(
        self,
        serving: ServingLoop,
        address: str,
        most_bytes: int,
        received: Callable[[Message], None],
        lost: Callable[[Exception], None],
    ) -> None:
        """Begin to connect. Raises OSError if there is no descriptor for it."""
        self._loop, self._turn = serving.loop, serving.turn
        self._address = address
        self._most_bytes = most_bytes
        self._received = received
        self._lost = lost
        self._unsent: deque[memoryview] = deque()
        self._is_connected = self._is_closed = self._is_finished = False
        self._connect_until_s = time.monotonic() + CONNECT_TIMEOUT_S
        self._view = memoryview(bytearray(PREFIX.size))  # what is being read
        self._filled = 0
        self._take: Callable[[memoryview], None] = self._take_prefix  # it, when all of it is there
        self._payload_bytes = 0
        self._header: dict[str, Any] = {}
        self.hello: Mapping[str, Any] = {}
        self._header_text = b"{}"
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.setblocking(False)
        self._connect()

    def send(self, header: Mapping[str, Any], payload: Sequence[Buffer] = ()) -> None:
        """Send a message, as soon as that is possible. The payload must not change until then."""
        text = json.dumps(header).encode()
        self._unsent.append(memoryview(PREFIX.pack(len(text), sum(map(len, payload))) + text))
        self._unsent.extend(memoryview(part) for part in payload if len(part))
        self._send_on()

    def serve(self, most_bytes: int, received: Callable[[Message], None], lost: Callable[[Exception], None]) -> None:
        """Be somebody else's, as if it were made anew."""
        self._most_bytes, self._received, self._lost = most_bytes, received, lost

    @property
    def is_idle(self) -> bool:
        """Whether it is made, and neither of the two is amid a message."""
        is_amid = self._unsent or self._filled or len(self._view) != PREFIX.size
        return self._is_connected and not (self._is_closed or self._is_finished or is_amid)

    def finish(self) -> None:
        """Close it when all has been sent."""
        self._is_finished = True
        self._send_on()

    def close(self) -> None:
        """Let go of it; while it is made, as soon as what is to be sent has been. Calling it again does nothing."""
        if not self._is_connected and self._unsent:
            self._is_finished = True  # the instance must hear of a request before it can forget it
        elif not self._is_closed:
            self._is_closed = True
            if self._is_connected:
                self._loop.remove_reader(self._socket.fileno())
                self._loop.remove_writer(self._socket.fileno())
            self._socket.close()
            self._unsent.clear()

    def _connect(self) -> None:
        if self._is_closed:
            return
        try:
            self._socket.connect(self._address)
            if not is_same_user(self._socket):
                raise OSError("another user's process has the address of an instance")
        except BlockingIOError as error:
            if time.monotonic() < self._connect_until_s:
                self._loop.call_later(CONNECT_AGAIN_S, self._connect)
            else:
                self._loop.call_soon(self._end, error)
        except OSError as error:
            self._loop.call_soon(self._end, error)  # not before its maker has returned
        else:
            self._is_connected = True
            self._loop.add_reader(self._socket.fileno(), self._read)
            self._send_on()

    def _end(self, error: Exception) -> None:
        if not self._is_closed:
            self._unsent.clear()
            self.close()
            self._lost(error)

    # -- sending

    def _send_on(self) -> None:
        if self._is_closed or not self._is_connected:
            return
        try:
            while self._unsent:
                sent = self._socket.sendmsg(list(islice(self._unsent, MOST_PARTS)))
                while self._unsent and sent >= len(self._unsent[0]):
                    sent -= len(self._unsent.popleft())
                if sent:
                    self._unsent[0] = self._unsent[0][sent:]
        except BlockingIOError:
            self._loop.add_writer(self._socket.fileno(), self._send_on)
        except OSError as error:
            self._loop.call_soon(self._end, error)  # not before the sender has returned
        else:
            self._loop.remove_writer(self._socket.fileno())
            if self._is_finished:
                self.close()

    # -- receiving

    def _read(self) -> None:
        self._turn.begin()
        try:
            self._read_some()
        except BlockingIOError:
            pass
        except (EOFError, OSError, ValueError) as error:
            self._end(error)
        finally:
            self._turn.end()

    def _read_some(self) -> None:
        """Read short messages at once, or what is missing of a long one. Raises EOFError, ValueError, OSError."""
        left_bytes = TURN_BYTES
        while left_bytes > 0 and not self._is_closed:
            missing = self._view[self._filled :]
            is_long = len(missing) >= READ_BYTES
            count = self._socket.recv_into(missing[:left_bytes] if is_long else _scratch)
            if not count:
                raise EOFError("the instance has closed the connection")
            left_bytes -= count
            if is_long:
                self._filled += count
                self._take_whole()
            else:
                self._fill(_scratch[:count])
                if len(self._view) - self._filled < READ_BYTES:
                    return

    def _fill(self, data: memoryview) -> None:
        while len(data) and not self._is_closed:
            count = min(len(data), len(self._view) - self._filled)
            self._view[self._filled : self._filled + count] = data[:count]
            self._filled += count
            data = data[count:]
            self._take_whole()

    def _take_whole(self) -> None:
        while self._filled == len(self._view) and not self._is_closed:
            self._take(self._view)

    def _expect(self, size_bytes: int, take: Callable[[memoryview], None]) -> None:
        self._view, self._filled, self._take = memoryview(bytearray(size_bytes)), 0, take

    def _take_prefix(self, view: memoryview) -> None:
        header_bytes, self._payload_bytes = PREFIX.unpack(view)
        if header_bytes > MAX_HEADER_BYTES:
            raise ValueError(f"a message of {header_bytes} and {self._payload_bytes} bytes")
        if self._payload_bytes > self._most_bytes:
            raise PayloadTooLargeError(self._payload_bytes)
        self._expect(header_bytes, self._take_header)

    def _take_header(self, view: memoryview) -> None:
        text = bytes(view)
        if text != self._header_text:  # most responses of a stream have the last one's
            header = json.loads(text)
            if not isinstance(header, dict):
                raise ValueError("a message whose header is no object")
            self._header, self._header_text = header, text
        self._expect(self._payload_bytes, self._take_payload)

    def _take_payload(self, view: memoryview) -> None:
        header = self._header
        self.hello = self.hello or header
        self._expect(PREFIX.size, self._take_prefix)
        self._received(Message(header, view))


class InstanceConnections:
    """Keeps connections that their users are done with for the next ones: a new one costs the instance a thread."""

    def __init__(self, serving: ServingLoop) -> None:
        self._serving = serving
        self._idle: dict[str, list[InstanceConnection]] = {}  # by address

    def take(
        self, address: str, most_bytes: int, received: Callable[[Message], None], lost: Callable[[Exception], None]
    ) -> InstanceConnection:
        """Return a connection, as `InstanceConnection` makes it. Raises OSError."""
        if idle := self._idle.get(address):
            connection = idle.pop()
            if not idle:
                del self._idle[address]
            connection.serve(most_bytes, received, lost)
            return connection
        return InstanceConnection(self._serving, address, most_bytes, received, lost)

    def give(self, address: str, connection: InstanceConnection) -> None:
        """Keep a connection on which nothing is to come; or close it."""
        if len(self._idle.get(address, ())) >= MOST_IDLE or not connection.is_idle:
            connection.close()
            return
        idle = self._idle.setdefault(address, [])

        def lost(_: Exception) -> None:
            idle.remove(connection)
            if not idle:
                del self._idle[address]

        connection.serve(0, _refuse, lost)
        idle.append(connection)


def _refuse(message: Message) -> None:
    raise ValueError("a message that nobody has asked for")
