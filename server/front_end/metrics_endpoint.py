"""The port of the metrics: GET /metrics, and nothing else.

A thread per connection, and few of them: when there are more, the oldest is cut off, so whoever is slow or says nothing
holds nobody else.
"""

import gzip
import logging
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from gangway.executor.control import ControlSegment
from gangway.server.addresses import socket_address
from gangway.server.front_end.metric_families import Exposition
from gangway.server.front_end.metrics_reading import CONTENT_TYPE, Machine, Source
from gangway.server.front_end.shared import Peers
from gangway.server.models.served import Models
from gangway.server.options.endpoints import MetricsOptions
from gangway.server.requests.data_plane import DataPlane

PATH = "/metrics"
MAX_CONNECTIONS = 16
IO_TIMEOUT_SECONDS = 10.0
COMPRESSION_LEVEL = 3  # of 1 to 9: text like this becomes a tenth at any level
_NO_THREAD = b"HTTP/1.0 503 Service Unavailable\r\nContent-Type: text/plain\r\n\r\nno thread can be started\n"
_log = logging.getLogger(__name__)


class MetricsEndpoint:
    """Takes the address when it is made (port 0: any), answers from `start` on. `render` makes the text. `reuse_port`:
    other processes may listen there, too.

    Raises OSError if the address cannot be had.
    """

    def __init__(self, host: str, port: int, render: Callable[[], bytes], reuse_port: bool = False) -> None:
        kind = _Server6 if ":" in host else _Server
        self._server = kind((host, port), reuse_port)
        self._server.render = render

    @property
    def address(self) -> str:
        """ "host:port", the port as bound."""
        host, port = self._server.server_address[:2]
        return f"[{host!s}]:{port}" if ":" in str(host) else f"{host!s}:{port}"

    def start(self) -> None:
        """Answer from now on, in threads of its own."""
        threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True).start()

    def close(self) -> None:
        """Stop and give the port back. Only after `start`."""
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128  # with the usual 5, a client that is not accepted at once tries again after a second
    render: Callable[[], bytes]

    def __init__(self, address: tuple[str, int], reuse_port: bool) -> None:
        self._reuse_port = reuse_port
        self._lock = threading.Lock()
        self._connections: dict[socket.socket, None] = {}  # the oldest first
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        """Take the address. Without the name of the host, which the base class looks up, and which can take seconds."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, self._reuse_port)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer one connection in a thread of its own; if there are too many, cut off the oldest."""
        with self._lock:
            if len(self._connections) >= MAX_CONNECTIONS:
                oldest = next(iter(self._connections))
                del self._connections[oldest]
                _shut(oldest)
            self._connections[request] = None
        try:
            super().process_request(request, client_address)
        except RuntimeError:
            with suppress(OSError):
                request.sendall(_NO_THREAD)
            self.shutdown_request(request)

    def shutdown_request(self, request: Any) -> None:
        """One connection has come to its end."""
        with self._lock:
            self._connections.pop(request, None)
            super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection broke off, or its client was too slow: no business of the log's."""
        _log.debug("metrics: a connection from %s ended early", client_address, exc_info=True)


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Handler(BaseHTTPRequestHandler):
    server: _Server  # pyright: ignore[reportIncompatibleVariableOverride]
    timeout = IO_TIMEOUT_SECONDS
    server_version = "gangway"
    sys_version = ""

    def do_GET(self) -> None:
        """Answer /metrics; 404 to everything else."""
        if self.path.partition("?")[0] != PATH:
            self._answer(HTTPStatus.NOT_FOUND, f"only {PATH} is served on this port\n".encode())
            return
        try:
            text = self.server.render()
        except Exception:
            _log.exception("metrics cannot be computed; the scraper is told 500")
            self._answer(HTTPStatus.INTERNAL_SERVER_ERROR, b"internal error, see the server's log\n")
            return
        if _accepts_gzip(self.headers.get("Accept-Encoding", "")):
            packed = gzip.compress(text, COMPRESSION_LEVEL)  # without the interpreter's lock
            self._answer(HTTPStatus.OK, packed, ("Content-Encoding", "gzip"))
        else:
            self._answer(HTTPStatus.OK, text)

    do_HEAD = do_GET  # noqa: N815

    def _refuse(self) -> None:
        self._answer(HTTPStatus.METHOD_NOT_ALLOWED, b"only GET and HEAD are allowed\n", ("Allow", "GET, HEAD"))

    do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = do_TRACE = do_CONNECT = _refuse  # noqa: N815

    def _answer(self, status: HTTPStatus, body: bytes, *headers: tuple[str, str]) -> None:
        self.send_response(status)
        kind = CONTENT_TYPE if status is HTTPStatus.OK else "text/plain; charset=utf-8"
        for name, value in (("Content-Type", kind), ("Content-Length", str(len(body))), *headers):
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Nothing: a scrape is no event."""


def _accepts_gzip(header: str) -> bool:
    encodings = [part.strip().lower().replace(" ", "") for part in header.split(",")]
    return any(name in ("gzip", "gzip;q=1", "gzip;q=1.0") for name in encodings)


def _shut(connection: socket.socket) -> None:
    """Break a connection off; whoever waits for it wakes up."""
    with suppress(OSError):  # it has just ended
        connection.shutdown(socket.SHUT_RDWR)


# The metrics of a front-end process, from its options to an open port.


def serve_metrics(
    options: MetricsOptions,
    models: Callable[[], Models],
    plane: DataPlane,
    control: ControlSegment,
    peers: Peers = Peers(),  # noqa: B008 - frozen
) -> str:
    """Answer on the metrics' port from now on; return its address ("host:port"), "" if there shall be no metrics.

    Raises OSError, which says why the port cannot be had.
    """
    if not options.target:
        return ""
    machine = Machine(options.interval_ms / 1000) if options.cpu else None
    exposition = Exposition(Source(models, plane, control, machine, peers), options)
    try:
        host, port, _ = socket_address(options.target)
        endpoint = MetricsEndpoint(host, port, exposition.render, options.reuse_port)
    except OSError as error:
        raise OSError(f"cannot serve metrics on {options.target}: {error.strerror or error}") from error
    endpoint.start()
    return endpoint.address
