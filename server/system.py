"""What a process asks of the system for itself: memory, standard streams, the version of its package."""

import ctypes
import os
from functools import cache
from typing import Final, TextIO

from gangway.base.memory_budget import memory_budget
from gangway.base.process import use_one_malloc_arena

_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
KEEP_BYTES: Final = (64 << 20, 32 << 20)  # of blocks up to this size; older versions of glibc refuse more than the last
KEEP_SHARE: Final = 1 / 32  # of the memory limit, if that is less
_libc = ctypes.CDLL(None, use_errno=True)


def keep_freed_memory() -> None:
    """Have malloc keep freed memory instead of returning it to the kernel.

    Otherwise every large message is a fresh mapping, and its page faults cost more than the rest of a request. There is
    one arena, so that one thread's freed memory is there for the next thread.
    """
    use_one_malloc_arena()
    sizes = [memory_budget().share_bytes(KEEP_SHARE, size) for size in KEEP_BYTES]
    kept = next((size for size in sizes if _libc.mallopt(_M_MMAP_THRESHOLD, size) == 1), None)
    if kept is None or _libc.mallopt(_M_TRIM_THRESHOLD, 2 * kept) != 1:
        raise ValueError("mallopt: the thresholds were refused")


def drop_unwritable(stream: TextIO) -> None:
    """Have a standard stream that takes nothing more (no space, no reader) lead nowhere, so that no end fails on it."""
    try:
        stream.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


@cache
def own_version() -> str:
    """Return the version of the server. The first call takes some 10 ms."""
    from importlib.metadata import version  # noqa: PLC0415 - imports what reads mail, which a successor has no time for

    return version("gangway-serve")
