"""Measures a model with the executor that will serve it. `docs/explanation/profiles-and-versions.md` says how.

Every setting (version, cores, rows) is one run of the whole model; the workers' own time stamps split it into layers.
What several gangs at once do to each other is measured likewise. Settings take turns in rounds until the time is over,
so that a machine whose speed drifts slows all of them alike.

`python -m gangway.measure.profiler` measures one compiled model while the server has nothing to do. It has the
scheduling class of idle processes, and so do its workers: whatever a server has to do goes first.
"""

import argparse
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from gangway.artifact.format import Engine, Manifest
from gangway.artifact.profile import LEAST_RUNS, LEAST_WHOLE, LayerProfile, Profile, ProfiledMachine, keep_better
from gangway.artifact.reader import read_manifest
from gangway.base.process import die_with_parent
from gangway.measure.interference import Disturbed, measure_interference
from gangway.measure.machine import OtherWork, measure_machine, share_of_cores
from gangway.measure.model_runner import Clock, ModelRunner, Progress, RunTimes, powers_of_two, version_count
from gangway.measure.whole_runner import WholeRunner

DEFAULT_SECONDS: Final = 18.0  # with the start of Python and of workers less than 20
LATENCY_PART: Final = 0.65  # of the time, when there are other cores to disturb from
MAX_ROWS: Final = 64
USUAL_ROWS: Final = 8  # batches up to here are measured if one run of each setting fits into the time,
LARGE_RUNS: Final = 1 + LEAST_RUNS  # of larger ones: what is not believed is not worth the time
LARGE_PART: Final = 0.75  # of the time, into which those must fit: the rest is for many runs of small ones
MAX_ROUNDS: Final = 24
USUAL_SCATTER: Final = 0.05
LEAST_SHARE: Final = 0.01  # of the cores: `Profile.cores_whole` is more than 0
HALF_OF_NORMAL: Final = 0.6745  # standard deviations within which half of a normal distribution lies


class RunSetting(NamedTuple):
    """One way to run the model: `gangs` at once, of so many ranks and rows each, every layer in this version."""

    rows: int
    ranks: int
    version: int = 0
    gangs: int = 1


class MeasurementPlan(NamedTuple):
    """What can be measured here: on these numbers of cores, the last one of them all, and so many rows at a time."""

    manifest: Manifest
    cores: tuple[int, ...]
    room_rows: int  # of all gangs together

    def settings(self, rows: int) -> list[RunSetting]:
        """Return the settings for so many rows: every version alone, then the first one with gangs on all cores."""
        versions = range(version_count(self.manifest))
        alone = [RunSetting(rows, ranks, version) for version in versions for ranks in self.cores]
        return alone + [together for ranks in self.cores if (together := self.together(rows, ranks)) is not None]

    def together(self, rows: int, ranks: int) -> RunSetting | None:
        """Return the setting in which gangs of so many ranks fill the machine; None if one does, or rows lack room."""
        gangs = self.cores[-1] // ranks
        return RunSetting(rows, ranks, gangs=gangs) if gangs > 1 and gangs * rows <= self.room_rows else None


class Samples:
    """The runs of each setting; of several gangs at once, the slowest. The first one counts if it is the only one."""

    def __init__(self) -> None:
        self._runs: defaultdict[RunSetting, list[RunTimes]] = defaultdict(list)

    def add(self, setting: RunSetting, run: RunTimes) -> None:
        """Note one run."""
        self._runs[setting].append(run)

    def count(self, setting: RunSetting) -> int:
        """How many runs there were."""
        return len(self._runs[setting])

    def fewest(self, rows: int) -> int:
        """How many runs there are at least behind any time of so many rows."""
        return min(len(self._counted(setting)) for setting in self._runs if setting.rows == rows)

    def scatter(self) -> float:
        """Return `Profile.scatter`: of all settings together, from half of the runs, so that outliers do not count.

        Where no setting has LEAST_RUNS that count it is not known; USUAL_SCATTER then.
        """
        away = []
        for setting in self._runs:
            runs, median_us = self._counted(setting), self.total_us(setting)
            away += [abs(run.total_us / median_us - 1) for run in runs] if len(runs) >= LEAST_RUNS and median_us else []
        return statistics.median(away) / HALF_OF_NORMAL if away else USUAL_SCATTER

    def layer_us(self, setting: RunSetting, layer: int) -> float:
        """Median of one layer."""
        return statistics.median(run.layer_us[layer] for run in self._counted(setting))

    def total_us(self, setting: RunSetting) -> float:
        """Median of the whole model."""
        return statistics.median(run.total_us for run in self._counted(setting))

    def totals_us(self) -> dict[RunSetting, float]:
        """Medians of the whole model, of all settings."""
        return {setting: self.total_us(setting) for setting in self._runs}

    def _counted(self, setting: RunSetting) -> list[RunTimes]:
        return self._runs[setting][1:] or self._runs[setting]


