"""The units that wait for a gang, in order of arrival."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from gangway.scheduler.policy import Query
from gangway.scheduler.units import Unit


class UnitQueue:
    """Units by their queries' numbers. A unit that was stopped waits in its old place."""

    def __init__(self) -> None:
        self._units: dict[int, Unit] = {}
        self._order: list[tuple[float, int]] = []  # the keys of `queries`
        self._queries: list[Query] = []

    @property
    def queries(self) -> Sequence[Query]:
        """The waiting queries in order of arrival. It changes with the queue."""
        return self._queries

    def __iter__(self) -> Iterator[Unit]:
        return iter(self._units.values())

    def __contains__(self, unit: Unit) -> bool:
        return self._units.get(unit.query.query_id) is unit

    def __getitem__(self, query_id: int) -> Unit:
        return self._units[query_id]

    def get(self, query_id: int) -> Unit | None:
        """Return the unit that waits under this number, None if none does."""
        return self._units.get(query_id)

    def add(self, unit: Unit) -> None:
        """Queue it."""
        query = unit.query
        self._units[query.query_id] = unit
        key = (query.arrival_us, query.query_id)
        place = bisect_left(self._order, key)
        self._order.insert(place, key)
        self._queries.insert(place, query)

    def remove(self, unit: Unit) -> None:
        """Take it out."""
        query = unit.query
        del self._units[query.query_id]
        place = bisect_left(self._order, (query.arrival_us, query.query_id))
        del self._order[place]
        del self._queries[place]

    def update(self, unit: Unit, query: Query) -> None:
        """Show another query of a waiting unit, with the same number and arrival."""
        unit.query = query
        self._queries[bisect_left(self._order, (query.arrival_us, query.query_id))] = query
