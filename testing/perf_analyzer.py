"""Triton's perf_analyzer: how it is made to generate load, in the ways that people use most, and what it reports."""

import csv
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from testing.fetch.perf_analyzer import BINARY, perf_analyzer_environment
from testing.report import Row

GRPC, HTTP = "grpc", "http"
RUN_TIMEOUT_S = 120


@dataclass(frozen=True)
class Mode:
    """How perf_analyzer generates load, and at how many levels; it `searches`: as many as it likes."""

    flags: tuple[str, ...]
    levels: int = 1
    metrics: bool = False  # it scrapes those of the server, too
    searches: bool = False


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
    """How one run ended: throughput and latency of each level of load. `problem` is empty if all is well."""

    model: str
    mode: str
    requests_per_s: tuple[float, ...]
    p50_ms: tuple[float, ...]
    p99_ms: tuple[float, ...]
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
    url: str,
    model: str,
    name: str,
    mode: Mode,
    interval_ms: int,
    metrics_url: str = "",
    protocol: str = GRPC,
    program: Path = BINARY,
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
            [str(program), *target, *mode.flags, *windows],
            env=perf_analyzer_environment() if program == BINARY else None,
            check=False,
            capture_output=True,
            text=True,
            timeout=RUN_TIMEOUT_S,
        )
        levels = _read_levels(exported)
    problem = _problem(done, levels, mode)
    rates = tuple(float(level["Inferences/Second"]) for level in levels)
    p50_ms, p99_ms = (tuple(float(level[f"p{p} latency"]) / 1000 for level in levels) for p in (50, 99))
    return Result(model, name, rates, p50_ms, p99_ms, problem)


def _read_levels(exported: Path) -> list[dict[str, str]]:
    """Return a row per level of load; perf_analyzer writes them sorted by throughput, they come back sorted by load."""
    if not exported.exists():
        return []
    with exported.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row.get("Inferences/Second")]
    return sorted(rows, key=lambda row: float(next(iter(row.values()))))


def _problem(done: "subprocess.CompletedProcess[str]", levels: Sequence[dict[str, str]], mode: Mode) -> str:
    said = (done.stdout + done.stderr).strip().splitlines()
    if done.returncode != 0:
        return f"exit status {done.returncode}: {said[-1] if said else 'it said nothing'}"
    if complaints := [line for line in said if "error" in line.lower() or "failed" in line.lower()]:
        return complaints[0].strip()
    enough = len(levels) > 0 if mode.searches else len(levels) == mode.levels
    if not enough or any(float(level["Inferences/Second"]) <= 0 for level in levels):
        return f"{len(levels)} levels of load instead of {mode.levels}, or no throughput"
    return ""
