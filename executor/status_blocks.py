"""What scheduler and supervisor say of themselves in the control segment, for the front end's metrics and health.

Two blocks, each written by one process and read by any, without a lock: a message per event would cost more than what
it tells. A block begins with the version of its layout, which `attach` compares: a process that was started again after
an upgrade must not take other numbers for its own.

All numbers are little endian. Scheduler's block, rewritten about twice a second while something happens:

    0   u32 version; u32 sequence (odd while it is being written); u32 requests that wait; u32 leases in use
    16  u64 bytes of arenas; f64 level of interference
    64  64 bytes for each model number: u64 growths, shrinks, layers, layers in another version than the first,
        arenas in use, bytes of its arenas

Supervisor's block, written when something dies:

    0   u32 version; u32 front ends, u32 schedulers that were started again
    16  f64 time of start (seconds since 1970)
    64  8 bytes for each worker: u32 CPU number; u32 times that it was started again

Heartbeats: for the supervisor, each front end and the scheduler a cache line with the time at which it was last seen to
get on, u64 ns on CLOCK_MONOTONIC.
"""

import struct
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from gangway.executor import _native
from gangway.executor.segment import Segment

VERSION: Final = 1
_HEADER_BYTES: Final = 64
_VERSION: Final = struct.Struct("<I")
_SEQUENCE: Final = struct.Struct("<I")
_SEQUENCE_OFFSET: Final = 4
_SCHEDULER: Final = struct.Struct("<2IQd")  # from offset 8 on
_SCHEDULER_OFFSET: Final = 8
_MODEL: Final = struct.Struct("<6Q")
_MODEL_BYTES: Final = 64
_READ_ATTEMPTS: Final = 100  # a writer that has died in the middle leaves an odd sequence for ever
_RESTARTS: Final = struct.Struct("<2I")
_RESTARTS_OFFSET: Final = 4
_START: Final = struct.Struct("<d")
_START_OFFSET: Final = 16
_WORKER: Final = struct.Struct("<2I")
_BEAT: Final = struct.Struct("<Q")

HEARTBEAT_BYTES: Final = 64  # of one process
BEAT_EVERY_S: Final = 0.1  # of who has a thread for that
STALE_AFTER_S: Final = 2.0  # who has not been seen for so long does not serve
SCHEDULER_BLOCK_BYTES: Final = _HEADER_BYTES + _native.MAX_MODELS * _MODEL_BYTES


class ModelAccount(NamedTuple):
    """What the scheduler has counted of one loaded model since its start, and which arenas the model has now."""

    growths: int = 0
    shrinks: int = 0
    layers: int = 0  # executed
    version_layers: int = 0  # of them in another version than the first
    arenas: int = 0  # in use
    arena_bytes: int = 0  # of memory, idle arenas included


@dataclass(frozen=True)
class SchedulerStatus:
    """The scheduler at one moment. `models` by model number."""

    waiting: int = 0  # requests that have no cores, stopped ones included
    leases: int = 0  # in use
    arena_bytes: int = 0
    level: float = 0.0
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
        _VERSION.pack_into(self._view, self._offset, VERSION)

    def attach(self) -> None:
        """Take over. Raises ValueError if the block has another layout."""
        _check_version(self._view, self._offset, "the scheduler's status")
        rows = range(_native.MAX_MODELS)
        self._written = {row for row in rows if any(_MODEL.unpack_from(self._view, self._offset + _row_offset(row)))}

    def write(self, status: SchedulerStatus) -> None:
        """Replace what stands there. For one process at a time, the scheduler."""
        view, base = self._view, self._offset
        sequence = _SEQUENCE.unpack_from(view, base + _SEQUENCE_OFFSET)[0] | 1
        _SEQUENCE.pack_into(view, base + _SEQUENCE_OFFSET, sequence)
        _SCHEDULER.pack_into(
            view, base + _SCHEDULER_OFFSET, status.waiting, status.leases, status.arena_bytes, status.level
        )
        for model_id, account in status.models.items():
            _MODEL.pack_into(view, base + _row_offset(model_id), *account)
        for model_id in self._written - status.models.keys():
            _MODEL.pack_into(view, base + _row_offset(model_id), *ModelAccount())
        self._written = set(status.models)
        _SEQUENCE.pack_into(view, base + _SEQUENCE_OFFSET, (sequence + 1) & 0xFFFFFFFF)

    def read(self, model_ids: Iterable[int]) -> SchedulerStatus:
        """Return what was written last, of these models."""
        for _ in range(_READ_ATTEMPTS):
            before = _SEQUENCE.unpack_from(self._view, self._offset + _SEQUENCE_OFFSET)
            content = bytes(self._view[self._offset : self._offset + SCHEDULER_BLOCK_BYTES])
            if not before[0] & 1 and _SEQUENCE.unpack_from(self._view, self._offset + _SEQUENCE_OFFSET) == before:
                break
        waiting, leases, arena_bytes, level = _SCHEDULER.unpack_from(content, _SCHEDULER_OFFSET)
        models = {model_id: ModelAccount(*_MODEL.unpack_from(content, _row_offset(model_id))) for model_id in model_ids}
        return SchedulerStatus(waiting, leases, arena_bytes, level, models)


