"""How many requests use a model, or a mapped region, so that it can go when the last of them has ended."""

import threading
from collections.abc import Callable


class RefCount:
    """Counts the requests of one loaded model. Safe for threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._when_unused: Callable[[], None] | None = None

    @property
    def count(self) -> int:
        """How many there are at this moment."""
        return self._count

    def begin(self) -> bool:
        """Count one more; False, and nothing is counted, when the model has been replaced meanwhile."""
        with self._lock:
            if self._when_unused is not None:
                return False
            self._count += 1
            return True

    def end(self) -> None:
        """Count one less."""
        with self._lock:
            self._count -= 1
            when_unused = None if self._count else self._when_unused
        if when_unused is not None:
            when_unused()

    def close(self, when_unused: Callable[[], None]) -> None:
        """Let nobody begin any more; `when_unused` is called once, as soon as all have ended, by whichever thread."""
        with self._lock:
            self._when_unused = when_unused
            unused = not self._count
        if unused:
            when_unused()
