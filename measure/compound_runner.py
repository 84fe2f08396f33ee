"""The models of a compound task on real workers: by a schedule of stages, or each on a core of its own.

A stage's gangs begin rank 0 of each, then rank 1 of each, and so on: the breadth-first issue of "Automated
Runtime-Aware Scheduling for Multi-Tenant DNN Inference on GPU" (Yu et al., ICCAD 2021), section III-D.
"""

import statistics
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Final

from gangway.artifact.format import Engine, Manifest
from gangway.executor.leases import LeaseSpec, Member
from gangway.executor.messages import LeaseLeft
from gangway.executor.slots import SLOT_BYTES, SlotRequest
from gangway.measure.model_runner import (
    ANSWER_BYTES,
    RUN_TIMEOUT_S,
    LocalExecutor,
    RunError,
    aligned,
    example,
    version_count,
    with_answer_room,
)
from gangway.measure.profiler import core_counts
from gangway.scheduler.profiles import ModelProfile, every_count
from gangway.scheduler.stages.ir import Schedule, StreamSegment, check_schedule

_PROFILE_RUNS: Final = 5


@dataclass(frozen=True)
class SegmentRun:
    """One segment as it ran, on workers [worker, worker + cores); microseconds since the compound task's begin.

    It begins where the stage before it ends; in the first stage, where its first rank arrives.
    """

    segment: StreamSegment
    worker: int
    begin_us: float
    end_us: float


@dataclass(frozen=True)
class CompoundTimes:
    """One run, from the first worker's arrival in any model to the last one's last layer.

    `skew_us`: from the first to the last beginning among the models that begin in the first stage.
    """

    total_us: float
    skew_us: float
    spans: tuple[SegmentRun, ...]


