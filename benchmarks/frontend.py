"""What serving adds to computing: latency of one client beyond compute, CPU per request, requests per second."""

import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from gangway.clients.connection import Connection
from gangway.clients.timing import ServerTimes, server_times

from benchmarks.fetch_perf_analyzer import BINARY
from benchmarks.live_server import LiveServer, live_server
from benchmarks.load import Load, LoadProcess, LoadResult, run_for
from benchmarks.perf_analyzer import closed_loop, run_one
from benchmarks.processes import cpu_ns
from benchmarks.reference import Example, example_of
from benchmarks.report import Report, Row, add_repository_option, option_parser, start_report
from benchmarks.repository import ensure_zoo, onnx_file

TARGETS_MS = {"mlp": 0.6, "mobilenetv2": 1.5}  # 1x16 floats; 1x3x224x224 floats
WARM_UP_S = 1.0
PERF_ANALYZER_INTERVAL_MS = 2000


@dataclass(frozen=True)
class Round:
    """One stretch of load: the client's view, the server's view, CPU per role of process."""

    load: LoadResult
    server: ServerTimes
    cpu_ns: dict[str, int]
    workers: int

    @property
    def round_trip_ms(self) -> float:
        """Median, seen by the client."""
        return statistics.median(self.load.latencies_ms())

    @property
    def beyond_compute_ms(self) -> float:
        """Mean round trip minus mean compute: means, since only they can be subtracted."""
        return statistics.fmean(self.load.latencies_ms()) - self.server.mean_ms("compute_infer")

    def cpu_us(self, role: str) -> float:
        """CPU microseconds per request of one role."""
        return self.cpu_ns[role] / len(self.load.outcomes) / 1000


def measure(server: LiveServer, model: str, example: Example, clients: int, seconds: float) -> Round:
    """Run a load for some time after a warm-up. Raises RuntimeError when an answer is wrong or an error."""
    load = Load(server.url, example.request, example.outputs, clients)
    with Connection(server.url, timeout_s=10) as connection:
        run_for(load, WARM_UP_S)
        with LoadProcess(load) as process:
            before, cpu_before = server_times(connection.model_statistics(model)), _cpu_by_role(server)
            time.sleep(seconds)
            cpu_after = _cpu_by_role(server)
            result = process.stop()
        after = server_times(connection.model_statistics(model))
    if bad := {outcome.result for outcome in result.outcomes} - {"right"}:
        raise RuntimeError(f"{model}: answers were {', '.join(bad)}")
    spent = {role: cpu_after[role] - cpu_before[role] for role in cpu_after}
    return Round(result, after.since(before), spent, len(server.pids()["worker"]))


def median_round(rounds: list[Round]) -> Round:
    """Return the round whose overhead is in the middle."""
    return sorted(rounds, key=lambda r: r.beyond_compute_ms)[len(rounds) // 2]


def _cpu_by_role(server: LiveServer) -> dict[str, int]:
    return {role: sum(cpu_ns(pid) for pid in pids) for role, pids in server.pids().items()}


def _row(model: str, clients: int, middle: Round) -> Row:
    return {
        "model": model,
        "clients": clients,
        "requests/s": len(middle.load.outcomes) / middle.load.elapsed_ns * 1e9,
        "round trip ms": middle.round_trip_ms,
        "compute ms": middle.server.mean_ms("compute_infer"),
        "beyond compute ms": middle.beyond_compute_ms,
    }


def _cpu_row(model: str, clients: int, middle: Round) -> Row:
    """Return CPU time per request. All workers compute at once, so compute is their number times its latency."""
    serving = {role: middle.cpu_us(role) for role in ("front end", "scheduler", "supervisor")}
    return {
        "model": model,
        "clients": clients,
        "serving": sum(serving.values()),
        **serving,
        "workers": middle.cpu_us("worker"),
        "of that compute": middle.workers * middle.server.mean_ms("compute_infer") * 1000,
        "(client)": middle.load.client_cpu_ns / len(middle.load.outcomes) / 1000,
    }


def perf_analyzer_row(url: str) -> Row:
    """Measure mlp at 16 clients with perf_analyzer."""
    return run_one(url, "mlp", "16 clients", closed_loop(16), PERF_ANALYZER_INTERVAL_MS).row()


def run(report: Report, repository: Path, rounds: int, seconds: float) -> None:
    """Measure each model with one client, and mlp with sixteen; models take turns."""
    examples = {model: example_of(model, onnx_file(repository, model)) for model in TARGETS_MS}
    cases = [("mlp", 1), ("mobilenetv2", 1), ("mlp", 16)]
    measured: dict[tuple[str, int], list[Round]] = {case: [] for case in cases}
    with live_server(repository) as server:
        for _ in range(rounds):
            for model, clients in cases:
                measured[model, clients].append(measure(server, model, examples[model], clients, seconds))
        flat_out = perf_analyzer_row(server.url) if BINARY.exists() else None
    middles = {case: median_round(found) for case, found in measured.items()}
    report.table("latency and throughput, median round", [_row(*case, middle) for case, middle in middles.items()])
    if flat_out is not None:
        report.table("throughput by perf_analyzer, whose client is cheaper than ours", [flat_out])
    report.table("CPU, microseconds per request", [_cpu_row(*case, middle) for case, middle in middles.items()])
    for model, at_most in TARGETS_MS.items():
        report.target(f"{model}, one client: ms beyond compute", middles[model, 1].beyond_compute_ms, at_most)


def main() -> int:
    """Run the benchmark; return 1 when a target is missed."""
    parser = option_parser(__doc__ or "")
    add_repository_option(parser)
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each case, taking turns")
    parser.add_argument("--seconds", type=float, default=3, help="length of a round")
    options = parser.parse_args()
    report = start_report("Front end: what serving adds to computing")
    run(report, ensure_zoo(options.repository), options.rounds, options.seconds)
    return report.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
