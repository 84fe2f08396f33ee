"""Messages of workers, for whichever thread is free to take them.

While the main thread has nothing to execute it takes them itself: a worker's request then needs one wake-up, which
stays on the worker's core. While it executes, a thread of each connection does. The kernel chooses (EPOLLEXCLUSIVE): it
wakes the first of those that wait, and the main thread's epoll is asked before the others.
"""

from __future__ import annotations

import os
import select
from collections.abc import Callable
from contextlib import suppress

from gangway.python_backend.messages import Connection, Message

_WAKE_BYTES = 4096
_EVENTS = select.EPOLLIN | select.EPOLLEXCLUSIVE


class Inbox:
    """Safe for threads; only the main thread calls `wait`."""

    def __init__(self) -> None:
        self._poll = select.epoll()
        self._connections: dict[int, Connection] = {}
        self._woken, self._waker = os.pipe()
        for descriptor in (self._woken, self._waker):
            os.set_blocking(descriptor, False)
        self._poll.register(self._woken, select.EPOLLIN)

    def attend(self, worker: Connection, take: Callable[[Message, Connection], None]) -> None:
        """Take the messages of a worker that the main thread does not take, until it goes: EOFError, OSError."""
        descriptor = worker.fileno()
        self._connections[descriptor] = worker
        try:
            with select.epoll() as own:
                self._poll.register(descriptor, _EVENTS)
                own.register(descriptor, _EVENTS)
                while True:
                    worker.take_now(take)  # also what was read before
                    own.poll()
        finally:
            self._connections.pop(descriptor, None)
            with suppress(OSError, ValueError):
                self._poll.unregister(descriptor)

    def watch(self, descriptor: int) -> None:
        """Have `wait` return, too, when this is readable."""
        self._poll.register(descriptor, select.EPOLLIN)

    def wait(self, seconds: float | None, take: Callable[[Message, Connection], None]) -> None:
        """Take what workers have sent; return after so long, or after `wake`. None: wait for ever."""
        for descriptor, _ in self._poll.poll(seconds):
            if descriptor == self._woken:
                with suppress(BlockingIOError):
                    os.read(descriptor, _WAKE_BYTES)
                continue
            worker = self._connections.get(descriptor)
            if worker is None:
                continue
            try:
                worker.take_now(take)
            except (EOFError, OSError, ValueError):
                worker.end()  # its own thread finds that

    def wake(self) -> None:
        """Have `wait` return."""
        with suppress(BlockingIOError):  # it is full of such
            os.write(self._waker, b"\0")
