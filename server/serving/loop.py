"""The front end's event loop: one thread, which everything that serves clients shares.

What the loop calls never blocks, and takes no longer than about 1 ms: all other clients wait so long. Work that takes
longer goes to a thread (`ServingLoop.aside`). Timers show how late the loop is (`Lag`).
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Final, TypeVar

import uvloop

from gangway.base.logs import OFTEN
from gangway.server.threads import NoThreadError, started_pool

_log = logging.getLogger(__name__)

Result = TypeVar("Result")
Due = Callable[[], float | None]  # what a timer does; it may return in how many seconds it is due again

SLICE_S: Final = 0.0005  # of a turn that one connection, or long work, has if others wait
THREADS: Final = 2  # for work that would stop the loop
LAG_WINDOW_S: Final = 10.0


class Lag:
    """The most that something was late in the last LAG_WINDOW_S, to twice that. `now_s`: any steady clock."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._end_s = now_s() + LAG_WINDOW_S
        self._before_s = self._most_s = 0.0

    def note(self, late_s: float) -> None:
        """Something was late by so much."""
        self._turn()
        self._most_s = max(self._most_s, late_s)

    @property
    def most_s(self) -> float:
        """The most that was noted."""
        self._turn()
        return max(self._before_s, self._most_s)

    def _turn(self) -> None:
        if (late_s := self._now_s() - self._end_s) >= 0:
            self._before_s = self._most_s if late_s < LAG_WINDOW_S else 0.0
            self._most_s = 0.0
            self._end_s += LAG_WINDOW_S * (late_s // LAG_WINDOW_S + 1)


class LoopTurn:
    """What the loop is at, from the bytes or answers that have come to all that follows from them.

    What is done `at_end` is done once for all of them, such as sending what has been answered, or waking a process.
    """

    __slots__ = ("_at_end", "_is_on", "_loop")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._at_end: list[Callable[[], object]] = []
        self._is_on = False

    def begin(self) -> None:
        """Something has come; `end` follows."""
        self._is_on = True

    def end(self) -> None:
        """All has been done that follows from it. What fails of the rest is logged."""
        while self._at_end:
            rest, self._at_end = self._at_end, []
            for function in rest:
                logged(function)
        self._is_on = False

    def at_end(self, function: Callable[[], object]) -> None:
        """Call it at the end of the turn; soon if it is no turn that asks."""
        if not (self._is_on or self._at_end):
            self._loop.call_soon(self.end)
        self._at_end.append(function)


class ServingLoop:
    """An event loop in a thread. Its methods are for any thread, from the beginning on.

    `lag`: by how much timers were late, since the loop was at something else. `turn`: what the loop is at. Both are for
    the loop's thread.
    """

    def __init__(self) -> None:
        """Make it. Raises NoThreadError."""
        self.loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
        self.lag = Lag()
        self.turn = LoopTurn(self.loop)
        self._thread = threading.Thread(target=self.serve, name="loop", daemon=True)
        self._pool = started_pool(THREADS, "aside")

    def start(self) -> None:
        """Begin, in a thread of its own. Raises NoThreadError."""
        try:
            self._thread.start()
        except RuntimeError:
            raise NoThreadError from None

    def serve(self) -> None:
        """Run in this thread, for ever."""
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def stop(self) -> None:
        """End, whatever is still due; return when the thread has. Calling it again does nothing."""
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join()
        self.loop.close()
        self._pool.shutdown(wait=False)

    def call(self, function: Callable[..., object], *arguments: Any) -> None:
        """Have the loop call it soon, unless it has been stopped."""
        with suppress(RuntimeError):
            self.loop.call_soon_threadsafe(function, *arguments)

    def run(self, coroutine: Coroutine[Any, Any, Result], timeout_s: float | None = None) -> Result:
        """Have the loop run a coroutine; return what that returns, or raise what it raises. Not for the loop's thread.

        Raises TimeoutError.
        """
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(timeout_s)

    def every(self, period_s: float, function: Due, aside: bool = False) -> None:
        """Call it every `period_s` seconds, or after as many as it has returned the last time.

        `aside`: it may block, so a thread calls it. What it raises is logged, and it is called again.
        """
        self.call(_Timer(self, period_s, function, aside).wait)

    def aside(self, function: Callable[..., object], *arguments: Any) -> None:
        """Have one of THREADS threads call what may block, as soon as one is free. What it raises is logged."""
        self._pool.submit(logged, function, *arguments)


class _Timer:
    """Calls a function again and again. On the loop, but for `_work`."""

    def __init__(self, serving: ServingLoop, period_s: float, function: Due, aside: bool) -> None:
        self._serving = serving
        self._period_s = period_s
        self._function = function
        self._aside = aside

    def wait(self, seconds: float | None = None) -> None:
        delay_s = self._period_s if seconds is None else seconds
        self._serving.loop.call_later(delay_s, self._due, time.monotonic() + delay_s)

    def _due(self, due_s: float) -> None:
        self._serving.lag.note(time.monotonic() - due_s)
        if self._aside:
            self._serving.aside(self._work)
        else:
            self.wait(logged(self._function))

    def _work(self) -> None:
        self._serving.call(self.wait, logged(self._function))


def logged(function: Callable[..., Result], *arguments: Any) -> Result | None:
    """Call it; log what it raises, and return None then."""
    try:
        return function(*arguments)
    except Exception:
        _log.exception("a part of the front end's loop failed: a fault of the server", extra=OFTEN)
        return None
