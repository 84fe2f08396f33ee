"""What serving adds to computing: latency of one client beyond compute, CPU per request, requests per second."""

import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gangway.clients.connection import Connection
from gangway.clients.timing import PHASES, ServerTimes, server_times

from benchmarks.fetch_perf_analyzer import BINARY
from benchmarks.live_server import LiveServer, live_server
from benchmarks.load import Load, LoadProcess, LoadResult, raw_channel, raw_infer, run_for
from benchmarks.perf_analyzer import closed_loop, run_one
from benchmarks.processes import cpu_ns
from benchmarks.reference import Example, example_of
from benchmarks.report import Report, Row, add_repository_option, option_parser, start_report
from benchmarks.repository import ensure_zoo, onnx_file

TARGETS_MS = {"mlp": 0.6, "mobilenetv2": 1.5}  # 1x16 floats; 1x3x224x224 floats
LOADS = (("mlp", 1), ("mobilenetv2", 1), ("mlp", 16))  # model and number of clients
SLICES = 20  # of each model in each round
SLICE_REQUESTS = 20
WARM_UP_S = 0.5
PERF_ANALYZER_INTERVAL_MS = 1000
TIMEOUT_S = 10


@dataclass(frozen=True)
class Slice:
    """A few requests in a row between two looks at the statistics; means, because those can be subtracted."""

    round_trip_ms: float
    server: ServerTimes

    @property
    def beyond_compute_ms(self) -> float:
        """Round trip minus compute."""
        return self.round_trip_ms - self.server.mean_ms("compute_infer")


@dataclass(frozen=True)
class Stretch:
    """Some seconds of load: the client's view, and CPU nanoseconds by role of process."""

    load: LoadResult
    cpu_ns: dict[str, int]

    def cpu_us(self, role: str) -> float:
        """CPU microseconds per request of one role."""
        return self.cpu_ns[role] / len(self.load.outcomes) / 1000


def measure_slices(server: LiveServer, model: str, example: Example) -> list[Slice]:
    """Be the only client; this process is not one of the server's."""
    slices = []
    with Connection(server.url, TIMEOUT_S) as connection, raw_channel(server.url) as channel:
        infer = raw_infer(channel)
        for number in range(SLICES + 1):
            before = server_times(connection.model_statistics(model))
            begin_ns = time.monotonic_ns()
            for _ in range(SLICE_REQUESTS):
                infer(example.request, timeout=TIMEOUT_S)
            round_trip_ms = (time.monotonic_ns() - begin_ns) / SLICE_REQUESTS / 1e6
            spent = server_times(connection.model_statistics(model)).since(before)
            if number > 0:  # the first one warms up
                slices.append(Slice(round_trip_ms, spent))
    return slices


def measure_stretch(server: LiveServer, model: str, example: Example, clients: int, seconds: float) -> Stretch:
    """Run a load for some time after a warm-up. Raises RuntimeError when an answer is wrong or an error."""
    load = Load(server.url, example.request, example.outputs, clients)
    run_for(load, WARM_UP_S)
    with LoadProcess(load) as process:
        before = _cpu_by_role(server)
        time.sleep(seconds)
        result = process.stop()
        after = _cpu_by_role(server)
    if bad := {outcome.result for outcome in result.outcomes} - {"right"}:
        raise RuntimeError(f"{model}: answers were {', '.join(bad)}")
    return Stretch(result, {role: after[role] - before[role] for role in after})


def _cpu_by_role(server: LiveServer) -> dict[str, int]:
    return {role: sum(cpu_ns(pid) for pid in pids) for role, pids in server.pids().items()}


def latency_row(model: str, slices: Sequence[Slice]) -> Row:
    """Return the medians over all slices."""
    phases = {phase: statistics.median(part.server.mean_ms(phase) for part in slices) for phase in PHASES}
    return {
        "model": model,
        "round trip ms": statistics.median(part.round_trip_ms for part in slices),
        **{f"{phase.replace('_', ' ')} ms": value_ms for phase, value_ms in phases.items()},
        "beyond compute ms": statistics.median(part.beyond_compute_ms for part in slices),
    }


def load_row(model: str, clients: int, stretches: Sequence[Stretch]) -> Row:
    """Return the medians over the stretches. Workers' time includes compute."""
    roles = ("front end", "scheduler", "supervisor", "worker")
    cpu_us = {role: statistics.median(part.cpu_us(role) for part in stretches) for role in roles}
    client_us = [part.load.client_cpu_ns / len(part.load.outcomes) / 1000 for part in stretches]
    return {
        "model": model,
        "clients": clients,
        "requests/s": statistics.median(len(s.load.outcomes) / s.load.elapsed_ns * 1e9 for s in stretches),
        "CPU us, serving": sum(cpu_us.values()) - cpu_us["worker"],
        **cpu_us,
        "(client)": statistics.median(client_us),
    }


def run(report: Report, repository: Path, rounds: int, seconds: float) -> None:
    """Measure latency and load of every case; the cases take turns, so that all of them see the same machine."""
    examples = {model: example_of(model, onnx_file(repository, model)) for model in TARGETS_MS}
    slices: dict[str, list[Slice]] = {model: [] for model in TARGETS_MS}
    stretches: dict[tuple[str, int], list[Stretch]] = {case: [] for case in LOADS}
    with live_server(repository) as server:
        for _ in range(rounds):
            for model, example in examples.items():
                slices[model] += measure_slices(server, model, example)
            for model, clients in LOADS:
                stretches[model, clients].append(measure_stretch(server, model, examples[model], clients, seconds))
        by_perf_analyzer = [perf_analyzer_row(server.url, *case) for case in LOADS if BINARY.exists()]
    latencies = [latency_row(model, found) for model, found in slices.items()]
    report.table("one client, medians", latencies)
    report.table("load, medians, CPU microseconds per request", [load_row(*case, s) for case, s in stretches.items()])
    if by_perf_analyzer:
        report.table("the same by perf_analyzer, whose client costs less than ours", by_perf_analyzer)
    for row in latencies:
        model = str(row["model"])
        report.target(f"{model}, one client: ms beyond compute", float(row["beyond compute ms"]), TARGETS_MS[model])


def perf_analyzer_row(url: str, model: str, clients: int) -> Row:
    """Measure one case with perf_analyzer."""
    return run_one(url, model, f"{clients} clients", closed_loop(clients), PERF_ANALYZER_INTERVAL_MS).row()


def main() -> int:
    """Run the benchmark; return 1 when a target is missed."""
    parser = option_parser(__doc__ or "")
    add_repository_option(parser)
    parser.add_argument("--rounds", type=int, default=7, help="rounds of each case, taking turns")
    parser.add_argument("--seconds", type=float, default=2, help="length of each load in a round")
    options = parser.parse_args()
    report = start_report("Front end: what serving adds to computing")
    run(report, ensure_zoo(options.repository), options.rounds, options.seconds)
    return report.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
