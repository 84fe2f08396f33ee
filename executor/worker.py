"""A worker process: `python -m gangway.executor.worker`, one per core, started by `executor/launch.py`.

It runs leases in C (native/worker.c) and comes back here only to load, unload or exit. It stays small: no numpy, unless
it is given a model that only onnxruntime can execute.
"""

import argparse
import os
import queue
import socket
import struct
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gangway.artifact.format import KERNELS_FILE, MAX_ARGUMENTS, WEIGHTS_FILE, Engine, Layer, Manifest, TensorSpec
from gangway.artifact.reader import MAX_VERSIONS, ArtifactError, read_manifest
from gangway.artifact.staging import plan_staging
from gangway.executor import _native
from gangway.executor.complain import complain
from gangway.executor.control import ControlSegment
from gangway.executor.messages import Exit, Load, Loaded, Ready, Unload, Unloaded, unpack
from gangway.executor.process import (
    as_before,
    be_ended_first,
    die_with_parent,
    give_way,
    give_way_less,
    keep_one_heap,
    return_freed_memory,
    take_precedence,
)
from gangway.executor.regions import RegionJobs, region_peer
from gangway.executor.segment import Segment

# From an artifact on disk to the C table that the layer loop runs (`struct layer_record`, native/py_program.c).

CLAIM_US: Final = 200.0  # largest claim: what STOP_NOW and a joining rank may have to wait for
_FLOPS_PER_US: Final = 50e3  # what a kernel does on one core where no profile says better
_BYTES_PER_US: Final = 10e3
_HEAD: Final = struct.Struct("<4I")  # arguments, versions, max_ranks, row_ns
_ARGUMENT: Final = struct.Struct("<IIQ")  # space, index, offset
# tasks, chunk, rows: of a version's own kernel, then of its batch kernel (rows 0: none)
_KERNEL: Final = struct.Struct("<III")
_NO_KERNEL: Final = bytes(_KERNEL.size)
_NOT_STAGED: Final = (1 << 64) - 1


def load_program(folder: Path) -> _native.Program:
    """Load the artifact in `folder`: kernels by dlopen, weights mapped read-only (one copy in the machine).

    A model for onnxruntime makes this process import it, and numpy; others leave it as small as it is.
    The files' checksums are not compared here, that is done once in the machine and not in every worker.
    Raises ArtifactError for a bad manifest, OSError or ValueError where files and manifest do not fit together.
    """
    manifest = read_manifest(folder)
    if manifest.engine is Engine.ONNXRUNTIME:
        from gangway.executor.onnxruntime_program import load_whole  # noqa: PLC0415

        return load_whole(folder, manifest)
    staging = plan_staging(manifest)
    return _native.Program(
        kernels=str(folder / KERNELS_FILE),
        weights=str(folder / WEIGHTS_FILE),
        table=b"".join(pack_layer(layer) for layer in manifest.layers),
        symbols=symbols(manifest),
        arena_bytes=manifest.arena_bytes,
        staging_bytes=staging.size_bytes,
        inputs=_tensors(manifest.inputs, staging.inputs),
        outputs=_tensors(manifest.outputs, staging.outputs),
        checks=tuple(layer.checks for layer in manifest.layers),
    )


def _tensors(tensors: Sequence[TensorSpec], places: Mapping[int, int]) -> list[tuple[int, int]]:
    return [(tensor.row_bytes, places.get(index, _NOT_STAGED)) for index, tensor in enumerate(tensors)]


def symbols(manifest: Manifest) -> list[str]:
    """Names of the kernels in the order of the table: by layer, by version, each followed by its batch kernel."""
    versions = [version for layer in manifest.layers for version in layer.versions]
    return [kernel.symbol for version in versions for kernel in (version, version.batch) if kernel]


