"""How much generated interference slows a model's layers, against how much it slows a reference at the same moment.

A virtual machine's cores are moved about on the host: the same load on the other cores halves the bandwidth of this
one in one second and does nothing in the next. So the level of interference is never taken from the load's settings; it
is measured beside every sample, by the same core, and a layer's slope is fitted to these pairs.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from gangway.artifact.profile import InterferencePoint
from gangway.executor import _probes
from gangway.executor.interference import IDLE, KINDS, Interference
from gangway.executor.machine import l3_bytes, pinned, touched
from gangway.executor.model_runner import ModelRunner, RunTimes
from gangway.executor.profile_clock import Clock, powers_of_two, version_count

SHARES: Final = (25, 50, 100)  # percent: the strengths of generated interference
LEAST_LEVEL: Final = 0.05  # root mean square: a slope through less than that is noise
MAX_ROUNDS: Final = 24
RUNS_US: Final = 2e4  # beside one load in one round: at least a run, and runs of a small model for so long
MAX_RUNS: Final = 10

Load = tuple[str, int]
LOADS: Final[tuple[Load, ...]] = tuple((kind, share) for share in SHARES for kind in KINDS)


@dataclass(frozen=True)
class Disturbed:
    """What interference did, relative to none: `slope[layer][version]`, `slowdown[layer][version][point]`."""

    ranks: int = 0
    points: tuple[InterferencePoint, ...] = ()
    slope: tuple[tuple[float, ...], ...] = ()
    slowdown: tuple[tuple[tuple[float, ...], ...], ...] = ()


@dataclass(frozen=True)
class _Sample:
    """The reference and the model (by version: medians of the layers), one after the other, beside one load."""

    reference_us: float
    layer_us: tuple[tuple[float, ...], ...]


_Round = dict[Load, _Sample]


def measure_interference(runner: ModelRunner, cores: Sequence[int], clock: Clock) -> Disturbed:
    """Run the model on half of the cores, with and without load on the others, in turns, until the time is over.

    The reference is reading, in order, twice as much memory as the last-level cache holds.
    """
    ranks = powers_of_two(len(cores) // 2)[-1]
    reference = touched(2 * l3_bytes())
    rounds: list[_Round] = []
    with Interference(cores[ranks:]) as interference:
        while len(rounds) < MAX_ROUNDS and (not rounds or clock.passed_s("interference") < clock.seconds):
            one: _Round = {}
            for load in (IDLE, *LOADS):
                interference.set(*load)
                one[load] = _sample(runner, ranks, reference, cores[0])
                clock.passed_s("interference")
            rounds.append(one)
    return _evaluate(rounds, [len(layer.versions) for layer in runner.manifest.layers], ranks)


def slope_of(levels: Sequence[float], slowdowns: Sequence[float]) -> float:
    """Return the slope of the straight line through the origin that is next to the points (least squares).

    0 where the levels are below LEAST_LEVEL.
    """
    squares = sum(level * level for level in levels)
    if squares < LEAST_LEVEL**2 * len(levels):
        return 0.0
    return sum(level * slowdown for level, slowdown in zip(levels, slowdowns, strict=True)) / squares


def _sample(runner: ModelRunner, ranks: int, reference: memoryview, core: int) -> _Sample:
    before_us = _reference_us(reference, core)
    versions = range(version_count(runner.manifest))
    layer_us = tuple(_layer_medians(list(_runs(runner, ranks, version))) for version in versions)
    return _Sample((before_us + _reference_us(reference, core)) / 2, layer_us)


def _reference_us(reference: memoryview, core: int) -> float:
    with pinned(core):  # where the workers' first rank runs, which has nothing to do now
        return statistics.median(_probes.read_memory(reference) for _ in range(3)) / 1e3


def _runs(runner: ModelRunner, ranks: int, version: int) -> list[RunTimes]:
    runs: list[RunTimes] = []
    spent_us = 0.0
    while not runs or (spent_us < RUNS_US and len(runs) < MAX_RUNS):
        runs.append(runner.run(1, ranks, version))
        spent_us += runs[-1].total_us
    return runs


def _layer_medians(runs: Sequence[RunTimes]) -> tuple[float, ...]:
    return tuple(statistics.median(times) for times in zip(*(run.layer_us for run in runs), strict=True))


def _evaluate(rounds: Sequence[_Round], versions: Sequence[int], ranks: int) -> Disturbed:
    idle_us = statistics.median(one[IDLE].reference_us for one in rounds)
    levels = {load: [max(0.0, one[load].reference_us / idle_us - 1) for one in rounds] for load in LOADS}
    by_layer = [[_slowdowns(rounds, layer, v) for v in range(count)] for layer, count in enumerate(versions)]
    return Disturbed(
        ranks=ranks,
        points=tuple(InterferencePoint(*load, statistics.fmean(levels[load])) for load in LOADS),
        slope=tuple(tuple(slope_of(_flat(levels), _flat(one)) for one in layer) for layer in by_layer),
        slowdown=tuple(
            tuple(tuple(statistics.fmean(one[load]) for load in LOADS) for one in layer) for layer in by_layer
        ),
    )


def _slowdowns(rounds: Sequence[_Round], layer: int, version: int) -> dict[Load, list[float]]:
    """Relative slowdown of a layer by load, one number per round."""
    alone_us = statistics.median(one[IDLE].layer_us[version][layer] for one in rounds)
    times_us = {load: [one[load].layer_us[version][layer] for one in rounds] for load in LOADS}
    return {load: [time_us / alone_us - 1 if alone_us else 0.0 for time_us in times_us[load]] for load in LOADS}


def _flat(by_load: dict[Load, list[float]]) -> list[float]:
    return [value for load in LOADS for value in by_load[load]]
