"""The queries that wait, in order of arrival."""

from bisect import bisect_left, insort

from gangway.scheduler.policy import Query


class WaitingQueue:
    """Queries by arrival, those of one moment by number: so a stopped one finds its place again, and a unit its own.

    `queries` is the list that policies see. It changes when a decision is applied: a policy must not keep it.
    """

    def __init__(self) -> None:
        self.queries: list[Query] = []
        self._places: list[tuple[float, int]] = []
        self._arrival_us: dict[int, float] = {}

    def __len__(self) -> int:
        return len(self.queries)

    def add(self, query: Query) -> None:
        """Put a new or a stopped query in its place."""
        place = (query.arrival_us, query.query_id)
        self._arrival_us[query.query_id] = query.arrival_us
        if not self._places or self._places[-1] < place:
            self._places.append(place)
            self.queries.append(query)
        else:
            index = bisect_left(self._places, place)
            self._places.insert(index, place)
            self.queries.insert(index, query)

    def find(self, query_id: int) -> Query:
        """Return a waiting query. Raises KeyError if it does not wait."""
        return self.queries[self._index(query_id)]

    def take(self, query_id: int) -> Query:
        """Remove a query and return it. Raises KeyError if it does not wait."""
        index = self._index(query_id)
        del self._places[index], self._arrival_us[query_id]
        return self.queries.pop(index)

    def _index(self, query_id: int) -> int:
        return bisect_left(self._places, (self._arrival_us[query_id], query_id))


class FreeCores:
    """Free cores in ascending order."""

    def __init__(self, count: int) -> None:
        self._free = list(range(count))
        self._known: tuple[int, ...] | None = None

    def all(self) -> tuple[int, ...]:
        """Return the free cores."""
        if self._known is None:
            self._known = tuple(self._free)
        return self._known

    def take(self, cores: tuple[int, ...]) -> None:
        """Take cores that must be free. Raises ValueError if one is not, or is named twice."""
        free = self._free
        for core in cores:
            index = bisect_left(free, core)
            if index == len(free) or free[index] != core:
                raise ValueError(f"core {core} is not free")
            del free[index]
        self._known = None

    def give(self, cores: tuple[int, ...]) -> None:
        """Give cores back."""
        for core in cores:
            insort(self._free, core)
        self._known = None
