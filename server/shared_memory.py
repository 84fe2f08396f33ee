"""The segments that all processes share, made once by the supervisor."""

from dataclasses import dataclass

from gangway.artifact.host_limits import memory_limit_bytes
from gangway.executor.control import ControlLayout, ControlSegment
from gangway.executor.segment import Segment
from gangway.executor.slots import SLOT_BYTES, SlotTable
from gangway.scheduler.lease_count import lease_count
from gangway.server.counting.table import StatisticsTable
from gangway.server.data_plane import DataPlane

SUPERVISOR = 0  # the supervisor's own io segment, for measuring; those of front ends follow, from FRONT_END on
FRONT_END = 1  # the first one
SLOTS = 1024  # requests in flight per front end
MOST_ARENA_BYTES = 1 << 45  # of the 2^47 that a process can address
HEAP_BYTES = 2 << 30  # tensors of requests in flight, per front end; sparse


@dataclass(frozen=True)
class SharedMemory:
    """Everything is sparse or small: memory is taken as it is used."""

    control: ControlSegment
    arenas: Segment
    io: tuple[Segment, ...]  # the supervisor's, then by front end
    tables: tuple[SlotTable, ...]  # the same
    statistics: StatisticsTable

    @classmethod
    def create(cls, workers: int, front_ends: int = 1) -> "SharedMemory":
        """Make all segments. Raises OSError when the system refuses."""
        submitters = FRONT_END + front_ends
        control = ControlSegment.create(ControlLayout(workers, submitters, lease_count(workers)))
        arenas = Segment.create(arenas_bytes(), "arenas")
        io = tuple(Segment.create(SLOTS * SLOT_BYTES + HEAP_BYTES, f"io{index}") for index in range(submitters))
        tables = tuple(SlotTable(segment, SLOTS) for segment in io)
        for segment, table in zip(io, tables, strict=True):
            segment.allocate(0, table.size_bytes)
            table.init()
        return cls(control, arenas, io, tables, StatisticsTable.create(front_ends))

    @property
    def io_fds(self) -> tuple[int, ...]:
        """Descriptors of the io segments."""
        return tuple(segment.fd for segment in self.io)

    def own_data_plane(self) -> DataPlane:
        """Return the supervisor's own way to submit requests."""
        ring = self.control.submit_rings[SUPERVISOR]
        return DataPlane(self.io[SUPERVISOR], self.tables[SUPERVISOR], ring, self.control.scheduler_bell)


def arenas_bytes() -> int:
    """Return the size of the segment of arenas: address space, since few of them are ever used at once."""
    return min(64 * memory_limit_bytes(), MOST_ARENA_BYTES)
