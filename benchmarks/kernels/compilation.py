"""How long compiling every network of the zoo takes, how much memory, and how long loading it from the cache.

Memory is the largest resident set of `gangway compile`, less that of compiling a model without weights: Python, numpy,
onnx and TVM, which every job needs. Loading is the job that `gangway serve` runs for a model that the cache has: its
key, and whether everything is undamaged.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gangway.zoo import MODELS
from testing.report import Report, Row, add_repository_option, option_parser, start_report
from testing.repository import GANGWAY, ensure_zoo, onnx_file

BASELINE = "simple"
COLD_S = {"bert_large": 60.0}
OTHERS_COLD_S = 20.0
WARM_S = 1.0
MODEL_SIZES = 2.0  # of memory, at most


@dataclass(frozen=True)
class Compilation:
    """One job: how long it took, and its largest resident set."""

    seconds: float
    resident_bytes: int


def compile_once(repository: Path, model: str, cache: Path) -> Compilation:
    """Compile a model."""
    return _run([*GANGWAY, "compile", str(repository / model), "--cache-dir", str(cache)])


def load(repository: Path, model: str, cache: Path) -> Compilation:
    """Find a model in the cache."""
    command = [sys.executable, "-m", "gangway.compiler", "--json", "--cache-dir", str(cache)]
    return _run([*command, str(onnx_file(repository, model))])


def _run(command: list[str]) -> Compilation:
    """Run a job, the start of Python included. Raises CalledProcessError."""
    begin = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return Compilation(time.monotonic() - begin, usage.ru_maxrss * 1024)


def measure(repository: Path, models: Sequence[str]) -> list[Row]:
    """Compile each model into an empty cache, then load it from there."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        base_bytes = compile_once(repository, BASELINE, Path(folder)).resident_bytes
        for model in models:
            size_bytes = onnx_file(repository, model).stat().st_size
            cold = compile_once(repository, model, Path(folder) / model)
            warm = load(repository, model, Path(folder) / model)
            rows.append(
                {
                    "model": model,
                    "model MB": size_bytes / 1e6,
                    "cold s": cold.seconds,
                    "memory MB": (cold.resident_bytes - base_bytes) / 1e6,
                    "memory / model": (cold.resident_bytes - base_bytes) / size_bytes,
                    "from cache s": warm.seconds,
                }
            )
    return rows


def run(report: Report, repository: Path, models: Sequence[str]) -> None:
    """Measure and compare with what the project promises."""
    rows = measure(repository, models)
    report.table("compile", rows)
    for row in rows:
        model = str(row["model"])
        report.target(f"{model}: compile, cold, s", float(row["cold s"]), COLD_S.get(model, OTHERS_COLD_S))
        report.target(f"{model}: from cache, s", float(row["from cache s"]), WARM_S)
        if float(row["model MB"]) > 100:  # a small model is less than what compiling anything takes
            report.target(f"{model}: memory / model", float(row["memory / model"]), MODEL_SIZES)


def main() -> int:
    """Run the benchmark; return 1 when a target is missed."""
    parser = option_parser(__doc__ or "")
    add_repository_option(parser)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS), metavar="NAME")
    options = parser.parse_args()
    report = start_report("Compilation")
    run(report, ensure_zoo(options.repository, [BASELINE, *options.models]), options.models)
    return report.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
