"""Shared memory: segments without a name, and Python's formats of the structures that lie in them.

A segment is inherited by file descriptor, so nothing of it stays behind, and no /dev/shm bounds it. Its pages are
charged to the cgroup of the process that touches them first, like all other memory. The formats are made of what
native/layout.h says about its structures.
"""

import ctypes
import errno
import mmap
import os
import struct
from collections.abc import Sequence
from typing import Final

from gangway.base.memory_budget import PIECE_BYTES, memory_budget
from gangway.executor import _native

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


class StructLayout:
    """One structure. `size_bytes`: with what follows its last field."""

    def __init__(self, name: str) -> None:
        self.size_bytes, self._fields = _native.LAYOUT[name]

    def offset(self, field: str) -> int:
        """Return where a field begins, in bytes."""
        return self._fields[field][0]

    def size(self, field: str) -> int:
        """Return the size of a field in bytes."""
        return self._fields[field][1]

    def reading(self, *fields: str) -> tuple[struct.Struct, int]:
        """Return a format of these fields, which skips what lies between them, and the offset of the first one.

        They are to be in the structure's order; else ValueError is raised.
        """
        begin = self.offset(fields[0])
        return struct.Struct("<" + self._format(fields, begin)[0]), begin

    def writing(self, *fields: str) -> tuple[struct.Struct, int]:
        """Return the same of fields that lie side by side: what is between them would be overwritten (ValueError)."""
        made, begin = self.reading(*fields)
        if made.size != sum(map(self.size, fields)):
            raise ValueError(f"{', '.join(fields)} do not lie side by side")
        return made, begin

    def whole(self, *fields: str, size_bytes: int = 0) -> struct.Struct:
        """Return a format of the whole structure, or of more, in which all other bytes are 0."""
        text, end = self._format(fields, 0)
        return struct.Struct(f"<{text}{max(size_bytes, self.size_bytes) - end}x")

    def _format(self, fields: Sequence[str], at: int) -> tuple[str, int]:
        parts = []
        for field in fields:
            offset, size_bytes, letter = self._fields[field]
            if offset < at or not letter:
                raise ValueError(f"{field} is out of order, or a structure")
            count = size_bytes if letter == "s" else size_bytes // struct.calcsize(f"<{letter}")
            parts.append(f"{offset - at}x{count}{letter}")
            at = offset + size_bytes
        return "".join(parts), at


MESSAGE: Final = StructLayout("message")
REQUEST_MESSAGE: Final = StructLayout("request_message")
GANG_MESSAGE: Final = StructLayout("gang_message")
MODEL_MESSAGE: Final = StructLayout("model_message")
WORKER_MESSAGE: Final = StructLayout("worker_message")
BELL: Final = StructLayout("bell")
WORKER_STATUS: Final = StructLayout("worker_status")
SLOT: Final = StructLayout("slot")
CONTROL_HEADER: Final = StructLayout("control_header")
MODEL_ACCOUNT: Final = StructLayout("model_account")
SCHEDULER_BLOCK: Final = StructLayout("scheduler_block")
WORKER_ACCOUNT: Final = StructLayout("worker_account")
SERVER_BLOCK: Final = StructLayout("server_block")
HEARTBEAT: Final = StructLayout("heartbeat")
LOST_REGIONS: Final = StructLayout("lost_regions")
DECISION_BLOCK: Final = StructLayout("decision_block")
