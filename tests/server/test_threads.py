"""Pools of threads: what they count, and what they do where the system starts no further thread."""

import threading
from collections import Counter

import pytest

from gangway.server.threads import CountingPool, NoThreadError
from tests.helpers.whole_server import until
from tests.server.conftest import no_more_threads


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
