"""What a child process writes to standard error, line by line."""

import asyncio
import os
from collections.abc import Callable
from typing import Final

MAX_PART_BYTES: Final = 64 * 1024  # read at a time; a longer line comes in parts


class ChildOutput:
    """A pipe that the event loop reads until its other end is closed. `on_line` gets lines without their ends.

    The child's end never blocks: a child that says more than is read loses lines, not time.
    """

    def __init__(self, on_line: Callable[[bytes], None], on_end: Callable[["ChildOutput"], None]) -> None:
        self._on_line = on_line
        self._on_end = on_end
        self._rest = b""
        self._descriptor, self.child_end = os.pipe()
        os.set_blocking(self._descriptor, False)
        os.set_blocking(self.child_end, False)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._descriptor, self._read)
        self.ended = asyncio.Event()

    def close_child_end(self) -> None:
        """Leave the child's end to the child alone."""
        os.close(self.child_end)

    def _read(self) -> None:
        try:
            data = os.read(self._descriptor, MAX_PART_BYTES)
        except BlockingIOError:
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        if self._rest and (not data or len(self._rest) > MAX_PART_BYTES):
            lines.append(self._rest)
            self._rest = b""
        for line in lines:
            self._on_line(line)
        if not data:
            self._loop.remove_reader(self._descriptor)
            os.close(self._descriptor)
            self.ended.set()
            self._on_end(self)
