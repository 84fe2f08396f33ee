"""What inference knows of a remote call, whatever brought it: gRPC, HTTP, a stream, or a request of a Python model."""

from collections.abc import Callable, Iterable
from typing import Protocol, runtime_checkable

from gangway.server.errors import RequestError


class Call(Protocol):
    """One call, which is answered once. All of it happens on the loop's thread. `front_end`: as traces name it."""

    @property
    def front_end(self) -> str:
        """Return by which protocol it has come."""
        ...

    def time_remaining(self) -> float | None:
        """Return the seconds until the client's deadline; None or a huge number without one."""

    def invocation_metadata(self) -> Iterable[tuple[str, str | bytes]] | None:
        """Return the headers that the client has sent, names in lower case."""

    def add_callback(self, callback: Callable[[], None]) -> bool:
        """Have `callback` called when the call is over: answered, or given up by the client; False if it is."""
        ...

    def answer(self, result: bytes | RequestError) -> None:
        """Send the serialised response, or why there is none; once. Empty bytes: all responses have been sent."""


class EndingCall:
    """What calls have in common: who is told of their end. For the loop's thread."""

    _callbacks: tuple[Callable[[], None], ...] | None = ()  # None: it is over

    def add_callback(self, callback: Callable[[], None]) -> bool:
        """Have `callback` called when the call is over; False if it is."""
        if self._callbacks is None:
            return False
        self._callbacks += (callback,)
        return True

    def end(self) -> None:
        """Say that the call is over. Saying it again does nothing."""
        callbacks, self._callbacks = self._callbacks, None
        for callback in callbacks or ():
            callback()


@runtime_checkable
class StreamingCall(Call, Protocol):
    """A call that takes any number of responses."""

    def respond(self, response: bytes) -> None:
        """Send a response that is not the last one."""