def profile_model(
    cache_dir: Path,
    manifest: Manifest,
    cores: Sequence[int],
    seconds: float = DEFAULT_SECONDS,
    progress: Progress = lambda phase, share: None,
    every_count: bool = False,
) -> Profile:
    """Measure the artifact `cache_dir/manifest.key` on these cores, in about `seconds`.

    `every_count`: on every number of cores, which Packrat's mixed gangs need (2024, section 3.3), not on powers of two.
    Each setting is measured at least once, however long that takes; batches that do not fit are left out. Raises
    RuntimeError when a worker cannot load the artifact, RunError, TimeoutError, and OSError when memory is lacking.
    """
    begin, others = time.monotonic(), OtherWork(cores)
    progress("machine", 0.0)
    before = share_of_cores(cores)
    machine = measure_machine(cores[0], len(cores), manifest.target)
    runner_of = WholeRunner if manifest.engine is Engine.ONNXRUNTIME else ModelRunner
    with runner_of(cache_dir, manifest, cores, MAX_ROWS, gangs=len(cores)) as runner:
        clock = Clock(begin, seconds, progress)
        latency_end = seconds * (LATENCY_PART if len(cores) > 1 else 1.0)
        plan = MeasurementPlan(manifest, core_counts(len(cores), every_count), runner.room_rows)
        batches, samples = _measure_latency(runner, plan, clock, latency_end)
        disturbed = measure_interference(runner, cores, clock) if len(cores) > 1 else Disturbed()
    isolated_us = tuple(tuple(samples.total_us(RunSetting(rows, ranks)) for rows in batches) for ranks in plan.cores)
    after, left = share_of_cores(cores), max(LEAST_SHARE, 1 - others.share())
    return Profile(
        key=manifest.key,
        model_name=manifest.model_name,
        machine=machine,
        cores=plan.cores,
        batches=batches,
        layers=tuple(
            _layer_profile(plan, index, machine, samples, batches, disturbed) for index in range(len(manifest.layers))
        ),
        isolated_us=isolated_us,
        together_us=together_us(plan, batches, isolated_us, samples.totals_us()),
        interference=disturbed.points,
        interference_cores=disturbed.ranks,
        runs=tuple(samples.fewest(rows) for rows in batches),
        scatter=samples.scatter(),
        seconds=time.monotonic() - begin,
        cores_whole=min(before, after, left),
        agreeing=int(left >= LEAST_WHOLE),
    )


def main() -> int:
    """Write the profile into the cache, unless a better one is there; 0 if that went well."""
    parser = argparse.ArgumentParser(prog="gangway.measure.profiler", description=__doc__)
    parser.add_argument("--cache-dir", type=Path, required=True)
    parser.add_argument("--key", required=True, help="of the artifact")
    parser.add_argument("--cores", type=lambda text: [int(core) for core in text.split(",")], required=True)
    parser.add_argument("--seconds", type=float, required=True, help="time to take")
    parser.add_argument("--parent", type=int, required=True, help="process to die with")
    options = parser.parse_args()
    die_with_parent()
    if os.getppid() != options.parent:  # it died before the line above
        return 1
    try:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    except OSError:  # some containers forbid it
        os.nice(19)
    manifest = read_manifest(options.cache_dir / options.key)
    keep_better(options.cache_dir, profile_model(options.cache_dir, manifest, options.cores, options.seconds))
    return 0


