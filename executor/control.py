"""The control segment: where each bell, ring, status block and lease lies, and what processes say of themselves there.

Scheduler and supervisor each have a block for the front end's metrics and health, written by one process and read by
any, without a lock: a message per event would cost more than what it tells. A block begins with the version of its
layout, which `attach` compares: a process that is started again after an upgrade must not take other numbers for its
own. The scheduler's block is rewritten about twice a second while something happens, the supervisor's when a process
dies. `sequence` is odd while the scheduler writes. A further block tells those who watch why it decided as it did.

A worker that finds memory of a client's region missing (`native/region.c`) marks the region as lost before it goes on
with zeros. So a process that sees an answer also sees whether it may be computed from zeros.
"""

import struct
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import msgspec

from gangway.executor import _native
from gangway.executor.leases import LEASE_BYTES, LeaseTable
from gangway.executor.messages import Bell, Ring, RingGroup, ring_bytes
from gangway.executor.segment import (
    BELL,
    CONTROL_HEADER,
    DECISION_BLOCK,
    HEARTBEAT,
    LOST_REGIONS,
    MODEL_ACCOUNT,
    SCHEDULER_BLOCK,
    SERVER_BLOCK,
    WORKER_ACCOUNT,
    WORKER_STATUS,
    Segment,
)

SUBMIT_CAPACITY: Final = 4096  # a Submit and a Cancel of every slot of a front end fit
COMMAND_CAPACITY: Final = 256
COMPLETION_CAPACITY: Final = 512  # more than commands, so a worker can answer all it has while the scheduler is away
VERSION: Final = 1
BEAT_EVERY_S: Final = 0.1  # of a process that always can
STALE_AFTER_S: Final = 2.0  # a process that has not been seen for so long does not serve
WATCHED_S: Final = 15.0  # so long after a look somebody is taken to watch: with very many models looks are 10 s apart
TOLD_S: Final = 60.0  # what the scheduler decided before is not told
LOST_REGIONS_BYTES: Final = LOST_REGIONS.size_bytes
_MAGIC: Final = 0x32574721
_READ_ATTEMPTS: Final = 100  # a writer that has died in the middle leaves an odd sequence for ever
_WORD: Final = struct.Struct("<I")  # `version`, `sequence`, or whether a region is lost
_HEADER, _ = CONTROL_HEADER.writing("magic", "workers", "front_ends", "leases")
_STATUS, _ = WORKER_STATUS.reading("pid", "busy", "lease", "runs", "busy_ns")
_SEQUENCE_AT: Final = SCHEDULER_BLOCK.offset("sequence")
_SCHEDULER, _SCHEDULER_AT = SCHEDULER_BLOCK.writing("waiting", "leases", "arena_bytes", "level", "compounds")
_MODEL, _ = MODEL_ACCOUNT.writing(
    "growths", "shrinks", "layers", "version_layers", "planned_blocks", "arenas", "arena_bytes"
)
_RESTARTS, _RESTARTS_AT = SERVER_BLOCK.writing("front_end_restarts", "scheduler_restarts")
_START, _START_AT = SERVER_BLOCK.writing("started_s")
_WORKER, _ = WORKER_ACCOUNT.writing("core", "restarts")
_BEAT, _ = HEARTBEAT.writing("seen_ns", "lag_ns")
_WATCHED, _WATCHED_AT = DECISION_BLOCK.writing("watched_ns")
_TEXT_HEADER, _TEXT_HEADER_AT = DECISION_BLOCK.writing("sequence", "text_bytes")
_TEXT_AT: Final = DECISION_BLOCK.offset("text")


