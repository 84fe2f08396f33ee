"""Other processes as the supervisor speaks with them: control sockets that its event loop drives."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from gangway.executor.peer import Peer

Message = TypeVar("Message")
MAX_UNSENT: Final = 1 << 16  # messages that wait for room in a socket: more than a successor is told at its start
BATCH: Final = 64  # messages of one peer that are handled before others have their turn
_log = logging.getLogger(__name__)


class AsyncPeer(Generic[Message]):
    """A peer that the event loop reads and writes. Sends in order and never blocks.

    `on_message` gets each message with the descriptor that came along, which is then its own, or -1. `after_send` is
    called after each attempt to send. A closed other end is no error here: what was sent is lost, and the end of its
    process is noticed elsewhere. `on_overflow` is called once, when more than MAX_UNSENT messages wait.
    """

    def __init__(
        self,
        peer: Peer[Message],
        on_message: Callable[[Message, int], None],
        after_send: Callable[[], None] = lambda: None,
        on_overflow: Callable[[], None] = lambda: None,
    ) -> None:
        self._peer = peer
        self._on_message = on_message
        self._after_send = after_send
        self._on_overflow = on_overflow
        self._unsent: deque[tuple[Message, int]] = deque()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(peer.fileno(), self._read)
        self._is_open = True
        self._is_lost = False  # the other end is closed, or does not read

    def send(self, message: Message, descriptor: int = -1) -> None:
        """Send now, or as soon as there is room. The descriptor stays the caller's, and open until it is sent."""
        if self._is_lost:
            return
        self._unsent.append((message, descriptor))
        if len(self._unsent) == 1:
            self._flush()
        elif len(self._unsent) > MAX_UNSENT:
            self._lose()
            self._on_overflow()

    def finish(self) -> None:
        """Handle what the peer has said until now, then close."""
        while self._is_open and self._read():
            pass
        self.close()

    def close(self) -> None:
        """Close this end; what was said and not heard is lost. Calling it again does nothing."""
        if self._is_open:
            self._is_open, self._is_lost = False, True
            self._unsent.clear()
            self._loop.remove_reader(self._peer.fileno())
            self._loop.remove_writer(self._peer.fileno())
            self._peer.close()

    def _flush(self) -> None:
        while self._is_open and self._unsent:
            try:
                self._peer.send(*self._unsent[0])
            except BlockingIOError:
                self._loop.add_writer(self._peer.fileno(), self._flush)
                break
            except OSError:
                self._lose()
                break
            self._unsent.popleft()
        else:
            if self._is_open:
                self._loop.remove_writer(self._peer.fileno())
        self._after_send()

    def _lose(self) -> None:
        self._is_lost = True
        self._unsent.clear()
        self._loop.remove_writer(self._peer.fileno())

    def _read(self) -> bool:
        """Handle the next messages; return whether there may be more. The loop calls again as long as there are."""
        for _ in range(BATCH):
            if not self._is_open:
                return False
            try:
                received = self._peer.receive_with_descriptor()
                if received is None:
                    return False
                self._on_message(*received)
            except EOFError:
                self._loop.remove_reader(self._peer.fileno())
                return False
            except ValueError:
                _log.exception("a control message from another process of this server is ignored: not understood")
        return True
