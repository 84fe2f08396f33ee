"""The supervisor's end of a control socket, driven by the event loop."""

import asyncio
import logging
import socket
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from gangway.scheduler.messages import PacketSocket

Message = TypeVar("Message")
_log = logging.getLogger(__name__)


class Link(Generic[Message]):
    """Sends without blocking, in order; calls `on_message` for what comes in.

    A peer that is gone is no error here: what was sent is lost, and the end of its process is noticed elsewhere.
    """

    def __init__(
        self,
        end: socket.socket,
        encode: Callable[[Message], bytes],
        decode: Callable[[bytes], Message],
        on_message: Callable[[Message], None],
        after_send: Callable[[], None] = lambda: None,
    ) -> None:
        self._socket = PacketSocket[Message](end, encode, decode)
        self._on_message = on_message
        self._after_send = after_send
        self._unsent: deque[Message] = deque()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket.fileno(), self._read)
        self._open = True

    def send(self, message: Message) -> None:
        """Send now, or as soon as there is room."""
        self._unsent.append(message)
        if len(self._unsent) == 1:
            self._flush()

    def close(self) -> None:
        """Handle what the peer has said until now and close this end. Calling it again does nothing."""
        self._read()
        if self._open:
            self._open = False
            self._unsent.clear()
            self._loop.remove_reader(self._socket.fileno())
            self._loop.remove_writer(self._socket.fileno())
            self._socket.close()

    def _flush(self) -> None:
        while self._open and self._unsent:
            try:
                self._socket.send(self._unsent[0])
            except BlockingIOError:
                self._loop.add_writer(self._socket.fileno(), self._flush)
                break
            except OSError:
                self._unsent.clear()
                break
            self._unsent.popleft()
        else:
            if self._open:
                self._loop.remove_writer(self._socket.fileno())
        self._after_send()

    def _read(self) -> None:
        try:
            while self._open and (message := self._socket.receive()) is not None:
                self._on_message(message)
        except EOFError:
            self._loop.remove_reader(self._socket.fileno())
        except ValueError:
            _log.exception("a control message makes no sense")
