"""Compound tasks by measured schedules: the five combinations of networks of Yu et al. (ICCAD 2021, Fig. 6), live.

Real workers, no server. Ways by turns in one run: the models one after the other, on a core each, side by side with
the cores shared out, and by the schedules that random search and coordinate descent find.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.lib.report import Report, Row, add_repository_option, option_parser, start_report
from benchmarks.lib.repository import compile_model, ensure_zoo
from gangway.artifact.reader import read_manifest
from gangway.executor.launch import available_cores
from gangway.measure.composer import SEARCHES, ComposeOptions, compose
from gangway.measure.compound_runner import CompoundRunner
from gangway.scheduler.stages.ir import Schedule, parallel, schedule, sequential

COMBINATIONS = (
    "alexnet+vgg16+resnet18",
    "vgg16+resnet18+resnet50",
    "resnet18+resnet34+resnet50",
    "resnet18+resnet34+resnet101",
    "resnet18+resnet50+resnet101",
)
SEQUENTIAL, ONE_CORE_EACH, SIDE_BY_SIDE = "sequential", "one core each", "side by side"
SLOWER_AT_MOST = 1.02  # than the better of sequential and side by side
SEARCH_SECONDS_AT_MOST = 120.0
ROUNDS, CANDIDATES = 3, 8  # of a search


def measure(names: Sequence[str], repository: Path, rounds: int, seconds: float, report: Report) -> Row:
    """Search schedules of one combination, then run all ways by turns; return a row of the table."""
    folders = [compile_model(repository, name) for name in names]
    with CompoundRunner(folders[0].parent, [read_manifest(folder) for folder in folders], available_cores()) as runner:
        found: dict[str, Schedule] = {}
        search_s: dict[str, float] = {}
        for search in SEARCHES:
            options = ComposeOptions(search, len(names), ROUNDS, CANDIDATES, seconds)
            composition = compose(runner, folders[0].parent, options, lambda _phase, _share: None)
            found[search], search_s[search] = composition.found.stages, composition.found.seconds
        times_us, skew_us = by_turns(runner, found, rounds)
    usual_us = times_us[SEQUENTIAL]
    row: dict[str, str | float] = {"models": "+".join(names), "sequential ms": statistics.median(usual_us) / 1e3}
    for way, way_us in times_us.items():
        if way != SEQUENTIAL:
            row[f"{way}, ratio"] = median_ratio(usual_us, way_us)
    row |= {f"{search} s": search_s[search] for search in SEARCHES}
    row["skew us"] = statistics.median(skew_us)
    reference = min((SEQUENTIAL, SIDE_BY_SIDE), key=lambda way: statistics.median(times_us[way]))
    for search in SEARCHES:
        what = f"{'+'.join(names)}, {search}: "
        slower = median_ratio(times_us[search], times_us[reference])
        report.target(f"{what}times as long as {reference}", slower, SLOWER_AT_MOST)
        report.target(f"{what}s of search", search_s[search], SEARCH_SECONDS_AT_MOST)
    return row


def by_turns(
    runner: CompoundRunner, found: Mapping[str, Schedule], rounds: int
) -> tuple[dict[str, list[float]], list[float]]:
    """Run all ways once in each round; return their times, and how late the last of models side by side begins."""
    streams, cores = runner.streams(), len(runner.workers)
    longest_first = sorted(
        range(len(streams)), key=lambda number: -streams[number].span_us(0, streams[number].layers, 1)
    )
    fixed = {
        SEQUENTIAL: schedule(streams, sequential(streams), cores),
        SIDE_BY_SIDE: schedule(streams, parallel(streams), cores),
        **found,
    }
    ways: dict[str, Callable[[], float]] = {
        way: lambda stages=stages: runner.run(stages).total_us  # type: ignore[misc]
        for way, stages in fixed.items()
    }
    ways[ONE_CORE_EACH] = lambda: runner.run_freely(longest_first).total_us
    times_us: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(rounds + 1):
        for way, run in ways.items():
            time_us = run()
            if number:  # the first one warms up
                times_us[way].append(time_us)
    return times_us, [runner.run(fixed[SIDE_BY_SIDE]).skew_us for _ in range(rounds)]


def median_ratio(times_us: Sequence[float], others_us: Sequence[float]) -> float:
    """Return the median of the ratios of times of the same rounds."""
    return statistics.median(one / other for one, other in zip(times_us, others_us, strict=True))


def main() -> int:
    """Run the benchmark."""
    parser = option_parser("compound tasks: schedules that were found beside the usual ones")
    add_repository_option(parser)
    parser.add_argument("--models", nargs="+", default=list(COMBINATIONS), metavar="A+B", help="combinations")
    parser.add_argument("--rounds", type=int, default=15, help="of all ways by turns")
    parser.add_argument("--seconds", type=float, default=60.0, help="for each search at most")
    options = parser.parse_args()
    combinations = [text.split("+") for text in options.models]
    repository = ensure_zoo(options.repository, sorted({name for names in combinations for name in names})).resolve()
    report = start_report("compound tasks")
    rows = [measure(names, repository, options.rounds, options.seconds, report) for names in combinations]
    report.table("times as fast as sequential; medians of ratios by turns", rows)
    return report.finish(options.json)


if __name__ == "__main__":
    raise SystemExit(main())
