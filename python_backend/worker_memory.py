"""Memory that an instance shares with a worker, which makes it: a descriptor that comes along with a message."""

from __future__ import annotations

import mmap
import os

from gangway.python_backend.messages import Message


class Memory:
    """A worker's shared memory, in which it writes inputs and finds outputs."""

    def __init__(self) -> None:
        self._descriptor = -1
        self._map: mmap.mmap | None = None

    def take(self, message: Message) -> memoryview:
        """Return the memory as a worker's message describes it. Raises ValueError, OSError."""
        if message.descriptor >= 0:
            self.close()
            self._descriptor = message.descriptor
            return self._mapped(os.fstat(self._descriptor).st_size)
        return self.sized(0)

    def sized(self, size_bytes: int) -> memoryview:
        """Return at least so many bytes, which the worker sees, too. Raises OSError where there is no memory."""
        if self._map is None or len(self._map) < size_bytes:
            os.posix_fallocate(self._descriptor, 0, size_bytes)
            return self._mapped(size_bytes)
        return memoryview(self._map)

    def close(self) -> None:
        """Let go of it."""
        self._map = None  # views of it may still be there: they end it
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _mapped(self, size_bytes: int) -> memoryview:
        if self._map is None or len(self._map) != size_bytes:
            self._map = mmap.mmap(self._descriptor, size_bytes)
        return memoryview(self._map)
