"""The supervisor's end of a socket for messages about regions, driven by the event loop."""

import asyncio
import logging
import os
import socket
from collections import deque
from collections.abc import Callable

from gangway.executor.region_channel import RegionChannel
from gangway.executor.region_messages import RegionMessage

Hear = Callable[[RegionMessage, int], None]  # a message, and the descriptor that came with it or -1: the hearer's
BATCH = 64
_log = logging.getLogger(__name__)


class Peer:
    """Sends without blocking, in order. A peer that is gone is no error: its end is noticed elsewhere."""

    def __init__(self, end: socket.socket, hear: Hear) -> None:
        end.setblocking(False)
        self._channel = RegionChannel(end)
        self._hear = hear
        self._unsent: deque[tuple[RegionMessage, int | None]] = deque()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._channel.fileno(), self._read)
        self._open = True

    def send(self, message: RegionMessage, descriptor: int | None = None) -> None:
        """Send now, or as soon as there is room. The descriptor is copied when it is sent, and closed by nobody."""
        self._unsent.append((message, descriptor))
        if len(self._unsent) == 1:
            self._flush()

    def close(self) -> None:
        """Close this end; what was said and not heard is lost."""
        if self._open:
            self._open = False
            self._loop.remove_reader(self._channel.fileno())
            self._loop.remove_writer(self._channel.fileno())
            self._channel.close()

    def _flush(self) -> None:
        while self._open and self._unsent:
            try:
                self._channel.send(*self._unsent[0])
            except BlockingIOError:
                self._loop.add_writer(self._channel.fileno(), self._flush)
                return
            except OSError:
                self._unsent.clear()
                break
            self._unsent.popleft()
        if self._open:
            self._loop.remove_writer(self._channel.fileno())

    def _read(self) -> None:
        for _ in range(BATCH):  # then others have their turn; the loop calls again as long as there is more
            if not self._open:
                return
            try:
                self._hear(*self._channel.receive())
            except BlockingIOError:
                return
            except EOFError:
                self._loop.remove_reader(self._channel.fileno())
                return
            except ValueError:
                _log.exception("a message about a region makes no sense")


def close_quietly(descriptor: int) -> None:
    """Close a descriptor that came with a message, if one did."""
    if descriptor >= 0:
        os.close(descriptor)