def _measure_latency(
    runner: ModelRunner, plan: MeasurementPlan, clock: Clock, end_s: float
) -> tuple[tuple[int, ...], Samples]:
    for setting in plan.settings(1):
        _run(runner, setting)  # pages fault, code and weights come into the caches
    row_us = sum(_run(runner, setting).total_us for setting in plan.settings(1))
    left_us = (end_s - clock.passed_s("latency")) * 1e6
    batches = batches_that_fit(row_us, left_us, runner.max_rows)
    settings = {rows: plan.settings(rows) for rows in batches}
    samples = Samples()
    for number in range(MAX_ROUNDS):
        for rows in batches:
            for setting in runs_in_round(number, rows) * settings[rows]:  # compared with each other, so side by side
                samples.add(setting, _run(runner, setting))
                if clock.passed_s("latency") > end_s and _enough(samples, settings):
                    return batches, samples
    return batches, samples


def core_counts(cores: int, every_count: bool = False) -> tuple[int, ...]:
    """Return 1, 2, 4, ... and `cores`; with `every_count` all numbers up to it."""
    return tuple(range(1, cores + 1)) if every_count else tuple(sorted({*powers_of_two(cores), cores}))


def batches_that_fit(row_us: float, left_us: float, max_rows: int) -> tuple[int, ...]:
    """Return the powers of two of rows for which there is time; `row_us`: one row, once in each setting."""
    batches = [1]
    for rows in powers_of_two(max_rows)[1:]:
        once_us = row_us * (2 * rows - 1)  # each size, up to this one
        if least_runs(rows) * once_us > left_us * (1.0 if rows <= USUAL_ROWS else LARGE_PART):
            break
        batches.append(rows)
    return tuple(batches)


def least_runs(rows: int) -> int:
    """Return how often a setting of so many rows is measured, however long it takes.

    The first run, in which pages fault, is not counted when there are others.
    """
    return 1 if rows <= USUAL_ROWS else LARGE_RUNS


def runs_in_round(number: int, rows: int) -> int:
    """Return how often a setting is run in a round: first once, later small batches as long as the usual ones."""
    return max(1, USUAL_ROWS // rows) if number >= least_runs(MAX_ROWS) else 1


def together_us(
    plan: MeasurementPlan,
    batches: Sequence[int],
    isolated_us: Sequence[Sequence[float]],
    measured_us: dict[RunSetting, float],
) -> tuple[tuple[float, ...], ...]:
    """Return `Profile.together_us` from what was measured.

    Batches for which memory was lacking are slowed down like the largest one that was measured, on as many cores.
    """
    grid = []
    for ranks, alone_us in zip(plan.cores, isolated_us, strict=True):
        slowdown, times_us = 1.0, []
        for rows, time_us in zip(batches, alone_us, strict=True):
            setting = plan.together(rows, ranks)
            if setting is not None and time_us:
                slowdown = measured_us[setting] / time_us
            times_us.append(slowdown * time_us)
        grid.append(tuple(times_us))
    return tuple(grid)


def _run(runner: ModelRunner, setting: RunSetting) -> RunTimes:
    """Return the slowest of several gangs: a batch ends with its last part."""
    return max(runner.run_gangs(*setting), key=lambda run: run.total_us)


def _enough(samples: Samples, settings: Mapping[int, Sequence[RunSetting]]) -> bool:
    return all(samples.count(setting) >= least_runs(rows) for rows, some in settings.items() for setting in some)


def _layer_profile(
    plan: MeasurementPlan,
    index: int,
    machine: ProfiledMachine,
    samples: Samples,
    batches: Sequence[int],
    disturbed: Disturbed,
) -> LayerProfile:
    layer = plan.manifest.layers[index]
    return LayerProfile(
        name=layer.name,
        latency_us=tuple(
            tuple(tuple(samples.layer_us(RunSetting(rows, r, v), index) for rows in batches) for r in plan.cores)
            for v in range(len(layer.versions))
        ),
        memory_us=layer.bytes / machine.bandwidth_bytes_per_us,
        compute_us=layer.flops / machine.peak_flops_per_us,
        slope=disturbed.slope[index] if disturbed.points else (),
        slowdown=disturbed.slowdown[index] if disturbed.points else (),
    )


if __name__ == "__main__":
    sys.exit(main())
