"""Find the fastest schedule of a compound task by measurement: `gangway compose`."""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from gangway.artifact.profile import whole_machine_id
from gangway.measure.compound_runner import CompoundRunner, CompoundTimes
from gangway.scheduler.profiles import ModelProfile
from gangway.scheduler.stages.ir import Pointers, Schedule
from gangway.scheduler.stages.schedule_file import (
    PointerTime,
    SearchState,
    StoredSchedule,
    read_state,
    state_path,
    write_schedule,
    write_state,
)
from gangway.scheduler.stages.search import PointerSpace, Record, best, coordinate_descent, random_search

SEARCHES: Final = ("coordinate", "random")
RUNS: Final = 5  # of a candidate, by turns with the best so far
FINAL_RUNS: Final = 15  # of the best, the sequential and the parallel schedule, by turns
HOPELESS: Final = 1.2  # a candidate that takes so many times as long in its first run gets no other one
LEAST_GAIN: Final = 0.01  # a found schedule that gains less is not worth its barriers
_KEEP_S: Final = 0.3  # between two writes of what was measured
_SEED: Final = 0
Progress = Callable[[str, float], None]


@dataclass(frozen=True)
class ComposeOptions:
    """`pointers`: barriers in each model. `samples` a random search draws as many as coordinate descent measures."""

    search: str
    pointers: int
    rounds: int
    candidates: int
    seconds: float  # for the search, after which it is as far as it is

    def text(self, cores: int) -> str:
        """What decides which schedules are measured."""
        return f"{self.search} {self.pointers} {self.rounds} {self.candidates} {cores} {_SEED}"


@dataclass(frozen=True)
class ComposedSchedule:
    """What was found, and one run of the sequential schedule and of it: those of median time."""

    found: StoredSchedule
    sequential: CompoundTimes
    fastest: CompoundTimes


class ByTurns:
    """Measures schedules in microseconds, each by turns with the best so far.

    A time is the best one's times the median of the ratios, so that all are comparable though the machine changes.
    """

    def __init__(self, runner: CompoundRunner) -> None:
        self._runner = runner
        self._best: tuple[Schedule, float] | None = None

    def start_with(self, stages: Schedule, time_us: float) -> None:
        """Take a schedule whose time is known as the best so far."""
        self._best = (stages, time_us)

    def __call__(self, stages: Schedule) -> float:
        """Return the time of one. Raises RunError."""
        self._runner.run(stages)  # what it reads comes into the caches
        if self._best is None:
            self._best = (stages, statistics.median(self._runner.run(stages).total_us for _ in range(RUNS)))
            return self._best[1]
        reference, best_us = self._best
        ratios: list[float] = []
        while len(ratios) < RUNS and (not ratios or ratios[0] < HOPELESS):
            ratios.append(self._runner.run(stages).total_us / self._runner.run(reference).total_us)
        time_us = best_us * statistics.median(ratios)
        if time_us < best_us:
            self._best = (stages, time_us)
        return time_us


def compose(runner: CompoundRunner, cache_dir: Path, options: ComposeOptions, progress: Progress) -> ComposedSchedule:
    """Search, write what is found into the cache, and return it. A search that was killed goes on where it was.

    The sequential and the parallel schedule are among the candidates, and are measured again by turns with the best
    one at the end: the result is never slower than the better of them. Raises RunError, OSError, and ValueError for
    fewer pointers than models less one.
    """
    keys = tuple(manifest.key for manifest in runner.manifests)
    machine = whole_machine_id(runner.manifests[0].target.name)
    path, cores = state_path(cache_dir, keys, machine), len(runner.workers)
    layers = [len(manifest.layers) for manifest in runner.manifests]
    text = options.text(cores)
    progress("layers alone", 0.0)
    state = read_state(path, keys, text, layers, cores)
    if state is None:
        streams = runner.streams()
        state = SearchState(keys, text, tuple(stream.latency_us for stream in streams), (), 0.0)
    space = PointerSpace(_streams(runner, state), cores, options.pointers)
    records, seconds = _search(runner, space, state, path, options, progress)
    progress("final turns", 1.0)
    chosen, times_us, runs = _final(runner, space, best(records))
    found = StoredSchedule(
        keys=keys,
        names=tuple(manifest.model_name for manifest in runner.manifests),
        layers=tuple(layers),
        machine=machine,
        cores=cores,
        search=options.search,
        pointers=chosen,
        stages=space.schedule(chosen),
        time_us=times_us[chosen],
        sequential_us=times_us[space.starts()[0]],
        parallel_us=times_us[space.starts()[1]],
        schedules=len({record.stages for record in records}),
        seconds=seconds,
    )
    write_schedule(cache_dir, found)
    path.unlink(missing_ok=True)
    return ComposedSchedule(found, runs[space.starts()[0]], runs[chosen])


