"""Shared memory without a name, inherited by file descriptor: nothing of it can stay behind, and no /dev/shm bounds it.

Its pages are charged to the cgroup of who touches them first, like all other memory.
"""

import ctypes
import errno
import mmap
import os
from typing import Final

from gangway.executor.memory_budget import PIECE_BYTES, memory_budget

_FALLOC_FL_KEEP_SIZE: Final = 1
_FALLOC_FL_PUNCH_HOLE: Final = 2
_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


class Segment:
    """One stretch of shared memory, mapped writable.

    `view` is its memory, `fd` the descriptor that a child process inherits by `subprocess.Popen(pass_fds=...)`.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.size_bytes = os.fstat(fd).st_size
        self._map = mmap.mmap(fd, self.size_bytes)
        self.view = memoryview(self._map)

    @classmethod
    def create(cls, size_bytes: int, label: str) -> "Segment":
        """Make a sparse segment of zeros, which /proc shows as `memfd:gangway.<label>`. Raises OSError.

        Memory is taken from the system when a page is first touched; `allocate` takes it in advance.
        """
        fd = os.memfd_create(f"gangway.{label}")
        try:
            os.ftruncate(fd, size_bytes)
            return cls(fd)
        except OSError:
            os.close(fd)
            raise

    @classmethod
    def attach(cls, fd: int) -> "Segment":
        """Map a segment that was inherited as `fd`."""
        return cls(fd)

    def allocate(self, offset: int, size_bytes: int) -> None:
        """Take memory for a range now. Raises MemoryFullError, an OSError, where the memory budget has no room for it.

        The kernel would kill a process instead, now or when the range is touched. A part of the range may have memory
        after an error.
        """
        self._check(offset, size_bytes)
        end, budget = offset + size_bytes, memory_budget()
        for at in range(offset, end, PIECE_BYTES):
            piece_bytes = min(PIECE_BYTES, end - at)
            budget.take(piece_bytes)
            self._fallocate(0, at, piece_bytes)

    def punch(self, offset: int, size_bytes: int) -> None:
        """Give the memory of a range back to the system; the range reads as zeros."""
        self._check(offset, size_bytes)
        if size_bytes:
            self._fallocate(_FALLOC_FL_PUNCH_HOLE | _FALLOC_FL_KEEP_SIZE, offset, size_bytes)

    def zero(self, offset: int, size_bytes: int) -> None:
        """Make a range all zeros and take memory for it. Raises MemoryFullError as `allocate` does."""
        self.punch(offset, size_bytes)
        self.allocate(offset, size_bytes)

    def close(self) -> None:
        """Unmap and close. Raises BufferError while slices of `view` are still in use."""
        self.view.release()
        self._map.close()
        os.close(self.fd)

    def _check(self, offset: int, size_bytes: int) -> None:
        if offset < 0 or size_bytes < 0 or offset + size_bytes > self.size_bytes:
            raise ValueError(f"range {offset}+{size_bytes} is outside a segment of {self.size_bytes} bytes")

    def _fallocate(self, mode: int, offset: int, size_bytes: int) -> None:
        while _libc.fallocate(self.fd, mode, offset, size_bytes) != 0:
            error = ctypes.get_errno()
            if error != errno.EINTR:
                raise OSError(error, f"fallocate of {size_bytes} bytes of shared memory: {os.strerror(error)}")
