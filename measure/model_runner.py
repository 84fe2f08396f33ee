"""Workers without a server, and one model on them, layer by layer against the clock."""

import array
import math
import os
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Final, Self, TypeVar

from gangway.artifact.format import MAX_TENSORS, Manifest, TensorSpec, align_up
from gangway.base.memory_budget import memory_budget
from gangway.executor.control import ControlLayout, ControlSegment
from gangway.executor.launch import WorkerPlan, start_worker
from gangway.executor.leases import Lease, LeaseSpec, Member, passes_for
from gangway.executor.messages import (
    Exit,
    LeaseLeft,
    LoadArtifact,
    Loaded,
    Message,
    RunLease,
    Unload,
    Unloaded,
    WorkerReady,
    unpack,
)
from gangway.executor.segment import Segment
from gangway.executor.slots import SLOT_BYTES, SlotRequest, SlotStatus, SlotTable, places_bytes

START_TIMEOUT_S = 10.0
RUN_TIMEOUT_S: Final = 60
MODEL_ID: Final = 0
_ALIGNMENT_BYTES: Final = 4096
_SPARE: Final = 0.5  # share of free memory that a measurement may take,
_MOST_BYTES: Final = 4 << 30  # but not more than this: it is zeroed first, and taken from other programs
COMPUTED: Final = (SlotStatus.OK, SlotStatus.INVALID)  # kernels that refuse a number compute to the end
ANSWER_BYTES: Final = 1 << 20  # where nothing says how large an answer is; one without room is not copied

MessageT = TypeVar("MessageT", bound=Message)
Progress = Callable[[str, float], None]
"""`progress(phase, share)`: the share of the whole measurement's time that is over, 0 to 1."""


class Clock:
    """Time since the beginning of a measurement (CLOCK_MONOTONIC seconds) that shall take `seconds`."""

    def __init__(self, begin: float, seconds: float, progress: Progress) -> None:
        self._begin, self.seconds, self._progress = begin, seconds, progress

    def passed_s(self, phase: str) -> float:
        """Seconds since the beginning; also reported as progress."""
        passed_s = time.monotonic() - self._begin
        self._progress(phase, min(1.0, passed_s / self.seconds))
        return passed_s


def version_count(manifest: Manifest) -> int:
    """Return the largest number of versions of any layer."""
    return max(len(layer.versions) for layer in manifest.layers)


def powers_of_two(limit: int) -> list[int]:
    """Return 1, 2, 4, ... up to `limit`."""
    return [1 << power for power in range(limit.bit_length())]


class RunError(Exception):
    """The model did not run to its end."""


