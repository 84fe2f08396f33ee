"""For which execution a thread or a coroutine works: the one whose requests to other models it makes.

Coroutines and their tasks inherit it, whichever loop runs them. Threads that a model starts, and calls that it gives to
pools of threads, have it of those who start or give them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from gangway.python_backend.executions import Execution

_execution: ContextVar[Execution | None] = ContextVar("execution", default=None)


def execution() -> Execution | None:
    """Return the execution; None in threads that have to do with none, or with all."""
    return _execution.get()


@contextmanager
def working_for(execution: Execution | None) -> Iterator[None]:
    """Work for this execution."""
    token = _execution.set(execution)
    try:
        yield
    finally:
        _execution.reset(token)


def let_threads_inherit() -> None:
    """Have threads and calls in pools work for whom those work that begin them."""
    start, submit = threading.Thread.start, ThreadPoolExecutor.submit

    def start_inheriting(thread: threading.Thread) -> None:
        execution, run = _execution.get(), thread.run
        if execution is not None:

            def run_inheriting() -> None:
                del thread.__dict__["run"]  # what it holds would hold the thread
                with working_for(execution):
                    run()

            thread.run = run_inheriting  # type: ignore[method-assign]
        start(thread)

    def submit_inheriting(
        self: ThreadPoolExecutor, fn: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Future[Any]:
        execution = _execution.get()

        def call_inheriting(*args: Any, **kwargs: Any) -> Any:
            with working_for(execution):
                return fn(*args, **kwargs)

        return submit(self, call_inheriting, *args, **kwargs)

    threading.Thread.start = start_inheriting  # type: ignore[method-assign,assignment]
    ThreadPoolExecutor.submit = submit_inheriting  # type: ignore[method-assign,assignment]
