"""Threads and calls in pools work for the execution in which they were begun."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from gangway.python_backend import working_for
from gangway.python_backend.executions import Execution, Form, OutputCheck, Responder
from gangway.python_backend.messages import Connection

ABOUT = {"wanted": [], "room_bytes": 0, "most_bytes": 0}


@pytest.fixture(autouse=True)
def inheriting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading.Thread, "start", threading.Thread.start)
    monkeypatch.setattr(ThreadPoolExecutor, "submit", ThreadPoolExecutor.submit)
    working_for.let_threads_inherit()


@pytest.fixture
def executions() -> Iterator[list[Execution]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        check = OutputCheck({"output": []})
        yield [
            Execution(number, [Responder(Form(ABOUT), {}, [], check, False)], Connection(ours), 0)
            for number in range(2)
        ]


class Thread(threading.Thread):
    """One that has a method of its own."""

    found: Execution | None = None

    def run(self) -> None:
        self.found = working_for.execution()


def of_thread() -> Execution | None:
    thread = Thread()
    thread.start()
    thread.join()
    return thread.found


def test_threads(executions: list[Execution]) -> None:
    for execution in (*executions, None):
        with working_for.working_for(execution):
            assert working_for.execution() is of_thread() is execution
    assert working_for.execution() is None


def test_calls_in_a_pool_are_not_those_of_the_thread_that_has_begun_it(executions: list[Execution]) -> None:
    with ThreadPoolExecutor(1) as pool:
        for execution in (*executions, None, executions[0]):
            with working_for.working_for(execution):
                assert pool.submit(working_for.execution).result() is execution
                assert pool.submit(of_thread).result() is execution
                assert list(pool.map(lambda _: working_for.execution(), range(3))) == [execution] * 3


def test_loops_of_other_threads(executions: list[Execution]) -> None:
    async def found() -> Execution | None:
        await asyncio.sleep(0)
        return working_for.execution()

    loop = asyncio.new_event_loop()
    with working_for.working_for(executions[1]):
        thread = threading.Thread(target=loop.run_forever)
        thread.start()
    for execution in executions:
        with working_for.working_for(execution):
            assert asyncio.run_coroutine_threadsafe(found(), loop).result() is execution
            assert asyncio.run(found()) is execution
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def test_results_and_errors_are_those_of_the_call(executions: list[Execution]) -> None:
    with ThreadPoolExecutor(1) as pool, working_for.working_for(executions[0]):
        assert pool.submit(int, "12", base=8).result() == 10
        with pytest.raises(ValueError, match="invalid literal"):
            pool.submit(int, "x").result()
