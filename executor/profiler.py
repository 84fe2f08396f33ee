"""Measures a compiled model on this machine with the executor that will serve it: `docs/profile.md` says how, and why.

Every setting (version, cores, rows) is one run of the whole model; the workers' own time stamps split it into layers.
Settings take turns in rounds until the time is over, so that a machine whose speed drifts slows all of them alike.
"""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from gangway.artifact.format import Manifest
from gangway.artifact.profile import InterferencePoint, LayerProfile, Machine, Profile
from gangway.executor import _probes
from gangway.executor.interference import IDLE, KINDS, Interference
from gangway.executor.machine import l3_bytes, measure_machine, pinned, touched
from gangway.executor.model_runner import ModelRunner, RunTimes

DEFAULT_SECONDS: Final = 18.0  # with the start of Python and of workers less than 20
MAX_ROWS: Final = 32
USUAL_ROWS: Final = 8  # batches up to here are measured if one run of each setting fits into the time,
MORE_ROUNDS: Final = 4  # larger ones if so many do
MAX_ROUNDS: Final = 24
SHARES: Final = (25, 50, 100)  # percent: the strengths of generated interference
LATENCY_PART: Final = 0.65  # of the time, when there are other cores to disturb from
DISTURBED_RUNS_US: Final = 2e4  # beside one load in one round: at least a run, and runs of a small model for so long
MAX_DISTURBED_RUNS: Final = 10

ProgressOf = Callable[[str, float], None]
"""`progress(phase, share)`: the share of the whole measurement's time that is over, 0 to 1."""


class Setting(NamedTuple):
    """One way to run the model."""

    version: int
    ranks: int
    rows: int


class Samples:
    """Layer times, and the model's, by key."""

    def __init__(self) -> None:
        self._runs: defaultdict[object, list[RunTimes]] = defaultdict(list)

    def add(self, key: object, run: RunTimes) -> None:
        """Note one run."""
        self._runs[key].append(run)

    def count(self, key: object) -> int:
        """How many runs there were."""
        return len(self._runs[key])

    def layer_us(self, key: object, layer: int) -> float:
        """Median of one layer."""
        return statistics.median(run.layer_us[layer] for run in self._runs[key])

    def total_us(self, key: object) -> float:
        """Median of the whole model."""
        return statistics.median(run.total_us for run in self._runs[key])


@dataclass(frozen=True)
class _Disturbed:
    """What interference did: `slowdown[layer][version][point]`, relative."""

    ranks: int = 0
    points: tuple[InterferencePoint, ...] = ()
    slowdown: tuple[tuple[tuple[float, ...], ...], ...] = ()


def profile_model(
    cache_dir: Path,
    manifest: Manifest,
    cores: Sequence[int],
    seconds: float = DEFAULT_SECONDS,
    progress: ProgressOf = lambda phase, share: None,
) -> Profile:
    """Return the profile of the artifact `cache_dir/manifest.key` on these cores, made in about `seconds`.

    Each setting is measured at least once, however long that takes; batches that do not fit are left out. Raises
    RuntimeError when a worker cannot load the artifact, RunError, TimeoutError, and OSError when memory is lacking.
    """
    begin = time.monotonic()
    progress("machine", 0.0)
    machine = measure_machine(cores[0], len(cores), manifest.target)
    with ModelRunner(cache_dir, manifest, cores, MAX_ROWS) as runner:
        clock = _Clock(begin, seconds, progress)
        latency_end = seconds * (LATENCY_PART if len(cores) > 1 else 1.0)
        ranks = core_counts(len(cores))
        batches, samples = _measure_latency(runner, ranks, clock, latency_end)
        disturbed = _measure_interference(runner, cores, clock) if len(cores) > 1 else _Disturbed()
    settings = [Setting(version, r, rows) for version in range(_versions(manifest)) for r in ranks for rows in batches]
    return Profile(
        key=manifest.key,
        model_name=manifest.model_name,
        machine=machine,
        cores=ranks,
        batches=batches,
        layers=tuple(
            _layer_profile(manifest, index, machine, samples, ranks, batches, disturbed)
            for index in range(len(manifest.layers))
        ),
        isolated_us=tuple(tuple(samples.total_us(Setting(0, r, rows)) for rows in batches) for r in ranks),
        interference=disturbed.points,
        interference_cores=disturbed.ranks,
        fewest_samples=min(samples.count(setting) for setting in settings),
        seconds=time.monotonic() - begin,
    )


def core_counts(cores: int) -> tuple[int, ...]:
    """Return 1, 2, 4, ... and `cores`."""
    return tuple(sorted({*_powers_of_two(cores), cores}))


def slope_of(levels: Sequence[float], slowdowns: Sequence[float]) -> float:
    """Return the slope of the straight line through the origin that is next to the points (least squares)."""
    squares = sum(level * level for level in levels)
    products = sum(level * slowdown for level, slowdown in zip(levels, slowdowns, strict=True))
    return products / squares if squares > 0 else 0.0


