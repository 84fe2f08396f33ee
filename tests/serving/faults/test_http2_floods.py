"""Peers that send too much, or take too little, over HTTP/2: others are served meanwhile, and all comes back.

Each bound of the server is tried with an amount that does no harm. Whether the server puts up with it or sends the peer
away is its own choice; what is asserted is that nobody else notices.
"""

import itertools
import resource
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack

import numpy as np
import pytest

from gangway.clients.inputs import infer_request
from testing.live_server import LiveServer
from testing.processes import memory_of
from tests.helpers.http2_frames import (
    END_HEADERS,
    END_STREAM,
    LIVE,
    PREFACE,
    FrameClient,
    Kind,
    call,
    frame,
    headers,
    literal,
    reset,
    settings,
    window,
)
from tests.helpers.neighbour import PATIENCE_S, SMALL, nobody_else_notices

IMAGE = np.zeros((1, 3, 224, 224), np.float32)
LARGE = infer_request("mobilenetv2", "", {"input": ("FP32", IMAGE)}).SerializeToString()
PING = frame(Kind.PING, 0, 0, b"12345678")
TOO_MANY = 4000  # more than any bound here


def framed(message: bytes) -> bytes:
    return struct.pack(">BI", 0, len(message)) + message


INFER = framed(SMALL)


def streams(first: int = 1) -> Iterator[int]:
    return itertools.count(first, 2)


def parts(count: int, of: bytes) -> Iterator[bytes]:
    return itertools.repeat(of, count)


def rapid_resets() -> Iterator[bytes]:
    return (headers(stream, "ModelInfer") + reset(stream) for stream in itertools.islice(streams(), TOO_MANY))


