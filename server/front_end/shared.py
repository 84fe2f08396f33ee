"""What a front end has in common with the others: counters, and what it can see of their requests."""

from collections.abc import Sequence
from dataclasses import dataclass

from gangway.executor.segment import Segment
from gangway.executor.slots import SlotTable
from gangway.server.models.served import own_statistics
from gangway.server.requests.data_plane import DataPlane
from gangway.server.statistics import Statistics, StatisticsTable


@dataclass(frozen=True)
class Peers:
    """The requests of other front ends: their slots, and the counters where they say what memory these have.

    And how many calls they refuse unread.
    """

    tables: tuple[SlotTable, ...] = ()
    statistics: StatisticsTable | None = None
    sections: tuple[int, ...] = ()

    @property
    def heap_bytes(self) -> int:
        """Bytes of tensors of their requests in flight, as they were within the last second or so."""
        return 0 if self.statistics is None else sum(map(self.statistics.heap_bytes, self.sections))

    @property
    def refused_unread(self) -> int:
        """How many calls they have refused unread."""
        return 0 if self.statistics is None else sum(map(self.statistics.refused_unread, self.sections))


class SharedStatistics:
    """Attaches to the table of statistics and the io segments of others. Raises ValueError if they are something else.

    `index`: the front end's number. `statistics_fd`: -1: there is no table.
    """

    def __init__(self, index: int, statistics_fd: int, other_io_fds: Sequence[int], plane: DataPlane) -> None:
        self._plane = plane
        self._section = index - 1  # number 0 is the supervisor, which counts nothing
        self._table = StatisticsTable.attach(statistics_fd) if statistics_fd >= 0 else None
        tables = tuple(SlotTable(Segment.attach(fd), plane.slots.slots) for fd in other_io_fds)
        if self._table is not None:
            plane.admission.count_in(self._table.refused_unread_word(self._section))
        sections = range(self._table.front_ends) if self._table else ()
        self.peers = Peers(tables, self._table, tuple(number for number in sections if number != self._section))

    def make_statistics(self, row: int, response_bounds_ns: tuple[int, ...]) -> Statistics:
        """Return the counters of a model that has been announced with this row; -1: it has none."""
        if self._table is None or row < 0:
            return own_statistics(row, response_bounds_ns)
        return self._table.statistics(self._section, row, response_bounds_ns)

    def heap_bytes(self) -> int:
        """Return how many bytes of tensors our requests have, and let the others know."""
        used_bytes = self._plane.usage().heap_bytes
        if self._table is not None:
            self._table.set_heap_bytes(self._section, used_bytes)
        return used_bytes
