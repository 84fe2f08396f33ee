"""How much generated interference slows a model's layers, against how much it slows a reference at the same moment.

Generators are processes on other cores that stream through memory or thrash the shared cache; `python -m
gangway.measure.interference` is one of them. All obey one word of shared memory, and answer in another, so that a
measurement goes through kinds and strengths of load, and none, back and forth without starting processes.

A virtual machine's cores are moved about on the host: the same load on the other cores halves the bandwidth of this
one in one second and does nothing in the next. So the level of interference is never taken from the load's settings.
It is measured beside every sample, by the same core, and a layer's slope is fitted to these pairs.
"""

import argparse
import os
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

from gangway.artifact.profile import InterferencePoint
from gangway.base.process import die_with_parent, raise_priority
from gangway.base.python_process import start_of
from gangway.executor import _probes
from gangway.executor.segment import Segment
from gangway.measure.machine import l3_bytes, pinned, touched
from gangway.measure.model_runner import Clock, ModelRunner, RunTimes, powers_of_two, version_count

Load = tuple[str, int]
"""Kind, and percent of the time that a generator works."""
KINDS: Final = ("stream", "thrash")
IDLE: Final[Load] = ("", 0)

SHARES: Final = (25, 50, 100)  # percent: the strengths of generated interference
LOADS: Final[tuple[Load, ...]] = tuple((kind, share) for share in SHARES for kind in KINDS)
LEAST_LEVEL: Final = 0.05  # root mean square: a slope through less than that is noise
MAX_ROUNDS: Final = 24
RUNS_US: Final = 2e4  # beside one load in one round: at least a run, and runs of a small model for so long
MAX_RUNS: Final = 10

SLICE_US: Final = 500  # how often the word is looked at
IDLE_S: Final = 0.0005
START_TIMEOUT_S: Final = 20.0
_ORDER: Final = struct.Struct("<HHI")  # kind + 1 (0: idle), share, number of the order
_LINE_BYTES: Final = 64


@dataclass(frozen=True)
class Disturbed:
    """What interference did, relative to none: `slope[layer][version]`, `slowdown[layer][version][point]`."""

    ranks: int = 0
    points: tuple[InterferencePoint, ...] = ()
    slope: tuple[tuple[float, ...], ...] = ()
    slowdown: tuple[tuple[tuple[float, ...], ...], ...] = ()


@dataclass(frozen=True)
class InterferenceSample:
    """The reference and the model (by version: medians of the layers), one after the other, beside one load."""

    reference_us: float
    layer_us: tuple[tuple[float, ...], ...]


Round = dict[Load, InterferenceSample]
"""One sample beside each of LOADS, and one beside none (IDLE)."""


def measure_interference(runner: ModelRunner, cores: Sequence[int], clock: Clock) -> Disturbed:
    """Return what load on half of the cores does to the model on the others; takes until the clock's time is over."""
    ranks = disturbed_ranks(len(cores))
    rounds = disturbed_rounds(runner, cores, clock)
    return _evaluate(rounds, [len(layer.versions) for layer in runner.manifest.layers], ranks)


