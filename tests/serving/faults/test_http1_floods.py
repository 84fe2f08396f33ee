"""Peers that send too much, or take too little, over HTTP/1.1: others are served meanwhile, and all comes back."""

import gzip
import itertools
import json
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress

import pytest

from testing.live_server import LiveServer
from testing.processes import memory_of
from tests.helpers.neighbour import BODY, nobody_else_notices

TIMEOUT_S = 10.0
QUIET_S = 0.25  # after which a flood is over
LIVE = b"GET /v2/health/live HTTP/1.1\r\nhost: x\r\n\r\n"
LAST = b"GET /v2/health/ready HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
PATH = b"POST /v2/models/simple/infer HTTP/1.1\r\nhost: x\r\n"
INFER = PATH + b"content-length: %d\r\n\r\n" % len(BODY) + BODY
METADATA = b"GET /v2/models/stats HTTP/1.1\r\nhost: x\r\n\r\n"
CHUNKED = PATH + b"transfer-encoding: chunked\r\n\r\n"
TOO_MANY = 20_000
LARGEST = 200 << 20  # within what a body may have
HALF_BODIES = 100


@contextmanager
def connected(address: str, receive_bytes: int = 0) -> Iterator[socket.socket]:
    host, _, port = address.rpartition(":")
    with socket.socket() as connection:
        if receive_bytes:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        connection.settimeout(TIMEOUT_S)
        connection.connect((host, int(port)))
        yield connection


def parts(count: int, of: bytes) -> Iterable[bytes]:
    return itertools.repeat(of, count)


def bomb() -> Iterator[bytes]:
    body = gzip.compress(b'{"inputs":[' + b" " * (64 << 20) + b"]}", 1)
    for _ in range(3):
        yield PATH + b"content-encoding: gzip\r\ncontent-length: %d\r\n\r\n" % len(body) + body


FLOODS: dict[str, Callable[[], Iterable[bytes]]] = {
    "pipelined health": lambda: parts(TOO_MANY, LIVE),
    "pipelined inferences": lambda: parts(2000, INFER),
    "pipelined large answers": lambda: parts(2000, METADATA),
    "pipelined errors": lambda: parts(TOO_MANY, LIVE.replace(b"health/live", b"nothing")),
    "chunks of one byte": lambda: itertools.chain([CHUNKED], parts(TOO_MANY, b"1\r\n \r\n")),
    "chunks with long extensions": lambda: itertools.chain([CHUNKED], parts(2000, b"1;" + b"x" * 5000 + b"\r\n \r\n")),
    "empty lines": lambda: parts(TOO_MANY, b"\r\n" * 20),
    "headers": lambda: itertools.chain([PATH], parts(TOO_MANY, b"x-own: y\r\n")),
    "one header": lambda: itertools.chain([PATH, b"x-own: "], parts(2000, b"y" * 1000)),
    "zeros": lambda: parts(2000, bytes(1000)),
    "bombs": bomb,
}


@pytest.mark.parametrize("reads", [True, False], ids=["reads", "does not read"])
@pytest.mark.parametrize("kind", FLOODS)
def test_a_flood(gangway_server: LiveServer, kind: str, reads: bool) -> None:
    flood = list(FLOODS[kind]())
    with nobody_else_notices(gangway_server), connected(gangway_server.http_url) as connection:
        connection.settimeout(QUIET_S)  # a server that does not read on is right
        with suppress(OSError):
            for count, piece in enumerate(flood):
                connection.sendall(piece)
                if reads and count % 50 == 0:
                    read_some(connection)
            if reads:
                while connection.recv(1 << 20):
                    pass


def read_some(connection: socket.socket) -> None:
    connection.setblocking(False)
    with suppress(BlockingIOError):
        connection.recv(1 << 20)
    connection.settimeout(QUIET_S)


def test_answers_that_are_not_taken_hold_little(gangway_server: LiveServer) -> None:
    (pid,) = gangway_server.pids()["front end"]
    with nobody_else_notices(gangway_server), ExitStack() as clients:
        before = memory_of(pid).private_bytes
        for _ in range(20):
            connection = clients.enter_context(connected(gangway_server.http_url, 4096))
            connection.settimeout(0.1)
            with suppress(TimeoutError):
                for _ in range(1000):
                    connection.sendall(METADATA)
        assert memory_of(pid).private_bytes - before < 20 * (2 << 20)


def test_bodies_that_are_announced_take_nothing_before_they_come(gangway_server: LiveServer) -> None:
    (pid,) = gangway_server.pids()["front end"]
    with nobody_else_notices(gangway_server), ExitStack() as clients:
        before = memory_of(pid).private_bytes
        for _ in range(HALF_BODIES):
            connection = clients.enter_context(connected(gangway_server.http_url))
            connection.sendall(PATH + b"content-length: %d\r\n\r\n" % LARGEST + BODY)
        assert memory_of(pid).private_bytes - before < HALF_BODIES * (256 << 10)


def test_a_slow_writer_holds_up_nobody(gangway_server: LiveServer) -> None:
    with nobody_else_notices(gangway_server), connected(gangway_server.http_url) as connection:
        begin, rest = time.monotonic(), INFER
        while time.monotonic() - begin < 1.5:
            connection.sendall(rest[:1])
            rest = rest[1:]
            time.sleep(0.1)
        connection.sendall(rest + LAST)
        assert everything(connection).count(b"HTTP/1.1 200") == 2


def test_a_slow_reader_gets_all_in_the_end(gangway_server: LiveServer) -> None:
    with nobody_else_notices(gangway_server), connected(gangway_server.http_url, 4096) as connection:
        connection.sendall(INFER * 50 + LAST)
        answers = b""
        for _ in range(100):
            answers += connection.recv(64)
            time.sleep(0.02)
        answers += everything(connection)
    assert answers.count(b"HTTP/1.1 200") == 51
    first = answers.partition(b"\r\n\r\n")[2].partition(b"HTTP/1.1")[0]
    assert json.loads(first)["outputs"][0]["data"] == [2] * 16


def everything(connection: socket.socket) -> bytes:
    pieces = []
    while piece := connection.recv(1 << 16):
        pieces.append(piece)
    return b"".join(pieces)


@pytest.mark.parametrize(
    "sent", [b"", LIVE, LIVE[:10], INFER[:-5]], ids=["silent", "idle", "half a head", "half a body"]
)
def test_connections_that_come_and_go(gangway_server: LiveServer, sent: bytes) -> None:
    with nobody_else_notices(gangway_server):
        for _ in range(300):
            with connected(gangway_server.http_url) as connection:
                connection.sendall(sent)


def test_watchers_that_do_not_read(gangway_server: LiveServer) -> None:
    with nobody_else_notices(gangway_server), ExitStack() as clients:
        for _ in range(100):
            connection = clients.enter_context(connected(gangway_server.http_url, 4096))
            connection.sendall(b"GET /v2/gangway/events HTTP/1.1\r\nhost: x\r\n\r\n")
        with connected(gangway_server.http_url) as another:
            another.sendall(LAST)
            assert everything(another).startswith(b"HTTP/1.1 200")