def pack_layer(layer: Layer) -> bytes:
    """Return the layer as one record of the table."""
    arguments = [_ARGUMENT.pack(ref.space, ref.index, ref.offset_bytes) for ref in layer.arguments]
    versions = [
        _pack_kernel(layer, version.tasks, 1)
        + (_pack_kernel(layer, version.batch.tasks, version.batch.rows) if version.batch else _NO_KERNEL)
        for version in layer.versions
    ]
    return (
        _HEAD.pack(len(arguments), len(versions), layer.max_ranks, layer.row_ns)
        + b"".join(arguments).ljust(MAX_ARGUMENTS * _ARGUMENT.size, b"\0")
        + b"".join(versions).ljust(MAX_VERSIONS * 2 * _KERNEL.size, b"\0")
    )


def _pack_kernel(layer: Layer, tasks: int, rows: int) -> bytes:
    return _KERNEL.pack(tasks, chunk_tasks(layer, tasks, rows), rows)


def chunk_tasks(layer: Layer, tasks: int, rows: int) -> int:
    """Return how many of a kernel's tasks take about CLAIM_US, at least one, when a call computes so many rows."""
    task_us = max(rows * layer.flops / _FLOPS_PER_US, layer.bytes / _BYTES_PER_US) / tasks
    return max(1, min(tasks, int(CLAIM_US / task_us))) if task_us > 0 else tasks


# Models are loaded and unloaded by a thread of their own, while the worker goes on running leases.
#
# Opening a model takes a millisecond or, in onnxruntime, seconds; a gang whose rank was away for so long would stand
# still. The thread gets the worker's core only when nobody else wants it; a hundredth of it if that takes too long, or
# if queries for onnxruntime might need the interpreter meanwhile. A worker that no gang can have before gives way to
# nobody. Only the thread that runs leases touches the worker itself: results come to it by a nudge.

NICE: Final = 15  # a hundredth of a core that a gang wants, too
PATIENCE_SECONDS: Final = 2.0  # with a core that is never free
SWITCH_SECONDS: Final = 0.0005  # how long it may hold the interpreter, which queries for onnxruntime need


@dataclass(frozen=True)
class _Done:
    answer: Loaded | Unloaded
    program: _native.Program | None