def _streams(runner: CompoundRunner, state: SearchState) -> tuple[ModelProfile, ...]:
    return tuple(
        ModelProfile(stream, manifest.model_name, len(manifest.layers), len(runner.workers), latency_us, measured=True)
        for stream, (manifest, latency_us) in enumerate(zip(runner.manifests, state.latency_us, strict=True))
    )


def _search(
    runner: CompoundRunner,
    space: PointerSpace,
    state: SearchState,
    path: Path,
    options: ComposeOptions,
    progress: Progress,
) -> tuple[list[Record], float]:
    """Measure schedules until the search or the time ends; return them, and the seconds, earlier attempts' included."""
    measure, known = ByTurns(runner), {sample.pointers: sample.time_us for sample in state.samples}
    if known:
        fastest = min(known, key=known.__getitem__)
        measure.start_with(space.schedule(fastest), known[fastest])
    before = [Record(pointers, space.schedule(pointers), time_us) for pointers, time_us in known.items()]
    records: list[Record] = []
    begin = kept = time.monotonic()
    total = len(space.starts()) + options.rounds * options.candidates * len(space.streams)
    for record in _records(measure, space, options, known):
        records.append(record)
        now = time.monotonic()
        seconds = state.seconds + now - begin
        fastest_us = best((*before, *records)).time_us
        progress(f"{fastest_us / 1e3:.4g} ms", min(1.0, max(len(records) / total, seconds / options.seconds)))
        if now - kept > _KEEP_S:
            samples = known | {each.pointers: each.time_us for each in records}
            write_state(
                path, replace(state, samples=tuple(PointerTime(*pair) for pair in samples.items()), seconds=seconds)
            )
            kept = now
        if seconds > options.seconds and len(records) >= len(space.starts()):
            break
    return [*before, *records], state.seconds + time.monotonic() - begin


def _records(
    measure: ByTurns, space: PointerSpace, options: ComposeOptions, known: Mapping[Pointers, float]
) -> Iterator[Record]:
    if options.search == "random":
        samples = options.rounds * options.candidates * len(space.streams)
        return random_search(measure, space, samples, _SEED, known)
    return coordinate_descent(measure, space, options.rounds, options.candidates, _SEED, known)


def _final(
    runner: CompoundRunner, space: PointerSpace, record: Record
) -> tuple[Pointers, dict[Pointers, float], dict[Pointers, CompoundTimes]]:
    """Return the pointers to keep, and of these, the sequential and the parallel ones: median times, and such a run."""
    starts = space.starts()
    runs: dict[Pointers, list[CompoundTimes]] = {pointers: [] for pointers in (*starts, record.pointers)}
    for _ in range(FINAL_RUNS):
        for pointers, mine in runs.items():
            mine.append(runner.run(space.schedule(pointers)))
    times_us = {each: statistics.median(run.total_us for run in mine) for each, mine in runs.items()}
    usual = min(starts, key=times_us.__getitem__)
    chosen = record.pointers if times_us[record.pointers] < times_us[usual] * (1 - LEAST_GAIN) else usual
    medians = {
        pointers: min(mine, key=lambda run: abs(run.total_us - times_us[pointers])) for pointers, mine in runs.items()
    }
    return chosen, times_us, medians
