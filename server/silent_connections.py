"""gRPC's connections, of which the most silent ones give way when there are nearly as many as there may be.

gRPC's core refuses further connections at its limit and closes none, so that clients that say nothing could keep all
others out, questions about health included. It has no way to close one either. What is used here is that its
connections are sockets of this process: one that is shut down is closed by core as if its client had gone.
"""

import logging
import os
import socket
import struct
import time
from contextlib import suppress
from typing import Final

from gangway.executor.log_limit import OFTEN

PAUSES: Final = 20  # times as long as a look takes, a tenth of a second for ten thousand descriptors
KEPT_FREE: Final = 1 / 8  # of the connections that there may be
_DESCRIPTORS: Final = "/proc/self/fd"
_TCP_INFO: Final = struct.Struct("44xI4xI")  # of Linux: milliseconds since data were sent, and since data came
_log = logging.getLogger(__name__)


class SilentConnections:
    """`limit`: as many connections core accepts. `port`: where it listens, 0: not by TCP."""

    def __init__(self, limit: int) -> None:
        self.port = 0
        self._most = limit - max(1, int(limit * KEPT_FREE))
        self._next_s = 0.0

    def look(self) -> int:
        """End the most silent connections if there are too many; return how many were ended."""
        now_s = time.monotonic()
        if not self.port or now_s < self._next_s or len(os.listdir(_DESCRIPTORS)) <= self._most:
            return 0
        silent_ms = self._silent_ms()
        self._next_s = now_s + PAUSES * (time.monotonic() - now_s)
        too_many = max(0, len(silent_ms) - self._most)
        for descriptor in sorted(silent_ms, key=lambda each: -silent_ms[each])[:too_many]:
            with suppress(OSError), self._connection(descriptor) as connection:
                connection.shutdown(socket.SHUT_RDWR)
        if too_many:
            _log.warning("%d gRPC connections that were silent are closed: others need the room", too_many, extra=OFTEN)
        return too_many

    def _silent_ms(self) -> dict[int, int]:
        """Return for how long each connection has been silent, by descriptor."""
        found = {}
        for name in os.listdir(_DESCRIPTORS):
            with suppress(OSError), self._connection(int(name)) as connection:
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
                found[int(name)] = min(_TCP_INFO.unpack(info))
        return found

    def _connection(self, descriptor: int) -> socket.socket:
        """Return the connection with this descriptor, under another one of its own. Raises OSError if it is none."""
        connection = socket.socket(fileno=os.dup(descriptor))
        try:
            if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.getsockname()[1] != self.port:
                raise OSError("another socket")
            connection.getpeername()  # a listener has none
        except OSError:
            connection.close()
            raise
        return connection
