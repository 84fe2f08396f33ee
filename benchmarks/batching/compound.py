"""Compound tasks by measured schedules: the five combinations of networks of Yu et al. (ICCAD 2021, Fig. 6), live.

Ways by turns in one run. On real workers without a server: the models one after the other, on a core each, side by side
with the cores shared out, and by the schedules that random search and coordinate descent find. As ensembles of real
servers, from the first task of a request to its last: `live` has the schedule of coordinate descent, `today` has none.
"""

import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import tritonclient.grpc as triton

from gangway.artifact.format import Manifest
from gangway.artifact.reader import read_manifest
from gangway.executor.launch import available_cores
from gangway.measure.composer import SEARCHES, ComposeOptions, compose
from gangway.measure.compound_runner import CompoundRunner
from gangway.scheduler.stages.ir import Schedule, parallel, schedule, sequential
from gangway.scheduler.stages.schedule_file import SCHEDULES_FOLDER, StoredSchedule, write_schedule
from testing.live_server import live_server
from testing.report import Report, Row, add_repository_option, option_parser, start_report
from testing.repository import compile_model, ensure_profiles, ensure_zoo

COMBINATIONS = (
    *("alexnet+vgg16+resnet18", "vgg16+resnet18+resnet50", "resnet18+resnet34+resnet50", "resnet18+resnet34+resnet101"),
    "resnet18+resnet50+resnet101",
)
SEQUENTIAL, ONE_CORE_EACH, SIDE_BY_SIDE = "sequential", "one core each", "side by side"
LIVE, TODAY = "live", "today"
ENSEMBLE = "compound"
SLOWER_AT_MOST = 1.02  # than the better of sequential and side by side
SEARCH_SECONDS_AT_MOST = 120.0
ROUNDS, CANDIDATES = 3, 8  # of a search
PROFILE_SECONDS = 5.0  # for each model, at most


def measure(names: Sequence[str], repository: Path, rounds: int, seconds: float, report: Report) -> Row:
    """Search schedules of one combination, then run all ways by turns; return a row of the table."""
    folders = [compile_model(repository, name) for name in names]
    cache_dir, manifests = folders[0].parent, [read_manifest(folder) for folder in folders]
    with CompoundRunner(cache_dir, manifests, available_cores()) as runner:
        found: dict[str, Schedule] = {}
        search_s: dict[str, float] = {}
        kept: dict[str, StoredSchedule] = {}
        for search in SEARCHES:
            options = ComposeOptions(search, len(names), ROUNDS, CANDIDATES, seconds)
            composition = compose(runner, cache_dir, options, lambda _phase, _share: None)
            found[search], search_s[search] = composition.found.stages, composition.found.seconds
            kept[search] = composition.found
        write_schedule(cache_dir, kept[SEARCHES[0]])
        with served(names, manifests, repository, cache_dir) as (asked, is_used):
            times_us, skew_us = by_turns(runner, found, rounds, asked)
    usual_us = times_us[SEQUENTIAL]
    row: dict[str, str | float] = {"models": "+".join(names), "sequential ms": statistics.median(usual_us) / 1e3}
    for way, way_us in times_us.items():
        if way != SEQUENTIAL:
            row[f"{way}, ratio"] = median_ratio(usual_us, way_us)
    row["by schedule"] = "yes" if is_used else "no"
    row[f"{LIVE} ms"] = statistics.median(times_us[LIVE]) / 1e3
    row[f"{TODAY} / {LIVE}"] = median_ratio(times_us[TODAY], times_us[LIVE])
    row |= {f"{search} s": search_s[search] for search in SEARCHES}
    row["skew us"] = statistics.median(skew_us)
    reference = min((SEQUENTIAL, SIDE_BY_SIDE), key=lambda way: statistics.median(times_us[way]))
    for search in SEARCHES:
        what = f"{'+'.join(names)}, {search}: "
        slower = median_ratio(times_us[search], times_us[reference])
        report.target(f"{what}times as long as {reference}", slower, SLOWER_AT_MOST)
        report.target(f"{what}s of search", search_s[search], SEARCH_SECONDS_AT_MOST)
    slower = median_ratio(times_us[LIVE], times_us[TODAY])
    report.target(f"{'+'.join(names)}, live: times as long as today", slower, SLOWER_AT_MOST)
    return row


