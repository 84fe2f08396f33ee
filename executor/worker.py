"""A worker process: `python -m gangway.executor.worker`, one per core, started by `executor/launch.py`.

It runs leases in C (native/worker.c) and comes back here only to load, unload or exit. It stays small: no numpy, unless
it is given a model that only onnxruntime can execute.

A thread of its own loads and unloads models (`ModelLoads`), while the worker goes on running leases. Opening a model
takes a millisecond or, in onnxruntime, seconds; a gang whose rank is away for so long stands still. Only the thread
that runs leases touches the worker itself: results come to it by `nudge`. What a model is for the layer loop is a table
in C (`struct layer_record`, native/py_program.c), which `load_program` packs from the artifact on disk.
"""

import gc

if __name__ == "__main__":
    gc.disable()  # imports leave no garbage, and to look for it is a fourteenth of their time

import argparse
import os
import queue
import socket
import struct
import sys
import threading
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from gangway.artifact.format import (
    KERNELS_FILE,
    MAX_OPERANDS,
    WEIGHTS_FILE,
    Engine,
    Layer,
    Manifest,
    TensorSpec,
    plan_staging,
)
from gangway.artifact.instances import SizeInstances
from gangway.artifact.reader import MAX_VERSIONS, ArtifactError, read_manifest
from gangway.base.host_limits import trim_heap
from gangway.base.process import (
    die_with_parent,
    leave_idle_priority,
    may_raise_priority,
    prefer_oom_kill,
    restored_priority,
    use_idle_priority,
    use_one_malloc_arena,
    use_worker_priority,
    write_log_line,
)
from gangway.executor import _native
from gangway.executor.control import ControlSegment
from gangway.executor.instance_addresses import InstanceAddresses
from gangway.executor.messages import Exit, Kept, LoadArtifact, Loaded, Ring, Unload, Unloaded, WorkerReady, unpack
from gangway.executor.python_program import load_python
from gangway.executor.regions import RegionJobs, region_peer
from gangway.executor.segment import Segment

LOADING_NICE: Final = 15  # a hundredth of a core that a gang wants, too
IDLE_TIMEOUT_S: Final = 2.0  # a load on a core that is never free leaves the idle policy after so long
SWITCH_INTERVAL_S: Final = 0.0005  # how long a load may hold the interpreter, which queries for onnxruntime need

CLAIM_US: Final = 200.0  # largest claim: what STOP_NOW and a joining rank may have to wait for
_FLOPS_PER_US: Final = 50e3  # what a kernel does on one core where no profile says better
_BYTES_PER_US: Final = 10e3
_HEAD: Final = struct.Struct("<6I")  # arguments, versions, max_ranks, row_ns, flushes_subnormals, unused
_ARGUMENT: Final = struct.Struct("<IIQ")  # space, index, offset
# tasks, chunk, rows: of a version's own kernel, then of its batch kernel (rows 0: none)
_KERNEL: Final = struct.Struct("<III")
_PLACE: Final = struct.Struct("<III")  # kind, layer, index
_NO_KERNEL: Final = bytes(_KERNEL.size)
_NOT_STAGED: Final = (1 << 64) - 1


@dataclass(frozen=True)
class _Done:
    answer: Loaded | Unloaded
    program: _native.Program | None


