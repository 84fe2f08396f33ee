"""Coroutines of the loop that take turns: a part that one at a time may enter, and long work in slices."""

import asyncio
import time
from collections import deque

from gangway.server.serving.call import Call
from gangway.server.serving.loop import SLICE_S
from gangway.server.serving.pending import Driven, Pending


class Slices:
    """Divides long work of the loop, so that others have their turn in between."""

    __slots__ = ("_begin_s", "_loop")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._begin_s = time.monotonic()

    async def rest(self) -> None:
        """Let all others on the loop have their turn, if this one has been long enough."""
        if time.monotonic() - self._begin_s > SLICE_S:
            others: Pending[None] = Pending()
            self._loop.call_soon(others.settle, None)
            await others
            self._begin_s = time.monotonic()


class Turns:
    """What one coroutine at a time enters, in the order of their coming. For the loop's thread.

    A coroutine that is closed while it waits is passed over.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._is_taken = False
        self._waiting: deque[Pending[None]] = deque()

    async def __aenter__(self) -> Slices:
        if self._is_taken:
            turn: Pending[None] = Pending()
            self._waiting.append(turn)
            try:
                await turn
            except GeneratorExit:
                if turn in self._waiting:
                    self._waiting.remove(turn)
                else:
                    self._leave()
                raise
        self._is_taken = True
        return Slices(self._loop)

    async def __aexit__(self, *_: object) -> None:
        self._leave()

    def _leave(self) -> None:
        """Let the next one in: not at once, as each would then run within the one before."""
        if self._waiting:
            self._loop.call_soon(self._waiting.popleft().settle, None)
        else:
            self._is_taken = False


def drive_for(call: Call, coroutine: Driven[None]) -> None:
    """Run a coroutine as `drive` does, but no further when the call is over: it is closed where it waits."""
    run = _Run(coroutine)
    run.go_on()
    if run.waits and not call.add_callback(run.close):
        run.close()


class _Run:
    def __init__(self, coroutine: Driven[None]) -> None:
        self._coroutine = coroutine
        self.waits = False

    def go_on(self) -> None:
        self.waits = False
        try:
            awaited = self._coroutine.send(None)
        except StopIteration:
            return
        self.waits = True
        awaited.when_settled(self._settled)

    def _settled(self) -> None:
        if self.waits:
            self.go_on()

    def close(self) -> None:
        if self.waits:
            self.waits = False
            self._coroutine.close()