@contextmanager
def served(
    names: Sequence[str], manifests: Sequence[Manifest], repository: Path, cache_dir: Path
) -> Iterator[tuple[dict[str, Callable[[], float]], bool]]:
    """Serve an ensemble of the models, with what the cache has and without its schedules.

    Yields what asks each of the two servers, and returns microseconds of computing; and whether the schedule is used,
    which it is not where it gains nothing over one model after the other.
    """
    with tempfile.TemporaryDirectory() as folder:
        models, without = Path(folder) / "models", Path(folder) / "cache"
        for name in names:
            (models / name).mkdir(parents=True)
            (models / name / "1").symlink_to(repository / name / "1")
        write_ensemble(models / ENSEMBLE, names, manifests)
        without.mkdir()
        for entry in cache_dir.iterdir():
            if entry.name != SCHEDULES_FOLDER:
                (without / entry.name).symlink_to(entry)
        (tensor,) = manifests[0].inputs
        value = np.random.default_rng(0).standard_normal((1, *tensor.shape[1:]), np.float32)
        given = triton.InferInput("x", list(value.shape), "FP32")
        given.set_data_from_numpy(value)
        with (
            live_server(models, [f"--cache-dir={cache_dir}"]) as live,
            live_server(models, [f"--cache-dir={without}"]) as today,
            triton.InferenceServerClient(live.url) as live_client,
            triton.InferenceServerClient(today.url) as today_client,
        ):
            ways = {LIVE: lambda: computed_us(live_client, given), TODAY: lambda: computed_us(today_client, given)}
            yield ways, "run by a schedule" in live.log.read_text()


def write_ensemble(folder: Path, names: Sequence[str], manifests: Sequence[Manifest]) -> None:
    """Write an ensemble whose steps all have its one input."""
    (folder / "1").mkdir(parents=True)
    steps, outputs = [], []
    for name, manifest in zip(names, manifests, strict=True):
        (source,), (target, *_) = manifest.inputs, manifest.outputs
        steps.append(
            f'{{ model_name: "{name}" model_version: -1 input_map {{ key: "{source.name}" value: "x" }}'
            f' output_map {{ key: "{target.name}" value: "{name}" }} }}'
        )
        outputs.append(f'{{ name: "{name}" data_type: TYPE_{target.datatype} dims: {list(target.shape[1:])} }}')
    dims = list(manifests[0].inputs[0].shape[1:])
    (folder / "config.pbtxt").write_text(
        f'platform: "ensemble" max_batch_size: 1 input [ {{ name: "x" data_type: TYPE_FP32 dims: {dims} }} ]'
        f" output [ {', '.join(outputs)} ] ensemble_scheduling {{ step [ {', '.join(steps)} ] }}"
    )


def computed_us(client: triton.InferenceServerClient, given: triton.InferInput) -> float:
    """Return how long a request takes from its first task to its last, after another one that warms caches."""
    client.infer(ENSEMBLE, [given])
    answer = client.infer(ENSEMBLE, [given], parameters={"gangway_stats": True})
    assert answer is not None
    value = answer.get_response().parameters["compute_us"]
    return float(getattr(value, value.WhichOneof("parameter_choice")))


def by_turns(
    runner: CompoundRunner, found: Mapping[str, Schedule], rounds: int, others: Mapping[str, Callable[[], float]]
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
    ways |= others
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
    ensure_profiles(repository, sorted({name for names in combinations for name in names}), PROFILE_SECONDS)
    report = start_report("compound tasks")
    rows = [measure(names, repository, options.rounds, options.seconds, report) for names in combinations]
    report.table("times as fast as sequential; medians of ratios by turns", rows)
    return report.finish(options.json)


if __name__ == "__main__":
    raise SystemExit(main())
