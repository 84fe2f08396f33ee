"""One tuning from beginning to end: sample, choose finalists, measure them beside interference, drop, write down."""

import hashlib
import json
import logging
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Final

from gangway.artifact.cache import Cache
from gangway.artifact.codec import decode_record
from gangway.artifact.files import write_whole
from gangway.artifact.format import Manifest
from gangway.artifact.profile import whole_machine_id
from gangway.artifact.reader import MAX_VERSIONS, read_manifest
from gangway.artifact.tuning import Finalist, Sample, TunedKernel, Tuning, tuning_path, write_tuning
from gangway.artifact.writer import temporary_prefix
from gangway.measure.compiler_process import Kernel, Space, TuningCompiler
from gangway.measure.sampling import FinalTimes, LayerTimes, measure_finalists, sample_versions
from gangway.scheduler.profiles import Table, drop_versions

# The decisions of VELTAIR's Algorithm 1 (Liu et al., ASPLOS 2022), as pure functions of what was measured.
#
# Its last one, which versions are dropped, is in `scheduler/profiles.py`.

STATIC: Final = 0  # number of the static choice among samples and finalists
SAME: Final = 0.01  # relative: a measured difference below this is none


def layer_qos_us(qos_us: float, flops: Sequence[int], sizes_bytes: Sequence[int]) -> tuple[float, ...]:
    """Return each layer's share of the model's QoS: in proportion to its operations.

    A byte counts as an operation where a layer has none (it only moves numbers).
    """
    weights = [operations or size_bytes for operations, size_bytes in zip(flops, sizes_bytes, strict=True)]
    return tuple(qos_us * weight / max(1, sum(weights)) for weight in weights)


def acceptable(samples: Sequence[Sample], qos_us: float, slack: float) -> tuple[int, ...]:
    """Return the numbers of the samples that meet their layer's QoS.

    Operations say too little of a layer that waits for memory. If not even the fastest meets its share, the layer may
    take `slack` times the fastest: what the model may take, relative to its time alone.
    """
    fastest_us = min(sample.latency_us for sample in samples)
    bound_us = qos_us if fastest_us <= qos_us else max(1.0, slack) * fastest_us
    return tuple(number for number, sample in enumerate(samples) if sample.latency_us <= bound_us)


def pareto_front(samples: Sequence[Sample], numbers: Sequence[int]) -> tuple[int, ...]:
    """Return those of `numbers` that no other one dominates, by falling blocking size.

    More is better on both axes: one sample dominates another if it has at least its blocking size AND at least its
    parallelism, and more of one of them. Of samples equal in both the fastest stays. Speed is no axis: the slow were
    dropped before.
    """

    def order(number: int) -> tuple[int, int, float]:
        sample = samples[number]
        return -sample.candidate.blocking_bytes, -sample.candidate.parallelism, sample.latency_us

    front: list[int] = []
    for number in sorted(numbers, key=order):
        if not front or samples[number].candidate.parallelism > samples[front[-1]].candidate.parallelism:
            front.append(number)
    return tuple(front)


def evenly_spaced(items: Sequence[int], count: int) -> tuple[int, ...]:
    """Return up to `count` of `items`, first and last among them (one: the middle), the others at equal distances."""
    if len(items) <= count:
        return tuple(items)
    if count <= 1:
        return tuple(items[len(items) // 2] for _ in range(count))
    return tuple(items[round(place * (len(items) - 1) / (count - 1))] for place in range(count))


def choose_finalists(samples: Sequence[Sample], qos_us: float, slack: float, most: int) -> tuple[int, ...]:
    """Return the samples that are measured again: static choice, fastest, then evenly spaced ones of the Pareto front.

    At most `most`, but always the first two.
    """
    fastest = min(range(len(samples)), key=lambda number: samples[number].latency_us)
    sure = tuple(dict.fromkeys((STATIC, fastest)))
    front = pareto_front(samples, acceptable(samples, qos_us, slack))
    return sure + evenly_spaced([number for number in front if number not in sure], max(0, most - len(sure)))


def fastest_alone(alone_us: Sequence[Sequence[float]]) -> int:
    """Return the fastest version, but the static choice where nothing is faster by more than SAME in every table.

    `alone_us[table][version]`: microseconds, independent measurements of the same.
    """
    versions = range(len(alone_us[0]))
    faster = [v for v in versions if all(table[v] < (1 - SAME) * table[STATIC] for table in alone_us)]
    return min(faster, key=lambda version: sum(table[version] for table in alone_us), default=STATIC)


# From what was measured of a kernel to what a tuning says of it.


def tuned_kernel(
    kernel: Kernel,
    qos_us: float,
    samples: Sequence[Sample],
    finalists: Sequence[int],
    alone_us: Sequence[Sequence[float]],
    tables: Sequence[Table],
    least_loss: float,
    most: int,
) -> TunedKernel:
    """Decide which finalists become versions.

    `finalists` are numbers of samples; each table of `alone_us` (on all cores) and of `tables` (rows of levels of
    interference; none without other cores) has a number, or a row, for each of them. The fastest alone is the first
    version; the others follow by falling blocking size.
    """
    first = fastest_alone(alone_us)
    by_level = tables or [[[time_us] for time_us in table] for table in alone_us]
    kept = drop_versions(by_level, first, least_loss, most)
    others = sorted(
        (place for place in kept if place != first),
        key=lambda place: -samples[finalists[place]].candidate.blocking_bytes,
    )
    return TunedKernel(
        name=kernel.name,
        operator=kernel.operator,
        uses=kernel.uses,
        qos_us=qos_us,
        samples=tuple(samples),
        finalists=tuple(
            Finalist(number, fmean(table[place] for table in alone_us), tuple(tuple(table[place]) for table in tables))
            for place, number in enumerate(finalists)
        ),
        versions=tuple(samples[finalists[place]].candidate for place in (first, *others)),
    )


# Samples of a tuning that is not finished: what a killed one had measured is not measured again.

_log = logging.getLogger(__name__)


@dataclass
class KeptSamples:
    """`latency_us[k][knobs]`: alone on all `cores` cores, one row, kernel k."""

    key: str  # of the artifact of static choices
    cores: int
    isolated_us: float = 0.0  # the whole model, static choices
    latency_us: list[dict[str, float]] = field(default_factory=list)


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
        record = decode_record(_Record, path.read_bytes(), "samples")
    except FileNotFoundError:
        return fresh
    except (OSError, ValueError, RecursionError) as error:
        _log.warning("damaged samples ignored: %s: %s", path, error)
        return fresh
    if (record.key, record.cores, len(record.latency_us)) != (key, cores, kernels):
        return fresh
    return KeptSamples(record.key, record.cores, record.isolated_us, list(record.latency_us))


# Which candidates are measured together, and what becomes of their times.


def plan_batches(space: Space, kept: KeptSamples) -> list[list[list[int]]]:
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


def keep(kept: KeptSamples, space: Space, batch: Sequence[Sequence[int]], times: LayerTimes) -> None:
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


def kernel_times(times: LayerTimes, space: Space, number: int) -> tuple[float, ...]:
    """Return a kernel's times by version: the mean of the layers that it computes."""
    layers = [times[layer] for layer, kernel in enumerate(space.layers) if kernel == number]
    return tuple(map(statistics.fmean, zip(*layers, strict=True)))


def samples_of(kernel: Kernel, latency_us: dict[str, float]) -> tuple[Sample, ...]:
    """Return the samples of a kernel, in the order of its candidates; all have been measured."""
    return tuple(Sample(candidate, latency_us[candidate.knobs]) for candidate in kernel.candidates)


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
