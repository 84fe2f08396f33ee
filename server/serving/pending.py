"""Coroutines of the event loop without tasks: each runs until its first `await` at once, and goes on where it is told.

`drive` begins one. It may await `Pending` values only, which cost next to nothing where they are there already.
"""

from collections.abc import Callable, Coroutine, Generator
from typing import Any, Generic, TypeVar

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
            raise self._error
        return self._value  # type: ignore[return-value] # of the kind that was promised


def drive(coroutine: Coroutine["Pending[Any]", None, None]) -> None:
    """Run a coroutine up to what it waits for; it goes on when that is settled. It must handle its own errors."""
    try:
        awaited = coroutine.send(None)
    except StopIteration:
        return
    awaited.when_settled(lambda: drive(coroutine))
