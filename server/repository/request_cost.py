"""What any request costs a client on this machine, whatever the model: measured by real calls through the front end.

Latencies that the supervisor measures of models leave out transport and front end. For a model of microseconds these
are nearly all that a client waits for.
"""

import logging
import socket
import ssl
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import StreamEnded, StreamReset
from h2.exceptions import ProtocolError

from gangway.server.addresses import UNIX, socket_address
from gangway.server.options.endpoints import GrpcOptions

USUAL_US: Final = 400.0  # where none can be made; `gangway perf` with `mlp`: 0.42-0.55 ms alone (2 cores, 2026-11-25)
WARM_UP_CALLS: Final = 8
LEAST_CALLS, MOST_CALLS = 5, 64
BUDGET_SECONDS: Final = 0.1
TIMEOUT_SECONDS: Final = 2.0
RECEIVE_BYTES: Final = 1 << 16
EMPTY_MESSAGE: Final = bytes(5)  # gRPC's prefix of a message without fields
EVERYWHERE: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}
HEADERS: Final = [
    (":method", "POST"),
    (":scheme", "http"),
    (":path", "/inference.GRPCInferenceService/ServerLive"),
    (":authority", "localhost"),
    ("te", "trailers"),
    ("content-type", "application/grpc"),
]
_log = logging.getLogger(__name__)


def measure_request_cost_us(options: GrpcOptions) -> float:
    """Return the round trip of the smallest call, one at a time, in microseconds. Blocks for some 50 ms.

    It is the lower quartile: while the server starts others have the cores, too. An error is an answer. USUAL_US where
    no call can be made: gRPC is not served, or asks for a client's certificate.
    """
    try:
        with _connected(options) as connection:
            cost_us = statistics.quantiles(_round_trips_us(connection), n=4)[0]
    except (OSError, ProtocolError) as error:
        _log.info(
            "a request without a model is assumed to take %.3f ms, because it cannot be measured: %s",
            USUAL_US / 1e3,
            error,
        )
        return USUAL_US
    _log.info("a request without a model takes %.3f ms by gRPC on this machine", cost_us / 1e3)
    return cost_us


@contextmanager
def _connected(options: GrpcOptions) -> Iterator[socket.socket]:
    """Connect to our own server; who it is need not be proved. Raises OSError."""
    if not options.allowed:
        raise OSError("gRPC is not served")
    if options.tls is not None and options.tls.mutual:
        raise OSError("clients must have a certificate")
    if options.target.startswith(UNIX):
        plain = socket.socket(socket.AF_UNIX)
        plain.settimeout(TIMEOUT_SECONDS)
        plain.connect(options.target.removeprefix(UNIX))
    else:
        host, port, _ = socket_address(options.target)
        plain = socket.create_connection((EVERYWHERE.get(host, host), port), TIMEOUT_SECONDS)
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with plain:
        if options.tls is None:
            yield plain
            return
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.set_alpn_protocols(["h2"])
        with context.wrap_socket(plain) as secured:
            yield secured


def _round_trips_us(connection: socket.socket) -> Iterator[float]:
    http = H2Connection(H2Configuration(client_side=True))
    http.initiate_connection()
    for _ in range(WARM_UP_CALLS):
        _call(connection, http)
    end = time.monotonic() + BUDGET_SECONDS
    for call in range(MOST_CALLS):
        begin = time.monotonic()
        if call >= LEAST_CALLS and begin > end:
            return
        _call(connection, http)
        yield (time.monotonic() - begin) * 1e6


def _call(connection: socket.socket, http: H2Connection) -> None:
    """Make one call and wait for its end. Raises OSError, ProtocolError."""
    stream = http.get_next_available_stream_id()
    http.send_headers(stream, HEADERS)
    http.send_data(stream, EMPTY_MESSAGE, end_stream=True)
    ended = False
    while not ended:
        connection.sendall(http.data_to_send())
        data = connection.recv(RECEIVE_BYTES)
        if not data:
            raise ConnectionResetError("the front end has closed the connection")
        ended = any(isinstance(event, StreamEnded | StreamReset) for event in http.receive_data(data))
    connection.sendall(http.data_to_send())
