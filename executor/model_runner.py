"""One model on workers of its own, layer by layer against the clock."""

import array
import math
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gangway.artifact.format import Manifest, TensorSpec
from gangway.executor.leases import LeaseSpec
from gangway.executor.local import LocalExecutor
from gangway.executor.slots import SLOT_BYTES, SlotRequest, SlotStatus

RUN_TIMEOUT_S: Final = 60
_MODEL_ID: Final = 0
_SLOTS: Final = 4
_ALIGNMENT_BYTES: Final = 4096
_SPARE: Final = 0.5  # share of free memory that a measurement may take


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
    """A worker per core with one model loaded, and room for one query of up to `max_rows` rows.

    FP32 inputs are random numbers in [0, 1), the same in each row; all others are zeros, valid as tokens and flags.
    """

    def __init__(self, cache_dir: Path, manifest: Manifest, cores: Sequence[int], max_rows: int) -> None:
        self.manifest = manifest
        self.max_rows = min(max_rows, _rows_that_fit(manifest)) if manifest.batched else 1
        arena_bytes = max(manifest.arena_bytes * self.max_rows, _ALIGNMENT_BYTES)
        offsets, end = [], _SLOTS * SLOT_BYTES
        for tensor in (*manifest.inputs, *manifest.outputs):
            offsets.append(end)
            end = _aligned(end + tensor.row_bytes * self.max_rows)
        self._inputs = tuple(offsets[: len(manifest.inputs)])
        self._outputs = tuple(offsets[len(manifest.inputs) :])
        super().__init__(cache_dir, cores, arena_bytes, end, _SLOTS, leases=1)
        try:
            self.arena.allocate(0, arena_bytes)  # a full /dev/shm is an OSError here, and would be a SIGBUS later
            self.io.allocate(0, end)
            for tensor, offset in zip(manifest.inputs, self._inputs, strict=True):
                size_bytes = tensor.row_bytes * self.max_rows
                self.io.view[offset : offset + size_bytes] = _example(tensor) * self.max_rows
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
        versions = bytes(min(version, len(layer.versions) - 1) for layer in self.manifest.layers)
        slot, sequence = self.begin(SlotRequest(_MODEL_ID, rows, self._inputs, self._outputs))
        self.start(0, self._spec(slot, sequence, rows, ranks, versions), range(ranks))
        if not self.slots.wait(slot, RUN_TIMEOUT_S * 1_000_000):
            raise RunError(f"{self.manifest.model_name} was not computed within {RUN_TIMEOUT_S} s")
        self.left(range(ranks))
        status = self.slots.outcome(slot).status
        self.slots.release(slot)
        if status is not SlotStatus.OK:
            raise RunError(f"{self.manifest.model_name} ended with {status.name}")
        lease = self.lease(0)
        ends_ns = lease.layer_end_ns(0, len(self.manifest.layers))
        begins_ns = [lease.start_ns(), *ends_ns]
        return RunTimes(tuple((end - begin) / 1e3 for begin, end in zip(begins_ns, ends_ns, strict=False)))

    def _spec(self, slot: int, sequence: int, rows: int, ranks: int, versions: bytes) -> LeaseSpec:
        return LeaseSpec(
            model_id=_MODEL_ID,
            front_end=0,
            slot=slot,
            sequence=sequence,
            arena_offset=0,
            arena_stride=self.manifest.arena_bytes,
            rows=rows,
            first_layer=0,
            end_layer=len(self.manifest.layers),
            versions=versions,
            wanted=ranks,
        )


def _rows_that_fit(manifest: Manifest) -> int:
    row_bytes = manifest.arena_bytes + sum(tensor.row_bytes for tensor in (*manifest.inputs, *manifest.outputs))
    shared = os.statvfs("/dev/shm")
    free_bytes = min(shared.f_bavail * shared.f_frsize, _available_bytes())
    return max(1, int(free_bytes * _SPARE / row_bytes))


def _available_bytes() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


def _example(tensor: TensorSpec) -> bytes:
    if tensor.datatype != "FP32":
        return bytes(tensor.row_bytes)
    numbers = random.Random(0)
    return array.array("f", (numbers.random() for _ in range(tensor.row_bytes // 4))).tobytes()


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