class _Clock:
    def __init__(self, begin: float, seconds: float, progress: ProgressOf) -> None:
        self._begin, self.seconds, self._progress = begin, seconds, progress

    def passed_s(self, phase: str) -> float:
        """Seconds since the beginning; shown to whoever watches."""
        passed_s = time.monotonic() - self._begin
        self._progress(phase, min(1.0, passed_s / self.seconds))
        return passed_s


def _measure_latency(
    runner: ModelRunner, ranks: Sequence[int], clock: _Clock, end_s: float
) -> tuple[tuple[int, ...], Samples]:
    versions = range(_versions(runner.manifest))
    one_row = [Setting(version, r, 1) for version in versions for r in ranks]
    for setting in one_row:
        runner.run(setting.rows, setting.ranks, setting.version)  # pages fault, code and weights come into the caches
    row_us = sum(runner.run(1, setting.ranks, setting.version).total_us for setting in one_row)
    left_us = (end_s - clock.passed_s("latency")) * 1e6
    batches = batches_that_fit(row_us, left_us, runner.max_rows)
    settings = [Setting(version, r, rows) for version in versions for r in ranks for rows in batches]
    samples = Samples()
    for _ in range(MAX_ROUNDS):
        for setting in settings:
            for _ in range(max(1, batches[-1] // setting.rows)):  # as much time for each size
                samples.add(setting, runner.run(setting.rows, setting.ranks, setting.version))
                if clock.passed_s("latency") > end_s and all(samples.count(each) for each in settings):
                    return batches, samples
    return batches, samples


def batches_that_fit(row_us: float, left_us: float, max_rows: int) -> tuple[int, ...]:
    """Return the powers of two of rows for which there is time; `row_us`: one row, once in each setting."""
    batches = [1]
    for rows in _powers_of_two(max_rows)[1:]:
        rounds = 1 if rows <= USUAL_ROWS else MORE_ROUNDS
        if row_us * rows * (len(batches) + 1) * rounds > left_us:
            break
        batches.append(rows)
    return tuple(batches)


def _measure_interference(runner: ModelRunner, cores: Sequence[int], clock: _Clock) -> _Disturbed:
    """Run the model on half of the cores, with and without load on the others, in turns."""
    ranks = _powers_of_two(len(cores) // 2)[-1]
    versions = range(_versions(runner.manifest))
    loads = [IDLE, *((kind, share) for share in SHARES for kind in KINDS)]
    reference = touched(l3_bytes() // 2)
    reference_us: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
    samples = Samples()
    with Interference(cores[ranks:]) as interference:
        for round_number in range(MAX_ROUNDS):
            for load in loads:
                interference.set(*load)
                with pinned(cores[0]):
                    reference_us[load] += [_probes.read_memory(reference) / 1e3 for _ in range(3)][1:]
                for version in versions:
                    for run in _disturbed_runs(runner, ranks, version):
                        samples.add((load, version), run)
                if round_number and clock.passed_s("interference") > clock.seconds:
                    break
            if clock.passed_s("interference") > clock.seconds:
                break
    levels = {load: statistics.median(reference_us[load]) / statistics.median(reference_us[IDLE]) - 1 for load in loads}
    points = tuple(InterferencePoint(*load, levels[load]) for load in loads[1:])

    def slowdown(layer: int, version: int) -> tuple[float, ...]:
        alone_us = samples.layer_us((IDLE, version), layer)
        return tuple(samples.layer_us((load, version), layer) / alone_us - 1 if alone_us else 0.0 for load in loads[1:])

    layers = enumerate(runner.manifest.layers)
    return _Disturbed(
        ranks, points, tuple(tuple(slowdown(i, v) for v in range(len(layer.versions))) for i, layer in layers)
    )


def _disturbed_runs(runner: ModelRunner, ranks: int, version: int) -> Iterator[RunTimes]:
    runner.run(1, ranks, version)  # what the load before left in the caches
    spent_us = 0.0
    for _ in range(MAX_DISTURBED_RUNS):
        run = runner.run(1, ranks, version)
        yield run
        spent_us += run.total_us
        if spent_us > DISTURBED_RUNS_US:
            return


def _layer_profile(
    manifest: Manifest,
    index: int,
    machine: Machine,
    samples: Samples,
    ranks: Sequence[int],
    batches: Sequence[int],
    disturbed: _Disturbed,
) -> LayerProfile:
    layer = manifest.layers[index]
    slowdown = disturbed.slowdown[index] if disturbed.points else ()
    levels = [point.level for point in disturbed.points]
    return LayerProfile(
        name=layer.name,
        latency_us=tuple(
            tuple(tuple(samples.layer_us(Setting(v, r, rows), index) for rows in batches) for r in ranks)
            for v in range(len(layer.versions))
        ),
        memory_us=layer.bytes / machine.bandwidth_bytes_per_us,
        compute_us=layer.flops / machine.peak_flops_per_us,
        slope=tuple(slope_of(levels, row) for row in slowdown),
        slowdown=slowdown,
    )


def _versions(manifest: Manifest) -> int:
    return max(len(layer.versions) for layer in manifest.layers)


def _powers_of_two(limit: int) -> list[int]:
    return [1 << power for power in range(limit.bit_length())]
