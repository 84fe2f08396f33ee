"""The end of a connection whose client is still sending: what comes is taken and dropped, for a while.

A close with bytes that nobody has read makes the system send a reset. It overtakes the answer, so a client that sends
all of its request before it reads would never learn why it was refused.
"""

import asyncio
from typing import Final

from gangway.server.serving.http.call import Site
from gangway.server.serving.limits import Phase

SECONDS: Final = 30.0  # for what the client is still sending
SILENT_SECONDS: Final = 5.0  # without a byte of it
MAX_BYTES: Final = 1 << 30


class Lingering(asyncio.BufferedProtocol):
    """Takes the place of a connection that has sent its last answer. Other connections may have its place at once."""

    __slots__ = (
        "_end_s", "_loop", "_received_bytes", "_seen_bytes", "_site", "_timer", "_transport", "phase", "since_s",
    )  # fmt: skip

    def __init__(self, site: Site, loop: asyncio.AbstractEventLoop, transport: asyncio.Transport) -> None:
        """`transport`: that of the connection, which the site does not have any more."""
        self.phase = Phase.IDLE
        self.since_s = loop.time()
        self._end_s = self.since_s + SECONDS
        self._site = site
        self._loop = loop
        self._transport = transport
        self._received_bytes = self._seen_bytes = 0
        self._timer = loop.call_later(SILENT_SECONDS, self._poll)
        site.transports.add(transport)
        transport.set_protocol(self)
        if not site.limit.admit(self, self.since_s):
            transport.close()
            return
        if transport.can_write_eof():  # TLS has no such thing
            transport.write_eof()
        transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._timer.cancel()
        self._site.transports.discard(self._transport)
        self._site.limit.leave(self)

    def give_way(self) -> None:
        """Close in favour of another connection."""
        self._transport.abort()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return where the next bytes go."""
        return self._site.scratch

    def buffer_updated(self, nbytes: int) -> None:
        """Drop them."""
        self._received_bytes += nbytes
        if self._received_bytes > MAX_BYTES:
            self._transport.abort()

    def _poll(self) -> None:
        """Look whether the client is still sending, and has time for it."""
        if self._received_bytes == self._seen_bytes or self._loop.time() >= self._end_s:
            self._transport.abort()
            return
        self._seen_bytes = self._received_bytes
        self._timer = self._loop.call_later(SILENT_SECONDS, self._poll)
