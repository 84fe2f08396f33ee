"""How often something happens on cores, relative to how much they do."""

from collections.abc import Sequence
from types import TracebackType
from typing import Self

from gangway.executor.perf_events import CYCLES, CoreCounters, Event


class CounterRates:
    """How often events happened on cores since the last look, per thousand cycles that they ran. A context manager.

    `per`: another event than cycles to relate to. Without events it opens nothing, and says nothing.
    """

    def __init__(self, events: Sequence[Event], per: Event = CYCLES) -> None:
        self._events = (per, *events)
        self._cores: tuple[int, ...] = ()
        self._counters: CoreCounters | None = None
        self._seen: tuple[int, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the events, in the order of the rates."""
        return tuple(event.name for event in self._events[1:])

    def look(self, cores: Sequence[int]) -> tuple[float, ...] | None:
        """Return the rates, one per event, since the last look at these same cores; nothing without events.

        None at the first look at them, when they have not run since, and where a core cannot be counted.
        """
        if len(self._events) == 1:
            return ()
        if self._counters is None or tuple(cores) != self._cores:
            self._open(tuple(cores))
            return None
        counts = self._counters.read()
        run, *events = (now - before for now, before in zip(counts, self._seen, strict=True))
        self._seen = counts
        return tuple(1e3 * count / run for count in events) if run > 0 else None

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

    def _open(self, cores: tuple[int, ...]) -> None:
        self.close()
        try:
            self._counters = CoreCounters(self._events, cores)
        except OSError:  # a core is offline
            return
        self._cores = cores
        self._seen = self._counters.read()
