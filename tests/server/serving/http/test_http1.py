"""Connections of HTTP/1.1 at their edges: bytes cut anywhere, bodies past the parser, clients that take no answers."""

import json
import random
import select
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPConnection, parse_headers
from typing import Any

import numpy as np
import pytest

from gangway.base.memory_budget import MemoryFullError, memory_budget
from gangway.server.options.endpoints import GrpcOptions
from gangway.server.serving.http import http1
from gangway.server.serving.http import site as http_site
from gangway.server.serving.loop import SLICE_S

IMAGE = np.random.default_rng(1).random((1, 3, 224, 224), np.float32)
LIVE = b"GET /v2/health/live HTTP/1.1\r\n\r\n"
SEEDS = range(6)


def ready(connection: socket.socket, events: int, timeout_s: float) -> int:
    """Return which of these events of poll() there are; select() knows no descriptor above 1023."""
    poll = select.poll()
    poll.register(connection, events)
    return next((found for _, found in poll.poll(timeout_s * 1000)), 0)


def image_request(values: "np.ndarray[Any, Any]" = IMAGE, chunks: int = 0) -> bytes:
    """Ask for `image` and back, all binary; in so many chunks."""
    given = {"name": "x", "shape": list(values.shape), "datatype": "FP32"}
    content = {"inputs": [{**given, "parameters": {"binary_data_size": values.nbytes}}]}
    text = json.dumps({**content, "parameters": {"binary_data_output": True}}).encode()
    body = text + values.tobytes()
    head = b"POST /v2/models/image/infer HTTP/1.1\r\nInference-Header-Content-Length: %d\r\n" % len(text)
    if not chunks:
        return head + b"Content-Length: %d\r\n\r\n" % len(body) + body
    step = -(-len(body) // chunks)
    pieces = [body[at : at + step] for at in range(0, len(body), step)]
    framed = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
    return head + b"Transfer-Encoding: chunked\r\n\r\n" + framed + b"0\r\n\r\n"


@contextmanager
def connected(address: str, buffer_bytes: int = 0) -> Iterator[socket.socket]:
    host, _, port = address.rpartition(":")
    with socket.socket() as connection:
        if buffer_bytes:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
        connection.settimeout(20)
        connection.connect((host, int(port)))
        yield connection


class Replies:
    """Reads replies one by one."""

    def __init__(self, connection: socket.socket, data: bytes = b"") -> None:
        self._connection = connection
        self._data = data

    def next(self) -> tuple[int, bytes]:
        while b"\r\n\r\n" not in self._data:
            self._more()
        head, _, self._data = self._data.partition(b"\r\n\r\n")
        size = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        while len(self._data) < size:
            self._more()
        body, self._data = self._data[:size], self._data[size:]
        return int(head.split()[1]), body

    def _more(self) -> None:
        piece = self._connection.recv(1 << 20)
        assert piece, self._data[:200]
        self._data += piece


@pytest.mark.parametrize("slice_s", [SLICE_S, 0.0])
@pytest.mark.parametrize("seed", SEEDS)
def test_bytes_may_be_cut_anywhere(server: Any, monkeypatch: pytest.MonkeyPatch, seed: int, slice_s: float) -> None:
    """Of bodies that go past the parser in part, chunks, and requests that begin where a body ends."""
    monkeypatch.setattr(http1, "SLICE_S", slice_s)
    chance = random.Random(seed)
    expected = []
    data = b""
    for number in range(8):
        kind = chance.choice(["live", "image", "chunked"])
        values = IMAGE + np.float32(number)
        data += {"live": LIVE, "image": image_request(values), "chunked": image_request(values, chance.randint(1, 50))}[
            kind
        ]
        expected.append(None if kind == "live" else values.tobytes())
    with connected(server.http_url) as connection:
        connection.setblocking(False)  # one that sends without reading could wait for itself
        received, at = b"", 0
        while at < len(data) or ready(connection, select.POLLIN, 0.5):
            events = ready(connection, select.POLLIN | (select.POLLOUT if at < len(data) else 0), 20)
            if events & select.POLLIN:
                piece = connection.recv(1 << 16)
                assert piece
                received += piece
            if events & select.POLLOUT:
                size = chance.choice([1, 7, 100, 5000, 70_000, 400_000])
                at += connection.send(data[at : at + size])
        connection.setblocking(True)
        replies = Replies(connection, received)
        for wanted in expected:
            status, body = replies.next()
            assert status == 200
            assert wanted is None or body[-len(wanted) :] == wanted


def test_many_requests_in_one_piece_take_many_turns(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http1, "SLICE_S", 0.0)
    with connected(server.http_url) as connection:
        connection.sendall(LIVE * 2000)
        connection.shutdown(socket.SHUT_WR)
        replies = Replies(connection)
        assert {replies.next()[0] for _ in range(2000)} == {200}


def test_a_body_that_is_given_up_on_the_way_is_no_request(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left of it goes past the parser, too; the next request is understood."""
    monkeypatch.setattr(http_site, "MAX_HELD_BYTES", 300_000)
    values = IMAGE.copy()
    values.view(np.uint8)[0, 0] = np.resize(np.frombuffer(LIVE, np.uint8), values.view(np.uint8)[0, 0].shape)
    with connected(server.http_url) as connection:
        replies = Replies(connection)
        for _ in range(3):
            connection.sendall(image_request(values) + LIVE)
            assert replies.next() == (503, b'{"error":"too many large requests at once"}')
            assert replies.next()[0] == 200


def test_memory_that_is_full_is_said_once(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    budget, take = memory_budget(), memory_budget().take

    def full(size_bytes: int) -> None:
        if size_bytes > 100_000:
            raise MemoryFullError(size_bytes, 0, budget.limit)
        take(size_bytes)

    monkeypatch.setattr(budget, "take", full)
    with connected(server.http_url) as connection:
        connection.sendall(image_request() + LIVE)
        replies = Replies(connection)
        status, body = replies.next()
        assert (status, b"the server's memory is full" in body) == (503, True)
        assert replies.next()[0] == 200


def test_a_client_that_takes_no_answers_is_read_no_further(server: Any) -> None:
    """It sends hundreds of megabytes if the server lets it; later it gets all answers in their order."""
    request = image_request()
    with connected(server.http_url, buffer_bytes=4096) as connection:
        connection.setblocking(False)
        sent, quiet_s = 0, time.monotonic()
        while time.monotonic() < quiet_s + 1.0:
            if ready(connection, select.POLLOUT, 0.1):
                sent += connection.send(request[sent % len(request) :])
                quiet_s = time.monotonic()
            assert sent < 100 * len(request), "it is read without end"
        connection.settimeout(20)
        replies = Replies(connection)
        for _ in range(sent // len(request)):
            status, body = replies.next()
            assert (status, body[-IMAGE.nbytes :] == IMAGE.tobytes()) == (200, True)


def test_many_requests_at_once_need_no_depth(server: Any) -> None:
    count = 1500  # answered at once, each from within the one before if that were how it is done
    with connected(server.http_url) as connection:
        connection.sendall(LIVE * count)
        replies = Replies(connection)
        assert {replies.next()[0] for _ in range(count)} == {200}


def test_nobody_waits_for_the_next_request_of_a_connection_that_ends(server: Any) -> None:
    last = b"GET /v2/health/live HTTP/1.1\r\nConnection: close\r\n\r\n"
    with connected(server.http_url) as connection:
        connection.sendall(last + LIVE)
        replies = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    assert replies.count(b"HTTP/1.1 200 OK") == 1
    assert b"connection: close" in replies


def test_a_client_that_goes_cancels_what_it_has_asked_for(server: Any) -> None:
    server.scheduler.holding = True
    small = {"shape": [1, 16], "datatype": "INT32", "data": [1] * 16}
    text = json.dumps({"inputs": [{"name": name, **small} for name in ("INPUT0", "INPUT1")]}).encode()
    for _ in range(2):  # one that a thread waits for, and a plain one
        with connected(server.http_url) as connection:
            head = b"POST /v2/models/simple/infer HTTP/1.1\r\nContent-Length: %d\r\n\r\n"
            connection.sendall(head % len(text) + text)
            submitted = server.scheduler.held.get(timeout=10)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # it ends with a reset
        assert server.scheduler.cancelled.get(timeout=10).slot == submitted.slot


def test_large_work_is_bounded(
    server: Any, monkeypatch: pytest.MonkeyPatch, start_front_end: Callable[..., Any]
) -> None:
    from gangway.server.serving.http import front_end as http_front_end

    monkeypatch.setattr(http_front_end, "MAX_WORK", 0)
    other = start_front_end(GrpcOptions())
    with connected(other.http_url) as connection:
        text = b" " * http_site.QUICK_BYTES + b"{}"
        connection.sendall(
            b"POST /v2/models/simple/infer HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(text) + text + LIVE
        )
        replies = Replies(connection)
        assert replies.next() == (503, b'{"error":"too many large requests at once"}')
        assert replies.next()[0] == 200


def test_a_plain_request_needs_no_thread(server: Any) -> None:
    small = {"shape": [1, 16], "datatype": "INT32", "data": [1] * 16}
    text = json.dumps({"inputs": [{"name": name, **small} for name in ("INPUT0", "INPUT1")]})
    connection = HTTPConnection(server.http_url, timeout=20)

    def ask() -> int:
        connection.request("POST", "/v2/models/simple/infer", text)
        answer = connection.getresponse()
        assert b'"data":[2,2' in answer.read()
        return answer.status

    assert ask() == 200  # is planned
    with server.without_threads():
        assert [ask() for _ in range(3)] == [200] * 3
    connection.close()


def test_a_connection_that_is_idle_keeps_nothing_of_its_requests(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no parser after a while, and gets one with its next request."""
    monkeypatch.setattr(http1, "STALL_SECONDS", 0.005)
    with connected(server.http_url) as connection:
        replies, end_s = Replies(connection), time.monotonic() + 0.3
        while time.monotonic() < end_s:
            connection.sendall(LIVE)
            assert replies.next()[0] == 200


@pytest.mark.parametrize(
    ("line", "body", "status"),
    [
        ("GET /v2/health/live", b"", 200),
        ("GET /v2/models/simple", b"", 200),
        ("POST /v2/models/simple/infer", b"{}", 400),
        ("POST /v2/health/live", b"", 405),
        ("GET /nothing", b"", 404),
    ],
)
@pytest.mark.parametrize(
    ("wish", "is_kept"),
    [
        ("", False),
        ("Connection: keep-alive\r\n", True),
        ("connection: Keep-Alive\r\n", True),
        ("Connection: close\r\n", False),
    ],
)
def test_http_1_0_is_kept_alive_as_its_client_wishes(
    server: Any, line: str, body: bytes, status: int, wish: str, is_kept: bool
) -> None:
    """ApacheBench with -k, which counts the answers that say so."""
    request = f"{line} HTTP/1.0\r\nContent-Length: {len(body)}\r\n{wish}\r\n".encode() + body
    with connected(server.http_url) as connection, connection.makefile("rb") as answers:
        for _ in range(3 if is_kept else 1):
            connection.sendall(request)
            assert int(answers.readline().split()[1]) == status
            headers = parse_headers(answers)
            assert headers["connection"] == ("keep-alive" if is_kept else "close")
            answers.read(int(headers["content-length"]))
        if is_kept:
            connection.sendall(LIVE.replace(b"1.1", b"1.0"))
        assert answers.read().startswith(b"HTTP/1.1 200") is is_kept
