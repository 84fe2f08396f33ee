"""What a process asks of the system for itself."""

import ctypes
import os
import resource
from contextlib import suppress
from typing import Final, TextIO

from gangway.executor.memory_budget import memory_budget
from gangway.executor.process import use_one_malloc_arena

# How many of the threads that it could use a front end may have, where processes and threads are limited.
#
# A front end has pools for about FRONT_END_THREADS threads, which are started as calls need them. Under a lower limit
# (`pids.max` of a container, `ulimit -u`) each pool and each count of calls that hold a thread is smaller by the same
# factor. So calls wait for one of the pool's threads, or are refused, and no thread is asked for that cannot be had.

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


_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
KEEP_BYTES: Final = (64 << 20, 32 << 20)  # of blocks up to this size; older versions of glibc refuse more than the last
MAX_CONNECTIONS: Final = 16384
LEAST_DESCRIPTORS: Final = 256
OTHER_DESCRIPTORS: Final = 192  # connections reserved for health, metrics, clients' regions, what the server has open
KEEP_SHARE: Final = 1 / 32  # of the memory limit, if that is less
_libc = ctypes.CDLL(None, use_errno=True)


class TooFewDescriptorsError(RuntimeError):
    """The server cannot work with so few open files; the message says how many it needs."""


def keep_freed_memory() -> None:
    """Have malloc keep freed memory instead of returning it to the kernel.

    Otherwise every large message is a fresh mapping, and its page faults cost more than all the rest (measured: 160 us
    of 550 us for 600 KB, 22 of 26 ms for a copy of 38 MB). One arena, so that the memory which one thread frees is the
    memory that the next one gets.
    """
    use_one_malloc_arena()
    sizes = [memory_budget().share_bytes(KEEP_SHARE, size) for size in KEEP_BYTES]
    kept = next((size for size in sizes if _libc.mallopt(_M_MMAP_THRESHOLD, size) == 1), None)
    if kept is None or _libc.mallopt(_M_TRIM_THRESHOLD, 2 * kept) != 1:
        raise ValueError("mallopt: the thresholds were refused")


def allow_many_descriptors() -> None:
    """Let the process open as many files as its hard limit says: the usual soft one ends at 1024 connections.

    Raises TooFewDescriptorsError.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # some systems name a hard limit that they do not grant
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    if soft < LEAST_DESCRIPTORS:
        raise TooFewDescriptorsError(
            f"a process may open only {soft} files here (ulimit -n), and the server needs {LEAST_DESCRIPTORS}"
        )


def max_connections() -> int:
    """Return how many connections gRPC and HTTP may have, each: half of the files that this process may open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(1, min(MAX_CONNECTIONS, (soft - OTHER_DESCRIPTORS) // 2))


def drop_unwritable(stream: TextIO) -> None:
    """Have a standard stream that takes nothing more (no space, no reader) lead nowhere, so that no end fails on it."""
    try:
        stream.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
