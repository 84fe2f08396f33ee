"""What a process asks of Linux and of the C library for itself."""

import ctypes
import signal
from typing import Final

_PR_SET_PDEATHSIG: Final = 1
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_M_ARENA_MAX: Final = -8
KEEP_BYTES: Final = 32 * 1024 * 1024  # the largest threshold that glibc accepts
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends, as it does when its process is killed.

    A parent that has ended before this call is to be noticed otherwise (its end of a socket is closed).
    """
    if _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")


def keep_freed_memory() -> None:
    """Have malloc keep freed memory instead of returning it to the kernel.

    Otherwise every large message is a fresh mapping, and its page faults cost more than all the rest (measured: 160 us
    of 550 us for 600 KB). One arena, so that the memory which one thread frees is the memory that the next one gets.
    """
    options = ((_M_MMAP_THRESHOLD, KEEP_BYTES), (_M_TRIM_THRESHOLD, 2 * KEEP_BYTES), (_M_ARENA_MAX, 1))
    for option, value in options:
        if _libc.mallopt(option, value) != 1:
            raise ValueError(f"mallopt({option}, {value}) was refused")
