"""What a stream shows of itself to those below it: each of its requests has a call of its own."""

import threading
from collections.abc import Callable, Iterable
from typing import Protocol


class StreamContext(Protocol):
    """What a stream must know of its remote call (the part of grpc.ServicerContext it uses)."""

    def time_remaining(self) -> float | None:
        """Return the seconds until the client's deadline for the stream; None or a huge number without one."""

    def add_callback(self, callback: Callable[[], None]) -> bool:
        """Have `callback` called when the stream ends, for whatever reason; False if it has ended."""

    def cancel(self) -> object:
        """End the stream."""

    def invocation_metadata(self) -> Iterable[tuple[str, str | bytes]] | None:
        """Return the headers that the client has sent."""


class StreamedCall:
    """One request's call: it ends when gRPC has taken the answer, or when the stream ends. Safe for threads.

    Inference cancels what is still running when a call ends.
    """

    def __init__(self, context: StreamContext) -> None:
        self._context = context
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], None]] | None = []

    def time_remaining(self) -> float | None:
        """Return the seconds until the deadline of the stream; what one request may take is in its parameters."""
        return self._context.time_remaining()

    def add_callback(self, callback: Callable[[], None]) -> bool:
        """Have `callback` called when the call ends; False if it has."""
        with self._lock:
            if self._callbacks is None:
                return False
            self._callbacks.append(callback)
            return True

    def invocation_metadata(self) -> Iterable[tuple[str, str | bytes]] | None:
        """Return the headers of the stream."""
        return self._context.invocation_metadata()

    def end(self) -> None:
        """Say that the call is over. Calling it again does nothing."""
        with self._lock:
            callbacks, self._callbacks = self._callbacks, None
        for callback in callbacks or ():
            callback()
