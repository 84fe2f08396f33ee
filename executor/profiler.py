"""Measures a compiled model on this machine with the executor that will serve it: `docs/profile.md` says how, and why.

Every setting (version, cores, rows) is one run of the whole model; the workers' own time stamps split it into layers.
Settings take turns in rounds until the time is over, so that a machine whose speed drifts slows all of them alike.
"""

import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final, NamedTuple

from gangway.artifact.format import Manifest
from gangway.artifact.profile import LayerProfile, Machine, Profile
from gangway.artifact.proxy import InterferenceProxy
from gangway.executor.disturbance import Disturbed, measure_interference
from gangway.executor.machine import measure_machine
from gangway.executor.model_runner import ModelRunner, RunTimes
from gangway.executor.perf_events import cache_events
from gangway.executor.profile_clock import Clock, Progress, powers_of_two, version_count
from gangway.executor.proxy_fit import ProxyFit

DEFAULT_SECONDS: Final = 18.0  # with the start of Python and of workers less than 20
MAX_ROWS: Final = 32
USUAL_ROWS: Final = 8  # batches up to here are measured if one run of each setting fits into the time,
MORE_ROUNDS: Final = 3  # larger ones if so many rounds do after that
MAX_ROUNDS: Final = 24
LATENCY_PART: Final = 0.65  # of the time, when there are other cores to disturb from


class Measured(NamedTuple):
    """A model's profile, and the machine's proxy for interference: None where caches are not counted, or were calm."""

    profile: Profile
    proxy: InterferenceProxy | None


class Setting(NamedTuple):
    """One way to run the model."""

    rows: int
    ranks: int
    version: int


class Samples:
    """The runs of each setting."""

    def __init__(self) -> None:
        self._runs: defaultdict[Setting, list[RunTimes]] = defaultdict(list)

    def add(self, setting: Setting, run: RunTimes) -> None:
        """Note one run."""
        self._runs[setting].append(run)

    def count(self, setting: Setting) -> int:
        """How many runs there were."""
        return len(self._runs[setting])

    def layer_us(self, setting: Setting, layer: int) -> float:
        """Median of one layer."""
        return statistics.median(run.layer_us[layer] for run in self._runs[setting])

    def total_us(self, setting: Setting) -> float:
        """Median of the whole model."""
        return statistics.median(run.total_us for run in self._runs[setting])


def profile_model(
    cache_dir: Path,
    manifest: Manifest,
    cores: Sequence[int],
    seconds: float = DEFAULT_SECONDS,
    progress: Progress = lambda phase, share: None,
) -> Measured:
    """Measure the artifact `cache_dir/manifest.key` on these cores, in about `seconds`.

    Each setting is measured at least once, however long that takes; batches that do not fit are left out. Raises
    RuntimeError when a worker cannot load the artifact, RunError, TimeoutError, and OSError when memory is lacking.
    """
    begin = time.monotonic()
    progress("machine", 0.0)
    machine = measure_machine(cores[0], len(cores), manifest.target)
    with ModelRunner(cache_dir, manifest, cores, MAX_ROWS) as runner:
        clock = Clock(begin, seconds, progress)
        latency_end = seconds * (LATENCY_PART if len(cores) > 1 else 1.0)
        ranks = core_counts(len(cores))
        batches, samples = _measure_latency(runner, ranks, clock, latency_end)
        disturbed = measure_interference(runner, cores, clock) if len(cores) > 1 else Disturbed()
    profile = Profile(
        key=manifest.key,
        model_name=manifest.model_name,
        machine=machine,
        cores=ranks,
        batches=batches,
        layers=tuple(
            _layer_profile(manifest, index, machine, samples, ranks, batches, disturbed)
            for index in range(len(manifest.layers))
        ),
        isolated_us=tuple(tuple(samples.total_us(Setting(rows, r, 0)) for rows in batches) for r in ranks),
        interference=disturbed.points,
        interference_cores=disturbed.ranks,
        fewest_samples=min(samples.count(setting) for setting in _settings(manifest, ranks, batches)),
        seconds=time.monotonic() - begin,
    )
    return Measured(profile, _proxy(machine, disturbed.proxy))


def _proxy(machine: Machine, fit: ProxyFit | None) -> InterferenceProxy | None:
    events = cache_events()
    if fit is None or events is None:
        return None
    return InterferenceProxy(machine.machine_id, events[0].name, events[1].name, **asdict(fit))


def core_counts(cores: int) -> tuple[int, ...]:
    """Return 1, 2, 4, ... and `cores`."""
    return tuple(sorted({*powers_of_two(cores), cores}))


def _measure_latency(
    runner: ModelRunner, ranks: Sequence[int], clock: Clock, end_s: float
) -> tuple[tuple[int, ...], Samples]:
    one_row = _settings(runner.manifest, ranks, [1])
    for setting in one_row:
        runner.run(*setting)  # pages fault, code and weights come into the caches
    row_us = sum(runner.run(*setting).total_us for setting in one_row)
    left_us = (end_s - clock.passed_s("latency")) * 1e6
    batches = batches_that_fit(row_us, left_us, runner.max_rows)
    settings = _settings(runner.manifest, ranks, batches)
    samples = Samples()
    for number in range(MAX_ROUNDS):
        for setting in settings:
            runs = batches[-1] // setting.rows if number else 1  # as much time for each size, but first each once
            for _ in range(runs):
                samples.add(setting, runner.run(*setting))
                if clock.passed_s("latency") > end_s and all(samples.count(each) for each in settings):
                    return batches, samples
    return batches, samples


def _settings(manifest: Manifest, ranks: Sequence[int], batches: Sequence[int]) -> list[Setting]:
    versions = range(version_count(manifest))
    return [Setting(rows, r, version) for version in versions for r in ranks for rows in batches]


def batches_that_fit(row_us: float, left_us: float, max_rows: int) -> tuple[int, ...]:
    """Return the powers of two of rows for which there is time; `row_us`: one row, once in each setting."""
    batches = [1]
    for rows in powers_of_two(max_rows)[1:]:
        first_us = row_us * (2 * rows - 1)  # each size once
        round_us = row_us * rows * (len(batches) + 1)
        if (first_us if rows <= USUAL_ROWS else first_us + MORE_ROUNDS * round_us) > left_us:
            break
        batches.append(rows)
    return tuple(batches)


def _layer_profile(
    manifest: Manifest,
    index: int,
    machine: Machine,
    samples: Samples,
    ranks: Sequence[int],
    batches: Sequence[int],
    disturbed: Disturbed,
) -> LayerProfile:
    layer = manifest.layers[index]
    return LayerProfile(
        name=layer.name,
        latency_us=tuple(
            tuple(tuple(samples.layer_us(Setting(rows, r, v), index) for rows in batches) for r in ranks)
            for v in range(len(layer.versions))
        ),
        memory_us=layer.bytes / machine.bandwidth_bytes_per_us,
        compute_us=layer.flops / machine.peak_flops_per_us,
        slope=disturbed.slope[index] if disturbed.points else (),
        slowdown=disturbed.slowdown[index] if disturbed.points else (),
    )
