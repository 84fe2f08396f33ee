"""What serving adds to computing: latency of one client beyond compute; CPU per request and latency beside Triton."""

import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.front_end.peers import compare
from gangway.clients.command import PHASES, ServerTimes, server_times
from gangway.clients.connection import ServerConnection
from testing.cost import run_in_rounds
from testing.fetch.perf_analyzer import BINARY
from testing.live_server import LiveServer, live_server
from testing.load import raw_channel, raw_infer
from testing.perf_analyzer import closed_loop, run_one
from testing.reference import Example, example_of
from testing.report import Report, Row
from testing.repository import onnx_file

TARGETS_MS = {"mlp": 0.6, "mobilenetv2": 1.5}  # 1x16 floats; 1x3x224x224 floats
LOADS = (("mlp", 1), ("mobilenetv2", 1), ("mlp", 16))  # model and number of clients
SLICES = 20  # of each model in each round
SLICE_REQUESTS = 20
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


def measure_slices(server: LiveServer, model: str, example: Example) -> list[Slice]:
    """Be the only client; this process is not one of the server's."""
    slices = []
    with ServerConnection(server.url, TIMEOUT_S) as connection, raw_channel(server.url) as channel:
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


def latency_row(model: str, slices: Sequence[Slice]) -> Row:
    """Return the medians over all slices."""
    phases = {phase: statistics.median(part.server.mean_ms(phase) for part in slices) for phase in PHASES}
    return {
        "model": model,
        "round trip ms": statistics.median(part.round_trip_ms for part in slices),
        **{f"{phase.replace('_', ' ')} ms": value_ms for phase, value_ms in phases.items()},
        "beyond compute ms": statistics.median(part.beyond_compute_ms for part in slices),
    }


def alone(report: Report, repository: Path, rounds: int) -> None:
    """Measure the latency of one client; the models take turns, so that all of them see the same machine."""
    examples = {model: example_of(model, onnx_file(repository, model)) for model in TARGETS_MS}
    slices: dict[str, list[Slice]] = {model: [] for model in TARGETS_MS}
    with live_server(repository) as server:
        for _ in range(rounds):
            for model, example in examples.items():
                slices[model] += measure_slices(server, model, example)
        by_perf_analyzer = [perf_analyzer_row(server.url, *case) for case in LOADS if BINARY.exists()]
    latencies = [latency_row(model, found) for model, found in slices.items()]
    report.table("one client, medians", latencies)
    if by_perf_analyzer:
        report.table("by perf_analyzer, whose client costs less than ours", by_perf_analyzer)
    for row in latencies:
        model = str(row["model"])
        report.target(f"{model}, one client: ms beyond compute", float(row["beyond compute ms"]), TARGETS_MS[model])


def perf_analyzer_row(url: str, model: str, clients: int) -> Row:
    """Measure one case with perf_analyzer."""
    return run_one(url, model, f"{clients} clients", closed_loop(clients), PERF_ANALYZER_INTERVAL_MS).row()


def run(report: Report, repository: Path, rounds: int, seconds: float) -> None:
    """Measure ours alone, then all servers beside each other."""
    alone(report, repository, rounds)
    compare(report, repository, rounds, seconds)


if __name__ == "__main__":
    sys.exit(run_in_rounds(__doc__, "Front end: what serving adds to computing", run, rounds=5))