class ModelLoads:
    """Loads and unloads of models, each in a thread that runs while the worker's core is idle.

    With the idle policy alone a load on a busy core would never end: after IDLE_TIMEOUT_S it gets a nice value instead.
    It gets one from the start if queries for onnxruntime may need the interpreter. A worker that no gang
    can have before (`at_once`) loads with its own priority. Everything public is for the thread that calls
    `worker.loop`; `pending` jobs are not answered yet. `instances` and `rank`: see `executor/python_program.py`.
    """

    def __init__(
        self,
        worker: _native.Worker,
        completions: Ring,
        cache_dir: Path,
        most_cores: int,
        instances: InstanceAddresses,
        rank: int,
    ) -> None:
        self._worker, self._completions = worker, completions
        self._most_cores = most_cores
        self._cache_dir = cache_dir
        self._instances, self._rank = instances, rank
        self._done: queue.SimpleQueue[_Done] = queue.SimpleQueue()
        # A second reference, so that the job's thread frees what an unload frees.
        self._programs: dict[int, _native.Program] = {}
        self._last: threading.Thread | None = None
        self.pending = 0

    def start(self, job: LoadArtifact | Unload) -> None:
        """Start a job; earlier ones are done first."""
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        if isinstance(job, Unload):
            self._worker.set_program(job.model_id, None)
        self.pending += 1
        thread = threading.Thread(target=self._work, args=(job, self._last), name="models", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no thread can be started: a gang that stands still for a while is better than no model
            self._work(job, self._last, in_background=False)
        else:
            self._last = thread

    def answer(self) -> None:
        """Put loaded models into the worker, and send the scheduler the answers."""
        while not self._done.empty():
            done = self._done.get()
            self.pending -= 1
            self._worker.set_program(done.answer.model_id, done.program)
            self._worker.send(done.answer.pack())

    def _work(self, job: LoadArtifact | Unload, before: threading.Thread | None, in_background: bool = True) -> None:
        """Do one job after the one before. Each has a thread: not every system lets a thread leave the idle policy."""
        try:
            if before is not None:
                before.join()
            at_once = isinstance(job, LoadArtifact) and job.at_once
            in_background = in_background and not at_once and not self._keeps_priority(job)
            with _background_priority() if in_background else nullcontext():
                done = self._load(job) if isinstance(job, LoadArtifact) else self._unload(job)
            self._done.put(done)
            del done
            self._worker.nudge()
        except BaseException as error:
            sys.excepthook(type(error), error, error.__traceback__)
            os._exit(1)  # as whenever a worker fails: it is replaced

    def _keeps_priority(self, job: LoadArtifact | Unload) -> bool:
        """Whether threads of the model would have the priority of who loads it for ever, and delay their gangs."""
        if not isinstance(job, LoadArtifact) or may_raise_priority():
            return False
        with suppress(ArtifactError):
            return read_manifest(self._cache_dir / job.key).engine is Engine.ONNXRUNTIME
        return False

    def _load(self, job: LoadArtifact) -> _Done:
        folder = self._cache_dir / job.key
        try:
            manifest = read_manifest(folder)
            if manifest.engine is Engine.PYTHON:
                kept = partial(self._completions.send, Kept(job.model_id).pack())  # the run's end rings the bell
                program = load_python(manifest, self._instances, job.model_id, self._rank, kept)
            else:
                program = load_program(folder, self._most_cores)
        except (ArtifactError, OSError, ValueError) as error:
            write_log_line(f"the compiled model in {folder} cannot be loaded: {error}")
            return _Done(Loaded(job.model_id, False, str(error).replace(f"{folder}/", "")), None)
        self._programs[job.model_id] = program
        return _Done(Loaded(job.model_id, True), program)

    def _unload(self, job: Unload) -> _Done:
        self._programs.pop(job.model_id, None)  # unmaps weights and kernels, or ends onnxruntime's session
        trim_heap()
        return _Done(Unloaded(job.model_id), None)


@contextmanager
def _background_priority() -> Iterator[None]:
    """Run the block with the idle policy, and with a nice value where that would take too long."""
    thread = threading.get_native_id()
    with restored_priority():
        if "onnxruntime" in sys.modules:
            leave_idle_priority(thread, LOADING_NICE)
            yield
            return
        fallback = threading.Timer(IDLE_TIMEOUT_S, leave_idle_priority, (thread, LOADING_NICE))
        use_idle_priority(alone=True)  # the timer's thread must keep its priority
        try:
            fallback.start()
        except RuntimeError:  # no thread can be started: the idle policy would have no end
            leave_idle_priority(thread, LOADING_NICE)
            yield
            return
        try:
            yield
        finally:
            fallback.cancel()
            fallback.join()


def main() -> None:
    """Serve the rings of one worker until Exit."""
    gc.freeze()  # what lives now lives on: a collection need not look at it
    gc.enable()
    options = _options()
    _set_up_process(options.core, options.parent)
    control = ControlSegment.attach(options.control_fd)
    control.command_rings[options.rank].discard()  # meant for a predecessor
    worker = _make_worker(control, options)
    regions = None
    if options.regions_fd >= 0:
        regions = RegionJobs(worker, region_peer(socket.socket(fileno=options.regions_fd)))
        regions.start()
    worker.send(WorkerReady(os.getpid()).pack())
    most_cores = control.layout.workers - options.rank  # rank 0 has the first core
    instances, completions = InstanceAddresses(options.instances_fd), control.completion_rings[options.rank]
    jobs = ModelLoads(worker, completions, options.cache_dir, most_cores, instances, options.rank)
    while _run_until_command(worker, jobs, regions):
        pass
    if jobs.pending or regions is not None:
        os._exit(0)  # the interpreter must not shut down while their threads work


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", type=int, required=True, help="number of this worker")
    parser.add_argument("--core", type=int, required=True, help="core to be pinned to")
    parser.add_argument("--control-fd", type=int, required=True)
    parser.add_argument("--arena-fd", type=int, required=True)
    parser.add_argument("--io-fds", type=lambda text: [int(fd) for fd in text.split(",")], required=True)
    parser.add_argument("--cache-dir", type=Path, required=True, help="folder of artifacts, one folder per key")
    parser.add_argument("--regions-fd", type=int, default=-1, help="socket for orders about regions; -1: none come")
    parser.add_argument("--instances-fd", type=int, default=-1, help="addresses of Python models' instances; -1: none")
    parser.add_argument("--spin-us", type=int, default=20)
    parser.add_argument("--parent", type=int, required=True, help="process to die with")
    return parser.parse_args()


def _set_up_process(core: int, parent: int) -> None:
    """Pin the process to the core, have it end with its parent only, and set its priority and heap."""
    die_with_parent()
    if os.getppid() != parent:  # it died before the line above
        sys.exit(1)
    os.sched_setaffinity(0, {core})
    use_worker_priority()
    prefer_oom_kill()
    use_one_malloc_arena()


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


def _run_until_command(worker: _native.Worker, jobs: ModelLoads, regions: RegionJobs | None) -> bool:
    """Run leases until another command comes, and execute that; False after Exit."""
    command = worker.loop(jobs.pending > 0)
    if command is None:
        jobs.answer()
        if regions is not None:
            regions.answer()
        return True
    match unpack(command):
        case LoadArtifact() | Unload() as job:
            jobs.start(job)
        case Exit():
            return False
        case unexpected:
            write_log_line(f"an unexpected command is ignored: {unexpected}")
    return True


def load_program(folder: Path, most_cores: int) -> _native.Program:
    """Load the artifact in `folder`: kernels by dlopen, weights mapped read-only (one copy in the machine).

    `most_cores`: of the gangs in which this worker is rank 0, for onnxruntime.
    A model for onnxruntime, or with an island, makes this process import it, and numpy; others leave it small.
    The files' checksums are not compared here, that is done once in the machine and not in every worker.
    Raises ArtifactError for a bad manifest, OSError or ValueError where files and manifest do not fit together.
    """
    manifest = read_manifest(folder)
    if manifest.engine is Engine.ONNXRUNTIME:
        from gangway.executor.onnxruntime_program import load_whole  # noqa: PLC0415

        return load_whole(folder, manifest, most_cores)
    staging = plan_staging(manifest)
    return _native.Program(
        kernels=str(folder / KERNELS_FILE),
        weights=str(folder / WEIGHTS_FILE),
        table=b"".join(pack_layer(layer) for layer in manifest.layers),
        symbols=symbols(manifest),
        arena_bytes=manifest.arena_bytes,
        staging_bytes=staging.size_bytes,
        inputs=_tensors(manifest.inputs, staging.inputs),
        outputs=[] if manifest.tail else _tensors(manifest.outputs, staging.outputs),
        checks=tuple(layer.checks for layer in manifest.layers),
        calls=_calls(folder, manifest, most_cores),
        tail=manifest.tail,
        instances=_instances(manifest.instances),
    )


def _instances(instances: SizeInstances | None) -> tuple[bytes, bytes, tuple[str, ...]] | None:
    """Return where numbers go, the numbers of all instances, and names of kernels."""
    if instances is None:
        return None
    places = b"".join(_PLACE.pack(place.kind, place.layer, place.index) for place in instances.places)
    numbers = array("Q", (number for instance in instances.each for number in instance.numbers))
    return places, numbers.tobytes(), instances.kernels


def _calls(folder: Path, manifest: Manifest, most_cores: int) -> tuple[Callable[..., Any] | None, ...]:
    """Return what computes each layer that is an island; None for all others."""
    if not manifest.islands:
        return (None,) * len(manifest.layers)
    from gangway.executor.island import Island, Tail  # noqa: PLC0415

    calls: list[Callable[..., Any] | None] = []
    for number, layer in enumerate(manifest.layers):
        if not layer.onnx_file:
            calls.append(None)
            continue
        model, cores = folder / layer.onnx_file, min(most_cores, layer.max_ranks)
        is_tail = manifest.tail and number == len(manifest.layers) - 1
        calls.append(Tail(model, manifest, cores) if is_tail else Island(model, manifest.model_name, cores))
    return tuple(calls)


def symbols(manifest: Manifest) -> list[str]:
    """Names of the kernels in the order of the table: by layer, by version, each followed by its batch kernel."""
    versions = [version for layer in manifest.layers if not layer.onnx_file for version in layer.versions]
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
        _HEAD.pack(len(arguments), len(versions), layer.max_ranks, layer.row_ns, layer.flushes_subnormals, 0)
        + b"".join(arguments).ljust(MAX_OPERANDS * _ARGUMENT.size, b"\0")
        + b"".join(versions).ljust(MAX_VERSIONS * 2 * _KERNEL.size, b"\0")
    )


def chunk_tasks(layer: Layer, tasks: int, rows: int) -> int:
    """Return how many of a kernel's tasks take about CLAIM_US, at least one, when a call computes so many rows."""
    task_us = max(rows * layer.flops / _FLOPS_PER_US, layer.bytes / _BYTES_PER_US) / tasks
    return max(1, min(tasks, int(CLAIM_US / task_us))) if task_us > 0 else tasks


def _tensors(tensors: Sequence[TensorSpec], places: Mapping[int, int]) -> list[tuple[int, int]]:
    return [(tensor.row_bytes, places.get(index, _NOT_STAGED)) for index, tensor in enumerate(tensors)]


def _pack_kernel(layer: Layer, tasks: int, rows: int) -> bytes:
    return _KERNEL.pack(tasks, chunk_tasks(layer, tasks, rows), rows)


if __name__ == "__main__":
    main()
