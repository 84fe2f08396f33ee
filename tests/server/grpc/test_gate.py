"""The gate before the methods of a server with few threads: stalled calls give way."""

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import pytest
from h2.events import DataReceived, ResponseReceived, StreamReset, TrailersReceived

from benchmarks.lib.raw_connection import RawConnection
from gangway.clients.connection import SERVICE
from gangway.server.access import Restrictions
from gangway.server.grpc import gate as grpc_gate
from gangway.server.grpc.gate import Gate, GatedService
from gangway.server.threads import CountingPool, NoThreadError
from tests.helpers.whole_server import until
from tests.server.conftest import no_more_threads

THREADS = 16
MESSAGE = b"\0\0\0\0\x02hi"
CANCELLED = {"reset", str(grpc.StatusCode.CANCELLED.value[0])}


def echo(message: bytes, _context: Any) -> bytes:
    return message


@contextmanager
def gated_server() -> Iterator[str]:
    gate = Gate(Restrictions(), grace_s=0.1)
    pool = CountingPool(THREADS, "test")
    server = grpc.server(pool)
    handlers = {"ModelInfer": grpc.unary_unary_rpc_method_handler(echo)}
    server.add_generic_rpc_handlers((GatedService(SERVICE.strip("/"), handlers, gate, pool),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    gate.cleaner.start()
    yield f"127.0.0.1:{port}"
    gate.cleaner.stop()
    server.stop(None).wait(5)


def ends(connection: RawConnection, count: int) -> dict[int, str]:
    """Wait until so many calls have ended, whichever; return how: a status, or "reset"."""
    found: dict[int, str] = {}
    while True:
        for event in connection.events:
            if isinstance(event, StreamReset):
                found[event.stream_id] = "reset"
            elif isinstance(event, (ResponseReceived, TrailersReceived)):  # a status stands in the last headers
                headers = dict(event.headers or ())
                if b"grpc-status" in headers:
                    found.setdefault(event.stream_id, headers[b"grpc-status"].decode())
        if len(found) >= count:
            return found
        connection.read()


def test_stalled_calls_cannot_take_all_threads_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_gate, "MAX_ARRIVING", 2)
    monkeypatch.setattr(grpc_gate, "MAX_PLAIN", 4)
    with gated_server() as address, RawConnection(address) as stalled, RawConnection(address) as other:
        for stream in [stalled.begin("ModelInfer") for _ in range(2 * THREADS)]:
            stalled.send(stream, MESSAGE[:-1])
        stream = other.begin("ModelInfer")
        other.send(stream, MESSAGE, end=True)
        headers, body = other.answer(stream)
        assert (headers["grpc-status"], body) == ("0", MESSAGE)
        assert set(ends(stalled, 1).values()) <= CANCELLED


def test_unread_answers_give_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_gate, "MAX_UNREAD_BYTES", 4)  # two answers
    monkeypatch.setattr(grpc_gate, "LARGE_ANSWER_BYTES", 1)
    with gated_server() as address, RawConnection(address, window_bytes=0) as connection:
        for stream in [connection.begin("ModelInfer") for _ in range(4)]:
            connection.send(stream, MESSAGE, end=True)
        assert set(ends(connection, 2).values()) <= CANCELLED, "two of the four make room for the others"
        assert not [event for event in connection.events if isinstance(event, DataReceived)]


def test_a_call_that_gets_no_thread_is_refused() -> None:
    with gated_server() as address, RawConnection(address) as connection:
        with no_more_threads():
            for _ in range(3):
                headers, _ = connection.answer(connection.begin("ModelInfer"))
                assert headers["grpc-status"] == str(grpc.StatusCode.UNAVAILABLE.value[0])
                assert "no further thread can be started" in headers["grpc-message"]
        stream = connection.begin("ModelInfer")
        connection.send(stream, MESSAGE, end=True)
        assert connection.answer(stream)[1] == MESSAGE


def test_a_pool_goes_on_with_the_threads_that_it_has() -> None:
    pool, go = CountingPool(3, "test", ready_threads=1), threading.Event()
    with no_more_threads():
        task = pool.submit(go.wait, 10)
        assert not pool.has_thread()
        with pytest.raises(NoThreadError):
            pool.submit(int)
        go.set()
        assert task.result(10)
        assert pool.submit(int).result(10) == 0
        with pytest.raises(NoThreadError):
            CountingPool(1, "test", ready_threads=1)
    go.clear()
    tasks = [pool.submit(go.wait, 10) for _ in range(4)]  # the last one waits for a thread
    assert pool.has_thread()
    go.set()
    assert all(task.result(10) for task in tasks)
    pool.shutdown()


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


def test_a_task_goes_to_the_thread_that_was_busy_last() -> None:
    """Its memory is in the caches of a core; by turns each thread would be the coldest."""
    pool, threads = CountingPool(8, "test", ready_threads=8), Counter[int]()
    for _ in range(200):
        threads[pool.submit(threading.get_ident).result(10)] += 1
        until(lambda: not pool.busy)
    pool.shutdown()
    assert max(threads.values()) > 100, threads
