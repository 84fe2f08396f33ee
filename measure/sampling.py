"""Measures the versions of a model's layers against each other, with the executor that will serve them.

Every version is one run of the whole model, in which all layers are in that version: so one run measures a sample of
every layer, and each finds in the caches what it would find there when it serves. Versions take turns.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gangway.artifact.format import Manifest
from gangway.artifact.profile import InterferencePoint
from gangway.measure.generators import IDLE, Load
from gangway.measure.interference import LOADS, Round, disturbed_ranks, disturbed_rounds, interference_points
from gangway.measure.model_runner import Clock, ModelRunner, Progress, version_count

LEAST_RUNS: Final = 3
MAX_RUNS: Final = 200
ALONE_PART: Final = 0.3  # of the time for finalists, when there are other cores to disturb from
TABLES: Final = 2  # independent measurements of the same: a difference that is in both is none of noise

LayerTimes = tuple[tuple[float, ...], ...]
"""Microseconds by layer and version."""


@dataclass(frozen=True)
class FinalTimes:
    """Independent tables of the same: `alone_us[table][layer][version]` on all cores; `disturbed_us`, likewise, on
    `ranks` cores: alone, then beside each point. Without other cores, `ranks` is 0, and there are no points.
    """

    alone_us: tuple[LayerTimes, ...]
    ranks: int = 0
    points: tuple[InterferencePoint, ...] = ()
    disturbed_us: tuple[tuple[tuple[tuple[float, ...], ...], ...], ...] = ()


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
            return FinalTimes(_alone(runner, 1, seconds, TABLES))
        alone_us = _alone(runner, len(cores), ALONE_PART * seconds, TABLES)
        rounds = disturbed_rounds(runner, cores, Clock(begin, seconds, progress), TABLES)
    tables = [rounds[table::TABLES] for table in range(TABLES)]
    versions = [len(layer.versions) for layer in manifest.layers]
    return FinalTimes(
        alone_us,
        disturbed_ranks(len(cores)),
        interference_points(rounds),
        tuple(
            tuple(tuple(_by_load(table, layer, v) for v in range(count)) for layer, count in enumerate(versions))
            for table in tables
        ),
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
