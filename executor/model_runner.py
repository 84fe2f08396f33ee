"""One model on workers of its own, layer by layer against the clock."""

import array
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gangway.artifact.format import Manifest, TensorSpec
from gangway.executor.leases import LeaseSpec, Member, passes_for
from gangway.executor.local import LocalExecutor
from gangway.executor.memory_budget import memory_budget
from gangway.executor.slots import SLOT_BYTES, SlotRequest, SlotStatus

RUN_TIMEOUT_S: Final = 60
_MODEL_ID: Final = 0
_ALIGNMENT_BYTES: Final = 4096
_SPARE: Final = 0.5  # share of free memory that a measurement may take,
_MOST_BYTES: Final = 4 << 30  # but not more than this: it is zeroed first, and taken from whoever else runs


class RunError(Exception):
    """The model did not run to its end."""


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

    def __init__(
        self, cache_dir: Path, manifest: Manifest, cores: Sequence[int], max_rows: int, gangs: int = 1
    ) -> None:
        self.manifest = manifest
        asked = max_rows if manifest.batched else 1
        self.room_rows = min(asked * gangs, _rows_that_fit(manifest))
        self.max_rows = min(asked, self.room_rows)
        self._reserved_rows = 0
        self._examples = [_example(tensor) for tensor in manifest.inputs]
        offsets, end = [], _aligned(gangs * SLOT_BYTES)
        for tensor in (*manifest.inputs, *manifest.outputs):
            offsets.append(end)
            end += self.room_rows * _aligned(tensor.row_bytes)
        self._offsets = tuple(offsets)
        arena_bytes = max(manifest.arena_bytes * self.room_rows, _ALIGNMENT_BYTES)
        super().__init__(cache_dir, cores, arena_bytes, end, gangs, leases=gangs)
        try:
            self.io.allocate(0, _aligned(gangs * SLOT_BYTES))
            self._reserve(1)
        except BaseException:
            self.__exit__(None, None, None)
            raise

    def __enter__(self) -> "ModelRunner":
        super().__enter__()
        try:
            self.load(_MODEL_ID, self.manifest.key)
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
        slots = [self.begin(SlotRequest(_MODEL_ID, rows, *self._places(gang * rows))) for gang in range(gangs)]
        for gang, (slot, sequence) in enumerate(slots):
            self.leases[gang].initialise(self._spec(slot, sequence, gang * rows, rows, ranks, versions))
        for worker in range(gangs * ranks):  # nothing between these messages, so that all begin at about one time
            self.join(worker // ranks, worker % ranks, worker)
        self._finish([slot for slot, _ in slots])
        self.left(range(gangs * ranks))
        return [self._times(gang) for gang in range(gangs)]

    def _finish(self, slots: Sequence[int]) -> None:
        for slot in slots:
            if not self.slots.wait(slot, RUN_TIMEOUT_S * 1_000_000):
                raise RunError(f"{self.manifest.model_name} was not computed within {RUN_TIMEOUT_S} s")
        for slot in slots:
            status = self.slots.outcome(slot).status
            self.slots.release(slot)
            if status not in (SlotStatus.OK, SlotStatus.INVALID):  # kernels that refuse a number compute to the end
                raise RunError(f"{self.manifest.model_name} ended with {status.name}")

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
            self.io.allocate(offset, rows * _aligned(tensor.row_bytes))
        for example, offset in zip(self._examples, self._offsets, strict=False):
            size_bytes = rows * _aligned(len(example))
            repeated = example * -(-size_bytes // len(example)) if example else b""
            self.io.view[offset : offset + size_bytes] = repeated[:size_bytes]
        self._reserved_rows = rows

    def _places(self, first_row: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return where the inputs and outputs of a query lie that has its rows from `first_row` on."""
        tensors = (*self.manifest.inputs, *self.manifest.outputs)
        places = [
            offset + first_row * _aligned(tensor.row_bytes)
            for tensor, offset in zip(tensors, self._offsets, strict=True)
        ]
        count = len(self.manifest.inputs)
        return tuple(places[:count]), tuple(places[count:])

    def _spec(self, slot: int, sequence: int, first_row: int, rows: int, ranks: int, versions: bytes) -> LeaseSpec:
        return LeaseSpec(
            model_id=_MODEL_ID,
            members=(Member(0, slot, sequence, rows=rows),),
            arena_offset=first_row * self.manifest.arena_bytes,
            arena_stride=self.manifest.arena_bytes,
            first_layer=0,
            end_layer=len(self.manifest.layers),
            versions=versions,
            wanted=ranks,
            pass_layers=self.manifest.pass_layers,
            passes=passes_for(self.manifest.pass_layers, self.manifest.pass_rows, rows, ranks),
        )


def _rows_that_fit(manifest: Manifest) -> int:
    tensors = (*manifest.inputs, *manifest.outputs)
    row_bytes = manifest.arena_bytes + sum(_aligned(tensor.row_bytes) for tensor in tensors)
    return max(1, int(min(memory_budget().room_bytes() * _SPARE, _MOST_BYTES) / row_bytes))


def _example(tensor: TensorSpec) -> bytes:
    if tensor.datatype != "FP32":
        return bytes(tensor.row_bytes)
    numbers = random.Random(0)
    return array.array("f", (numbers.random() for _ in range(tensor.row_bytes // 4))).tobytes()


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
