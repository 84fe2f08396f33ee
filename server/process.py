"""What a process asks of the C library for itself."""

import ctypes
import resource
from contextlib import suppress
from typing import Final

from gangway.executor.process import keep_one_heap

_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
KEEP_BYTES: Final = 32 * 1024 * 1024  # the largest threshold that glibc accepts
_libc = ctypes.CDLL(None, use_errno=True)


def keep_freed_memory() -> None:
    """Have malloc keep freed memory instead of returning it to the kernel.

    Otherwise every large message is a fresh mapping, and its page faults cost more than all the rest (measured: 160 us
    of 550 us for 600 KB). One arena, so that the memory which one thread frees is the memory that the next one gets.
    """
    keep_one_heap()
    for option, value in ((_M_MMAP_THRESHOLD, KEEP_BYTES), (_M_TRIM_THRESHOLD, 2 * KEEP_BYTES)):
        if _libc.mallopt(option, value) != 1:
            raise ValueError(f"mallopt({option}, {value}) was refused")


def allow_many_descriptors() -> None:
    """Let the process open as many files as its hard limit says: the usual soft one ends at 1024 connections."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # some systems name a hard limit that they do not grant
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
