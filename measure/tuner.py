"""One tuning from beginning to end: sample, choose finalists, measure them beside interference, drop, write down.

Versions are measured against each other with the executor that will serve them. Every version is one run of the whole
model, in which all layers are in that version. One run measures a sample of every layer, and each finds in the caches
what it would find there when it serves. Versions take turns.
"""

import hashlib
import json
import logging
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Final, Self

from gangway.artifact.cache import Cache
from gangway.artifact.format import Manifest
from gangway.artifact.profile import InterferencePoint, whole_machine_id
from gangway.artifact.reader import MAX_VERSIONS, read_manifest
from gangway.artifact.tuning import CandidateTime, KnobCandidate, Tuning, tuning_path, write_tuning
from gangway.artifact.writer import temporary_prefix
from gangway.base.files import write_whole
from gangway.base.json_codec import decode
from gangway.base.python_process import start_of
from gangway.measure.interference import (
    IDLE,
    LOADS,
    Load,
    Round,
    disturbed_ranks,
    disturbed_rounds,
    interference_points,
)
from gangway.measure.model_runner import Clock, ModelRunner, Progress, powers_of_two, version_count
from gangway.measure.version_choice import STATIC, KernelChoice, choose_finalists, layer_qos_us, tuned_kernel
from gangway.server.errors import CompileError

_log = logging.getLogger(__name__)
USUAL_QOS: Final = 3.0  # times the isolated latency
NO_DIMENSIONS: Final[Mapping[str, int]] = MappingProxyType({})
SAMPLES_PART: Final = 0.5  # of the time for measurements; the rest is for finalists
SAMPLES_SHARE: Final = 0.75  # of all the work, compilation included: for the progress bar

LEAST_RUNS: Final = 3
MAX_RUNS: Final = 200
ALONE_PART: Final = 0.3  # of the time for finalists, when there are other cores to disturb from
TABLES: Final = 2  # independent measurements of the same: a difference that is in both is none of noise
LayerTimes = tuple[tuple[float, ...], ...]
"""Microseconds by layer and version."""


@dataclass(frozen=True)
class TuneOptions:
    """What is asked for. `seconds` are those of measurements; compilation comes on top.

    The latency target is `qos_us`; None: so many times the isolated latency as `qos_multiple` says.
    """

    trials: int
    most_versions: int
    least_loss: float
    seconds: float
    qos_us: float | None = None
    qos_multiple: float = USUAL_QOS


@dataclass(frozen=True)
class TuningSpace:
    """All kernels; `key` is that of the artifact of static choices, `layers[l]` the number of layer l's kernel."""

    key: str
    kernels: tuple[KernelChoice, ...]
    layers: tuple[int, ...]


@dataclass
class KeptSamples:
    """`latency_us[k][knobs]`: alone on all `cores` cores, one row, kernel k."""

    key: str  # of the artifact of static choices
    cores: int
    isolated_us: float = 0.0  # the whole model, static choices
    latency_us: list[dict[str, float]] = field(default_factory=list)


@dataclass(frozen=True)
class FinalTimes:
    """Independent tables of the same: `gang_us[table][layer][version][g]` alone on `gangs[g]` cores; `disturbed_us`,
    likewise, on `ranks` cores: alone, then beside each point. Without other cores, `ranks` is 0, and there are no
    points.
    """

    gangs: tuple[int, ...]
    gang_us: tuple[tuple[tuple[tuple[float, ...], ...], ...], ...]
    ranks: int = 0
    points: tuple[InterferencePoint, ...] = ()
    disturbed_us: tuple[tuple[tuple[tuple[float, ...], ...], ...], ...] = ()


