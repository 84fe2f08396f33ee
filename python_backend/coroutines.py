"""The event loop of an instance's main thread, in which coroutines of `execute` run.

It stands still while `execute` itself runs, which may so have loops of its own. Where it has nothing to do, the main
thread waits for messages of workers and for the loop's events at once.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from contextlib import suppress
from typing import Protocol


class Waiter(Protocol):
    """The main thread, as the loop needs it (`host.py`)."""

    @property
    def has_more(self) -> bool:
        """Whether something else than the loop waits for the main thread."""
        ...

    def wait(self, seconds: float | None) -> None:
        """Wait without a core, if that is not needed: for the loop's events, for messages, at most so long."""

    def go_on(self) -> None:
        """Return when coroutines may compute again."""


class Coroutines:
    """The loop. `waiter` waits for the descriptor `fileno` of it, too."""

    def __init__(self, waiter: Waiter) -> None:
        self._selector = _Selector(waiter)
        self.loop = asyncio.SelectorEventLoop(self._selector)
        asyncio.set_event_loop(self.loop)

    def fileno(self) -> int:
        """Return what is readable when the loop has events."""
        return self._selector.fileno()

    def run(self) -> None:
        """Run coroutines until something else waits for the main thread."""
        self._selector.stops = True
        try:
            with suppress(SystemExit, KeyboardInterrupt):  # of a task, which has it as its exception
                self.loop.run_forever()
        finally:
            self._selector.stops = False


class _Selector(selectors.EpollSelector):
    """Waits as the main thread does. `stops`: it ends the loop if something else waits for that."""

    def __init__(self, waiter: Waiter) -> None:
        super().__init__()
        self._waiter = waiter
        self.stops = False

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Return what is ready. Blocks, for `timeout` seconds at most."""
        events, is_due = super().select(0), timeout == 0
        end = None if timeout is None else time.monotonic() + timeout
        while not (events or is_due or (self.stops and self._waiter.has_more)):
            self._waiter.wait(None if end is None else max(0.0, end - time.monotonic()))
            events, is_due = super().select(0), end is not None and time.monotonic() >= end
        if events or is_due:
            self._waiter.go_on()
        if self.stops and self._waiter.has_more:
            asyncio.get_running_loop().stop()
        return events
