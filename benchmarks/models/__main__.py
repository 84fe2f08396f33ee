"""Compute time of whole models in float32: our gangs, onnxruntime and OpenVINO, taking turns on the same cores.

With --batch every query has so many rows; "rows/s" is what each side makes of them.

Ours is measured on the real executor: worker processes, shared memory, barriers, but neither server nor scheduler.
"""

import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.lib.gang_runner import GangRunner, LoadedModel
from benchmarks.lib.load import relative_error
from benchmarks.lib.reference import Example, example_of
from benchmarks.lib.report import Report, Row, add_repository_option, option_parser, start_report
from benchmarks.lib.repository import compile_model, ensure_zoo, onnx_file
from benchmarks.models.peers import PEERS
from benchmarks.peers.onnxruntime_peer import Timed, pinned, timed_ms
from gangway.clients.inputs import Array
from gangway.zoo import MODELS

NETWORKS = [name for name in MODELS if not name.startswith("simple") and name not in ("mlp", "accumulator")]
ALL = "all"
RATIO_AT_MOST = {**dict.fromkeys(NETWORKS, 1.08), "resnet50": 1.03, "mobilenetv2": 0.95}
MEAN_RATIO_AT_MOST = 0.95  # over all networks
BATCH_RATIO_AT_MOST = {"resnet50": 1.0, "bert_base": 1.0}
OURS = "gangway"
QUERIES = 5  # rows of each side in each round, at least one query, after one that does not count
SETTLE_S = 0.02  # between sides: other engines' threads spin for a while after a query


@dataclass
class Contest:
    """One model on so many cores: the sides, and the median milliseconds of each of their rounds."""

    model: str
    cores: int
    rows: int
    sides: dict[str, Timed]
    error: float
    rounds_ms: dict[str, list[float]] = field(default_factory=dict)
    handed_over_ms: list[float] = field(default_factory=list)

    def run_round(self, first: int) -> None:
        """Let every side run once, beginning with side number `first`."""
        names = list(self.sides)
        for name in names[first % len(names) :] + names[: first % len(names)]:
            time.sleep(SETTLE_S)
            self.sides[name]()
            queries = max(1, QUERIES // self.rows)
            self.rounds_ms.setdefault(name, []).append(statistics.median(self.sides[name]() for _ in range(queries)))

    def median_ms(self, name: str) -> float:
        """Return the median over the rounds."""
        return statistics.median(self.rounds_ms[name])

    @property
    def better_peer(self) -> str:
        """The peer with the smaller median."""
        return min(PEERS, key=self.median_ms)

    @property
    def ratio(self) -> float:
        """Our time over the better peer's: the median of each round's ratio, so that drifting load cancels out."""
        pairs = zip(self.rounds_ms[OURS], self.rounds_ms[self.better_peer], strict=True)
        return statistics.median(ours / theirs for ours, theirs in pairs)

    def row(self) -> Row:
        """Return what the table shows."""
        return {
            "model": self.model,
            "rows": self.rows,
            "cores": self.cores,
            f"{OURS} ms": self.median_ms(OURS),
            "(with hand-over)": statistics.median(self.handed_over_ms),
            **{f"{name} ms": self.median_ms(name) for name in PEERS},
            **{f"{name} rows/s": 1e3 * self.rows / self.median_ms(name) for name in (OURS, *PEERS) if self.rows > 1},
            "ratio to better": self.ratio,
            "max error": self.error,
        }


def prepare(runner: GangRunner, model: LoadedModel, path: Path, cores: Sequence[int], rows: int) -> list[Contest]:
    """Make one contest for every gang size from all cores down to one core.

    Widest first: OpenVINO's thread library sizes itself once, by the cores it finds at its first use.
    """
    example = example_of(model.manifest.model_name, path, rows=rows)
    return [_contest(runner, model, path, example, cores[:count]) for count in range(len(cores), 0, -1)]


def _contest(runner: GangRunner, model: LoadedModel, path: Path, example: Example, cores: Sequence[int]) -> Contest:
    outputs = runner.run(model, example.inputs, len(cores)).outputs
    contest = Contest(
        model.manifest.model_name, len(cores), _rows(model, example), {}, _error(outputs, example.outputs)
    )

    def ours() -> float:
        finished = runner.run(model, example.inputs, len(cores))
        contest.handed_over_ms.append(finished.total_us / 1000)
        return finished.outcome.compute_us / 1000

    contest.sides[OURS] = ours
    for name, open_peer in PEERS.items():
        with pinned(cores):
            contest.sides[name] = timed_ms(open_peer(path, example.inputs, len(cores)), cores)
    return contest


def _rows(model: LoadedModel, example: Example) -> int:
    first = model.manifest.inputs[0]
    return example.inputs[first.name].nbytes // first.row_bytes


def _error(outputs: dict[str, Array], expected: dict[str, Array]) -> float:
    return max(relative_error(outputs[name], expected[name]) for name in expected)


def measure(repository: Path, model: str, rows: int, rounds: int, cores: Sequence[int]) -> list[Contest]:
    """Let the contests of one model take turns, so that all of them see the same load of the machine."""
    folder = compile_model(repository, model)
    with GangRunner(folder.parent, cores) as runner:
        contests = prepare(runner, runner.open_model(folder, rows), onnx_file(repository, model), cores, rows)
        for number in range(rounds):
            for contest in contests:
                contest.run_round(first=number)
    for contest in contests:
        contest.sides.clear()  # they hold the model's weights
    return contests


def run(report: Report, repository: Path, models: Sequence[str], rows: int, rounds: int, max_cores: int) -> None:
    """Measure every model, one after the other."""
    cores = sorted(os.sched_getaffinity(0))[:max_cores]
    contests = [contest for model in models for contest in measure(repository, model, rows, rounds, cores)]
    report.table("compute time, medians", [contest.row() for contest in contests])
    limits = RATIO_AT_MOST if rows == 1 else BATCH_RATIO_AT_MOST
    for contest in contests:
        if contest.model in limits:
            what = f"{contest.model}, {contest.cores} cores: ratio to {contest.better_peer}"
            report.target(what, contest.ratio, limits[contest.model])
        report.target(f"{contest.model}, {contest.cores} cores: max error", contest.error, 1e-4)
    if rows == 1 and set(NETWORKS) <= set(models):
        for count in range(len(cores), 0, -1):
            ratios = [contest.ratio for contest in contests if contest.cores == count and contest.model in NETWORKS]
            mean = statistics.geometric_mean(ratios)
            report.target(f"{len(ratios)} networks, {count} cores: geometric mean of ratios", mean, MEAN_RATIO_AT_MOST)


def main() -> int:
    """Run the benchmark; return 1 when a target is missed."""
    parser = option_parser(__doc__ or "")
    add_repository_option(parser)
    parser.add_argument(
        "--models", nargs="+", default=["resnet50", "mobilenetv2"], metavar="NAME", help=f"'{ALL}': every network"
    )
    parser.add_argument("--batch", type=int, default=1, metavar="ROWS", help="rows of a query")
    parser.add_argument("--rounds", type=int, default=15, help=f"rounds; each side runs {QUERIES} rows in each")
    parser.add_argument("--max-cores", type=int, default=2, help="largest gang")
    options = parser.parse_args()
    report = start_report("Compute time of whole models, float32")
    models = NETWORKS if options.models == [ALL] else options.models
    run(report, ensure_zoo(options.repository, models), models, options.batch, options.rounds, options.max_cores)
    return report.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
