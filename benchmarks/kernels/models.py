"""Compute time of whole models: our gangs, onnxruntime and OpenVINO, taking turns on the same cores.

With --precision bf16 sides are ours in bfloat16 and in float32, and OpenVINO in float32 and as it comes: in bfloat16,
where the processor has it.

With --batch every query has so many rows; "rows/s" is what each side makes of them.

Ours is measured on the real executor: worker processes, shared memory, barriers, but neither server nor scheduler.
"""

import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import get_args

import numpy as np

from benchmarks.peers.onnxruntime_peer import Timed, pinned, timed_ms
from benchmarks.peers.openvino_peer import PEERS, OpenPeer
from gangway.artifact.format import Precision
from gangway.clients.inputs import Array
from gangway.zoo import MODELS
from testing.gang_runner import GangRunner, LoadedModel
from testing.load import relative_error
from testing.reference import Example, example_of
from testing.report import Report, Row, add_repository_option, option_parser, start_report
from testing.repository import compile_model, ensure_zoo, onnx_file

NETWORKS = [name for name in MODELS if not name.startswith("simple") and name not in ("mlp", "accumulator")]
ALL = "all"
RATIO_AT_MOST = {**dict.fromkeys(NETWORKS, 1.08), "resnet50": 1.03, "mobilenetv2": 0.95}
MEAN_RATIO_AT_MOST = 0.95  # over all networks
BATCH_RATIO_AT_MOST = {"resnet50": 1.0, "bert_base": 1.0}
OURS = "gangway"
OURS_FP32 = "gangway fp32"
BF16_RATIO_AT_MOST = 1.02  # of our float32
BF16_GAIN_AT_MOST = {"resnet50": 0.58, "bert_base": 0.58}
LEAST_COSINE = 0.998
QUERIES = 5  # rows of each side in each round, at least one query, after one that does not count
SETTLE_S = 0.02  # between sides: other engines' threads spin for a while after a query


@dataclass
class Contest:
    """One model on so many cores: the sides, and the median milliseconds of each of their rounds."""

    model: str
    cores: int
    rows: int
    peers: Mapping[str, OpenPeer]
    sides: dict[str, Timed]
    error: float
    cosine: float
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
        return min(self.peers, key=self.median_ms)

    @property
    def ratio(self) -> float:
        """Our time over the better peer's: the median of each round's ratio, so that drifting load cancels out."""
        return self.ratio_to(self.better_peer)

    def ratio_to(self, name: str) -> float:
        """Return the same of another side."""
        pairs = zip(self.rounds_ms[OURS], self.rounds_ms[name], strict=True)
        return statistics.median(ours / theirs for ours, theirs in pairs)

    def row(self) -> Row:
        """Return what the table shows."""
        return {
            "model": self.model,
            "rows": self.rows,
            "cores": self.cores,
            f"{OURS} ms": self.median_ms(OURS),
            "(with hand-over)": statistics.median(self.handed_over_ms),
            **{f"{name} ms": self.median_ms(name) for name in self.sides if name != OURS},
            **{f"{name} rows/s": 1e3 * self.rows / self.median_ms(name) for name in self.sides if self.rows > 1},
            "ratio to better": self.ratio,
            **({"ratio to fp32": self.ratio_to(OURS_FP32), "cosine": self.cosine} if OURS_FP32 in self.sides else {}),
            "max error": self.error,
        }


def prepare(
    runner: GangRunner, models: Mapping[str, LoadedModel], path: Path, cores: Sequence[int], rows: int
) -> list[Contest]:
    """Make one contest for every gang size from all cores down to one core; `models`: ours, by what they are called.

    Widest first: OpenVINO's thread library sizes itself once, by the cores it finds at its first use.
    """
    example = example_of(models[OURS].manifest.model_name, path, rows=rows)
    return [_contest(runner, models, path, example, cores[:count]) for count in range(len(cores), 0, -1)]


