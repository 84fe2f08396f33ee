"""A thread pool that knows how many of its tasks have begun or wait and not ended, and whether a task gets a thread.

Where the system starts no further thread, a pool goes on with those that it has. It says so before it takes a task, so
that the caller can refuse the call: a task that waits for a thread which never comes is a call that hangs.
"""

import itertools
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any, Final, ParamSpec, TypeVar

from gangway.executor.logs import OFTEN

NO_THREAD: Final = "no further thread can be started: the limit of processes (pids.max, ulimit -u) or memory is reached"

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
Task = tuple["Future[Any]", Callable[..., Any], tuple[Any, ...], dict[str, Any]]
_log = logging.getLogger(__name__)


class NoThreadError(RuntimeError):
    """No thread is free, and the system starts none; the message says so."""

    def __init__(self) -> None:
        super().__init__(NO_THREAD)


class CountingPool(Executor):
    """For any threads. `ready_threads` are started at once, further ones as tasks need them, up to `max_threads`.

    Raises NoThreadError if those cannot be started.
    """

    def __init__(self, max_threads: int, name: str, ready_threads: int = 0) -> None:
        self._max_threads = max_threads
        self._name = name
        self._tasks: SimpleQueue[Task | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._submitted = self._ended = 0
        self._ends = itertools.count(1)  # counts atomically, where += does not
        for _ in range(min(ready_threads, max_threads)):
            if not self._start():
                raise NoThreadError

    @property
    def submitted(self) -> int:
        """How many tasks there were so far."""
        return self._submitted

    @property
    def busy(self) -> int:
        """How many tasks have not ended. Too many by a few for moments."""
        return self._submitted - self._ended

    def has_thread(self) -> bool:
        """Say whether a task gets a thread: a free one, a new one, or the next free one where all are started."""
        with self._lock:
            return self._provide()

    def submit(
        self, task: Callable[Arguments, Result], /, *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> "Future[Result]":
        """Have a thread run the task. Raises NoThreadError, and nothing is done then."""
        future: Future[Result] = Future()
        with self._lock:
            if not self._provide():
                raise NoThreadError
            self._submitted += 1
        self._tasks.put((future, task, args, kwargs))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the threads behind the tasks that there are; take no further task."""
        with self._lock:
            self._max_threads = 0
            threads, self._threads = self._threads, []
        for _ in threads:
            self._tasks.put(None)
        for thread in threads if wait else ():
            thread.join()

    def _provide(self) -> bool:
        """See `has_thread`. The caller holds the lock."""
        count = len(self._threads)
        return self._submitted - self._ended < count or count >= self._max_threads or self._start()

    def _start(self) -> bool:
        thread = threading.Thread(target=self._work, name=f"{self._name}_{len(self._threads)}", daemon=True)
        try:
            thread.start()
        except (RuntimeError, MemoryError):
            _log.error("no thread can be started for %s (%s), so calls are refused", self._name, NO_THREAD, extra=OFTEN)
            return False
        self._threads.append(thread)
        return True

    def _work(self) -> None:
        while (item := self._tasks.get()) is not None:
            future, task, args, kwargs = item
            del item
            if not future.set_running_or_notify_cancel():
                self._ended = next(self._ends)
                continue
            try:
                result = task(*args, **kwargs)
            except BaseException as error:
                self._ended = next(self._ends)
                future.set_exception(error)
            else:
                self._ended = next(self._ends)
                future.set_result(result)
                del result
            del future, task, args, kwargs  # a thread that waits holds nothing of the last call


def started_pool(threads: int, name: str) -> ThreadPoolExecutor:
    """Return a pool of Python's own whose threads run already. Raises NoThreadError."""
    pool, all_run = ThreadPoolExecutor(threads, thread_name_prefix=name), threading.Barrier(threads + 1)
    try:
        for _ in range(threads):
            pool.submit(all_run.wait)
    except RuntimeError:
        all_run.abort()
        raise NoThreadError from None
    all_run.wait()
    return pool