def disturbed_ranks(cores: int) -> int:
    """Return the number of cores that the model runs on while the others disturb it."""
    return powers_of_two(cores // 2)[-1]


def disturbed_rounds(runner: ModelRunner, cores: Sequence[int], clock: Clock, least: int = 1) -> list[Round]:
    """Run the model on some cores, with and without load on the others, in turns, until the time is over.

    At least `least` rounds, at most MAX_ROUNDS. The reference is reading, in order, twice as much memory as the
    last-level cache holds.
    """
    ranks = disturbed_ranks(len(cores))
    cache_bytes = l3_bytes()
    reference = touched(2 * cache_bytes)
    rounds: list[Round] = []
    with Generators(cores[ranks:], cache_bytes) as generators:
        while len(rounds) < MAX_ROUNDS and (len(rounds) < least or clock.passed_s("interference") < clock.seconds):
            one: Round = {}
            for load in (IDLE, *LOADS):
                generators.set(*load)
                one[load] = _sample(runner, cores[:ranks], reference)
                clock.passed_s("interference")
            rounds.append(one)
    return rounds


def interference_points(rounds: Sequence[Round]) -> tuple[InterferencePoint, ...]:
    """Return the loads, each with the mean level it had."""
    return tuple(InterferencePoint(*load, statistics.fmean(levels)) for load, levels in _levels(rounds).items())


def slope_of(levels: Sequence[float], slowdowns: Sequence[float]) -> float:
    """Return the slope of the straight line through the origin that is next to the points (least squares).

    0 where the levels are below LEAST_LEVEL.
    """
    squares = sum(level * level for level in levels)
    if squares < LEAST_LEVEL**2 * len(levels):
        return 0.0
    return sum(level * slowdown for level, slowdown in zip(levels, slowdowns, strict=True)) / squares


class Generators:
    """One generator per core of `cores`, idle until told otherwise. A context manager.

    `cache_bytes`: the size of the last-level cache, which they take or exceed.
    """

    def __init__(self, cores: Sequence[int], cache_bytes: int) -> None:
        self._segment = Segment.create((1 + len(cores)) * _LINE_BYTES, "interference")
        self._cache_bytes = cache_bytes
        self._number = 0
        self.processes = [self._start(place, core) for place, core in enumerate(cores)]

    def __enter__(self) -> Self:
        self.set(*IDLE)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        self._segment.close()

    def set(self, kind: str, share: int) -> None:
        """Have all generators work `share` percent of the time at `kind`; return when all do. `IDLE` stops them.

        Both change memory line by line. "stream": four times what the last-level cache holds, so it takes bandwidth.
        "thrash": as much as that cache holds, so it takes the cache (in order: fast enough to drive others' lines out,
        which random order measured not to be). Raises TimeoutError.
        """
        self._number += 1
        order = _ORDER.pack(KINDS.index(kind) + 1 if kind else 0, share, self._number)
        self._segment.view[: _ORDER.size] = order
        deadline = time.monotonic() + START_TIMEOUT_S
        for place, process in enumerate(self.processes):
            while self._answer(place) != order:
                if time.monotonic() > deadline or process.poll() is not None:
                    raise TimeoutError("a generator of interference does not obey")
                time.sleep(IDLE_S)

    def _answer(self, place: int) -> bytes:
        begin = (1 + place) * _LINE_BYTES
        return bytes(self._segment.view[begin : begin + _ORDER.size])

    def _start(self, place: int, core: int) -> "subprocess.Popen[bytes]":
        arguments = {"fd": self._segment.fd, "place": place, "core": core, "parent": os.getpid()}
        arguments["cache-bytes"] = self._cache_bytes
        start = start_of("gangway.measure.interference", [f"--{key}={value}" for key, value in arguments.items()])
        fds = (self._segment.fd,)
        return subprocess.Popen(start.command, env=start.environment, pass_fds=fds, stdin=subprocess.DEVNULL)


def main() -> None:
    """Disturb as the word says, until the parent ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("fd", "place", "core", "parent", "cache-bytes"):
        parser.add_argument(f"--{name}", type=int, required=True)
    options = parser.parse_args()
    die_with_parent()
    if os.getppid() != options.parent:  # it died before the line above
        sys.exit(1)
    os.sched_setaffinity(0, {options.core})
    raise_priority()
    _obey(Segment.attach(options.fd), (1 + options.place) * _LINE_BYTES, options.cache_bytes)


def _obey(segment: Segment, answer: int, cache_bytes: int) -> None:
    memory = touched(4 * cache_bytes)
    parts = {"stream": memory, "thrash": memory[:cache_bytes]}
    at = 0
    while True:
        order = bytes(segment.view[: _ORDER.size])
        kind, share, _ = _ORDER.unpack(order)
        if kind:
            at = _probes.disturb(parts[KINDS[kind - 1]], at, share, SLICE_US)
        else:
            time.sleep(IDLE_S)
        segment.view[answer : answer + _ORDER.size] = order


def _sample(runner: ModelRunner, cores: Sequence[int], reference: memoryview) -> InterferenceSample:
    before_us = _reference_us(reference, cores[0])
    versions = range(version_count(runner.manifest))
    layer_us = tuple(_layer_medians(list(_runs(runner, len(cores), version))) for version in versions)
    return InterferenceSample((before_us + _reference_us(reference, cores[0])) / 2, layer_us)


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


def _evaluate(rounds: Sequence[Round], versions: Sequence[int], ranks: int) -> Disturbed:
    levels = _levels(rounds)
    by_layer = [[_slowdowns(rounds, layer, v) for v in range(count)] for layer, count in enumerate(versions)]
    return Disturbed(
        ranks=ranks,
        points=interference_points(rounds),
        slope=tuple(tuple(slope_of(_flat(levels), _flat(one)) for one in layer) for layer in by_layer),
        slowdown=tuple(
            tuple(tuple(statistics.fmean(one[load]) for load in LOADS) for one in layer) for layer in by_layer
        ),
    )


def _levels(rounds: Sequence[Round]) -> dict[Load, list[float]]:
    idle_us = statistics.median(one[IDLE].reference_us for one in rounds)
    return {load: [max(0.0, one[load].reference_us / idle_us - 1) for one in rounds] for load in LOADS}


def _slowdowns(rounds: Sequence[Round], layer: int, version: int) -> dict[Load, list[float]]:
    """Relative slowdown of a layer by load, one number per round."""
    alone_us = statistics.median(one[IDLE].layer_us[version][layer] for one in rounds)
    times_us = {load: [one[load].layer_us[version][layer] for one in rounds] for load in LOADS}
    return {load: [time_us / alone_us - 1 if alone_us else 0.0 for time_us in times_us[load]] for load in LOADS}


def _flat(by_load: dict[Load, list[float]]) -> list[float]:
    return [value for load in LOADS for value in by_load[load]]


if __name__ == "__main__":
    main()