class ControlLayout(msgspec.Struct, frozen=True):
    """Counts, and the offsets that follow from them. Everything is aligned to cache lines."""

    workers: int
    front_ends: int
    leases: int

    @property
    def scheduler_bell(self) -> int:
        """Offset of the bell that front ends and workers ring."""
        return CONTROL_HEADER.size_bytes

    def submit_ring(self, front_end: int) -> int:
        """Offset of the ring front end -> scheduler."""
        return self.scheduler_bell + BELL.size_bytes + front_end * ring_bytes(SUBMIT_CAPACITY)

    def worker(self, rank: int) -> int:
        """Offset of a worker's part: bell, status, command ring, completion ring."""
        size_bytes = (
            BELL.size_bytes + WORKER_STATUS.size_bytes + ring_bytes(COMMAND_CAPACITY) + ring_bytes(COMPLETION_CAPACITY)
        )
        return self.submit_ring(self.front_ends) + rank * size_bytes

    def worker_status(self, rank: int) -> int:
        """Offset of the worker's status block."""
        return self.worker(rank) + BELL.size_bytes

    def command_ring(self, rank: int) -> int:
        """Offset of the ring scheduler -> worker."""
        return self.worker_status(rank) + WORKER_STATUS.size_bytes

    def completion_ring(self, rank: int) -> int:
        """Offset of the ring worker -> scheduler."""
        return self.command_ring(rank) + ring_bytes(COMMAND_CAPACITY)

    @property
    def lease_table(self) -> int:
        """Offset of the first lease."""
        return self.worker(self.workers)

    @property
    def scheduler_block(self) -> int:
        """Offset of the scheduler's status."""
        return self.lease_table + self.leases * LEASE_BYTES

    @property
    def server_block(self) -> int:
        """Offset of the supervisor's status of the server."""
        return self.scheduler_block + SCHEDULER_BLOCK.size_bytes

    @property
    def heartbeats(self) -> int:
        """Offset of the heartbeats of all processes."""
        return self.server_block + server_block_bytes(self.workers)

    @property
    def lost_regions(self) -> int:
        """Offset of a word for each region: whether it has lost memory."""
        return self.heartbeats + heartbeats_bytes(self.front_ends)

    @property
    def decision_block(self) -> int:
        """Offset of the scheduler's last decisions."""
        return self.lost_regions + LOST_REGIONS_BYTES

    @property
    def size_bytes(self) -> int:
        """Size of the segment."""
        return self.decision_block + DECISION_BLOCK.size_bytes


class WorkerStatus(msgspec.Struct, frozen=True):
    """A worker's status block."""

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
        self.decision_block = DecisionBlock(segment, layout.decision_block)

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
        pid, busy, lease, runs, busy_ns = _STATUS.unpack_from(self.segment.view, self.layout.worker_status(rank))
        return WorkerStatus(pid, busy != 0, lease - 1 if lease else None, runs, busy_ns / 1e3)

    def quiet(self, rank: int) -> bool:
        """Whether a worker has no command left and works on none (a new scheduler waits for this). Order matters."""
        return self.command_rings[rank].pending() == 0 and not self.status(rank).busy

    def forget_worker(self, rank: int) -> None:
        """Clear the status block of a worker that has died."""
        offset = self.layout.worker_status(rank)
        self.segment.view[offset : offset + WORKER_STATUS.size_bytes] = bytes(WORKER_STATUS.size_bytes)


# What becomes of a compound task: it ran by its schedule, or it did not, for one of the reasons of
# `scheduler/stages/compound_policy.py`, in their order.
COMPOUND_RESULTS: Final = (
    "by_schedule",
    "member_missing",
    "cores_busy",
    "target_at_risk",
    "core_missing",
    "member_lost",
)


class ModelAccount(NamedTuple):
    """What the scheduler has counted of one loaded model since its start, and which arenas the model has now."""

    growths: int = 0
    shrinks: int = 0
    layers: int = 0  # executed
    version_layers: int = 0  # of them in another version than the first
    planned_blocks: int = 0  # begun by the plans of leases, without a decision
    arenas: int = 0  # in use
    arena_bytes: int = 0  # of memory, idle arenas included


@dataclass(frozen=True)
class SchedulerStatus:
    """The scheduler at one moment. `models` by model number. `compounds`: ended compound tasks by COMPOUND_RESULTS."""

    waiting: int = 0  # requests that have no cores, stopped ones included
    leases: int = 0  # in use
    arena_bytes: int = 0
    level: float = 0.0
    compounds: tuple[int, ...] = (0,) * len(COMPOUND_RESULTS)
    models: Mapping[int, ModelAccount] = field(default_factory=dict)

    def account(self, model_ids: Iterable[int]) -> ModelAccount:
        """Return the sum over some model numbers."""
        found = [self.models[model_id] for model_id in model_ids if model_id in self.models]
        return ModelAccount(*map(sum, zip(*found, strict=True))) if found else ModelAccount()