@dataclass(frozen=True)
class ServerStatus:
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
        _VERSION.pack_into(self._view, self._offset, VERSION)
        _START.pack_into(self._view, self._offset + _START_OFFSET, started_s)
        for worker, core in enumerate(cores):
            _WORKER.pack_into(self._view, self._offset + _worker_offset(worker), core, 0)

    def attach(self) -> None:
        """Check it. Raises ValueError if the block has another layout."""
        _check_version(self._view, self._offset, "the supervisor's status")

    def front_end_restarted(self) -> None:
        """Count (the supervisor)."""
        front_ends, schedulers = _RESTARTS.unpack_from(self._view, self._offset + _RESTARTS_OFFSET)
        _RESTARTS.pack_into(self._view, self._offset + _RESTARTS_OFFSET, front_ends + 1, schedulers)

    def scheduler_restarted(self) -> None:
        """Count (the supervisor)."""
        front_ends, schedulers = _RESTARTS.unpack_from(self._view, self._offset + _RESTARTS_OFFSET)
        _RESTARTS.pack_into(self._view, self._offset + _RESTARTS_OFFSET, front_ends, schedulers + 1)

    def worker_restarted(self, worker: int) -> None:
        """Count (the supervisor)."""
        core, restarts = _WORKER.unpack_from(self._view, self._offset + _worker_offset(worker))
        _WORKER.pack_into(self._view, self._offset + _worker_offset(worker), core, restarts + 1)

    def read(self) -> ServerStatus:
        """Return what stands there."""
        front_ends, schedulers = _RESTARTS.unpack_from(self._view, self._offset + _RESTARTS_OFFSET)
        offsets = [self._offset + _worker_offset(worker) for worker in range(self._workers)]
        workers = [_WORKER.unpack_from(self._view, offset) for offset in offsets]
        return ServerStatus(
            started_s=_START.unpack_from(self._view, self._offset + _START_OFFSET)[0],
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

    def beat(self, process: int) -> None:
        """Say that a process gets on. For that process alone."""
        _BEAT.pack_into(self._view, self._offset + process * HEARTBEAT_BYTES, time.monotonic_ns())

    def last_ns(self, process: int) -> int:
        """Return when a process was last seen; 0: never."""
        return int(_BEAT.unpack_from(self._view, self._offset + process * HEARTBEAT_BYTES)[0])

    def all_fresh(self) -> bool:
        """Whether supervisor and scheduler get on, as far as they have begun."""
        seen_ns = [self.last_ns(process) for process in (self.SUPERVISOR, self.scheduler)]
        return all(not last_ns or time.monotonic_ns() - last_ns < STALE_AFTER_S * 1e9 for last_ns in seen_ns)


def heartbeats_bytes(submitters: int) -> int:
    """Return the size of the heartbeats of so many front ends, the supervisor among them, and the scheduler."""
    return (submitters + 1) * HEARTBEAT_BYTES


def server_block_bytes(workers: int) -> int:
    """Return the size of the supervisor's block, a multiple of 64."""
    return _HEADER_BYTES + -(-workers * _WORKER.size // 64) * 64


def _row_offset(model_id: int) -> int:
    return _HEADER_BYTES + model_id * _MODEL_BYTES


def _worker_offset(worker: int) -> int:
    return _HEADER_BYTES + worker * _WORKER.size


def _check_version(view: memoryview, offset: int, what: str) -> None:
    (version,) = _VERSION.unpack_from(view, offset)
    if version != VERSION:
        raise ValueError(f"{what} has layout {version}, this program knows {VERSION}: restart the whole server")
