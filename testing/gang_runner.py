"""One query at a time on a gang of real worker processes: no server, no scheduler."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gangway.artifact.format import Engine, Manifest, TensorSpec
from gangway.artifact.reader import read_manifest
from gangway.clients.inputs import Array, dtype_of
from gangway.executor.leases import LeaseSpec, Member, passes_for
from gangway.executor.slots import SLOT_BYTES, SlotOutcome, SlotRequest, SlotStatus
from gangway.measure.model_runner import LocalExecutor
from testing.frame_requests import read_answer, write_request

SLOTS = 4
ARENA_BYTES = 1 << 34  # sparse: only what a model touches costs memory
IO_BYTES = 1 << 30
PAGE_BYTES = 4096
TIMEOUT_S = 20


@dataclass(frozen=True)
class LoadedModel:
    """A model that every worker has loaded, and where its one query keeps activations and tensors."""

    model_id: int
    manifest: Manifest
    max_rows: int
    arena_offset: int
    input_offsets: tuple[int, ...]
    output_offsets: tuple[int, ...]


@dataclass(frozen=True)
class Finished:
    """One query: its outputs, the workers' account of it, and the time from hand-over to answer."""

    outputs: dict[str, Array]
    outcome: SlotOutcome
    total_us: float


class GangRunner(LocalExecutor):
    """A worker per core; models with a place for one query each."""

    def __init__(self, cache_dir: Path, cores: Sequence[int]) -> None:
        super().__init__(cache_dir, cores, ARENA_BYTES, IO_BYTES, SLOTS, leases=1)
        self._arena_end, self._io_end, self._models = 0, SLOTS * SLOT_BYTES, 0

    def open_model(self, artifact: Path, max_rows: int = 1) -> LoadedModel:
        """Load an artifact of the cache into every worker. Raises RuntimeError with a worker's reason."""
        manifest = read_manifest(artifact)
        model_id, self._models = self._models, self._models + 1
        self.load(model_id, manifest.key)
        arena_offset = self._arena_end
        self._arena_end += _pages(manifest.arena_bytes * max_rows)
        self.arena.allocate(arena_offset, self._arena_end - arena_offset)
        inputs, outputs = (self._place(side, max_rows) for side in (manifest.inputs, manifest.outputs))
        return LoadedModel(model_id, manifest, max_rows, arena_offset, inputs, outputs)

    def run(self, model: LoadedModel, inputs: Mapping[str, Array], ranks: int) -> Finished:
        """Run one query on the first `ranks` workers; its rows are those of the inputs.

        Raises RuntimeError when it is not answered well, ValueError when it has more rows than there is room for.
        """
        name = model.manifest.model_name
        first = model.manifest.inputs[0]
        rows = inputs[first.name].nbytes // first.row_bytes
        if rows > model.max_rows:
            raise ValueError(f"{name} was opened for {model.max_rows} rows, not {rows}")
        request = self._request(model, inputs, rows)
        begin_ns = time.monotonic_ns()
        slot, generation = self.begin(request)
        self.start(0, _whole_model(model, slot, generation, rows, ranks), range(ranks))
        if not self.slots.wait(slot, TIMEOUT_S * 1_000_000):
            raise RuntimeError(f"{name} was not answered within {TIMEOUT_S} s")
        total_us = (time.monotonic_ns() - begin_ns) / 1e3
        self.left(range(ranks))
        outcome = self.slots.outcome(slot)
        if outcome.status is not SlotStatus.OK:
            raise RuntimeError(f"{name} ended with {outcome.status.name}")
        self.slots.release(slot)
        return Finished(self._outputs(model, request, rows), outcome, total_us)

    def _request(self, model: LoadedModel, inputs: Mapping[str, Array], rows: int) -> SlotRequest:
        if model.manifest.engine is Engine.ONNXRUNTIME:
            arrays = [inputs[spec.name] for spec in model.manifest.inputs]
            tensors = [(array.shape, array.tobytes()) for array in arrays]
            answer_bytes = sum(_pages(spec.row_bytes * rows) for spec in model.manifest.outputs) + PAGE_BYTES
            return write_request(self.io, self._io_end, model.model_id, rows, tensors, answer_bytes)
        for spec, offset in zip(model.manifest.inputs, model.input_offsets, strict=True):
            self.io.view[offset : offset + rows * spec.row_bytes] = inputs[spec.name].tobytes()
        return SlotRequest(model.model_id, rows, model.input_offsets, model.output_offsets)

    def _outputs(self, model: LoadedModel, request: SlotRequest, rows: int) -> dict[str, Array]:
        specs = model.manifest.outputs
        if model.manifest.engine is Engine.ONNXRUNTIME:
            parts = zip(specs, read_answer(self.io, request), strict=True)
            return {s.name: np.frombuffer(raw, dtype_of(s.datatype)).reshape(shape) for s, (shape, raw) in parts}
        return {spec.name: self._read(spec, at, rows) for spec, at in zip(specs, model.output_offsets, strict=True)}

    def _place(self, tensors: Sequence[TensorSpec], max_rows: int) -> tuple[int, ...]:
        offsets = []
        for tensor in tensors:
            offsets.append(self._io_end)
            self._io_end += _pages(tensor.row_bytes * max_rows)
        return tuple(offsets)

    def _read(self, spec: TensorSpec, offset: int, rows: int) -> Array:
        raw = bytes(self.io.view[offset : offset + rows * spec.row_bytes])
        return np.frombuffer(raw, dtype_of(spec.datatype)).reshape([rows if size < 0 else size for size in spec.shape])


def _whole_model(model: LoadedModel, slot: int, generation: int, rows: int, ranks: int) -> LeaseSpec:
    return LeaseSpec(
        model_id=model.model_id,
        members=(Member(0, slot, generation, rows=rows),),
        arena_offset=model.arena_offset,
        arena_stride=model.manifest.arena_bytes,
        first_layer=0,
        end_layer=len(model.manifest.layers),
        wanted=ranks,
        pass_layers=model.manifest.pass_layers,
        passes=passes_for(model.manifest.pass_layers, model.manifest.pass_rows, rows, ranks),
    )


def _pages(size_bytes: int) -> int:
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES
