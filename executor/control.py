"""The control segment: bells, rings, status blocks and leases, and where each lies."""

import struct
from dataclasses import dataclass
from typing import Final

from gangway.executor import _native
from gangway.executor.leases import LEASE_BYTES, LeaseTable
from gangway.executor.lost_regions import LOST_REGIONS_BYTES, LostRegions
from gangway.executor.ring import BELL_BYTES, Bell, Ring, RingGroup, ring_bytes
from gangway.executor.segment import Segment
from gangway.executor.status_blocks import (
    SCHEDULER_BLOCK_BYTES,
    Heartbeats,
    SchedulerBlock,
    ServerBlock,
    heartbeats_bytes,
    server_block_bytes,
)

SUBMIT_CAPACITY: Final = 4096  # a Submit and a Cancel of every slot of a front end fit
COMMAND_CAPACITY: Final = 256
COMPLETION_CAPACITY: Final = 512  # more than commands, so a worker can answer all it has while the scheduler is away
_HEADER: Final = struct.Struct("<4I")
_HEADER_BYTES: Final = 64
_MAGIC: Final = 0x32574721
_STATUS: Final = struct.Struct("<4I2Q")


@dataclass(frozen=True)
class ControlLayout:
    """Counts, and the offsets that follow from them. Everything is aligned to cache lines."""

    workers: int
    front_ends: int
    leases: int

    @property
    def scheduler_bell(self) -> int:
        """Offset of the bell that front ends and workers ring."""
        return _HEADER_BYTES

    def submit_ring(self, front_end: int) -> int:
        """Offset of the ring front end -> scheduler."""
        return self.scheduler_bell + BELL_BYTES + front_end * ring_bytes(SUBMIT_CAPACITY)

    def worker(self, rank: int) -> int:
        """Offset of a worker's part: bell, status, command ring, completion ring."""
        size_bytes = BELL_BYTES + _native.STATUS_BYTES + ring_bytes(COMMAND_CAPACITY) + ring_bytes(COMPLETION_CAPACITY)
        return self.submit_ring(self.front_ends) + rank * size_bytes

    def worker_status(self, rank: int) -> int:
        """Offset of the worker's status block."""
        return self.worker(rank) + BELL_BYTES

    def command_ring(self, rank: int) -> int:
        """Offset of the ring scheduler -> worker."""
        return self.worker_status(rank) + _native.STATUS_BYTES

    def completion_ring(self, rank: int) -> int:
        """Offset of the ring worker -> scheduler."""
        return self.command_ring(rank) + ring_bytes(COMMAND_CAPACITY)

    @property
    def lease_table(self) -> int:
        """Offset of the first lease."""
        return self.worker(self.workers)

    @property
    def scheduler_block(self) -> int:
        """Offset of what the scheduler says of itself."""
        return self.lease_table + self.leases * LEASE_BYTES

    @property
    def server_block(self) -> int:
        """Offset of what the supervisor says of the server."""
        return self.scheduler_block + SCHEDULER_BLOCK_BYTES

    @property
    def heartbeats(self) -> int:
        """Offset of what says which processes get on."""
        return self.server_block + server_block_bytes(self.workers)

    @property
    def lost_regions(self) -> int:
        """Offset of the words that say which regions have lost memory."""
        return self.heartbeats + heartbeats_bytes(self.front_ends)

    @property
    def size_bytes(self) -> int:
        """Size of the segment."""
        return self.lost_regions + LOST_REGIONS_BYTES


@dataclass(frozen=True)
class WorkerStatus:
    """What a worker says of itself."""

    pid: int
    busy: bool  # between taking a command and having answered it
    lease: int | None  # the lease it is in
    runs: int
    busy_us: float  # time spent in leases since its start


class ControlSegment:
    """Everything in the control segment by name; lists are indexed by front end and by worker."""

    def __init__(self, segment: Segment, layout: ControlLayout) -> None:
        self.segment = segment
        self.layout = layout
        self.scheduler_bell = Bell(segment, layout.scheduler_bell)
        self.submit_rings = [Ring(segment, layout.submit_ring(index)) for index in range(layout.front_ends)]
        self.worker_bells = [Bell(segment, layout.worker(rank)) for rank in range(layout.workers)]
        self.command_rings = [Ring(segment, layout.command_ring(rank)) for rank in range(layout.workers)]
        self.completion_rings = [Ring(segment, layout.completion_ring(rank)) for rank in range(layout.workers)]
        self.all_submit_rings = RingGroup(segment, [layout.submit_ring(index) for index in range(layout.front_ends)])
        self.all_completion_rings = RingGroup(segment, [layout.completion_ring(rank) for rank in range(layout.workers)])
        self.leases = LeaseTable(segment, layout.lease_table, layout.leases)
        self.scheduler_block = SchedulerBlock(segment, layout.scheduler_block)
        self.server_block = ServerBlock(segment, layout.server_block, layout.workers)
        self.heartbeats = Heartbeats(segment, layout.heartbeats, layout.front_ends)
        self.lost_regions = LostRegions(segment, layout.lost_regions)

    @classmethod
    def create(cls, layout: ControlLayout) -> "ControlSegment":
        """Make the segment, with all rings empty (the supervisor, once)."""
        segment = Segment.create(layout.size_bytes, "control")
        segment.allocate(0, layout.size_bytes)
        _HEADER.pack_into(segment.view, 0, _MAGIC, layout.workers, layout.front_ends, layout.leases)
        control = cls(segment, layout)
        for rings, capacity in (
            (control.submit_rings, SUBMIT_CAPACITY),
            (control.command_rings, COMMAND_CAPACITY),
            (control.completion_rings, COMPLETION_CAPACITY),
        ):
            for ring in rings:
                ring.init(capacity)
        control.scheduler_block.init()
        control.server_block.init(range(layout.workers), 0.0)
        return control

    @classmethod
    def attach(cls, fd: int) -> "ControlSegment":
        """Map an inherited control segment. Raises ValueError if `fd` is none, or its layout another."""
        segment = Segment.attach(fd)
        magic, *counts = _HEADER.unpack_from(segment.view, 0)
        layout = ControlLayout(*counts)
        if magic != _MAGIC or layout.size_bytes != segment.size_bytes:
            raise ValueError(f"file descriptor {fd} is not a control segment")
        control = cls(segment, layout)
        control.scheduler_block.attach()
        control.server_block.attach()
        return control

    def command(self, rank: int, message: bytes) -> bool:
        """Send a message to a worker and wake it; False if its ring is full."""
        sent = self.command_rings[rank].send(message)
        self.worker_bells[rank].ring()
        return sent

    def submit(self, front_end: int, message: bytes) -> bool:
        """Send a message of a front end to the scheduler and wake it; False if the ring is full."""
        sent = self.submit_rings[front_end].send(message)
        self.scheduler_bell.ring()
        return sent

    def status(self, rank: int) -> WorkerStatus:
        """Read a worker's status block."""
        pid, busy, lease, _, runs, busy_ns = _STATUS.unpack_from(self.segment.view, self.layout.worker_status(rank))
        return WorkerStatus(pid, busy != 0, lease - 1 if lease else None, runs, busy_ns / 1e3)

    def quiet(self, rank: int) -> bool:
        """Whether a worker has no command left and works on none (a new scheduler waits for this). Order matters."""
        return self.command_rings[rank].pending() == 0 and not self.status(rank).busy

    def forget_worker(self, rank: int) -> None:
        """Clear the status block of a worker that has died."""
        offset = self.layout.worker_status(rank)
        self.segment.view[offset : offset + _native.STATUS_BYTES] = bytes(_native.STATUS_BYTES)
