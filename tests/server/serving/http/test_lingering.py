"""Clients that send all of a request before they read why it is refused."""

import asyncio
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from gangway.server.access import Ports, TlsFiles
from gangway.server.options.endpoints import GrpcOptions
from gangway.server.serving.http import lingering
from gangway.server.serving.http.metrics_site import MetricsSite
from gangway.server.serving.limits import RESERVED, ConnectionLimit, Phase
from gangway.server.serving.loop import ServingLoop
from tests.helpers.certificates import Authority

BODY_BYTES = 24 << 20  # more than sockets hold, and than the server takes
POST = b"POST /v2/models/simple/infer HTTP/1.1\r\n"
CLOSE = b"Connection: close\r\n"
LENGTH = b"Content-Length: %d\r\n" % BODY_BYTES
ZEROS = bytes(1 << 20)
CHUNK = b"%x\r\n%b\r\n" % (len(ZEROS), ZEROS)
REFUSED = {
    "one request": (POST + CLOSE + LENGTH + b"\r\n", ZEROS, 413),
    "HTTP/1.0": (POST.replace(b"1.1", b"1.0") + LENGTH + b"\r\n", ZEROS, 413),
    "a body that is not to come": (POST + b"Expect: 100-continue\r\n" + LENGTH + b"\r\n", ZEROS, 413),
    "chunks": (POST + CLOSE + b"Transfer-Encoding: chunked\r\n\r\n", CHUNK, 413),
    "another coding": (POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n", CHUNK, 501),
    "no number": (POST + b"Content-Length: many\r\n\r\n", ZEROS, 400),
    "a long head": (POST, b"x: %b\r\n" % (b"y" * 1000), 431),
    "no method": (b"nonsense ", ZEROS, 400),
    "no path": (b"POST /nobody HTTP/1.1\r\n" + CLOSE + LENGTH + b"\r\n", ZEROS, 404),
    "no body for GET": (b"GET /v2/models/simple/infer HTTP/1.1\r\n" + CLOSE + LENGTH + b"\r\n", ZEROS, 405),
}
Connect = Callable[[], Any]


@pytest.fixture(scope="module", params=["HTTP", "HTTPS"])
def connect(request: Any, start_front_end: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Connect:
    """Return what connects to a server."""
    folder: Path = tmp_path_factory.mktemp("https")
    authority = Authority(folder)
    own = authority.issue("server")
    tls = TlsFiles(own.certificate, own.key) if request.param == "HTTPS" else None
    context = ssl.create_default_context(cafile=authority.root)
    host, _, port = start_front_end(GrpcOptions(max_message_bytes=len(ZEROS)), tls).http_url.rpartition(":")

    @contextmanager
    def connected() -> Iterator[socket.socket]:
        with socket.create_connection((host, int(port)), 20) as plain:
            if tls is None:
                yield plain
            else:
                with context.wrap_socket(plain, server_hostname="localhost") as secured:
                    yield secured

    return connected


def status_of(connection: socket.socket) -> int:
    """Read a reply, which is an error."""
    reply = b""
    while not reply.endswith(b'"}'):
        piece = connection.recv(1 << 16)
        assert piece, reply
        reply += piece
    return int(reply.split()[1])


@pytest.mark.parametrize("kind", REFUSED)
def test_who_is_refused_may_send_on_and_reads_why(connect: Connect, kind: str) -> None:
    head, piece, status = REFUSED[kind]
    with connect() as connection:
        connection.sendall(head)
        for _ in range(BODY_BYTES // len(piece)):
            connection.sendall(piece)
        assert status_of(connection) == status


def test_who_says_nothing_more_is_waited_for_a_while(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lingering, "SILENT_SECONDS", 0.1)
    with connect() as connection:
        connection.sendall(POST + CLOSE + LENGTH + b"\r\n")
        assert status_of(connection) == 413
        assert connection.recv(1) == b""


@pytest.mark.parametrize(
    ("begin", "status"),
    [
        (POST, 413),
        (b"POST /nobody HTTP/1.1\r\n", 404),
        (b"GET /v2/models/simple/infer HTTP/1.1\r\n", 405),
        (b"POST /v2/repository/index HTTP/1.1\r\n", 403),
        (b"POST /v1/models/simple:explain HTTP/1.1\r\n", 501),
    ],
)
def test_a_refused_body_that_may_never_come_ends_the_connection(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, begin: bytes, status: int
) -> None:
    """Else the client's next request would count as the body."""
    monkeypatch.setattr(lingering, "SILENT_SECONDS", 0.1)
    with connect() as connection:
        connection.sendall(begin + b"Expect: 100-continue\r\n" + LENGTH + b"\r\n")
        assert status_of(connection) == status
        assert connection.recv(1) == b""


@pytest.mark.parametrize(("bound", "value"), [("SECONDS", 0.2), ("MAX_BYTES", 8 << 20)])
def test_who_sends_without_end_is_not_heard_for_ever(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, bound: str, value: float
) -> None:
    monkeypatch.setattr(lingering, bound, value)
    monkeypatch.setattr(lingering, "SILENT_SECONDS", 0.1)
    end_s = time.monotonic() + 10
    with connect() as connection, pytest.raises(OSError, match=r"reset|pipe|EOF"):
        connection.sendall(POST + CLOSE + LENGTH + b"\r\n")
        while time.monotonic() < end_s:
            connection.sendall(ZEROS)


class Waiting:
    """A connection whose client waits for the server, so that it gives way to nobody."""

    phase, since_s = Phase.ANSWERING, 0.0

    def give_way(self) -> None:
        raise AssertionError("it is being answered")


def test_where_there_is_no_room_nothing_of_it_is_left(serving: ServingLoop) -> None:
    site = MetricsSite(cast("Any", None), serving.loop, Ports())  # nobody asks for metrics
    site.limit, others = ConnectionLimit(0), [Waiting() for _ in range(RESERVED)]
    ours, theirs = socket.socketpair()

    async def linger() -> None:
        transport, _ = await serving.loop.create_connection(asyncio.Protocol, sock=ours)
        assert all(site.limit.admit(other, 0.0) for other in others)
        lingering.Lingering(site, serving.loop, transport)
        while site.transports:
            await asyncio.sleep(0.001)
        for other in others:
            site.limit.leave(other)

    with theirs:
        serving.run(linger(), 20)
        assert theirs.recv(1) == b""
    assert not site.limit.exceeded