def _contest(
    runner: GangRunner, models: Mapping[str, LoadedModel], path: Path, example: Example, cores: Sequence[int]
) -> Contest:
    model = models[OURS]
    outputs = runner.run(model, example.inputs, len(cores)).outputs
    contest = Contest(
        model.manifest.model_name,
        len(cores),
        _rows(model, example),
        PEERS[model.manifest.precision if len(models) == 1 else "bf16"],
        {},
        _error(outputs, example.outputs),
        _cosine(outputs, example.outputs),
    )

    def ours(name: str) -> float:
        finished = runner.run(models[name], example.inputs, len(cores))
        if name == OURS:
            contest.handed_over_ms.append(finished.total_us / 1000)
        return finished.outcome.compute_us / 1000

    contest.sides = {name: partial(ours, name) for name in models}
    for name, open_peer in contest.peers.items():
        with pinned(cores):
            contest.sides[name] = timed_ms(open_peer(path, example.inputs, len(cores)), cores)
    return contest


def _rows(model: LoadedModel, example: Example) -> int:
    first = model.manifest.inputs[0]
    return example.inputs[first.name].nbytes // first.row_bytes


def _error(outputs: dict[str, Array], expected: dict[str, Array]) -> float:
    return max(relative_error(outputs[name], expected[name]) for name in expected)


def _cosine(outputs: dict[str, Array], expected: dict[str, Array]) -> float:
    """Return the least cosine of an output and what is expected."""
    pairs = [[array.ravel().astype(np.float64) for array in (outputs[name], expected[name])] for name in expected]
    return min(float(a @ b / max(np.linalg.norm(a) * np.linalg.norm(b), 1e-30)) for a, b in pairs)


def measure(
    repository: Path,
    model: str,
    rows: int,
    rounds: int,
    cores: Sequence[int],
    precision: Precision,
    min_cosine: float | None,
) -> list[Contest]:
    """Let the contests of one model take turns, so that all of them see the same load of the machine."""
    folders = {OURS: compile_model(repository, model, precision, min_cosine)}
    if precision != "fp32":
        folders[OURS_FP32] = compile_model(repository, model)
    with GangRunner(folders[OURS].parent, cores) as runner:
        models = {name: runner.open_model(folder, rows) for name, folder in folders.items()}
        contests = prepare(runner, models, onnx_file(repository, model), cores, rows)
        for number in range(rounds):
            for contest in contests:
                contest.run_round(first=number)
    for contest in contests:
        contest.sides = dict.fromkeys(contest.sides, lambda: 0.0)  # they hold the model's weights
    return contests


def run(
    report: Report,
    repository: Path,
    models: Sequence[str],
    rows: int,
    rounds: int,
    max_cores: int,
    precision: Precision,
    min_cosine: float | None,
) -> None:
    """Measure every model, one after the other."""
    cores = sorted(os.sched_getaffinity(0))[:max_cores]
    contests = [
        contest
        for model in models
        for contest in measure(repository, model, rows, rounds, cores, precision, min_cosine)
    ]
    report.table("compute time, medians", [contest.row() for contest in contests])
    limits = {} if precision != "fp32" else RATIO_AT_MOST if rows == 1 else BATCH_RATIO_AT_MOST
    for contest in contests:
        where = f"{contest.model}, {contest.cores} cores"
        if contest.model in limits:
            report.target(f"{where}: ratio to {contest.better_peer}", contest.ratio, limits[contest.model])
        if precision == "fp32":
            report.target(f"{where}: max error", contest.error, 1e-4)
        else:
            limit = BF16_GAIN_AT_MOST.get(contest.model, BF16_RATIO_AT_MOST)
            report.target(f"{where}: ratio to fp32", contest.ratio_to(OURS_FP32), limit)
            report.target(f"{where}: 1 - cosine", 1 - contest.cosine, 1 - LEAST_COSINE)
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
    parser.add_argument("--precision", choices=get_args(Precision), default="fp32", help="of products of ours")
    parser.add_argument(
        "--min-cosine", type=float, help="of answers to those in fp32, else layers stay in fp32: as compiled"
    )
    options = parser.parse_args()
    report = start_report(f"Compute time of whole models, {options.precision}")
    models = NETWORKS if options.models == [ALL] else options.models
    repository = ensure_zoo(options.repository, models)
    run(
        report,
        repository,
        models,
        options.batch,
        options.rounds,
        options.max_cores,
        options.precision,
        options.min_cosine,
    )
    return report.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
