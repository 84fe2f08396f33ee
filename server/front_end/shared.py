"""What a front end has in common with the others: counters, and what it can see of their requests."""

from dataclasses import dataclass

from gangway.executor.segment import Segment
from gangway.executor.slots import SlotTable
from gangway.server.front_end_options import FrontEndOptions
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
    stretches: tuple[int, ...] = ()

    @property
    def heap_bytes(self) -> int:
        """Bytes of tensors of their requests in flight, as they were within the last second or so."""
        return 0 if self.statistics is None else sum(map(self.statistics.heap_bytes, self.stretches))

    @property
    def refused_unread(self) -> int:
        """How many calls they have refused unread."""
        return 0 if self.statistics is None else sum(map(self.statistics.refused_unread, self.stretches))


class Shared:
    """Attaches to what the options name. Raises ValueError if that is something else."""

    def __init__(self, options: FrontEndOptions, plane: DataPlane) -> None:
        self._plane = plane
        self._stretch = options.index - 1  # number 0 is the supervisor, which counts nothing
        self._table = StatisticsTable.attach(options.statistics_fd) if options.statistics_fd >= 0 else None
        tables = tuple(SlotTable(Segment.attach(fd), options.slots) for fd in options.other_io_fds)
        if self._table is not None:
            plane.door.count_in(self._table.refused_unread_word(self._stretch))
        stretches = range(self._table.front_ends) if self._table else ()
        self.peers = Peers(tables, self._table, tuple(number for number in stretches if number != self._stretch))

    def make_statistics(self, row: int, response_bounds_ns: tuple[int, ...]) -> Statistics:
        """Return the counters of a model that has been announced with this row; -1: it has none."""
        if self._table is None or row < 0:
            return own_statistics(row, response_bounds_ns)
        return self._table.statistics(self._stretch, row, response_bounds_ns)

    def heap_bytes(self) -> int:
        """Return how many bytes of tensors our requests have, and let the others know."""
        used_bytes = self._plane.usage().heap_bytes
        if self._table is not None:
            self._table.set_heap_bytes(self._stretch, used_bytes)
        return used_bytes
