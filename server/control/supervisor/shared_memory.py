"""The segments that all processes share, and the cores of processes that do not compute."""

import os
from collections.abc import Sequence
from dataclasses import dataclass

from gangway.base.host_limits import address_space_bytes, machine_bytes, memory_limit_bytes
from gangway.base.memory_budget import memory_budget
from gangway.executor.control import ControlLayout, ControlSegment
from gangway.executor.leases import lease_count
from gangway.executor.segment import Segment
from gangway.executor.slots import SLOT_BYTES, SlotTable
from gangway.scheduler.policies.targets import SHARED_WAY_BACK_US, SPARE_WAY_BACK_US
from gangway.server.cancellations import CancellationTable
from gangway.server.custom_metrics import CustomMetricsTable
from gangway.server.requests.data_plane import DataPlane
from gangway.server.statistics import StatisticsTable

# CPU of a batch's way through the scheduler, of any size: one decision, a lease, the notice of its end.
SHARED_DISPATCH_US = 450


@dataclass(frozen=True)
class CorePlacement:
    """Where front ends and scheduler run: a CPU number for each."""

    front_ends: tuple[int, ...]
    scheduler: int
    shared: bool  # workers have these cores, too

    @property
    def way_back_us(self) -> int:
        """What policies shall reckon with for an answer's way to the client."""
        return SHARED_WAY_BACK_US if self.shared else SPARE_WAY_BACK_US

    @property
    def dispatch_us(self) -> int:
        """What of the workers' cores each dispatch takes."""
        return SHARED_DISPATCH_US if self.shared else 0


def place(worker_cores: Sequence[int], front_ends: int = 1) -> CorePlacement:
    """Choose cores that no worker has, if there are any; otherwise those of the last workers, beginning with the last.

    A front end's threads share one interpreter lock. On one core handing it over is cheap; on several cores it costs
    much of the throughput. So each front end has one core, and the scheduler the next one. If there are fewer cores
    than that, some are shared.
    """
    spare = sorted(os.sched_getaffinity(0) - set(worker_cores))
    cores = (spare or sorted(worker_cores))[::-1]
    chosen = [cores[number % len(cores)] for number in range(front_ends + 1)]
    return CorePlacement(front_ends=tuple(chosen[:-1]), scheduler=chosen[-1], shared=not spare)


SUPERVISOR = 0  # the supervisor's own io segment, for measuring; those of front ends follow, from FRONT_END on
FRONT_END = 1  # the first one
SLOTS = 1024  # requests in flight per front end
MOST_ARENA_BYTES = 1 << 45  # of the 2^47 that a process can address
HEAP_BYTES = 2 << 30  # tensors of requests in flight, per front end; sparse
SHARE = 1 / 4  # of the memory limit, if that is less
ARENAS = 64  # times the machine's memory, of address space
PROCESS_BYTES = {"worker": 16 << 20, "front end": 64 << 20, "others": 40 << 20}  # of their own, without a model
LEAST_ADDRESS_SPACE_BYTES = 512 << 20


@dataclass(frozen=True)
class SharedMemory:
    """Everything is sparse or small: memory is taken as it is used."""

    control: ControlSegment
    arenas: Segment
    io: tuple[Segment, ...]  # the supervisor's, then by front end
    tables: tuple[SlotTable, ...]  # the same
    statistics: StatisticsTable
    custom_metrics: CustomMetricsTable
    cancellations: CancellationTable

    @classmethod
    def create(cls, workers: int, front_ends: int = 1) -> "SharedMemory":
        """Make all segments. Raises OSError when the system refuses, or has no memory for the server's processes."""
        _require_memory(workers, front_ends)
        submitters = FRONT_END + front_ends
        control = ControlSegment.create(ControlLayout(workers, submitters, lease_count(workers)))
        arenas = Segment.create(arenas_bytes(), "arenas")
        share_bytes = int(SHARE * memory_limit_bytes())
        bounded = address_space_bytes() is not None
        heap_bytes = min(HEAP_BYTES, share_bytes // submitters if bounded else share_bytes)
        io = tuple(Segment.create(SLOTS * SLOT_BYTES + heap_bytes, f"io{index}") for index in range(submitters))
        tables = tuple(SlotTable(segment, SLOTS) for segment in io)
        for segment, table in zip(io, tables, strict=True):
            segment.allocate(0, table.size_bytes)
            table.init()
        for table in tables[FRONT_END:]:
            table.bell.make_event_fd()
        statistics, cancellations = StatisticsTable.create(front_ends), CancellationTable.create(submitters)
        return cls(control, arenas, io, tables, statistics, CustomMetricsTable.create(), cancellations)

    @property
    def io_fds(self) -> tuple[int, ...]:
        """Descriptors of the io segments."""
        return tuple(segment.fd for segment in self.io)

    @property
    def bell_fds(self) -> tuple[int, ...]:
        """The front ends' eventfds, in their order: whoever finishes their requests inherits them."""
        return tuple(table.bell.event_fd for table in self.tables[FRONT_END:])

    def own_data_plane(self) -> DataPlane:
        """Return the supervisor's own way to submit requests."""
        ring = self.control.submit_rings[SUPERVISOR]
        return DataPlane(self.io[SUPERVISOR], self.tables[SUPERVISOR], ring, self.control.scheduler_bell)


def arenas_bytes() -> int:
    """Return the size of the segment of arenas: address space, since few of them are ever used at once."""
    if address_space_bytes() is not None:
        return int(SHARE * memory_limit_bytes())
    return min(ARENAS * machine_bytes(), MOST_ARENA_BYTES)


def _require_memory(workers: int, front_ends: int) -> None:
    counts = {"worker": workers, "front end": front_ends, "others": 1}
    needed_bytes = sum(counts[kind] * size_bytes for kind, size_bytes in PROCESS_BYTES.items())
    budget, address_space = memory_budget(), address_space_bytes()
    if address_space is not None and address_space < LEAST_ADDRESS_SPACE_BYTES:
        raise OSError(
            f"each process needs {LEAST_ADDRESS_SPACE_BYTES >> 20} MiB of address space, RLIMIT_AS allows"
            f" {address_space >> 20} MiB"
        )
    left_bytes = budget.room_bytes()
    if left_bytes < needed_bytes:
        raise OSError(
            f"the server needs {needed_bytes >> 20} MiB without a model, but of {budget.limit}"
            f" {max(0, left_bytes) >> 20} MiB are left"
        )