class SchedulerBlock:
    """The scheduler's block at `offset`."""

    def __init__(self, segment: Segment, offset: int) -> None:
        self._view = segment.view
        self._offset = offset
        self._written: set[int] = set()

    def init(self) -> None:
        """Make it an empty block of this version (the supervisor, once)."""
        _WORD.pack_into(self._view, self._offset, VERSION)

    def attach(self) -> None:
        """Take over. Raises ValueError if the block has another layout."""
        _check_version(self._view, self._offset, "the scheduler's status")
        rows = range(_native.MAX_MODELS)
        self._written = {row for row in rows if any(_MODEL.unpack_from(self._view, self._offset + _row_offset(row)))}

    def write(self, status: SchedulerStatus) -> None:
        """Replace the status. For one process at a time, the scheduler."""
        view, base = self._view, self._offset
        sequence = _WORD.unpack_from(view, base + _SEQUENCE_AT)[0] | 1
        _WORD.pack_into(view, base + _SEQUENCE_AT, sequence)
        _SCHEDULER.pack_into(
            view,
            base + _SCHEDULER_AT,
            status.waiting,
            status.leases,
            status.arena_bytes,
            status.level,
            *status.compounds,
        )
        for model_id, account in status.models.items():
            _MODEL.pack_into(view, base + _row_offset(model_id), *account)
        for model_id in self._written - status.models.keys():
            _MODEL.pack_into(view, base + _row_offset(model_id), *ModelAccount())
        self._written = set(status.models)
        _WORD.pack_into(view, base + _SEQUENCE_AT, (sequence + 1) & 0xFFFFFFFF)

    def read(self, model_ids: Iterable[int]) -> SchedulerStatus:
        """Return the status written last, of these models."""
        content = self._content()
        waiting, leases, arena_bytes, level, *compounds = _SCHEDULER.unpack_from(content, _SCHEDULER_AT)
        models = {model_id: ModelAccount(*_MODEL.unpack_from(content, _row_offset(model_id))) for model_id in model_ids}
        return SchedulerStatus(waiting, leases, arena_bytes, level, tuple(compounds), models)

    def _content(self) -> bytes:
        """Copy the block between two writes; in the middle of one if its writer does not come to an end."""
        for _ in range(_READ_ATTEMPTS):
            before = _WORD.unpack_from(self._view, self._offset + _SEQUENCE_AT)
            content = bytes(self._view[self._offset : self._offset + SCHEDULER_BLOCK.size_bytes])
            if not before[0] & 1 and _WORD.unpack_from(self._view, self._offset + _SEQUENCE_AT) == before:
                return content
        return bytes(self._view[self._offset : self._offset + SCHEDULER_BLOCK.size_bytes])


class ServerStatus(msgspec.Struct, frozen=True):
    """The server as the supervisor knows it. Lists are by worker."""

    started_s: float  # since 1970
    front_end_restarts: int
    scheduler_restarts: int
    worker_restarts: Sequence[int]
    cores: Sequence[int]  # CPU numbers


class ServerBlock:
    """The supervisor's block at `offset`, of so many workers."""

    def __init__(self, segment: Segment, offset: int, workers: int) -> None:
        self._view = segment.view
        self._offset = offset
        self._workers = workers

    def init(self, cores: Sequence[int], started_s: float) -> None:
        """Make it a block of this version, with nothing restarted (the supervisor, once)."""
        _WORD.pack_into(self._view, self._offset, VERSION)
        _START.pack_into(self._view, self._offset + _START_AT, started_s)
        for worker, core in enumerate(cores):
            _WORKER.pack_into(self._view, self._offset + _worker_offset(worker), core, 0)

    def attach(self) -> None:
        """Check it. Raises ValueError if the block has another layout."""
        _check_version(self._view, self._offset, "the supervisor's status")

    def front_end_restarted(self) -> None:
        """Count (the supervisor)."""
        front_ends, schedulers = _RESTARTS.unpack_from(self._view, self._offset + _RESTARTS_AT)
        _RESTARTS.pack_into(self._view, self._offset + _RESTARTS_AT, front_ends + 1, schedulers)

    def scheduler_restarted(self) -> None:
        """Count (the supervisor)."""
        front_ends, schedulers = _RESTARTS.unpack_from(self._view, self._offset + _RESTARTS_AT)
        _RESTARTS.pack_into(self._view, self._offset + _RESTARTS_AT, front_ends, schedulers + 1)

    def worker_restarted(self, worker: int) -> None:
        """Count (the supervisor)."""
        core, restarts = _WORKER.unpack_from(self._view, self._offset + _worker_offset(worker))
        _WORKER.pack_into(self._view, self._offset + _worker_offset(worker), core, restarts + 1)

    def read(self) -> ServerStatus:
        """Return the status."""
        front_ends, schedulers = _RESTARTS.unpack_from(self._view, self._offset + _RESTARTS_AT)
        offsets = [self._offset + _worker_offset(worker) for worker in range(self._workers)]
        workers = [_WORKER.unpack_from(self._view, offset) for offset in offsets]
        return ServerStatus(
            started_s=_START.unpack_from(self._view, self._offset + _START_AT)[0],
            front_end_restarts=front_ends,
            scheduler_restarts=schedulers,
            worker_restarts=[restarts for _, restarts in workers],
            cores=[core for core, _ in workers],
        )


