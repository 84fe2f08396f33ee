"""What a batch gains by computing its first layers pass by pass, in gangs of one core side by side, one for each core.

Both ways have workers of their own, of which one side idles while the other works; they take turns. The time of a run
is the mean of its gangs, so that a core which others use counts no more than any. Real workers, no server.
"""

import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from gangway.artifact.reader import read_manifest
from gangway.executor.launch import available_cores
from gangway.measure.model_runner import ModelRunner
from testing.report import Row, add_repository_option, option_parser, start_report
from testing.repository import compile_model, ensure_zoo


def row_ms(runner: ModelRunner, rows: int, gangs: int) -> float:
    """Run so many rows on each of so many cores; return what a row took."""
    runs = runner.run_gangs(rows, 1, gangs=gangs)
    return statistics.fmean(sum(run.layer_us) for run in runs) / rows / 1e3


def measure(folder: Path, batches: Sequence[int], rounds: int, cores: Sequence[int]) -> list[Row]:
    """Return a line for each number of rows; times are medians, and so is the ratio of each round."""
    manifest = read_manifest(folder)
    lines: list[Row] = []
    count = len(cores)
    with (
        ModelRunner(folder.parent, replace(manifest, pass_layers=0), cores, max(batches), gangs=count) as layers,
        ModelRunner(folder.parent, manifest, cores, max(batches), gangs=count) as passes,
    ):
        for rows in batches:
            turns = [(row_ms(layers, rows, count), row_ms(passes, rows, count)) for _ in range(rounds + 1)]
            layers_ms, passes_ms = zip(*turns[1:], strict=True)  # in the first one pages fault
            lines.append(
                {
                    "model": manifest.model_name,
                    "layers in passes": f"{manifest.pass_layers} of {len(manifest.layers)}",
                    "rows": rows,
                    "ms a row, all layer by layer": statistics.median(layers_ms),
                    "in passes": statistics.median(passes_ms),
                    "ratio": statistics.median(b / a for a, b in turns[1:]),
                }
            )
    return lines


def main() -> int:
    """Run the benchmark."""
    parser = option_parser(__doc__ or "")
    add_repository_option(parser)
    parser.add_argument("--models", nargs="+", default=["resnet50", "mobilenetv2"], metavar="NAME")
    parser.add_argument("--rows", nargs="+", type=int, default=[2, 4, 8, 16], help="of each gang")
    parser.add_argument("--rounds", type=int, default=12)
    options = parser.parse_args()
    report = start_report("Batches in passes")
    repository = ensure_zoo(options.repository, options.models)
    for model in options.models:
        report.table(model, measure(compile_model(repository, model), options.rows, options.rounds, available_cores()))
    return report.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
