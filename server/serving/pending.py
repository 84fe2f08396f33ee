"""Coroutines of the event loop without tasks: each runs until its first `await` at once, and goes on where it is told.

`drive` begins one. It may await `Pending` values only, which cost next to nothing where they are there already. Work
that blocks, or would hold the loop for too long, is done by threads (`Offload`).
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Generator
from functools import partial
from typing import Any, Generic, TypeVar

from gangway.server.errors import unavailable
from gangway.server.serving.loop import ServingLoop

Value = TypeVar("Value")


class Pending(Generic[Value]):
    """A value to come, for one coroutine that awaits it. All of it on the loop's thread."""

    __slots__ = ("_error", "_is_settled", "_resume", "_value")

    def __init__(self) -> None:
        self._is_settled = False
        self._value: Value | None = None
        self._error: BaseException | None = None
        self._resume: Callable[[], None] | None = None

    def settle(self, value: Value | None, error: BaseException | None = None) -> None:
        """Say what it is, or why there is none. Saying something else later does nothing."""
        if self._is_settled:
            return
        self._is_settled, self._value, self._error = True, value, error
        if self._resume is not None:
            self._resume()

    def when_settled(self, resume: Callable[[], None]) -> None:
        """Have this called once, as soon as it is settled."""
        self._resume = resume

    def __await__(self) -> "Generator[Pending[Any], None, Value]":
        if not self._is_settled:
            yield self
        if self._error is not None:
            error, self._error = self._error, None
            try:
                raise error
            finally:
                del error  # no frame of the traceback refers to it: that would keep all that its frames hold
        return self._value  # type: ignore[return-value] # of the kind that was promised


Driven = Coroutine["Pending[Any]", None, Value]


def drive(coroutine: Driven[None]) -> None:
    """Run a coroutine up to what it waits for; it goes on when that is settled. It must handle its own errors."""
    try:
        awaited = coroutine.send(None)
    except StopIteration:
        return
    awaited.when_settled(partial(drive, coroutine))


def pause(loop: asyncio.AbstractEventLoop, seconds: float) -> Pending[None]:
    """Return what is settled after this time."""
    over: Pending[None] = Pending()
    loop.call_later(seconds, over.settle, None)
    return over


class Offload:
    """A bounded queue before threads. For the loop's thread.

    `submit` has a thread call something, or raises NoThreadError; `call` the loop, from any thread. At most `most`
    functions are queued or run at a time (None: any number); further ones are refused with the words `too_many`.
    """

    def __init__(
        self,
        submit: Callable[..., object],
        call: Callable[..., object],
        most: int | None = None,
        too_many: str = "",
    ) -> None:
        self._submit = submit
        self._call = call
        self._most = most
        self._too_many = too_many
        self._count = 0

    def run(self, function: Callable[..., Value], *arguments: Any) -> Pending[Value]:
        """Have a thread call it; what it returns or raises settles the value. Raises RequestError or NoThreadError."""
        if self._most is not None and self._count >= self._most:
            unavailable(self._too_many)
        pending: Pending[Value] = Pending()
        self._submit(self._work, pending, function, arguments)
        self._count += 1
        return pending

    def _work(self, pending: Pending[Value], function: Callable[..., Value], arguments: tuple[Any, ...]) -> None:
        try:
            value = function(*arguments)
        except BaseException as error:
            self._call(self._done, pending, None, error)
        else:
            self._call(self._done, pending, value, None)

    def _done(self, pending: Pending[Value], value: Value | None, error: BaseException | None) -> None:
        self._count -= 1
        pending.settle(value, error)


def result_of(serving: ServingLoop, coroutine: Driven[Value]) -> Value:
    """Drive a coroutine on the loop; return what it returns, or raise what it raises. Blocks: for other threads."""
    results: list[tuple[Value | None, BaseException | None]] = []
    ended = threading.Event()

    async def run() -> None:
        try:
            results.append((await coroutine, None))
        except BaseException as error:
            results.append((None, error))
        ended.set()

    serving.call(lambda: drive(run()))
    ended.wait()
    value, error = results.pop()
    if error is not None:
        try:
            raise error
        finally:
            del error
    return value  # type: ignore[return-value] # of the kind that was promised
