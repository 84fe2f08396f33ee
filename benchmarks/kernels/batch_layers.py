"""Where the time of a batch goes, layer by layer: one gang of all cores (fat) against one gang a core (thin).

"thin": the batch is cut over gangs of one core that run at the same time; "alone": one of these while the other cores
are idle, so what they do to each other is the difference; "row": all cores, row after row. Milliseconds of the whole
batch, lower quartiles of the rounds: what else the machine does only adds to them. Real workers, no server.

On a machine that is not idle `chrt -r 1 python -m benchmarks.kernels.batch_layers` keeps others off the cores for as
long as a batch takes; the workers inherit it.
"""

import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gangway.artifact.format import Layer, Manifest
from gangway.artifact.reader import read_manifest
from gangway.executor.launch import available_cores
from gangway.measure.machine import measure_machine
from gangway.measure.model_runner import ModelRunner
from testing.report import Report, Row, add_repository_option, option_parser, start_report
from testing.repository import compile_model, ensure_zoo

Joined = Callable[[Sequence[float]], float]  # of the runs of one round
WAYS = ("row", "fat", "thin", "alone")


@dataclass
class Contest:
    """One model and one batch: by way the times of its layers in each round, in microseconds of the whole batch."""

    manifest: Manifest
    rows: int
    cores: int
    layers_us: dict[str, list[tuple[float, ...]]] = field(default_factory=lambda: defaultdict(list))
    total_us: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def run_round(self, runner: ModelRunner) -> None:
        """Execute the batch in every way."""
        part = self.rows // self.cores
        self._note("row", [runner.run(1, self.cores).layer_us for _ in range(self.rows)], sum)
        self._note("fat", [runner.run(self.rows, self.cores).layer_us], sum)
        self._note("thin", [run.layer_us for run in runner.run_gangs(part, 1, gangs=self.cores)], statistics.fmean)
        self._note("alone", [runner.run(part, 1).layer_us], sum)

    def _note(self, way: str, runs: Sequence[tuple[float, ...]], joined: Joined) -> None:
        self.layers_us[way].append(tuple(joined(times) for times in zip(*runs, strict=True)))
        totals = [sum(times) for times in runs]
        self.total_us[way].append(max(totals) if way == "thin" else sum(totals))

    def total_ms(self, way: str) -> float:
        """Return the time of the whole batch; of gangs beside each other the slowest."""
        return _lower_quartile(self.total_us[way]) / 1e3

    def layer_ms(self, way: str, layer: int) -> float:
        """Return the time of one layer; of gangs beside each other the mean."""
        return _lower_quartile([times[layer] for times in self.layers_us[way]]) / 1e3


def _lower_quartile(times_us: Sequence[float]) -> float:
    return sorted(times_us)[len(times_us) // 4]


def total_row(contest: Contest) -> Row:
    """Return the line of a whole model."""
    times_ms = {way: contest.total_ms(way) for way in WAYS}
    return {
        "model": contest.manifest.model_name,
        "rows": contest.rows,
        **{f"{way} ms": time_ms for way, time_ms in times_ms.items()},
        "thin / fat": times_ms["thin"] / times_ms["fat"],
        "alone / thin": times_ms["alone"] / times_ms["thin"],
        "row / fat": times_ms["row"] / times_ms["fat"],
    }


def layer_rows(contest: Contest, chosen: Iterable[tuple[str, Sequence[int]]], peak_flops_per_us: float) -> list[Row]:
    """Return a line per group of layers: its times, its share of the difference, and of the peak of all cores."""
    rows: list[Row] = []
    for name, layers in chosen:
        times_ms = {way: sum(contest.layer_ms(way, layer) for layer in layers) for way in WAYS}
        flops = contest.rows * sum(contest.manifest.layers[layer].flops for layer in layers)
        ideal_ms = flops / (contest.cores * peak_flops_per_us) / 1e3
        rows.append(
            {
                "layers": name,
                "n": len(layers),
                **{f"{way} ms": time_ms for way, time_ms in times_ms.items()},
                "thin - fat": times_ms["thin"] - times_ms["fat"],
                "fat, of peak": f"{ideal_ms / times_ms['fat']:.0%}",
                "thin, of peak": f"{ideal_ms / times_ms['thin']:.0%}",
            }
        )
    return rows


def by_operator(layers: Sequence[Layer]) -> list[tuple[str, list[int]]]:
    """Group layers by their first operator and whether there is a kernel for several rows."""
    groups: dict[str, list[int]] = defaultdict(list)
    for index, layer in enumerate(layers):
        batch = " (several rows a call)" if layer.versions[0].batch else ""
        groups[f"{layer.operator.split('+')[0]}{batch}"].append(index)
    return list(groups.items())


def largest_differences(contest: Contest, count: int) -> list[tuple[str, list[int]]]:
    """Return the layers in which thin and fat differ most."""
    layers = contest.manifest.layers
    ranked = sorted(
        range(len(layers)), key=lambda layer: -abs(contest.layer_ms("thin", layer) - contest.layer_ms("fat", layer))
    )
    return [
        (f"{layers[index].name} {layers[index].operator} {layers[index].shape}", [index]) for index in ranked[:count]
    ]


def measure(folder: Path, rows: Sequence[int], rounds: int, cores: Sequence[int]) -> list[Contest]:
    """Let all ways and batches of one model take turns."""
    manifest = read_manifest(folder)
    contests = [Contest(manifest, count, len(cores)) for count in rows]
    with ModelRunner(folder.parent, manifest, cores, max(rows), gangs=len(cores)) as runner:
        for contest in contests:
            Contest(manifest, contest.rows, len(cores)).run_round(runner)  # pages fault
        for _ in range(rounds):
            for contest in contests:
                contest.run_round(runner)
    return contests


def run(report: Report, contests: Sequence[Contest], most: int, cores: Sequence[int]) -> None:
    """Show what was measured of one model."""
    peak = measure_machine(cores[0], len(cores), contests[0].manifest.target).peak_flops_per_us
    for contest in contests:
        name = f"{contest.manifest.model_name}, {contest.rows} rows"
        report.table(f"{name}: by operator", layer_rows(contest, by_operator(contest.manifest.layers), peak))
        report.table(f"{name}: where the ways differ", layer_rows(contest, largest_differences(contest, most), peak))


def main() -> int:
    """Run the benchmark."""
    parser = option_parser(__doc__ or "")
    add_repository_option(parser)
    parser.add_argument("--models", nargs="+", default=["resnet50", "bert_base", "gpt2"], metavar="NAME")
    parser.add_argument("--rows", nargs="+", type=int, default=[8, 16], help="multiples of the number of cores")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=8, help="so many are shown one by one")
    options = parser.parse_args()
    report = start_report("A batch on one gang and on several, layer by layer")
    repository = ensure_zoo(options.repository, options.models)
    cores = available_cores()
    totals: list[Row] = []
    for model in options.models:
        contests = measure(compile_model(repository, model), options.rows, options.rounds, cores)
        run(report, contests, options.layers, cores)
        totals += [total_row(contest) for contest in contests]
    report.table("whole models", totals)
    return report.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
