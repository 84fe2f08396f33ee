"""One instant per query: which come due, and when the first one does. Times are microseconds."""

import heapq
from collections.abc import Iterable, Iterator

MIN_STALE = 64  # entries of a heap that nobody needs any more, before it is worth cleaning up


class Timers:
    """A heap whose size is bounded by the number of queries that have a timer, not by how many ever had."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int]] = []  # (time, query id); stale unless `_times` says the same
        self._times: dict[int, float] = {}

    def __len__(self) -> int:
        return len(self._times)

    def set(self, query_id: int, at_us: float) -> None:
        """Let a query come due at this time, and at no other."""
        self._times[query_id] = at_us
        heapq.heappush(self._heap, (at_us, query_id))
        if len(self._heap) > 2 * len(self._times) + MIN_STALE:
            self._heap = [(time_us, number) for number, time_us in self._times.items()]
            heapq.heapify(self._heap)

    def discard(self, query_id: int) -> None:
        """Let it not come due, if it has a timer."""
        self._times.pop(query_id, None)

    @property
    def next_us(self) -> float | None:
        """When the first one is due; None: there is none."""
        while self._heap and self._times.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def due(self, now_us: float) -> Iterable[int]:
        """Yield, once each, the queries that were due before now. What is set meanwhile for an earlier time, too."""
        return self._due(now_us) if self._heap and self._heap[0][0] < now_us else ()

    def _due(self, now_us: float) -> Iterator[int]:
        while (at_us := self.next_us) is not None and at_us < now_us:
            query_id = heapq.heappop(self._heap)[1]
            del self._times[query_id]
            yield query_id
