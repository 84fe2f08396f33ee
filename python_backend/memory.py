"""The memory of an instance: how much its model may have, what it keeps, and what errors say of the limit."""

from __future__ import annotations

import ctypes
import errno
import re
import resource
from contextlib import suppress
from pathlib import Path

from gangway.python_backend.log import text_of

PARAMETER = "gangway_python_memory_mib"
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
_KEPT_BYTES = 64 << 20  # of memory that a model has let go of; a single array above a half goes back to the system
_WORDS = re.compile(r"alloc|out of memory|enough memory|cannot .*memory", re.IGNORECASE)  # of libraries in C++


def keep() -> None:
    """Let the arrays of a request lie where those of the last one lay: fresh pages cost more than what fills them."""
    with suppress(AttributeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES // 2)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def limit(data_bytes: int) -> None:
    """Let the process have no more data; 0: any. It is the first one that the kernel ends when memory is full."""
    if data_bytes:
        resource.setrlimit(resource.RLIMIT_DATA, (data_bytes, data_bytes))
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("800")


def about(error: BaseException) -> str:
    """Return which limit an error may come from and what raises it; empty for other errors, and without a limit."""
    limit_bytes = resource.getrlimit(resource.RLIMIT_DATA)[0]
    is_memory = isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM
    if limit_bytes == resource.RLIM_INFINITY or not (is_memory or _WORDS.search(text_of(error))):
        return ""
    return f" (the instance may have {limit_bytes >> 20} MiB of data; the model's parameter {PARAMETER} raises that)"