class LocalExecutor:
    """The smallest thing that can run a gang: a worker per core, one io segment, the caller as scheduler.

    A context manager, for measurements, benchmarks and tests.

    Everything public is meant to be used: `control`, `arena`, `io`, `slots`, `workers` (processes), `leases`.
    """

    def __init__(
        self,
        cache_dir: Path,
        cores: Sequence[int],
        arena_bytes: int = 1 << 26,
        io_bytes: int = 1 << 26,
        slots: int = 16,
        leases: int = 4,
        spin_us: int = 20,
    ) -> None:
        self.control = ControlSegment.create(ControlLayout(workers=len(cores), front_ends=1, leases=leases))
        self.arena = Segment.create(arena_bytes, "arena")
        self._lists_at, self._list_bytes = aligned(io_bytes), places_bytes(MAX_TENSORS, MAX_TENSORS)
        self.io = Segment.create(self._lists_at + slots * self._list_bytes, "io")  # sparse
        self.slots = SlotTable(self.io, slots)
        self.slots.init()
        self.leases = self.control.leases
        self._messages: list[deque[Message]] = [deque() for _ in cores]
        self._plans = [
            WorkerPlan(rank, core, self.control.segment.fd, self.arena.fd, (self.io.fd,), cache_dir, spin_us)
            for rank, core in enumerate(cores)
        ]
        self.workers = [start_worker(plan) for plan in self._plans]

    def __enter__(self) -> Self:
        for worker in range(len(self.workers)):
            self.expect(worker, WorkerReady)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for process in self.workers:
            process.kill()
            process.wait()
        for segment in (self.control.segment, self.arena, self.io):
            os.close(segment.fd)  # mapped memory goes when the last view of it does

    def restart(self, worker: int) -> None:
        """Replace a worker's process (killed if it still runs) and wait until the new one is ready."""
        self.workers[worker].kill()
        self.workers[worker].wait()
        self.control.forget_worker(worker)
        self.workers[worker] = start_worker(self._plans[worker])
        self.expect(worker, WorkerReady)

    def load(
        self, model_id: int, key: str, workers: Sequence[int] | None = None, in_the_background: bool = False
    ) -> None:
        """Load an artifact into all workers (or those given). Raises RuntimeError with the worker's reason.

        `in_the_background`: with the idle policy, as workers in service do.
        """
        chosen = range(len(self.workers)) if workers is None else workers
        for worker in chosen:
            self.control.command(worker, LoadArtifact(model_id, key, at_once=not in_the_background).pack())
        for worker in chosen:
            answer = self.expect(worker, Loaded)
            if not answer.ok:
                raise RuntimeError(f"worker {worker}: {answer.error}")

    def unload(self, model_id: int) -> None:
        """Make all workers forget a model."""
        for worker in range(len(self.workers)):
            self.control.command(worker, Unload(model_id).pack())
        for worker in range(len(self.workers)):
            self.expect(worker, Unloaded)

    def begin(self, request: SlotRequest, parts: int = 1) -> tuple[int, int]:
        """Take a slot, fill it and make it RUNNING, in so many parts; return slot and generation.

        Raises RuntimeError if no slot is free.
        """
        slot = self.slots.acquire()
        if slot is None:
            raise RuntimeError("no free slot")
        self.slots.fill(slot, request._replace(places_at=self._lists_at + slot * self._list_bytes))
        generation = self.slots.submit(slot)
        self.slots.start(slot, generation, parts)
        return slot, generation

    def start(self, lease: int, spec: LeaseSpec, workers: Sequence[int]) -> int:
        """Initialise a lease and send Run to these workers, as ranks 0, 1, ...; return the generation."""
        generation = self.leases[lease].initialise(spec)
        for rank, worker in enumerate(workers):
            self.join(lease, rank, worker)
        return generation

    def join(self, lease: int, rank: int, worker: int) -> None:
        """Send one worker into a lease."""
        self.control.command(worker, RunLease(lease, rank, self.lease(lease).generation()).pack())

    def lease(self, index: int) -> Lease:
        """Return a lease."""
        return self.leases[index]

    def expect(self, worker: int, kind: type[MessageT], timeout_s: float = START_TIMEOUT_S) -> MessageT:
        """Return the worker's next message. Raises TimeoutError, or RuntimeError if it is not of this kind."""
        message = self.receive(worker, timeout_s)
        if not isinstance(message, kind):
            raise RuntimeError(f"worker {worker} sent {message} instead of {kind.__name__}")
        return message

    def left(self, workers: Sequence[int], timeout_s: float = START_TIMEOUT_S) -> list[LeaseLeft]:
        """Wait for one Left of each of these workers."""
        return [self.expect(worker, LeaseLeft, timeout_s) for worker in workers]

    def receive(self, worker: int, timeout_s: float = START_TIMEOUT_S, spin_us: int = 0) -> Message:
        """Return the worker's next message. Raises TimeoutError."""
        deadline = time.monotonic() + timeout_s
        bell = self.control.scheduler_bell
        while not self._messages[worker]:
            seen = bell.seen()
            if not self._collect():
                left_us = int((deadline - time.monotonic()) * 1e6)
                if left_us <= 0:
                    raise TimeoutError(f"no message from worker {worker} within {timeout_s} s")
                bell.wait(seen, spin_us, left_us)
        return self._messages[worker].popleft()

    def stop(self, timeout_s: float = START_TIMEOUT_S) -> list[int]:
        """Send Exit to all workers; return their exit statuses."""
        for worker in range(len(self.workers)):
            self.control.command(worker, Exit().pack())
        return [process.wait(timeout_s) for process in self.workers]

    def finish(self, slots: Sequence[int], computed: Sequence[SlotStatus] = COMPUTED) -> None:
        """Wait until these slots are answered, and free them. Raises RunError for another status than `computed`."""
        for slot in slots:
            if not self.slots.wait(slot, RUN_TIMEOUT_S * 1_000_000):
                raise RunError(f"a model was not computed within {RUN_TIMEOUT_S} s")
        statuses = [self.slots.outcome(slot).status for slot in slots]
        for slot in slots:
            self.slots.release(slot)
        if others := [status for status in statuses if status not in computed]:
            raise RunError(f"a model ended with {others[0].name}")

    def _collect(self) -> bool:
        found = False
        for ring, messages in zip(self.control.completion_rings, self._messages, strict=True):
            while (raw := ring.receive()) is not None:
                messages.append(unpack(raw))
                found = True
        return found


