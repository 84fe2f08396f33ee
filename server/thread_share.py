"""How many of the threads that it could use a front end may have, where processes and threads are limited.

A front end has pools for about FRONT_END_THREADS threads, which are started as calls need them. Under a lower limit
(`pids.max` of a container, `ulimit -u`) each pool and each count of calls that hold a thread is smaller by the same
factor. So calls wait for one of the pool's threads, or are refused, and no thread is asked for that cannot be had.
"""

from typing import Final

FRONT_END_THREADS: Final = 4096  # in pools, with 1024 request slots; tests/server/test_limits.py adds them up
LEAST_POOL_THREADS: Final = 64
FRONT_END_OTHERS: Final = 80  # gRPC's core, metrics, what looks after something, and the least of each pool
SERVER_OTHERS: Final = 32  # processes and threads of supervisor, scheduler, trace exporter, a job that compiles
WORKER_THREADS: Final = 4
PROFILER_THREADS: Final = 2  # for each core, while a model is measured


class TooFewThreadsError(RuntimeError):
    """The server cannot work with so few threads; the message says what to do."""


def thread_share(limit: int | None, cores: int, front_ends: int) -> float:
    """Return the part (0 to 1) of its pools' threads that each front end may have. Raises TooFewThreadsError.

    `limit`: as many processes and threads there may be together, None: any number.
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
