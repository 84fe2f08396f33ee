"""Shared memory that can never be left behind: made with posix_ipc, unlinked at once, inherited by file descriptor."""

import contextlib
import ctypes
import errno
import mmap
import os
import re
from pathlib import Path
from typing import Final

import posix_ipc

_SHARED_MEMORY_FOLDER: Final = Path("/dev/shm")
_NAME: Final = re.compile(r"gangway\.(\d+)\..+")
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
        """Make a sparse segment of zeros called `/gangway.<pid>.<label>` and unlink the name.

        Memory is taken from the system when a page is first touched; `allocate` takes it in advance.
        """
        name = f"/gangway.{os.getpid()}.{label}"
        with contextlib.suppress(posix_ipc.ExistentialError):  # left by a killed process that had our number
            posix_ipc.unlink_shared_memory(name)
        shared = posix_ipc.SharedMemory(name, posix_ipc.O_CREX, mode=0o600, size=size_bytes)
        posix_ipc.unlink_shared_memory(name)
        return cls(shared.fd)

    @classmethod
    def attach(cls, fd: int) -> "Segment":
        """Map a segment that was inherited as `fd`."""
        return cls(fd)

    def allocate(self, offset: int, size_bytes: int) -> None:
        """Take memory for a range now. Raises OSError (ENOSPC) where touching it would kill the process by SIGBUS."""
        self._fallocate(0, offset, size_bytes)

    def punch(self, offset: int, size_bytes: int) -> None:
        """Give the memory of a range back to the system; the range reads as zeros."""
        self._fallocate(_FALLOC_FL_PUNCH_HOLE | _FALLOC_FL_KEEP_SIZE, offset, size_bytes)

    def zero(self, offset: int, size_bytes: int) -> None:
        """Make a range all zeros and take memory for it. Raises OSError (ENOSPC) when the system has none."""
        self.punch(offset, size_bytes)
        self.allocate(offset, size_bytes)

    def close(self) -> None:
        """Unmap and close. Raises BufferError while slices of `view` are still in use."""
        self.view.release()
        self._map.close()
        os.close(self.fd)

    def _fallocate(self, mode: int, offset: int, size_bytes: int) -> None:
        if offset < 0 or size_bytes < 0 or offset + size_bytes > self.size_bytes:
            raise ValueError(f"range {offset}+{size_bytes} is outside a segment of {self.size_bytes} bytes")
        if size_bytes == 0:
            return
        while _libc.fallocate(self.fd, mode, offset, size_bytes) != 0:
            error = ctypes.get_errno()
            if error != errno.EINTR:
                raise OSError(error, f"fallocate of {size_bytes} bytes of shared memory: {os.strerror(error)}")


def sweep_stale() -> list[str]:
    """Unlink segments whose owner is gone; return their names. To be called before this process makes its own.

    They exist only if a process was killed between making a segment and unlinking its name.
    """
    swept = []
    for path in _SHARED_MEMORY_FOLDER.glob("gangway.*"):
        match = _NAME.fullmatch(path.name)
        if match and not _is_other_process(int(match[1])):
            with contextlib.suppress(posix_ipc.ExistentialError, posix_ipc.PermissionsError):
                posix_ipc.unlink_shared_memory(f"/{path.name}")
                swept.append(path.name)
    return swept


def _is_other_process(pid: int) -> bool:
    return pid != os.getpid() and Path(f"/proc/{pid}").exists()