@dataclass(frozen=True)
class RunTimes:
    """One run: each layer from the end of the one before (the first: from the first rank's arrival) to its own end."""

    layer_us: tuple[float, ...]

    @property
    def total_us(self) -> float:
        """The whole model."""
        return math.fsum(self.layer_us)


class ModelRunner(LocalExecutor):
    """A worker per core with one model loaded, and room for `gangs` queries at once, of up to `max_rows` rows.

    `room_rows`: all of them together; less than asked for where memory is short. FP32 inputs are random numbers in
    [0, 1); all others are zeros, valid as tokens and flags.
    """

    computed: ClassVar[tuple[SlotStatus, ...]] = COMPUTED

    def __init__(
        self, cache_dir: Path, manifest: Manifest, cores: Sequence[int], max_rows: int, gangs: int = 1
    ) -> None:
        self.manifest = manifest = with_answer_room(manifest)
        asked = max_rows if manifest.batched else 1
        self.room_rows = min(asked * gangs, _rows_that_fit(manifest))
        self.max_rows = min(asked, self.room_rows)
        self._reserved_rows = 0
        self._examples = [example(tensor) for tensor in manifest.inputs]
        offsets, end = [], aligned(gangs * SLOT_BYTES)
        for tensor in (*manifest.inputs, *manifest.outputs):
            offsets.append(end)
            end += self.room_rows * aligned(tensor.row_bytes)
        self._offsets = tuple(offsets)
        arena_bytes = max(manifest.arena_bytes * self.room_rows, _ALIGNMENT_BYTES)
        super().__init__(cache_dir, cores, arena_bytes, end, gangs, leases=gangs)
        try:
            self.io.allocate(0, aligned(gangs * SLOT_BYTES))
            self._reserve(1)
        except BaseException:
            self.__exit__(None, None, None)
            raise

    def __enter__(self) -> "ModelRunner":
        super().__enter__()
        try:
            self.load(MODEL_ID, self.manifest.key)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def run(self, rows: int, ranks: int, version: int = 0) -> RunTimes:
        """Run one query on the first `ranks` workers, every layer in this version or its last. Raises RunError."""
        return self.run_gangs(rows, ranks, version)[0]

    def run_gangs(self, rows: int, ranks: int, version: int = 0, gangs: int = 1) -> list[RunTimes]:
        """Run so many queries at once, each on `ranks` workers of its own. Raises RunError, OSError (no memory)."""
        self._reserve(gangs * rows)
        versions = bytes(min(version, len(layer.versions) - 1) for layer in self.manifest.layers)
        slots = [self.begin(self._request(gang, rows)) for gang in range(gangs)]
        for gang, (slot, generation) in enumerate(slots):
            self.leases[gang].initialise(self._spec(slot, generation, gang * rows, rows, ranks, versions))
        for worker in range(gangs * ranks):  # nothing between these messages, so that all begin at about one time
            self.join(worker // ranks, worker % ranks, worker)
        self.finish([slot for slot, _ in slots], self.computed)
        self.left(range(gangs * ranks))
        return [self._times(gang) for gang in range(gangs)]

    def _times(self, gang: int) -> RunTimes:
        lease = self.lease(gang)
        ends_ns = lease.layer_end_ns(0, len(self.manifest.layers))
        begins_ns = [lease.start_ns(), *ends_ns]
        return RunTimes(tuple((end - begin) / 1e3 for begin, end in zip(begins_ns, ends_ns, strict=False)))

    def _reserve(self, rows: int) -> None:
        """Take memory for so many rows of all gangs together. Raises MemoryFullError."""
        if rows <= self._reserved_rows:
            return
        if rows > self.room_rows:
            raise ValueError(f"room for {self.room_rows} rows, not for {rows}")
        self.arena.allocate(0, max(rows * self.manifest.arena_bytes, _ALIGNMENT_BYTES))
        for tensor, offset in zip((*self.manifest.inputs, *self.manifest.outputs), self._offsets, strict=True):
            self.io.allocate(offset, rows * aligned(tensor.row_bytes))
        for example, offset in zip(self._examples, self._offsets, strict=False):
            size_bytes = rows * aligned(len(example))
            repeated = example * -(-size_bytes // len(example)) if example else b""
            self.io.view[offset : offset + size_bytes] = repeated[:size_bytes]
        self._reserved_rows = rows

    def _request(self, gang: int, rows: int) -> SlotRequest:
        frame_bytes = rows * aligned(ANSWER_BYTES) if self.manifest.tail else 0
        return SlotRequest(MODEL_ID, rows, *self._places(gang * rows), frame_bytes=(0, frame_bytes))

    def _places(self, first_row: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return where the inputs and outputs of a query lie that has its rows from `first_row` on."""
        tensors = (*self.manifest.inputs, *self.manifest.outputs)
        places = [
            offset + first_row * aligned(tensor.row_bytes)
            for tensor, offset in zip(tensors, self._offsets, strict=True)
        ]
        count = len(self.manifest.inputs)
        return tuple(places[:count]), tuple(places[count:])

    def _spec(self, slot: int, generation: int, first_row: int, rows: int, ranks: int, versions: bytes) -> LeaseSpec:
        return LeaseSpec(
            model_id=MODEL_ID,
            members=(Member(0, slot, generation, rows=rows),),
            arena_offset=first_row * self.manifest.arena_bytes,
            arena_stride=self.manifest.arena_bytes,
            first_layer=0,
            end_layer=len(self.manifest.layers),
            versions=versions,
            wanted=ranks,
            pass_layers=self.manifest.pass_layers,
            passes=passes_for(self.manifest.pass_layers, self.manifest.pass_rows, rows, ranks),
        )


def with_answer_room(manifest: Manifest) -> Manifest:
    """Give room for an answer to a model whose outputs' sizes depend on data: one frame has them all."""
    if not manifest.tail:
        return manifest
    return replace(manifest, outputs=(replace(manifest.outputs[0], row_bytes=ANSWER_BYTES),))


def _rows_that_fit(manifest: Manifest) -> int:
    tensors = (*manifest.inputs, *manifest.outputs)
    row_bytes = manifest.arena_bytes + sum(aligned(tensor.row_bytes) for tensor in tensors)
    return max(1, int(min(memory_budget().room_bytes() * _SPARE, _MOST_BYTES) / row_bytes))


def example(tensor: TensorSpec) -> bytes:
    """Return one row of an input: random numbers in [0, 1) for FP32, zeros for all else."""
    if tensor.datatype != "FP32":
        return bytes(tensor.row_bytes)
    numbers = random.Random(0)
    return array.array("f", (numbers.random() for _ in range(tensor.row_bytes // 4))).tobytes()


def aligned(size_bytes: int) -> int:
    """Return the size rounded up to whole pages."""
    return align_up(size_bytes, _ALIGNMENT_BYTES)
