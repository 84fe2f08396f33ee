"""Gangs without a server: real worker processes on real shared memory; the benchmark takes the scheduler's place."""

import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import numpy as np
from gangway.artifact.cache import Cache
from gangway.artifact.format import Manifest, TensorSpec
from gangway.artifact.reader import read_manifest
from gangway.clients.tensors import Array, dtype_of
from gangway.executor.control import ControlLayout, ControlSegment
from gangway.executor.launch import WorkerPlan, start_worker
from gangway.executor.leases import LeaseSpec
from gangway.executor.messages import Exit, Left, LeftReason, Load, Loaded, Message, Ready, Run, unpack
from gangway.executor.segment import Segment
from gangway.executor.slots import SLOT_BYTES, SlotOutcome, SlotRequest, SlotStatus, SlotTable

SLOTS = 4
ARENA_BYTES = 1 << 30  # sparse: only what a model touches costs memory
IO_BYTES = 64 << 20
PAGE_BYTES = 4096
TIMEOUT_S = 20.0

Kind = TypeVar("Kind", bound=Message)


@dataclass(frozen=True)
class LoadedModel:
    """A model that every worker has loaded, and where its one query keeps activations and tensors."""

    model_id: int
    manifest: Manifest
    arena_offset: int
    input_offsets: tuple[int, ...]
    output_offsets: tuple[int, ...]


@dataclass(frozen=True)
class Finished:
    """One query: its outputs, the workers' account of it, and the time from hand-over to answer."""

    outputs: dict[str, Array]
    outcome: SlotOutcome
    total_us: float


class GangRunner:
    """One worker per core, and one query at a time. Leaves no process and no shared memory behind."""

    def __init__(self, cores: Sequence[int], cache_dir: Path) -> None:
        self._cache = Cache(cache_dir)
        self._control = ControlSegment.create(ControlLayout(workers=len(cores), front_ends=1, leases=1))
        self._arena = Segment.create(ARENA_BYTES, "bench-arena")
        self._io = Segment.create(IO_BYTES, "bench-io")
        self._slots = SlotTable(self._io, SLOTS)
        self._slots.init()
        self._arena_end, self._io_end, self._models = 0, SLOTS * SLOT_BYTES, 0
        self._workers = [
            start_worker(
                WorkerPlan(rank, core, self._control.segment.fd, self._arena.fd, (self._io.fd,), cache_dir=cache_dir)
            )
            for rank, core in enumerate(cores)
        ]

    def __enter__(self) -> Self:
        for rank in range(len(self._workers)):
            self._expect(rank, Ready)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for rank, worker in enumerate(self._workers):
            self._control.command(rank, Exit().pack())
            try:
                worker.wait(TIMEOUT_S)
            except subprocess.TimeoutExpired:
                worker.kill()
                worker.wait()

    def load(self, key: str) -> LoadedModel:
        """Load an artifact of the cache into every worker. Raises RuntimeError when a worker cannot."""
        manifest = read_manifest(self._cache.folder(key))
        model_id, self._models = self._models, self._models + 1
        for rank in range(len(self._workers)):
            self._control.command(rank, Load(model_id, key).pack())
            if not (answer := self._expect(rank, Loaded)).ok:
                raise RuntimeError(f"worker {rank} cannot load {manifest.model_name}: {answer.error}")
        arena_offset = self._arena_end
        self._arena_end += -(-manifest.arena_bytes // PAGE_BYTES) * PAGE_BYTES
        self._arena.allocate(arena_offset, self._arena_end - arena_offset)
        return LoadedModel(
            model_id, manifest, arena_offset, self._place(manifest.inputs), self._place(manifest.outputs)
        )

    def run(self, model: LoadedModel, inputs: Mapping[str, Array], ranks: int) -> Finished:
        """Run one query of one row on the first `ranks` workers. Raises RuntimeError when it is not answered."""
        for spec, offset in zip(model.manifest.inputs, model.input_offsets, strict=True):
            self._io.view[offset : offset + spec.row_bytes] = inputs[spec.name].tobytes()
        begin_ns = time.monotonic_ns()
        slot = self._submit(model)
        self._run_gang(model, slot, ranks)
        if not self._slots.wait(slot, round(TIMEOUT_S * 1e6)):
            raise RuntimeError(f"{model.manifest.model_name} was not answered within {TIMEOUT_S} s")
        total_us = (time.monotonic_ns() - begin_ns) / 1e3
        for rank in range(ranks):
            if (left := self._expect(rank, Left)).reason not in (LeftReason.DONE, LeftReason.STALE):
                raise RuntimeError(f"rank {rank} left {model.manifest.model_name}: {left.reason.name}")
        outcome = self._slots.outcome(slot)
        if outcome.status is not SlotStatus.OK:
            raise RuntimeError(f"{model.manifest.model_name} ended with {outcome.status.name}")
        outputs = {
            spec.name: self._read(spec, offset)
            for spec, offset in zip(model.manifest.outputs, model.output_offsets, strict=True)
        }
        self._slots.release(slot)
        return Finished(outputs, outcome, total_us)

    def _submit(self, model: LoadedModel) -> int:
        slot = self._slots.acquire()
        assert slot is not None, "one query at a time, and every one is released"
        self._slots.fill(slot, SlotRequest(model.model_id, 1, model.input_offsets, model.output_offsets))
        return slot

    def _run_gang(self, model: LoadedModel, slot: int, ranks: int) -> None:
        sequence = self._slots.submit(slot)
        self._slots.start(slot, sequence)
        lease = LeaseSpec(
            model_id=model.model_id,
            front_end=0,
            slot=slot,
            sequence=sequence,
            arena_offset=model.arena_offset,
            arena_stride=model.manifest.arena_bytes,
            rows=1,
            first_layer=0,
            end_layer=len(model.manifest.layers),
            wanted=ranks,
        )
        term = self._control.leases[0].initialise(lease)
        for rank in range(ranks):
            self._control.command(rank, Run(0, rank, term).pack())

    def _place(self, tensors: Sequence[TensorSpec]) -> tuple[int, ...]:
        offsets = []
        for tensor in tensors:
            offsets.append(self._io_end)
            self._io_end += -(-tensor.row_bytes // PAGE_BYTES) * PAGE_BYTES
        return tuple(offsets)

    def _read(self, spec: TensorSpec, offset: int) -> Array:
        raw = bytes(self._io.view[offset : offset + spec.row_bytes])
        return np.frombuffer(raw, dtype_of(spec.datatype)).reshape([abs(size) for size in spec.shape])

    def _expect(self, rank: int, kind: type[Kind]) -> Kind:
        """Wait for a worker's next message. Raises RuntimeError when it is of another kind, or does not come."""
        deadline = time.monotonic() + TIMEOUT_S
        bell, ring = self._control.scheduler_bell, self._control.completion_rings[rank]
        while True:
            seen = bell.seen()
            if (raw := ring.receive()) is not None:
                break
            if time.monotonic() > deadline or self._workers[rank].poll() is not None:
                raise RuntimeError(f"worker {rank} did not send {kind.__name__}")
            bell.wait(seen, timeout_us=100_000)
        message = unpack(raw)
        if not isinstance(message, kind):
            raise RuntimeError(f"worker {rank} sent {message} instead of {kind.__name__}")
        return message
