"""The gate before the methods of a server with few threads: stalled calls give way."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import pytest
from gangway.clients.connection import SERVICE
from gangway.server import grpc_gate
from gangway.server.counting_pool import CountingPool
from gangway.server.grpc_gate import Gate, GatedService
from gangway.server.restriction import Restrictions

from benchmarks.raw_connection import RawConnection

THREADS = 16
MESSAGE = b"\0\0\0\0\x02hi"


def echo(message: bytes, _context: Any) -> bytes:
    return message


@contextmanager
def gated_server() -> Iterator[str]:
    gate = Gate(Restrictions(), patience_s=0.1)
    pool = CountingPool(THREADS, "test")
    server = grpc.server(pool)
    handlers = {"ModelInfer": grpc.unary_unary_rpc_method_handler(echo)}
    server.add_generic_rpc_handlers((GatedService(SERVICE.strip("/"), handlers, gate, pool),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    gate.watchman.start()
    yield f"127.0.0.1:{port}"
    gate.watchman.stop()
    server.stop(None).wait(5)


def test_stalled_calls_cannot_take_all_threads_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_gate, "MAX_ARRIVING", 2)
    monkeypatch.setattr(grpc_gate, "MAX_PLAIN", 4)
    with gated_server() as address, RawConnection(address) as stalled, RawConnection(address) as other:
        streams = [stalled.begin("ModelInfer") for _ in range(2 * THREADS)]
        for stream in streams:
            stalled.send(stream, MESSAGE[:-1])
        stream = other.begin("ModelInfer")
        other.send(stream, MESSAGE, end=True)
        headers, body = other.answer(stream)
        assert (headers["grpc-status"], body) == ("0", MESSAGE)
        headers, _ = stalled.answer(streams[8])  # the first ones have the plain form
        assert headers.get("grpc-status") == str(grpc.StatusCode.CANCELLED.value[0]) or "reset" in headers


def test_unread_answers_give_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_gate, "MAX_UNREAD_BYTES", 4)
    monkeypatch.setattr(grpc_gate, "FOLLOWED_BYTES", 1)
    with gated_server() as address, RawConnection(address, window_bytes=0) as connection:
        streams = [connection.begin("ModelInfer") for _ in range(4)]
        for stream in streams:
            connection.send(stream, MESSAGE, end=True)
        headers, body = connection.answer(streams[0])
        assert body == b""
        assert headers.get("grpc-status", headers.get("reset")) != "0"


def test_the_pool_counts_what_has_not_ended() -> None:
    pool, go = CountingPool(2, "test"), threading.Event()
    tasks = [pool.submit(go.wait, 10) for _ in range(5)]
    failing = pool.submit(int, "x")
    assert pool.busy == 6
    go.set()
    assert all(task.result(10) for task in tasks)
    with pytest.raises(ValueError, match="invalid literal"):
        failing.result(10)
    pool.shutdown()
    assert pool.busy == 0
