"""What the port of the metrics serves: GET /metrics, and nothing else.

The text is made on the event loop, piece by piece, with turns for others in between. So a scrape needs no thread, and
is answered whatever all threads are at.
"""

import asyncio
import logging
import zlib
from http import HTTPStatus
from typing import Final

from gangway.server.access import Ports
from gangway.server.serving.http.call import HttpCall, Site
from gangway.server.serving.http.replies import Reply
from gangway.server.serving.http.routes import METRICS_PATH
from gangway.server.serving.limits import ConnectionLimit
from gangway.server.serving.metrics import Exposition
from gangway.server.serving.pending import drive
from gangway.server.serving.turns import Slices

_log = logging.getLogger(__name__)

MAX_CONNECTIONS: Final = 16  # beyond that the one whose client has been waited for longest is closed
MAX_BODY_BYTES: Final = 64 * 1024  # which nobody reads
COMPRESSION_LEVEL: Final = 3  # of 1 to 9: text like this becomes a tenth at any level
PIECE_CHARACTERS: Final = 32 * 1024  # are compressed at once
GZIP: Final = 31  # window bits of zlib that mean: gzip's header
CONTENT_TYPE: Final = b"text/plain; version=0.0.4; charset=utf-8"
TEXT: Final = b"text/plain; charset=utf-8"


class MetricsSite(Site):
    """`ports`: where other requests are sent."""

    unknown_method = HTTPStatus.NOT_IMPLEMENTED

    def __init__(self, exposition: Exposition, loop: asyncio.AbstractEventLoop, ports: Ports) -> None:
        super().__init__(ConnectionLimit(MAX_CONNECTIONS, patience=0.0))
        self._exposition = exposition
        self._loop = loop
        self._ports = ports

    def open(self, call: HttpCall) -> Reply | None:
        """Refuse everything else."""
        if call.path != METRICS_PATH:
            return self.refusal(HTTPStatus.NOT_FOUND, self.elsewhere)
        if call.method not in ("GET", "HEAD"):
            message = b"only GET and HEAD are allowed\n"
            return Reply(HTTPStatus.METHOD_NOT_ALLOWED, (message,), TEXT, allow="GET, HEAD")
        return None

    def begin(self, call: HttpCall) -> None:
        """Answer a scrape."""
        call.drop()
        drive(self._answer(call))

    def take(self, call: HttpCall, size_bytes: int) -> Reply | None:
        """Refuse what no scraper sends."""
        if call.received_bytes > MAX_BODY_BYTES:
            return self.refusal(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "nobody reads a body here")
        return None

    def release(self, call: HttpCall) -> None:
        """Nothing of it is held."""

    def refusal(self, status: int, message: str) -> Reply:
        """Return a refusal as text."""
        return Reply(status, (f"{message}\n".encode(),), TEXT)

    @property
    def elsewhere(self) -> str:
        """Where other requests are served."""
        return f"only {METRICS_PATH.decode()} is served on this port: {self._ports.text}"

    async def _answer(self, call: HttpCall) -> None:
        try:
            reply = await self._scrape(call)
        except Exception:
            _log.exception("metrics cannot be computed; the scraper is told 500")
            reply = self.refusal(HTTPStatus.INTERNAL_SERVER_ERROR, "internal error, see the server's log")
        call.finish(reply)

    async def _scrape(self, call: HttpCall) -> Reply:
        texts, slices = list[str](), Slices(self._loop)
        for text in self._exposition.pieces():
            texts.append(text)
            await slices.rest()
        text = "".join(texts)
        if not _accepts_gzip(call.headers.get(b"accept-encoding", b"").decode("latin-1")):
            return Reply(HTTPStatus.OK, (text.encode(),), CONTENT_TYPE)
        stream = zlib.compressobj(COMPRESSION_LEVEL, wbits=GZIP)
        pieces = []
        for at in range(0, len(text), PIECE_CHARACTERS):
            pieces.append(stream.compress(text[at : at + PIECE_CHARACTERS].encode()))
            await slices.rest()
        return Reply(HTTPStatus.OK, (*pieces, stream.flush()), CONTENT_TYPE, encoding="gzip")


def _accepts_gzip(header: str) -> bool:
    encodings = [part.strip().lower().replace(" ", "") for part in header.split(",")]
    return any(name in ("gzip", "gzip;q=1", "gzip;q=1.0") for name in encodings)
