"""The units that wait for a gang, in order of arrival."""

from collections.abc import Iterator

from gangway.scheduler.policy import Query
from gangway.scheduler.units import Unit
from gangway.scheduler.waiting import WaitingQueries


class UnitQueue:
    """Units by their queries' numbers. A unit that was stopped waits in its old place."""

    def __init__(self) -> None:
        self._units: dict[int, Unit] = {}
        self.queries = WaitingQueries()

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
        self._units[unit.query.query_id] = unit
        self.queries.add(unit.query)

    def remove(self, unit: Unit) -> None:
        """Take it out."""
        del self._units[unit.query.query_id]
        self.queries.take(unit.query.query_id)

    def update(self, unit: Unit, query: Query) -> None:
        """Show another query of a waiting unit, with the same number and arrival."""
        unit.query = query
        self.queries.take(query.query_id)
        self.queries.add(query)
