"""Threads: pools that say whether a task gets one, how many a front end may have, and counts of users."""

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any, Final, ParamSpec, TypeVar

from gangway.executor.logs import OFTEN

_log = logging.getLogger(__name__)

NO_THREAD: Final = "no further thread can be started: the limit of processes (pids.max, ulimit -u) or memory is reached"

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
Task = tuple["Future[Any]", Callable[..., Any], tuple[Any, ...], dict[str, Any]]


class NoThreadError(RuntimeError):
    """No thread is free, and the system starts none; the message says so."""

    def __init__(self) -> None:
        super().__init__(NO_THREAD)


class CountingPool(Executor):
    """A pool that counts its tasks, and says whether a task gets a thread. For any threads.

    Where the system starts no further thread, the pool goes on with those that it has. It says so before it takes a
    task, so that the caller refuses the call: a task whose thread never comes is a call that hangs. `ready_threads` are
    started at once, further ones as tasks need them, up to `max_threads`. Raises NoThreadError if those cannot be
    started.

    A task goes to the thread that has been free for the shortest time: its memory is in the core's caches.
    """

    def __init__(self, max_threads: int, name: str, ready_threads: int = 0) -> None:
        self._max_threads = max_threads
        self._name = name
        self._lock = threading.Lock()  # of all that follows
        self._tasks: deque[Task] = deque()  # for which no thread is free yet
        self._free: list[SimpleQueue[Task | None]] = []  # threads that wait, each for its own task
        self._threads: list[threading.Thread] = []
        self._submitted = self._ended = 0
        self._is_over = False
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
            item = (future, task, args, kwargs)
            if self._free:
                self._free.pop().put(item)
            else:
                self._tasks.append(item)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the threads behind the tasks that there are; take no further task."""
        with self._lock:
            self._max_threads, self._is_over = 0, True
            threads, self._threads = self._threads, []
            while self._free:
                self._free.pop().put(None)
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

    def _next(self, own: "SimpleQueue[Task | None]") -> Task | None:
        """Return the next task of a thread; None: there will be none."""
        with self._lock:
            if self._tasks:
                return self._tasks.popleft()
            if self._is_over:
                return None
            self._free.append(own)
        return own.get()

    def _work(self) -> None:
        own: SimpleQueue[Task | None] = SimpleQueue()
        while (item := self._next(own)) is not None:
            future, task, args, kwargs = item
            del item
            if not future.set_running_or_notify_cancel():
                self._note_end()
                continue
            try:
                result = task(*args, **kwargs)
            except BaseException as error:
                self._note_end()
                future.set_exception(error)
            else:
                self._note_end()
                future.set_result(result)
                del result
            del future, task, args, kwargs  # a thread that waits holds nothing of the last call

    def _note_end(self) -> None:
        with self._lock:
            self._ended += 1


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


FRONT_END_THREADS: Final = 2304  # in pools, with 1024 request slots; tests/server/test_limits.py adds them up
LEAST_POOL_THREADS: Final = 64
FRONT_END_OTHERS: Final = 80  # gRPC's core, metrics, what looks after something, and the least of each pool
SERVER_OTHERS: Final = 32  # processes and threads of supervisor, scheduler, trace exporter, a job that compiles
WORKER_THREADS: Final = 4
PROFILER_THREADS: Final = 2  # for each core, while a model is measured


class TooFewThreadsError(RuntimeError):
    """The server cannot work with so few threads; the message says what to do."""


def thread_share(limit: int | None, cores: int, front_ends: int) -> float:
    """Return the part (0 to 1) of its pools' threads that each front end may have. Raises TooFewThreadsError.

    A front end has pools for about FRONT_END_THREADS threads. Under a lower limit (`pids.max` of a container, `ulimit
    -u`) each pool, and each bound of calls that hold a thread, is smaller by the same factor. So calls wait for a
    thread of the pool or are refused, and no thread is asked for beyond the limit. `limit`: how many processes and
    threads there may be together, None: any number.
    """
    if limit is None:
        return 1.0
    others = SERVER_OTHERS + (WORKER_THREADS + PROFILER_THREADS) * cores
    pool_threads = (limit - others) // front_ends - FRONT_END_OTHERS
    if pool_threads < LEAST_POOL_THREADS:
        needed = others + front_ends * (FRONT_END_OTHERS + LEAST_POOL_THREADS)
        raise TooFewThreadsError(
            f"only {limit} processes and threads are allowed here (pids.max, ulimit -u), and {cores} --cores with"
            f" {front_ends} --front-ends need {needed}: raise the limit, or choose fewer"
        )
    return min(1.0, pool_threads / FRONT_END_THREADS)


def scaled(count: int, share: float) -> int:
    """Return that part of a number of threads, or of calls that hold one: at least one."""
    return max(1, int(count * share))


class RefCount:
    """Counts the requests that use a loaded model or a mapped region, so that it can go with the last. Safe for
    threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._when_unused: Callable[[], None] | None = None

    @property
    def count(self) -> int:
        """How many there are at this moment."""
        return self._count

    def begin(self) -> bool:
        """Count one more; False, and nothing is counted, when it is closed."""
        with self._lock:
            if self._when_unused is not None:
                return False
            self._count += 1
            return True

    def end(self) -> None:
        """Count one less."""
        with self._lock:
            self._count -= 1
            when_unused = None if self._count else self._when_unused
        if when_unused is not None:
            when_unused()

    def close(self, when_unused: Callable[[], None]) -> None:
        """Let no request begin; `when_unused` is called once, as soon as all have ended, by whichever thread."""
        with self._lock:
            self._when_unused = when_unused
            unused = not self._count
        if unused:
            when_unused()