class Heartbeats:
    """Lines from `offset` on, the supervisor's (number 0) first, then by front end, the scheduler's last."""

    SUPERVISOR: Final = 0

    def __init__(self, segment: Segment, offset: int, submitters: int) -> None:
        self._view = segment.view
        self._offset = offset
        self.scheduler = submitters

    def beat(self, process: int, lag_s: float = 0.0) -> None:
        """Note that a process is alive, and by how much its loop was late lately. For that process alone."""
        place = self._offset + process * HEARTBEAT.size_bytes
        _BEAT.pack_into(self._view, place, time.monotonic_ns(), round(lag_s * 1e9))

    def last_ns(self, process: int) -> int:
        """Return when a process was last seen; 0: never."""
        return self._read(process)[0]

    def loop_lag_s(self) -> float:
        """Return by how much the loop of any front end was late lately, at most."""
        return max([self._read(front_end)[1] for front_end in range(1, self.scheduler)], default=0) / 1e9

    def all_fresh(self) -> bool:
        """Whether supervisor and scheduler are alive, as far as they have begun."""
        seen_ns = [self.last_ns(process) for process in (self.SUPERVISOR, self.scheduler)]
        return all(not last_ns or time.monotonic_ns() - last_ns < STALE_AFTER_S * 1e9 for last_ns in seen_ns)

    def _read(self, process: int) -> tuple[int, int]:
        seen_ns, lag_ns = _BEAT.unpack_from(self._view, self._offset + process * HEARTBEAT.size_bytes)
        return seen_ns, lag_ns


class LostRegions:
    """The words at `offset` of a segment. Numbers begin with 1."""

    def __init__(self, segment: Segment, offset: int) -> None:
        self._view = segment.view
        self._offset = offset

    def is_lost(self, number: int) -> bool:
        """Whether a part of the region has been lost since `forget`."""
        return bool(_WORD.unpack_from(self._view, self._place(number))[0])

    def lose(self, number: int) -> None:
        """Mark the region as lost."""
        _WORD.pack_into(self._view, self._place(number), 1)

    def forget(self, number: int) -> None:
        """Clear the mark, for a new region of this number. Only while no worker maps it and no request names it."""
        _WORD.pack_into(self._view, self._place(number), 0)

    def _place(self, number: int) -> int:
        if not 1 <= number <= _native.MAX_REGIONS:
            raise ValueError(f"no region has the number {number}")
        return self._offset + (number - 1) * _WORD.size


class DecisionBlock:
    """The block at `offset`: the scheduler's last decisions as text (`scheduler/observability.py`), while watched."""

    MAX_TEXT_BYTES: Final = DECISION_BLOCK.size("text")

    def __init__(self, segment: Segment, offset: int) -> None:
        self._view = segment.view
        self._offset = offset

    def watch(self) -> None:
        """Let the scheduler know that somebody watches. For front ends."""
        _WATCHED.pack_into(self._view, self._offset + _WATCHED_AT, time.monotonic_ns())

    def is_watched(self) -> bool:
        """Whether a front end has had a watcher lately."""
        (last_ns,) = _WATCHED.unpack_from(self._view, self._offset + _WATCHED_AT)
        return bool(last_ns) and time.monotonic_ns() - last_ns < WATCHED_S * 1e9

    def write(self, text: bytes) -> None:
        """Replace the text, of at most MAX_TEXT_BYTES. For the scheduler."""
        header, begin = self._offset + _TEXT_HEADER_AT, self._offset + _TEXT_AT
        sequence = _TEXT_HEADER.unpack_from(self._view, header)[0] | 1
        _TEXT_HEADER.pack_into(self._view, header, sequence, 0)
        self._view[begin : begin + len(text)] = text
        _TEXT_HEADER.pack_into(self._view, header, (sequence + 1) & 0xFFFFFFFF, len(text))

    def read(self) -> bytes:
        """Return the text written last; nothing if it is being written at the moment, or its writer has died."""
        header, begin = self._offset + _TEXT_HEADER_AT, self._offset + _TEXT_AT
        sequence, text_bytes = _TEXT_HEADER.unpack_from(self._view, header)
        text = bytes(self._view[begin : begin + min(text_bytes, self.MAX_TEXT_BYTES)])
        unchanged = not sequence & 1 and _TEXT_HEADER.unpack_from(self._view, header)[0] == sequence
        return text if unchanged else b""


def heartbeats_bytes(submitters: int) -> int:
    """Return the size of the heartbeats of so many front ends, the supervisor among them, and the scheduler."""
    return (submitters + 1) * HEARTBEAT.size_bytes


def server_block_bytes(workers: int) -> int:
    """Return the size of the supervisor's block, a multiple of 64."""
    return SERVER_BLOCK.size_bytes + -(-workers * WORKER_ACCOUNT.size_bytes // 64) * 64


def _row_offset(model_id: int) -> int:
    return SCHEDULER_BLOCK.offset("models") + model_id * MODEL_ACCOUNT.size_bytes


def _worker_offset(worker: int) -> int:
    return SERVER_BLOCK.size_bytes + worker * WORKER_ACCOUNT.size_bytes


def _check_version(view: memoryview, offset: int, what: str) -> None:
    (version,) = _WORD.unpack_from(view, offset)
    if version != VERSION:
        raise ValueError(f"{what} has layout {version}, this program knows {VERSION}: restart the whole server")
