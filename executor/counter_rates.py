"""Events per microsecond on a core, of threads that come and go."""

from collections.abc import Sequence
from types import TracebackType
from typing import Self

from gangway.executor.perf_events import TASK_CLOCK, Event, ThreadCounters


class CounterRates:
    """How often events happened since the last look, per microsecond that the threads were on cores. A context manager.

    Without events it opens nothing, and says nothing.
    """

    def __init__(self, events: Sequence[Event]) -> None:
        self._events = (*events, TASK_CLOCK)
        self._threads: tuple[int, ...] = ()
        self._counters: ThreadCounters | None = None
        self._seen: tuple[float, ...] = ()

    def look(self, threads: Sequence[int]) -> tuple[float, ...] | None:
        """Return the rates, one per event, since the last look at these same threads (ids).

        None at the first look at them, when they were on no core, or when one is gone; nothing without events.
        """
        if len(self._events) == 1:
            return ()
        if self._counters is None or tuple(threads) != self._threads:
            self._open(tuple(threads))
            return None
        counts = self._counters.read()
        *events, busy_ns = (now - before for now, before in zip(counts, self._seen, strict=True))
        self._seen = counts
        return tuple(1e3 * count / busy_ns for count in events) if busy_ns > 0 else None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop counting."""
        if self._counters is not None:
            self._counters.close()
            self._counters = None

    def _open(self, threads: tuple[int, ...]) -> None:
        self.close()
        try:
            self._counters = ThreadCounters(self._events, threads)
        except OSError:  # a thread has just ended: its successor comes with the next look
            return
        self._threads = threads
        self._seen = self._counters.read()
