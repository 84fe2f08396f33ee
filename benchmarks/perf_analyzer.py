"""Triton's own load generator against a running server, in every mode that people use, with no special flags."""

import csv
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.fetch_perf_analyzer import BINARY, fetch, perf_analyzer_environment
from benchmarks.live_server import live_server
from benchmarks.report import Report, Row, add_repository_option, option_parser, start_report
from benchmarks.repository import ensure_zoo

MODELS = ("mlp", "simple", "mobilenetv2")
RUN_TIMEOUT_S = 120


@dataclass(frozen=True)
class Mode:
    """How perf_analyzer generates load, and at how many levels."""

    flags: tuple[str, ...]
    levels: int = 1
    metrics: bool = False  # it scrapes those of the server, too


MODES = {
    "sync": Mode(("--sync",)),
    "async": Mode(("--async",)),
    "concurrency 1:8": Mode(("--concurrency-range", "1:8"), levels=8),
    "poisson": Mode(("--request-rate-range", "100", "--request-distribution", "poisson")),
    "stream, shared memory": Mode(("--streaming", "--async", "--shared-memory", "system")),
    "stream": Mode(("--streaming", "--async", "--concurrency-range", "8")),
    "shared memory": Mode(("--shared-memory", "system", "--concurrency-range", "8")),
    "metrics": Mode(("--async",), metrics=True),
}


def closed_loop(clients: int) -> Mode:
    """Return the mode that keeps so many requests under way."""
    return Mode(("--concurrency-range", str(clients)))


@dataclass(frozen=True)
class Result:
    """How one run ended: throughput and median latency of each level of load. `problem` is empty if all is well."""

    model: str
    mode: str
    requests_per_s: tuple[float, ...]
    p50_ms: tuple[float, ...]
    problem: str

    def row(self) -> Row:
        """Return the best throughput and the median latency of the first level."""
        return {
            "model": self.model,
            "mode": self.mode,
            "result": self.problem or "pass",
            "levels": len(self.requests_per_s),
            "best requests/s": max(self.requests_per_s, default=0.0),
            "p50 ms, first level": self.p50_ms[0] if self.p50_ms else 0.0,
        }


def run_one(
    url: str, model: str, name: str, mode: Mode, interval_ms: int, metrics_url: str = "", protocol: str = "grpc"
) -> Result:
    """Run perf_analyzer once.

    It takes three windows of `interval_ms` and asks for no more stability than that: the protocol is on trial here.
    """
    with tempfile.TemporaryDirectory() as folder:
        exported = Path(folder) / "results.csv"
        windows = ["--measurement-interval", str(interval_ms), "--stability-percentage", "999", "--max-trials", "3"]
        target = ["-m", model, "-u", url, "-i", protocol, "-f", str(exported)]
        if mode.metrics:
            target += ["--collect-metrics", "--metrics-interval", "50", "--verbose-csv"]
            target += ["--metrics-url", metrics_url.removeprefix("http://")]
        done = subprocess.run(
            [str(BINARY), *target, *mode.flags, *windows],
            env=perf_analyzer_environment(),
            check=False,
            capture_output=True,
            text=True,
            timeout=RUN_TIMEOUT_S,
        )
        levels = _read_levels(exported)
    problem = _problem(done, levels, mode.levels)
    rates = tuple(float(level["Inferences/Second"]) for level in levels)
    return Result(model, name, rates, tuple(float(level["p50 latency"]) / 1000 for level in levels), problem)


def run_all(url: str, models: Sequence[str], modes: Sequence[str], interval_ms: int, metrics_url: str) -> list[Result]:
    """Run every mode on every model, one after the other."""
    return [run_one(url, model, mode, MODES[mode], interval_ms, metrics_url) for model in models for mode in modes]


def _read_levels(exported: Path) -> list[dict[str, str]]:
    """Return a row per level of load; perf_analyzer writes them sorted by throughput, they come back sorted by load."""
    if not exported.exists():
        return []
    with exported.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row.get("Inferences/Second")]
    return sorted(rows, key=lambda row: float(next(iter(row.values()))))


def _problem(done: "subprocess.CompletedProcess[str]", levels: Sequence[dict[str, str]], expected: int) -> str:
    said = (done.stdout + done.stderr).strip().splitlines()
    if done.returncode != 0:
        return f"exit status {done.returncode}: {said[-1] if said else 'it said nothing'}"
    if complaints := [line for line in said if "error" in line.lower() or "failed" in line.lower()]:
        return complaints[0].strip()
    if len(levels) != expected or any(float(level["Inferences/Second"]) <= 0 for level in levels):
        return f"{len(levels)} levels of load instead of {expected}, or no throughput"
    return ""


def report_results(report: Report, results: Sequence[Result]) -> None:
    """Print a row for each run; the target is that none has a problem."""
    report.table("perf_analyzer over gRPC", [result.row() for result in results])
    report.target("runs with a problem", sum(bool(result.problem) for result in results), 0)


def main() -> int:
    """Run the benchmark; return 1 when a run has a problem."""
    parser = option_parser(__doc__ or "")
    add_repository_option(parser)
    parser.add_argument("--url", metavar="HOST:PORT", help="a server that runs already (default: start one)")
    parser.add_argument(
        "--metrics-url", default="localhost:8002/metrics", metavar="URL", help="of that server's metrics"
    )
    parser.add_argument("--models", nargs="+", default=list(MODELS), metavar="NAME", help="models to ask")
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=list(MODES), help="modes of perf_analyzer")
    parser.add_argument("--interval-ms", type=int, default=500, help="length of a measurement window")
    options = parser.parse_args()
    report = start_report("perf_analyzer, the real one")
    fetch()
    if options.url:
        results = run_all(options.url, options.models, options.modes, options.interval_ms, options.metrics_url)
    else:
        with live_server(ensure_zoo(options.repository)) as server:
            results = run_all(server.url, options.models, options.modes, options.interval_ms, server.metrics_url)
    report_results(report, results)
    return report.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