class CompoundRunner(LocalExecutor):
    """A worker per core with all models loaded, a slot, a lease and an arena for each. One row of each at a time.

    Raises ValueError for a model that onnxruntime serves whole: it has no layers to cut between.
    """

    def __init__(self, cache_dir: Path, manifests: Sequence[Manifest], cores: Sequence[int]) -> None:
        for manifest in manifests:
            if manifest.engine is Engine.ONNXRUNTIME:
                reason = f"onnxruntime serves it whole: {manifest.fallback_reason}"
                raise ValueError(f"{manifest.model_name} has no layers, {reason}")
        self.manifests = tuple(map(with_answer_room, manifests))
        self.places: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        """By model: where its inputs and outputs lie in `io`."""
        end = first = aligned(len(manifests) * SLOT_BYTES)
        for manifest in self.manifests:
            sides = []
            for tensors in (manifest.inputs, manifest.outputs):
                ends = list(accumulate((aligned(tensor.row_bytes) for tensor in tensors), initial=end))
                sides.append(tuple(ends[:-1]))
                end = ends[-1]
            self.places.append((sides[0], sides[1]))
        arena_ends = list(accumulate((aligned(manifest.arena_bytes) for manifest in manifests), initial=0))
        self._arenas = arena_ends[:-1]
        super().__init__(cache_dir, cores, max(arena_ends[-1], aligned(1)), end, len(manifests), len(manifests))
        try:
            self.arena.allocate(0, self.arena.size_bytes)
            self.io.allocate(0, first)
            self.io.allocate(first, end - first)
            for manifest, (inputs, _) in zip(self.manifests, self.places, strict=True):
                for tensor, offset in zip(manifest.inputs, inputs, strict=True):
                    self.io.view[offset : offset + tensor.row_bytes] = example(tensor)
        except BaseException:
            self.__exit__(None, None, None)
            raise

    def __enter__(self) -> "CompoundRunner":
        super().__enter__()
        try:
            for model_id, manifest in enumerate(self.manifests):
                self.load(model_id, manifest.key)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def run(self, stages: Schedule) -> CompoundTimes:
        """Run each model once, stage after stage. Raises RunError, ValueError for a schedule that is not of these."""
        self._check(stages)
        slots = self._begin()
        left: list[list[int]] = []
        for stage in stages:
            workers = list(accumulate((segment.cores for segment in stage), initial=0))
            for segment in stage:
                self._prepare(segment, slots)
            for rank in range(max(segment.cores for segment in stage)):
                for segment, worker in zip(stage, workers, strict=False):
                    if rank < segment.cores:
                        self.join(segment.stream, rank, worker + rank)
            self._wait(range(workers[-1]))
            left.append(workers)
        self.finish([slot for slot, _ in slots])
        return self._times(stages, left)

    def run_freely(self, order: Sequence[int]) -> CompoundTimes:
        """Run each model on one core, in this order, each as soon as a core is free. Raises RunError."""
        slots = self._begin()
        waiting = deque(order)
        busy: dict[int, int] = {}
        placed: list[tuple[int, int]] = []
        free = deque(range(len(self.workers)))
        while waiting or busy:
            while waiting and free:
                worker, stream = free.popleft(), waiting.popleft()
                self._prepare(StreamSegment(stream, 0, len(self.manifests[stream].layers), 1), slots)
                self.join(stream, 0, worker)
                busy[worker] = stream
                placed.append((stream, worker))
            ended = self._any_left(busy)
            del busy[ended]
            free.append(ended)
        self.finish([slot for slot, _ in slots])
        stages = tuple((StreamSegment(stream, 0, len(self.manifests[stream].layers), 1),) for stream, _ in placed)
        times = self._times(stages, [[worker] for _, worker in placed])
        start_ns = [self.lease(stream).start_ns() for stream, _ in placed]
        spans = [
            replace(span, begin_us=(begin - min(start_ns)) / 1e3)
            for span, begin in zip(times.spans, start_ns, strict=True)
        ]
        return replace(times, spans=tuple(spans))

    def streams(self) -> tuple[ModelProfile, ...]:
        """Measure each model alone, one row, on 1, 2, 4, ... and all workers: medians of a few runs, by layer."""
        counts = core_counts(len(self.workers))
        return tuple(self._stream(stream, counts) for stream in range(len(self.manifests)))

    def _stream(self, stream: int, counts: Sequence[int]) -> ModelProfile:
        manifest = self.manifests[stream]
        by_version = []
        for version in range(version_count(manifest)):
            versions = tuple(min(version, len(layer.versions) - 1) for layer in manifest.layers)
            times_us = [self._layers_us(StreamSegment(stream, 0, len(versions), cores, versions)) for cores in counts]
            by_version.append([every_count(counts, layer_us) for layer_us in zip(*times_us, strict=True)])
        latency_us = tuple(
            tuple(by_version[version][index] for version in range(len(layer.versions)))
            for index, layer in enumerate(manifest.layers)
        )
        return ModelProfile(stream, manifest.model_name, len(latency_us), counts[-1], latency_us, measured=True)

    def _layers_us(self, segment: StreamSegment) -> list[float]:
        """Return the medians of a whole model's layers over a few runs, alone."""
        lease, runs = self.lease(segment.stream), []
        for _ in range(_PROFILE_RUNS + 1):
            slot = self._begin_one(segment.stream)
            self._prepare(segment, {segment.stream: slot})
            for rank in range(segment.cores):
                self.join(segment.stream, rank, rank)
            self._wait(range(segment.cores))
            self.finish([slot[0]])
            ends_ns = [lease.start_ns(), *lease.layer_end_ns(0, segment.end)]
            runs.append([(end - begin) / 1e3 for begin, end in pairwise(ends_ns)])
        return [statistics.median(times_us) for times_us in zip(*runs[1:], strict=True)]  # the first one warms up

    def _begin(self) -> list[tuple[int, int]]:
        return [self._begin_one(stream) for stream in range(len(self.manifests))]

    def _begin_one(self, stream: int) -> tuple[int, int]:
        frame_bytes = aligned(ANSWER_BYTES) if self.manifests[stream].tail else 0
        return self.begin(SlotRequest(stream, 1, *self.places[stream], frame_bytes=(0, frame_bytes)))

    def _prepare(self, segment: StreamSegment, slots: Sequence[tuple[int, int]] | dict[int, tuple[int, int]]) -> None:
        """Make the segment's lease ready for its workers."""
        lease, manifest = self.lease(segment.stream), self.manifests[segment.stream]
        if segment.begin:
            lease.resume(segment.end, segment.cores, bytes(segment.versions))
            return
        lease.initialise(
            LeaseSpec(
                model_id=segment.stream,
                members=(Member(0, *slots[segment.stream]),),
                arena_offset=self._arenas[segment.stream],
                arena_stride=manifest.arena_bytes,
                first_layer=0,
                end_layer=segment.end,
                versions=bytes(segment.versions) + bytes(len(manifest.layers) - len(segment.versions)),
                wanted=segment.cores,
            )
        )

    def _wait(self, workers: Sequence[int]) -> None:
        try:
            self.left(workers, RUN_TIMEOUT_S)
        except TimeoutError as error:
            raise RunError(str(error)) from error

    def _any_left(self, workers: dict[int, int]) -> int:
        """Wait until one of these workers has left its lease; return it."""
        deadline = time.monotonic() + RUN_TIMEOUT_S
        bell = self.control.scheduler_bell
        while time.monotonic() < deadline:
            seen = bell.seen()
            self._collect()
            for worker in workers:
                if self._messages[worker]:
                    self.expect(worker, LeaseLeft)
                    return worker
            bell.wait(seen, 0, 1_000_000)
        raise RunError(f"no model ended within {RUN_TIMEOUT_S} s")

    def _times(self, stages: Schedule, workers: Sequence[Sequence[int]]) -> CompoundTimes:
        starts_ns = {segment.stream: self.lease(segment.stream).start_ns() for stage in stages for segment in stage}
        begin_ns = min(starts_ns.values())
        end_us = 0.0
        spans = []
        for number, (stage, first) in enumerate(zip(stages, workers, strict=True)):
            stage_us = end_us
            for segment, worker in zip(stage, first, strict=False):
                (last_ns,) = self.lease(segment.stream).layer_end_ns(segment.end - 1, segment.end)
                own_us = (last_ns - begin_ns) / 1e3
                started_us = stage_us if number else (starts_ns[segment.stream] - begin_ns) / 1e3
                spans.append(SegmentRun(segment, worker, started_us, own_us))
                end_us = max(end_us, own_us)
        first_ns = [starts_ns[segment.stream] for segment in stages[0]]
        return CompoundTimes(end_us, (max(first_ns) - min(first_ns)) / 1e3, tuple(spans))

    def _check(self, stages: Schedule) -> None:
        check_schedule(stages, [len(manifest.layers) for manifest in self.manifests], len(self.workers))
        for segment in (segment for stage in stages for segment in stage if segment.versions):
            manifest = self.manifests[segment.stream]
            layers = manifest.layers[segment.begin : segment.end]
            counts = [len(layer.versions) for layer in layers]
            if not all(0 <= version < count for version, count in zip(segment.versions, counts, strict=True)):
                raise ValueError(f"{manifest.model_name} has not the versions {segment.versions}")
