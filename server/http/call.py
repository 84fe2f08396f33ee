"""A request over HTTP as inference sees it: the part of grpc.ServicerContext that it uses."""

import threading
from collections.abc import Callable, Mapping


class HttpCall:
    """Ends when the answer has been handed to the connection, or when the client has gone. Safe for threads."""

    front_end = "HTTP"  # in traces

    def __init__(self, headers: Mapping[bytes, bytes]) -> None:
        self._headers = headers
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], None]] | None = []

    def time_remaining(self) -> None:
        """HTTP states no deadline; the parameter `timeout` does."""

    def add_callback(self, callback: Callable[[], None]) -> bool:
        """Have `callback` called when the call ends; False if it has ended."""
        with self._lock:
            if self._callbacks is None:
                return False
            self._callbacks.append(callback)
            return True

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        """Return the headers; names are in lower case."""
        return tuple((name.decode("latin-1"), value.decode("latin-1")) for name, value in self._headers.items())

    def end(self) -> None:
        """End the call. Ending it again does nothing."""
        with self._lock:
            callbacks, self._callbacks = self._callbacks, None
        for callback in callbacks or ():
            callback()
