"""perf_analyzer in a closed loop, as everybody begins: with a latency target, without one, and Triton, by turns.

So many clients each ask again when they have an answer. Triton runs onnxruntime in the best of some configurations.
"""

import argparse
import statistics
import sys
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers.triton_server import CONFIGURATIONS
from benchmarks.serving.servers import Served, serving
from testing.fetch.perf_analyzer import fetch
from testing.perf_analyzer import closed_loop, run_one
from testing.report import Report, Row, add_repository_option, option_parser, start_report
from testing.repository import ensure_profiles, ensure_zoo

TARGET, NO_TARGET = "gangway, 3x", "gangway"
LEAST_RATE, MOST_P99, MOST_P99_WITH_TARGET = 1.10, 1.2, 3.0  # times Triton's


@dataclass(frozen=True)
class Load:
    """One run. `in_time`: share of the requests with a target, NaN without one."""

    requests_per_s: float
    p50_ms: float
    p99_ms: float
    in_time: float = float("nan")


def median(loads: Sequence[Load]) -> Load:
    """Return the median of each figure."""
    return Load(*(statistics.median(getattr(one, name) for one in loads) for name in Load.__dataclass_fields__))


def start(name: str, repository: Path, model: str) -> AbstractContextManager[Served]:
    """Start one of the servers that are compared."""
    policy = name if name in CONFIGURATIONS else "gangway"
    return serving(policy, repository, {model: "3x" if name == TARGET else None})


def measure(server: Served, model: str, clients: int, seconds: float) -> Load:
    """Let perf_analyzer load a server. Raises RuntimeError when it has a problem."""
    before = qos_counts(server.metrics_url)
    found = run_one(server.url, model, "", closed_loop(clients), int(seconds * 1000))
    if found.problem:
        raise RuntimeError(f"{model}, {clients} clients: {found.problem}")
    met, missed = (after - b for after, b in zip(qos_counts(server.metrics_url), before, strict=True))
    in_time = met / (met + missed) if met + missed else float("nan")
    return Load(found.requests_per_s[0], found.p50_ms[0], found.p99_ms[0], in_time)


def qos_counts(metrics_url: str) -> tuple[float, float]:
    """Return how many requests met and missed their targets so far."""
    if not metrics_url:
        return 0.0, 0.0
    with urllib.request.urlopen(metrics_url, timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    counts = {"met": 0.0, "missed": 0.0}
    for line in lines:
        for name in counts:
            if line.startswith(f"gangway_qos_{name}_total"):
                counts[name] += float(line.rsplit(" ", 1)[1])
    return counts["met"], counts["missed"]


def run(report: Report, options: argparse.Namespace) -> None:
    """Measure all models, and compare them with Triton's best."""
    names = [TARGET, NO_TARGET, *(f"triton {one}" for one in options.triton.split(",") if one)]
    rows: list[Row] = []
    for model in options.models.split(","):
        with ExitStack() as stack:  # idle servers take no time
            servers = {name: stack.enter_context(start(name, options.repository, model)) for name in names}
            for clients in map(int, options.clients.split(",")):
                loads: dict[str, list[Load]] = {name: [] for name in names}
                for _ in range(options.rounds):
                    for name in names:
                        loads[name].append(measure(servers[name], model, clients, options.seconds))
                medians = {name: median(some) for name, some in loads.items()}
                rows += [row(model, clients, name, load) for name, load in medians.items()]
                compare(report, f"{model}, {clients} clients", medians)
    report.table("perf_analyzer, closed loop", rows)


def row(model: str, clients: int, name: str, load: Load) -> Row:
    """Return the line of a table."""
    return {
        "model": model,
        "clients": clients,
        "server": name,
        "requests/s": load.requests_per_s,
        "p50 ms": load.p50_ms,
        "p99 ms": load.p99_ms,
        "in time": load.in_time,
    }


def compare(report: Report, what: str, medians: Mapping[str, Load]) -> None:
    """Compare with the Triton of the highest throughput, and with the least p99 of all."""
    tritons = [load for name, load in medians.items() if name in CONFIGURATIONS]
    if not tritons:
        return
    rate, p99_ms = max(one.requests_per_s for one in tritons), min(one.p99_ms for one in tritons)
    for name, most in ((TARGET, MOST_P99_WITH_TARGET), (NO_TARGET, MOST_P99)):
        report.goal(f"{what}, {name}: requests/s over Triton's", medians[name].requests_per_s / rate, LEAST_RATE)
        report.target(f"{what}, {name}: p99 over Triton's", medians[name].p99_ms / p99_ms, most)


def main() -> int:
    """Run the benchmark; return 1 when a target is missed."""
    parser = option_parser(__doc__ or "")
    add_repository_option(parser)
    add = parser.add_argument
    add("--models", default="mobilenetv2,resnet50", help="of the zoo")
    add("--clients", default="1,4,8", help="at a time")
    add("--triton", default="1x2,2x1", help="instances x threads; empty: without Triton")
    add("--rounds", type=int, default=3, help="of all servers, by turns")
    add("--seconds", type=float, default=2.0, help="of a window of perf_analyzer, which takes three")
    options = parser.parse_args()
    report = start_report("Closed loops of perf_analyzer")
    fetch()
    ensure_zoo(options.repository, options.models.split(","))
    ensure_profiles(options.repository, options.models.split(","))
    run(report, options)
    return report.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
