"""Work for threads that coroutines of the event loop await: what blocks, and what would hold the loop for too long."""

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from gangway.server.errors import unavailable
from gangway.server.serving.pending import Pending

Result = TypeVar("Result")


class Submit(Protocol):
    """Has a thread call something. Raises NoThreadError."""

    def __call__(self, function: Callable[..., object], /, *arguments: Any) -> object:
        """Do so."""


class Offload:
    """A bounded queue before threads. For the loop's thread.

    `call`: has the loop call something, from any thread. At most `most` functions are queued or run at a time; further
    ones are refused with the words `too_many`.
    """

    def __init__(self, submit: Submit, call: Submit, most: int, too_many: str) -> None:
        self._submit = submit
        self._call = call
        self._most = most
        self._too_many = too_many
        self._count = 0

    def run(self, function: Callable[..., Result], *arguments: Any) -> Pending[Result]:
        """Have a thread call it; what it returns or raises settles the value. Raises RequestError or NoThreadError."""
        if self._count >= self._most:
            unavailable(self._too_many)
        pending: Pending[Result] = Pending()
        self._submit(self._work, pending, function, arguments)
        self._count += 1
        return pending

    def _work(self, pending: Pending[Result], function: Callable[..., Result], arguments: tuple[Any, ...]) -> None:
        value: Result | None = None
        error: BaseException | None = None
        try:
            value = function(*arguments)
        except BaseException as failure:
            error = failure
        self._call(self._done, pending, value, error)

    def _done(self, pending: Pending[Result], value: Result | None, error: BaseException | None) -> None:
        self._count -= 1
        pending.settle(value, error)
