"""Pools of threads that run already, and counts of users."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

NO_THREAD: Final = "no further thread can be started: the limit of processes (pids.max, ulimit -u) or memory is reached"


class NoThreadError(RuntimeError):
    """No thread is free, and the system starts none; the message says so."""

    def __init__(self) -> None:
        super().__init__(NO_THREAD)


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
