"""The queries that wait, in order of arrival and by kind, live and simulated; and timers of queries.

An overload makes this queue long, and every decision looks at it. What a decision needs of a long queue (the next
deadlines that can be met, the oldest of the others) is found here without looking at all of it.
"""

import heapq
from bisect import bisect_left, insort
from collections.abc import Collection, Iterable, Iterator
from itertools import islice
from operator import attrgetter

from gangway.scheduler.policy import Query

KIND = attrgetter("model_id", "precision", "priority", "rejects_late", "join_key", "compound", "started", "formed")
BY_ARRIVAL = attrgetter("arrival_us", "query_id")
MIN_STALE = 64  # stale entries of a heap before it is worth cleaning up


def earlier(one_us: float | None, other_us: float | None) -> float | None:
    """Return the earlier of two times; None: never."""
    if one_us is None or other_us is None:
        return other_us if one_us is None else one_us
    return min(one_us, other_us)


class Timers:
    """One moment (microseconds) for each query at most, and the next of them.

    The heap's size is bounded by the number of queries that have a timer, not by how many ever had one.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int]] = []  # (time, query id); stale unless `_times` says the same
        self._times: dict[int, float] = {}

    def __len__(self) -> int:
        return len(self._times)

    def set(self, query_id: int, at_us: float) -> None:
        """Set the timer of a query, in place of an earlier one."""
        self._times[query_id] = at_us
        heapq.heappush(self._heap, (at_us, query_id))
        if len(self._heap) > 2 * len(self._times) + MIN_STALE:
            self._heap = [(time_us, number) for number, time_us in self._times.items()]
            heapq.heapify(self._heap)

    def discard(self, query_id: int) -> None:
        """Remove the timer of a query, if it has one."""
        self._times.pop(query_id, None)

    @property
    def next_us(self) -> float | None:
        """When the first timer is due; None: there is none."""
        heap = self._heap
        while heap and self._times.get(heap[0][1]) != heap[0][0]:
            heapq.heappop(heap)
        return heap[0][0] if heap else None

    def due(self, now_us: float) -> Iterable[int]:
        """Yield, once each, the queries that were due before now, also those whose timer is set meanwhile."""
        return self._due(now_us) if self._heap and self._heap[0][0] < now_us else ()

    def _due(self, now_us: float) -> Iterator[int]:
        while (at_us := self.next_us) is not None and at_us < now_us:
            query_id = heapq.heappop(self._heap)[1]
            del self._times[query_id]
            yield query_id


class _ByArrival:
    """Queries by arrival, those of one moment by number. A stopped query finds its place again, and a unit its own."""

    def __init__(self) -> None:
        self.in_order: list[Query] = []
        self._places: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self.in_order)

    def add(self, query: Query) -> None:
        """Put a query in its place."""
        place = BY_ARRIVAL(query)
        if not self._places or self._places[-1] < place:
            self._places.append(place)
            self.in_order.append(query)
        else:
            index = bisect_left(self._places, place)
            self._places.insert(index, place)
            self.in_order.insert(index, query)

    def remove(self, query: Query) -> None:
        """Take a query out that was added."""
        in_order = self.in_order
        index = 0 if in_order[0] is query else bisect_left(self._places, BY_ARRIVAL(query))
        del self._places[index], in_order[index]


class WaitingGroup(_ByArrival):
    """Queries of one kind: all of those in `KIND` are equal. `in_order`: by arrival. `rows`: of all together."""

    def __init__(self, like: Query) -> None:
        super().__init__()
        self.model_id, self.precision, self.priority = like.model_id, like.precision, like.priority
        self.started, self.formed, self.compound = like.started, like.formed, like.compound
        self.rows = 0
        self._due: list[tuple[float, int, Query]] = []  # those with a deadline, by it

    def add(self, query: Query) -> None:
        """Put a query in its place."""
        super().add(query)
        self.rows += query.rows
        if query.deadline_us is not None:
            insort(self._due, (query.deadline_us, query.query_id, query))

    def remove(self, query: Query) -> None:
        """Take a query out that was added."""
        super().remove(query)
        self.rows -= query.rows
        if query.deadline_us is not None:
            del self._due[bisect_left(self._due, (query.deadline_us, query.query_id))]

    @property
    def is_timed(self) -> bool:
        """Whether any of them has a deadline."""
        return bool(self._due)

    def late(self, now_us: float) -> int:
        """Return how many of them have a deadline that has passed."""
        return bisect_left(self._due, (now_us,))

    def late_ones(self, now_us: float) -> list[Query]:
        """Return those, the earliest deadline first."""
        return [query for _, _, query in self._due[: self.late(now_us)]]

    def best_effort(self, most: int | None = None) -> list[Query]:
        """Return those without a deadline, the oldest first; so many at most (None: all)."""
        count = len(self.in_order) - len(self._due)
        found = (query for query in self.in_order if query.deadline_us is None)
        return list(islice(found, count if most is None else min(most, count)))

    def split_at(self, from_us: float, on_time: int, others: int) -> tuple[list[Query], list[Query]]:
        """Return `on_time` queries with the earliest deadlines from `from_us` on, by deadline, and the oldest others.

        Of these `others` queries have an earlier deadline, and as many have none; they come in order of arrival.
        """
        begin = self.late(from_us)
        found = [query for _, _, query in self._due[begin : begin + on_time]]
        late = (query for query in self.in_order if query.deadline_us is not None and query.deadline_us < from_us)
        rest = list(islice(late, min(others, begin)))
        if len(self.in_order) > len(self._due):
            rest += self.best_effort(others)
            rest.sort(key=BY_ARRIVAL)
        return found, rest


class WaitingQueries(_ByArrival):
    """Queries by number, arrival and kind.

    `in_order` is the list that policies see. It changes when a decision is applied: a policy must not keep it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._by_id: dict[int, Query] = {}
        self._groups: dict[object, WaitingGroup] | None = None  # by kind

    @property
    def groups(self) -> Collection[WaitingGroup]:
        """The kinds of which queries wait. Kept from the first time on that somebody asks for them."""
        if self._groups is None:
            self._groups = {}
            for query in self.in_order:
                self._add_to_group(self._groups, query)
        return self._groups.values()

    @property
    def oldest_us(self) -> float | None:
        """Arrival of the oldest; None if there is none."""
        return self.in_order[0].arrival_us if self.in_order else None

    def add(self, query: Query) -> None:
        """Put a new or a stopped query in its place."""
        super().add(query)
        self._by_id[query.query_id] = query
        if self._groups is not None:
            self._add_to_group(self._groups, query)

    def find(self, query_id: int) -> Query:
        """Return a waiting query. Raises KeyError if it does not wait."""
        return self._by_id[query_id]

    def remove(self, query: Query) -> None:
        """Take a query out that was added."""
        del self._by_id[query.query_id]
        super().remove(query)
        if self._groups is not None:
            group = self._groups[kind := KIND(query)]
            group.remove(query)
            if not group.in_order:
                del self._groups[kind]

    def take(self, query_id: int) -> Query:
        """Remove a query and return it. Raises KeyError if it does not wait."""
        query = self._by_id[query_id]
        self.remove(query)
        return query

    @staticmethod
    def _add_to_group(groups: dict[object, WaitingGroup], query: Query) -> None:
        kind = KIND(query)
        group = groups.get(kind)
        if group is None:
            group = groups[kind] = WaitingGroup(query)
        group.add(query)