class TuningCompiler:
    """A process that compiles, one order after the other. A context manager; the process ends with it."""

    def __init__(
        self,
        path: Path,
        dimensions: Mapping[str, int],
        cache_dir: Path,
        scratch: Path,
        trials: int,
        progress: Callable[[int, int], None],
    ) -> None:
        self._progress = progress
        read_fd, write_fd = os.pipe()
        arguments = [str(path), f"--cache-dir={cache_dir}"]
        arguments += [f"--dimension={name}={size}" for name, size in dimensions.items()]
        arguments += [f"--scratch={scratch}", f"--trials={trials}", f"--answers-fd={write_fd}"]
        start = start_of("gangway.compiler.tuning", arguments)
        self._process = subprocess.Popen(
            start.command, env=start.environment, pass_fds=(write_fd,), stdin=subprocess.PIPE, text=True
        )
        os.close(write_fd)
        self._answers = os.fdopen(read_fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self._process.terminate()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self._answers.close()

    def space(self) -> TuningSpace:
        """Return what can be tried; the artifact of static choices is in the cache then. Raises CompileError."""
        found = self._answer("kernels")
        kernels = [
            KernelChoice(
                one["name"], one["operator"], one["uses"], tuple(KnobCandidate(**item) for item in one["candidates"])
            )
            for one in found["kernels"]
        ]
        return TuningSpace(found["key"], tuple(kernels), tuple(found["layers"]))

    def make(self, folder: Path, versions: Sequence[Sequence[int]]) -> None:
        """Make the artifact `folder`: `versions[k]` are the numbers of kernel k's candidates. Raises CompileError."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"folder": str(folder), "versions": versions}) + "\n")
        self._process.stdin.flush()
        self._answer("folder")

    def _answer(self, field: str) -> dict[str, Any]:
        for line in self._answers:
            message: dict[str, Any] = json.loads(line)
            if field in message:
                return message
            if "error" in message:
                raise CompileError(message["error"])
            if "done" in message:
                self._progress(message["done"], message["total"])
        raise CompileError("the compiler's process ended")


class Tuner:
    """Tunes one model, the ONNX file `path`, on some cores. `dimensions`: sizes of its symbolic dimensions."""

    def __init__(
        self,
        path: Path,
        cache_dir: Path,
        cores: Sequence[int],
        options: TuneOptions,
        progress: Progress,
        dimensions: Mapping[str, int] = NO_DIMENSIONS,
    ) -> None:
        self._path = path
        self._dimensions = dimensions
        self._cache = Cache(cache_dir)
        self._cores = cores
        self._options = options
        self._progress = progress
        self._phase, self._share = "compiler", 0.0

    def tune(self, name: str) -> Tuning:
        """Tune the model called `name`, make the artifact of the chosen versions, write down and return what was found.

        Raises CompileError, RunError, RuntimeError, TimeoutError, OSError.
        """
        begin = time.monotonic()
        place = hashlib.sha256(str(self._path.resolve()).encode()).hexdigest()
        with self._cache.lock(place), self._scratch(place) as scratch, self._compiler(scratch) as compiler:
            space = compiler.space()
            manifest = read_manifest(self._cache.folder(space.key))
            machine = whole_machine_id(manifest.target.name)
            kept_path = tuning_path(self._cache.root, space.key, machine).with_suffix(".samples")
            kept = self._sample(compiler, space, scratch, kept_path)
            tuning = self._decide(compiler, space, scratch, kept, _Origin(name, machine, manifest, begin))
            self._make(compiler, space, tuning)
            write_tuning(self._cache.root, tuning)
            kept_path.unlink(missing_ok=True)
        return tuning

    def _sample(self, compiler: TuningCompiler, space: TuningSpace, scratch: Path, kept_path: Path) -> KeptSamples:
        """Measure what is not measured yet."""
        kept = read_kept(kept_path, space.key, len(self._cores), len(space.kernels))
        batches = plan_batches(space, kept)
        for number, batch in enumerate(batches):
            self._enter(f"samples, {number + 1} of {len(batches)}", SAMPLES_SHARE * number / len(batches))
            artifact = _artifact(compiler, scratch, f"samples {number}", batch)
            seconds = self._options.seconds * SAMPLES_PART / len(batches)
            keep(kept, space, batch, sample_versions(scratch, artifact, self._cores, seconds))
            write_kept(kept_path, kept)
            shutil.rmtree(scratch / artifact.key)
        return kept

    def _decide(
        self, compiler: TuningCompiler, space: TuningSpace, scratch: Path, kept: KeptSamples, origin: "_Origin"
    ) -> Tuning:
        options, layers = self._options, origin.manifest.layers
        qos_us = options.qos_multiple * kept.isolated_us if options.qos_us is None else options.qos_us
        shares_us = layer_qos_us(qos_us, [layer.flops for layer in layers], [layer.bytes for layer in layers])
        kernel_qos_us = [shares_us[space.layers.index(number)] for number in range(len(space.kernels))]
        samples = [samples_of(*pair) for pair in zip(space.kernels, kept.latency_us, strict=True)]
        slack = qos_us / max(1.0, kept.isolated_us)
        most = min(MAX_VERSIONS, options.most_versions)
        finalists = [choose_finalists(*pair, slack, most) for pair in zip(samples, kernel_qos_us, strict=True)]
        times = self._measure_finalists(compiler, scratch, finalists)
        kernels = tuple(
            tuned_kernel(
                kernel,
                kernel_qos_us[number],
                samples[number],
                finalists[number],
                [_table(table, space, number) for table in times.gang_us],
                [_table(table, space, number) for table in times.disturbed_us],
                options.least_loss,
                most,
            )
            for number, kernel in enumerate(space.kernels)
        )
        return Tuning(
            key=space.key,
            model_name=origin.name,
            machine=origin.machine,
            cores=len(self._cores),
            gangs=times.gangs,
            interference_cores=times.ranks,
            interference=times.points,
            isolated_us=kept.isolated_us,
            qos_us=qos_us,
            trials=options.trials,
            most_versions=options.most_versions,
            least_loss=options.least_loss,
            kernels=kernels,
            layers=space.layers,
            seconds=time.monotonic() - origin.begin,
        )

    def _measure_finalists(
        self, compiler: TuningCompiler, scratch: Path, finalists: Sequence[Sequence[int]]
    ) -> FinalTimes:
        self._enter("finalists", SAMPLES_SHARE)
        artifact = _artifact(compiler, scratch, "finalists", finalists)

        def progress(phase: str, share: float) -> None:
            self._progress(f"finalists: {phase}", SAMPLES_SHARE + (1 - SAMPLES_SHARE) * share)

        return measure_finalists(scratch, artifact, self._cores, self._options.seconds * (1 - SAMPLES_PART), progress)

    def _make(self, compiler: TuningCompiler, space: TuningSpace, tuning: Tuning) -> None:
        """Make the artifact of the chosen versions, unless the cache has it."""
        with self._cache.lock(tuning.tuned_key):
            if self._cache.lookup(tuning.tuned_key) is None:
                pairs = zip(space.kernels, tuning.kernels, strict=True)
                numbers = [[kernel.candidates.index(item) for item in tuned.versions] for kernel, tuned in pairs]
                compiler.make(self._cache.folder(tuning.tuned_key), numbers)

    def _compiler(self, scratch: Path) -> TuningCompiler:
        trials = self._options.trials
        return TuningCompiler(self._path, self._dimensions, self._cache.root, scratch, trials, self._compiled)

    @contextmanager
    def _scratch(self, place: str) -> Iterator[Path]:
        """A folder beside the artifacts, to share weights with them; what a killed tuning leaves goes with the next."""
        prefix = temporary_prefix(self._cache.folder(place))
        with tempfile.TemporaryDirectory(prefix=prefix, dir=self._cache.root) as folder:
            yield Path(folder)

    def _enter(self, phase: str, share: float) -> None:
        self._phase, self._share = phase, share
        self._progress(phase, share)

    def _compiled(self, done: int, total: int) -> None:
        self._progress(f"{self._phase}: compiled {done} of {total}", self._share)


@dataclass(frozen=True)
class _Origin:
    """What is tuned, where, and since when (time.monotonic() seconds)."""

    name: str
    machine: str
    manifest: Manifest
    begin: float


def _artifact(compiler: TuningCompiler, scratch: Path, what: str, numbers: Sequence[Sequence[int]]) -> Manifest:
    folder = scratch / hashlib.sha256(what.encode()).hexdigest()
    compiler.make(folder, numbers)
    return read_manifest(folder)


def _table(table: Sequence[Sequence[Sequence[float]]], space: TuningSpace, number: int) -> list[tuple[float, ...]]:
    """Microseconds of a kernel by version and situation: the mean of the layers that it computes."""
    levels = len(table[0][0])
    by_level = [
        kernel_times(tuple(tuple(version[level] for version in layer) for layer in table), space, number)
        for level in range(levels)
    ]
    return list(zip(*by_level, strict=True))


def plan_batches(space: TuningSpace, kept: KeptSamples) -> list[list[list[int]]]:
    """Return batch by batch what is still to be measured: of each kernel the static choice, then some candidates."""
    missing = [
        [number for number, item in enumerate(kernel.candidates) if number != STATIC and item.knobs not in known]
        for kernel, known in zip(space.kernels, kept.latency_us, strict=True)
    ]
    others = MAX_VERSIONS - 1  # that an artifact can hold beside the static choice
    parts = -(-max(map(len, missing)) // others)
    if not all(kept.latency_us):
        parts = max(1, parts)  # not even the static choices have been measured
    return [[[STATIC, *numbers[part * others : (part + 1) * others]] for numbers in missing] for part in range(parts)]


def keep(kept: KeptSamples, space: TuningSpace, batch: Sequence[Sequence[int]], times: LayerTimes) -> None:
    """Note a batch's times.

    A machine's speed drifts. So each batch is scaled to make its static choice, which all batches have, take what it
    took in the first one.
    """
    kept.isolated_us = kept.isolated_us or sum(layer[STATIC] for layer in times)
    for number, (kernel, numbers) in enumerate(zip(space.kernels, batch, strict=True)):
        known = kept.latency_us[number]
        latency_us = kernel_times(times, space, number)
        first_us = known.setdefault(kernel.candidates[STATIC].knobs, latency_us[STATIC])
        scale = first_us / latency_us[STATIC] if latency_us[STATIC] else 1.0
        for place, candidate in enumerate(numbers[1:], start=1):
            known[kernel.candidates[candidate].knobs] = latency_us[place] * scale


def kernel_times(times: LayerTimes, space: TuningSpace, number: int) -> tuple[float, ...]:
    """Return a kernel's times by version: the mean of the layers that it computes."""
    layers = [times[layer] for layer, kernel in enumerate(space.layers) if kernel == number]
    return tuple(map(statistics.fmean, zip(*layers, strict=True)))


def samples_of(kernel: KernelChoice, latency_us: dict[str, float]) -> tuple[CandidateTime, ...]:
    """Return the samples of a kernel, in the order of its candidates; all have been measured."""
    return tuple(CandidateTime(candidate, latency_us[candidate.knobs]) for candidate in kernel.candidates)


def sample_versions(cache_dir: Path, manifest: Manifest, cores: Sequence[int], seconds: float) -> LayerTimes:
    """Return medians of `layer` and `version` of the artifact `cache_dir/manifest.key`: alone, one row, all cores.

    Takes `seconds`, or as long as LEAST_RUNS of each version do. Raises RuntimeError when a worker cannot load the
    artifact, RunError, TimeoutError, and OSError when memory is lacking.
    """
    with ModelRunner(cache_dir, manifest, cores, 1) as runner:
        (times,) = _alone(runner, len(cores), seconds, 1)
        return times


def measure_finalists(
    cache_dir: Path, manifest: Manifest, cores: Sequence[int], seconds: float, progress: Progress
) -> FinalTimes:
    """Return the times of all versions, alone and beside generated interference. Errors as above."""
    begin = time.monotonic()
    with ModelRunner(cache_dir, manifest, cores, 1) as runner:
        if len(cores) == 1:
            return FinalTimes((1,), _by_gang(runner, (1,), seconds))
        gangs = tuple(sorted({*powers_of_two(len(cores)), len(cores)}))
        gang_us = _by_gang(runner, gangs, ALONE_PART * seconds)
        rounds = disturbed_rounds(runner, cores, Clock(begin, seconds, progress), TABLES)
    tables = [rounds[table::TABLES] for table in range(TABLES)]
    versions = [len(layer.versions) for layer in manifest.layers]
    return FinalTimes(
        gangs,
        gang_us,
        disturbed_ranks(len(cores)),
        interference_points(rounds),
        tuple(
            tuple(tuple(_by_load(table, layer, v) for v in range(count)) for layer, count in enumerate(versions))
            for table in tables
        ),
    )


def _by_gang(
    runner: ModelRunner, gangs: Sequence[int], seconds: float
) -> tuple[tuple[tuple[tuple[float, ...], ...], ...], ...]:
    """Return times alone by table, layer, version and gang."""
    by_gang = [_alone(runner, ranks, seconds / len(gangs), TABLES) for ranks in gangs]
    return tuple(
        tuple(tuple(zip(*layer, strict=True)) for layer in zip(*tables, strict=True))
        for tables in zip(*by_gang, strict=True)
    )


def _alone(runner: ModelRunner, ranks: int, seconds: float, tables: int) -> tuple[LayerTimes, ...]:
    versions = range(version_count(runner.manifest))
    runs: list[list[tuple[float, ...]]] = [[] for _ in versions]
    for version in versions:
        runner.run(1, ranks, version)  # pages fault, code and weights come into the caches
    end = time.monotonic() + seconds
    while len(runs[0]) < LEAST_RUNS * tables or (time.monotonic() < end and len(runs[0]) < MAX_RUNS):
        for version in versions:
            runs[version].append(runner.run(1, ranks, version).layer_us)
    return tuple(_medians(runner.manifest, [mine[table::tables] for mine in runs]) for table in range(tables))


def _medians(manifest: Manifest, runs: Sequence[Sequence[tuple[float, ...]]]) -> LayerTimes:
    """Medians of `runs[version]`, each of which has the times of all layers."""
    return tuple(
        tuple(statistics.median(run[index] for run in runs[version]) for version in range(len(layer.versions)))
        for index, layer in enumerate(manifest.layers)
    )


def _by_load(rounds: Sequence[Round], layer: int, version: int) -> tuple[float, ...]:
    loads: tuple[Load, ...] = (IDLE, *LOADS)
    return tuple(statistics.median(one[load].layer_us[version][layer] for one in rounds) for load in loads)


@dataclass(frozen=True)
class _Record:
    key: str
    cores: int
    isolated_us: float
    latency_us: tuple[dict[str, float], ...]


def write_kept(path: Path, samples: KeptSamples) -> None:
    """Write the samples, whole or not at all. Raises OSError."""
    write_whole(path, json.dumps(asdict(samples)).encode())


def read_kept(path: Path, key: str, cores: int, kernels: int) -> KeptSamples:
    """Return the samples of this artifact on so many cores; none if there are none. A damaged file is logged."""
    fresh = KeptSamples(key, cores, 0.0, [{} for _ in range(kernels)])
    try:
        record = decode(_Record, path.read_bytes(), "samples")
    except FileNotFoundError:
        return fresh
    except (OSError, ValueError, RecursionError) as error:
        _log.warning("damaged samples ignored: %s: %s", path, error)
        return fresh
    if (record.key, record.cores, len(record.latency_us)) != (key, cores, kernels):
        return fresh
    return KeptSamples(record.key, record.cores, record.isolated_us, list(record.latency_us))