def resets_of_whole_calls() -> Iterator[bytes]:
    calls = itertools.islice(streams(), TOO_MANY // 4)
    return (call(stream, "ModelInfer", INFER) + reset(stream) for stream in calls)


def continuations(size: int) -> Iterator[bytes]:
    piece = literal("x-own", "y" * (size - 20)) if size else b""
    yield headers(1, flags=0)
    yield from parts(TOO_MANY, frame(Kind.CONTINUATION, 0, 1, piece))


def expanded_headers() -> Iterator[bytes]:
    """One header of 3 KB in the table, which thousands of bytes refer to: 9 MB in all."""
    name = literal("x-own", "y" * 3000, 0x40)
    for stream in itertools.islice(streams(), 10):
        yield headers(stream, more=name + b"\xbe" * 300) + frame(Kind.DATA, END_STREAM, stream, LIVE)


FLOODS: dict[str, Callable[[], Iterable[bytes]]] = {
    "rapid resets": rapid_resets,
    "resets of whole calls": resets_of_whole_calls,
    "pings": lambda: parts(TOO_MANY, PING),
    "settings": lambda: parts(TOO_MANY, settings([(3, 100)])),
    "settings without a value": lambda: parts(TOO_MANY, settings()),
    "settings of many values": lambda: parts(20, settings([(3, 100)] * 2000)),
    "settings that change the table": lambda: parts(TOO_MANY, settings([(1, 0)]) + settings([(1, 4096)])),
    "windows of streams": lambda: parts(TOO_MANY // 2, settings([(4, 0)]) + settings([(4, 1 << 20)])),
    "continuations": lambda: continuations(1000),
    "continuations without bytes": lambda: continuations(0),
    "headers that expand": expanded_headers,
    "data without bytes": lambda: itertools.chain([headers(1, "ModelInfer")], parts(TOO_MANY, frame(Kind.DATA, 0, 1))),
    "priorities": lambda: (
        frame(Kind.PRIORITY, 0, stream, bytes(5)) for stream in itertools.islice(streams(), TOO_MANY)
    ),
    "unknown frames": lambda: parts(TOO_MANY, frame(0xEE, 0, 0, bytes(100))),
    "windows of the connection": lambda: parts(TOO_MANY, window(0, 1)),
    "headers of no call": lambda: (
        frame(Kind.HEADERS, END_HEADERS, stream) for stream in itertools.islice(streams(), 500)
    ),
    "goodbyes": lambda: parts(TOO_MANY, frame(Kind.GOAWAY, 0, 0, bytes(8))),
    "half calls": lambda: (headers(stream, "ModelInfer") for stream in itertools.islice(streams(), 1000)),
    "flags that there are not": lambda: (
        call(stream, "ModelInfer", bytes([2]) + INFER[1:]) for stream in itertools.islice(streams(), 100)
    ),
}


@pytest.mark.parametrize("reads", [True, False], ids=["reads", "does not read"])
@pytest.mark.parametrize("kind", FLOODS)
def test_a_flood(gangway_server: LiveServer, kind: str, reads: bool) -> None:
    with nobody_else_notices(gangway_server), FrameClient(gangway_server.url) as client:
        for count, piece in enumerate(FLOODS[kind]()):
            if not client.send(piece):
                break
            if reads and count % 50 == 0 and not client.closed:
                client.read(0)
        until_quiet(client)


def until_quiet(client: FrameClient) -> None:
    """Wait until the server has closed, or has looked at all that it was sent."""
    client.send(PING)
    client.wait(lambda each: each.kind == Kind.PING or (each.kind == Kind.GOAWAY and each.code > 0), 2)


def test_streams_beyond_the_limit_are_refused(gangway_server: LiveServer) -> None:
    with nobody_else_notices(gangway_server), FrameClient(gangway_server.url) as client:
        first = client.wait(lambda each: each.kind == Kind.SETTINGS)
        assert first is not None
        values = dict(struct.iter_unpack(">HI", first.payload))
        limit = values[3]
        for stream in itertools.islice(streams(), limit + 20):
            client.send(headers(stream, "ModelInfer"))
        refused = client.wait(lambda each: each.kind in (Kind.RST_STREAM, Kind.GOAWAY) and each.code > 0)
        assert refused is not None, "the last ones are one too many"
        assert (refused.kind, refused.code) in {
            (Kind.RST_STREAM, 7),
            (Kind.RST_STREAM, 11),
            (Kind.GOAWAY, 1),
            (Kind.GOAWAY, 11),
        }


def test_an_oversized_frame_ends_the_connection(gangway_server: LiveServer) -> None:
    with nobody_else_notices(gangway_server), FrameClient(gangway_server.url) as client:
        client.send(headers(1, "ModelInfer") + frame(Kind.DATA, 0, 1, b"", (1 << 24) - 1))
        client.wait(lambda each: each.kind == Kind.GOAWAY)
        while not client.closed:
            client.read()


@pytest.mark.parametrize("over", ["windows that stay closed", "a socket that is not read"])
def test_answers_that_are_not_taken(gangway_server: LiveServer, over: str) -> None:
    hello = PREFACE + settings([(4, 0)] if over.startswith("windows") else [])
    with nobody_else_notices(gangway_server), FrameClient(gangway_server.url, hello, 4096) as client:
        for stream in itertools.islice(streams(), 300):
            client.send(call(stream, "ModelInfer", INFER))


def test_answers_wait_until_the_window_opens(gangway_server: LiveServer) -> None:
    hello = PREFACE + settings([(4, 3)])
    with nobody_else_notices(gangway_server), FrameClient(gangway_server.url, hello) as client:
        client.send(call(1, "ModelInfer", INFER))
        data = client.wait(lambda each: each.kind == Kind.DATA and each.payload != b"")
        assert data is not None and len(data.payload) == 3
        assert not client.is_answered(1, 0.2)
        client.send(settings([(4, 1 << 20)]))
        assert client.is_answered(1)


def test_a_slow_writer_holds_up_nobody(gangway_server: LiveServer) -> None:
    with nobody_else_notices(gangway_server), FrameClient(gangway_server.url) as client:
        client.send(headers(1, "ModelInfer"))
        begin, body = time.monotonic(), INFER
        while time.monotonic() - begin < 3 and len(body) > 1:
            client.send(frame(Kind.DATA, 0, 1, body[:1]))
            body = body[1:]
            time.sleep(0.1)
        stream = 3
        client.send(call(stream))
        assert client.is_answered(stream), "a call of the same connection"
        client.send(frame(Kind.DATA, END_STREAM, 1, body))
        assert client.is_answered(1)


def test_a_slow_reader_gets_all_in_the_end(gangway_server: LiveServer) -> None:
    with nobody_else_notices(gangway_server), FrameClient(gangway_server.url, receive_bytes=4096) as client:
        sent = list(itertools.islice(streams(), 50))
        for stream in sent:
            client.send(call(stream, "ModelInfer", INFER))
        for _ in range(100):
            client.read(0.05, 64)
        assert all(client.is_answered(stream) for stream in sent)


def test_large_bodies_of_which_the_end_does_not_come(gangway_server: LiveServer) -> None:
    body = framed(LARGE)[:60_000]
    with nobody_else_notices(gangway_server), ExitStack() as clients:
        for _ in range(20):
            client = clients.enter_context(FrameClient(gangway_server.url))
            for stream in (1, 3):
                client.send(headers(stream, "ModelInfer"))
                client.send(
                    b"".join(frame(Kind.DATA, 0, stream, body[at : at + 10_000]) for at in range(0, 30_000, 10_000))
                )


@pytest.mark.parametrize("hello", [b"", PREFACE[:10], PREFACE + settings()], ids=["silent", "half a hello", "idle"])
def test_a_thousand_idle_connections(gangway_server: LiveServer, hello: bytes) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    (pid,) = gangway_server.pids()["front end"]
    with nobody_else_notices(gangway_server), ExitStack() as clients:
        before = memory_of(pid).private_bytes
        for _ in range(1000):
            clients.enter_context(FrameClient(gangway_server.url, hello))
        assert memory_of(pid).private_bytes - before < 1000 * 30_000
        with FrameClient(gangway_server.url) as client:
            client.send(call(1))
            assert client.is_answered(1, PATIENCE_S)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_connections_that_come_and_go(gangway_server: LiveServer) -> None:
    with nobody_else_notices(gangway_server):
        for number in range(300):
            with FrameClient(gangway_server.url) as client:
                client.send(call(1, "ModelInfer", INFER) if number % 2 else headers(1, "ModelInfer"))


def test_a_client_of_grpc_at_the_port_of_http(gangway_server: LiveServer) -> None:
    with nobody_else_notices(gangway_server), FrameClient(gangway_server.http_url) as client:
        client.send(call(1, "ModelInfer", INFER))
        assert client.is_answered(1), "it is told where gRPC is"