class ModelJobs:
    """Everything public is for the thread that calls `worker.loop`; `pending` jobs are not answered yet."""

    def __init__(self, worker: _native.Worker, cache_dir: Path) -> None:
        self._worker = worker
        self._cache_dir = cache_dir
        self._done: queue.SimpleQueue[_Done] = queue.SimpleQueue()
        # A second reference: what an unload frees is freed by the thread.
        self._programs: dict[int, _native.Program] = {}
        self._last: threading.Thread | None = None
        self.pending = 0

    def give(self, job: Load | Unload) -> None:
        """Begin with a job; those before it are done first."""
        sys.setswitchinterval(SWITCH_SECONDS)
        if isinstance(job, Unload):
            self._worker.set_program(job.model_id, None)
        self.pending += 1
        thread = threading.Thread(target=self._work, args=(job, self._last), name="models", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no thread can be started: better a gang that stands still for a while than no model
            self._work(job, self._last, gives_way=False)
        else:
            self._last = thread

    def answer(self) -> None:
        """Take over what has been loaded, and tell the scheduler what has been done."""
        while not self._done.empty():
            done = self._done.get()
            self.pending -= 1
            self._worker.set_program(done.answer.model_id, done.program)
            self._worker.send(done.answer.pack())

    def _work(self, job: Load | Unload, before: threading.Thread | None, gives_way: bool = True) -> None:
        """Do one job after the one before. A thread for each: not everywhere may one come back that has given way."""
        try:
            if before is not None:
                before.join()
            at_once = isinstance(job, Load) and job.at_once
            with _in_the_background() if gives_way and not at_once else nullcontext():
                done = self._load(job) if isinstance(job, Load) else self._unload(job)
            self._done.put(done)
            del done
            self._worker.nudge()
        except BaseException as error:
            sys.excepthook(type(error), error, error.__traceback__)
            os._exit(1)  # as whenever a worker fails: it is replaced

    def _load(self, job: Load) -> _Done:
        folder = self._cache_dir / job.key
        try:
            program = load_program(folder)
        except (ArtifactError, OSError, ValueError) as error:
            complain(f"the compiled model in {folder} cannot be loaded: {error}")
            return _Done(Loaded(job.model_id, False, str(error).replace(f"{folder}/", "")), None)
        self._programs[job.model_id] = program
        return _Done(Loaded(job.model_id, True), program)

    def _unload(self, job: Unload) -> _Done:
        self._programs.pop(job.model_id, None)  # unmaps weights and kernels, or ends onnxruntime's session
        return_freed_memory()
        return _Done(Unloaded(job.model_id), None)


@contextmanager
def _in_the_background() -> Iterator[None]:
    """Let the calling thread give way for the block."""
    thread = threading.get_native_id()
    with as_before():
        if "onnxruntime" in sys.modules:
            give_way_less(thread, NICE)
            yield
            return
        patience = threading.Timer(PATIENCE_SECONDS, give_way_less, (thread, NICE))
        give_way(alone=True)  # the timer's thread must not wait as this one does
        try:
            patience.start()
        except RuntimeError:  # no thread can be started: nobody would end its patience
            give_way_less(thread, NICE)
            yield
            return
        try:
            yield
        finally:
            patience.cancel()
            patience.join()


def main() -> None:
    """Serve the rings of one worker until Exit."""
    options = _options()
    _settle(options.core, options.parent)
    control = ControlSegment.attach(options.control_fd)
    control.command_rings[options.rank].discard()  # meant for a predecessor
    worker = _make_worker(control, options)
    regions = None
    if options.regions_fd >= 0:
        regions = RegionJobs(worker, region_peer(socket.socket(fileno=options.regions_fd)))
        regions.start()
    worker.send(Ready(os.getpid()).pack())
    jobs = ModelJobs(worker, options.cache_dir)
    while _obey(worker, jobs, regions):
        pass
    if jobs.pending or regions is not None:
        os._exit(0)  # their threads must not be found in the middle of something when the interpreter goes


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", type=int, required=True, help="number of this worker")
    parser.add_argument("--core", type=int, required=True, help="core to be pinned to")
    parser.add_argument("--control-fd", type=int, required=True)
    parser.add_argument("--arena-fd", type=int, required=True)
    parser.add_argument("--io-fds", type=lambda text: [int(fd) for fd in text.split(",")], required=True)
    parser.add_argument("--cache-dir", type=Path, required=True, help="folder of artifacts, one folder per key")
    parser.add_argument("--regions-fd", type=int, default=-1, help="socket for orders about regions; -1: none come")
    parser.add_argument("--spin-us", type=int, default=20)
    parser.add_argument("--parent", type=int, required=True, help="process to die with")
    return parser.parse_args()


def _settle(core: int, parent: int) -> None:
    """Pin to the core, tie this life to the parent's and to nothing else; then whatever holds for the whole process."""
    die_with_parent()
    if os.getppid() != parent:  # it died before the line above
        sys.exit(1)
    os.sched_setaffinity(0, {core})
    take_precedence()
    be_ended_first()
    keep_one_heap()


def _make_worker(control: ControlSegment, options: argparse.Namespace) -> _native.Worker:
    layout = control.layout
    return _native.Worker(
        control=control.segment.view,
        bell=layout.worker(options.rank),
        status=layout.worker_status(options.rank),
        commands=layout.command_ring(options.rank),
        completions=layout.completion_ring(options.rank),
        scheduler_bell=layout.scheduler_bell,
        leases=layout.lease_table,
        lease_count=layout.leases,
        arena=Segment.attach(options.arena_fd).view,
        io=[Segment.attach(fd).view for fd in options.io_fds],
        spin_us=options.spin_us,
        lost_regions=layout.lost_regions,
    )


def _obey(worker: _native.Worker, jobs: ModelJobs, regions: RegionJobs | None) -> bool:
    """Run leases until there is another command, and do it; False after Exit."""
    command = worker.loop(jobs.pending > 0)
    if command is None:
        jobs.answer()
        if regions is not None:
            regions.answer()
        return True
    match unpack(command):
        case Load() | Unload() as job:
            jobs.give(job)
        case Exit():
            return False
        case unexpected:
            complain(f"an unexpected command is ignored: {unexpected}")
    return True


if __name__ == "__main__":
    main()
