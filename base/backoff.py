"""Exponential backoff: how long to wait before what has failed is tried again.

A cause may last: a core that was taken away, a full disk, a file that ends each process that reads it. Retries without
a pause cost others their cores, and giving up costs the server. So pauses grow to a bound and end only with success.
"""

import time
from typing import Final

_MOST_DOUBLINGS: Final = 30


class Backoff:
    """Backoff after failures of one thing: none for the first `free` failures, then each twice as long as the last one.

    They begin with `first_seconds` and grow up to `longest_seconds`. What has worked for `settled_seconds` before it
    fails begins anew.
    """

    def __init__(self, first_seconds: float, longest_seconds: float, settled_seconds: float, free: int = 0) -> None:
        self._first_seconds = first_seconds
        self._longest_seconds = longest_seconds
        self._settled_seconds = settled_seconds
        self._free = free
        self._failures = 0
        self._began: float | None = None  # to work, time.monotonic()

    def works(self) -> None:
        """Note that it works, as far as is known."""
        self._began = time.monotonic()

    def failed(self) -> float:
        """Note that it works no more; return the seconds until the next attempt."""
        if self._began is not None and time.monotonic() - self._began >= self._settled_seconds:
            self._failures = 0
        return self._next()

    def not_begun(self) -> float:
        """Note that an attempt has failed from the start; return as `failed` does, and never 0."""
        self._failures = max(self._failures, self._free)
        return self._next()

    def _next(self) -> float:
        self._began = None
        self._failures += 1
        doublings = self._failures - self._free - 1
        if doublings < 0:
            return 0.0
        return min(self._first_seconds * 2.0 ** min(doublings, _MOST_DOUBLINGS), self._longest_seconds)
