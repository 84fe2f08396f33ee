"""One tuning from beginning to end: sample, choose finalists, measure them beside interference, drop, write down."""

import hashlib
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gangway.artifact.cache import Cache
from gangway.artifact.format import Manifest
from gangway.artifact.machine import whole_machine_id
from gangway.artifact.reader import MAX_VERSIONS, read_manifest
from gangway.artifact.tuning import Tuning, tuning_path, write_tuning
from gangway.artifact.writer import temporary_prefix
from gangway.executor.sampling import FinalTimes, measure_finalists, sample_versions
from gangway.server.tuning.compiler_process import Space, TuningCompiler
from gangway.server.tuning.decisions import choose_finalists, layer_qos_us
from gangway.server.tuning.kept import KeptSamples, read_kept, write_kept
from gangway.server.tuning.outcome import tuned_kernel
from gangway.server.tuning.samples import keep, kernel_times, plan_batches, samples_of

USUAL_QOS: Final = 3.0  # times the isolated latency
SAMPLES_PART: Final = 0.5  # of the time for measurements; the rest is for finalists
SAMPLES_SHARE: Final = 0.75  # of all the work, compilation included: for the progress bar

Progress = Callable[[str, float], None]
"""`progress(phase, share)`: the share of the whole that is done, 0 to 1."""


@dataclass(frozen=True)
class TuneOptions:
    """What is asked for. `seconds` are those of measurements; compilation comes on top. `qos_us` None: USUAL_QOS."""

    trials: int
    most_versions: int
    least_loss: float
    seconds: float
    qos_us: float | None = None


class Tuner:
    """Tunes one model, the ONNX file `path`, on some cores."""

    def __init__(
        self, path: Path, cache_dir: Path, cores: Sequence[int], options: TuneOptions, progress: Progress
    ) -> None:
        self._path = path
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

    def _sample(self, compiler: TuningCompiler, space: Space, scratch: Path, kept_path: Path) -> KeptSamples:
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
        self, compiler: TuningCompiler, space: Space, scratch: Path, kept: KeptSamples, origin: "_Origin"
    ) -> Tuning:
        options, layers = self._options, origin.manifest.layers
        qos_us = USUAL_QOS * kept.isolated_us if options.qos_us is None else options.qos_us
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
                [kernel_times(table, space, number) for table in times.alone_us],
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
            searches=(),
        )

    def _measure_finalists(
        self, compiler: TuningCompiler, scratch: Path, finalists: Sequence[Sequence[int]]
    ) -> FinalTimes:
        self._enter("finalists", SAMPLES_SHARE)
        artifact = _artifact(compiler, scratch, "finalists", finalists)

        def progress(phase: str, share: float) -> None:
            self._progress(f"finalists: {phase}", SAMPLES_SHARE + (1 - SAMPLES_SHARE) * share)

        return measure_finalists(scratch, artifact, self._cores, self._options.seconds * (1 - SAMPLES_PART), progress)

    def _make(self, compiler: TuningCompiler, space: Space, tuning: Tuning) -> None:
        """Make the artifact of the chosen versions, unless the cache has it."""
        with self._cache.lock(tuning.tuned_key):
            if self._cache.lookup(tuning.tuned_key) is None:
                pairs = zip(space.kernels, tuning.kernels, strict=True)
                numbers = [[kernel.candidates.index(item) for item in tuned.versions] for kernel, tuned in pairs]
                compiler.make(self._cache.folder(tuning.tuned_key), numbers)

    def _compiler(self, scratch: Path) -> TuningCompiler:
        return TuningCompiler(self._path, self._cache.root, scratch, self._options.trials, self._compiled)

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


def _table(table: Sequence[Sequence[Sequence[float]]], space: Space, number: int) -> list[tuple[float, ...]]:
    """Microseconds of a kernel by version and level: the mean of the layers that it computes."""
    levels = len(table[0][0])
    by_level = [
        kernel_times(tuple(tuple(version[level] for version in layer) for layer in table), space, number)
        for level in range(levels)
    ]
    return list(zip(*by_level, strict=True))
