"""What traces cost: requests per second and CPU per request without them, with a few, and with all of them."""

import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import tritonclient.grpc as triton

from testing.cost import Stretch, measure_stretch, median_of
from testing.live_server import LiveServer, live_server
from testing.load import Load
from testing.otlp_collector import OtlpCollector
from testing.processes import running_below
from testing.reference import Example, example_of
from testing.report import Report, Row, add_repository_option, option_parser, start_report
from testing.repository import ensure_zoo, onnx_file

MODEL = "mlp"  # the smaller the model, the larger the share
MAX_SHARE_LOST = 0.01  # of the throughput, at rate 1000


@dataclass(frozen=True)
class Case:
    """Settings of traces on one of the servers. `level` OFF: no request is traced."""

    server: str  # the mode, or "no flags"
    level: str = "OFF"
    rate: int = 1000

    def __str__(self) -> str:
        return f"{self.server}, {'off' if self.level == 'OFF' else f'rate {self.rate}'}"


CASES = (
    Case("no flags"),
    Case("triton"),
    Case("triton", "TIMESTAMPS", 1000),
    Case("triton", "TIMESTAMPS", 1),
    Case("opentelemetry"),
    Case("opentelemetry", "TIMESTAMPS", 1000),
    Case("opentelemetry", "TIMESTAMPS", 1),
)


@dataclass
class Measured:
    """All stretches of a case."""

    stretches: list[Stretch] = field(default_factory=list)

    @property
    def requests_per_s(self) -> float:
        """The median."""
        return median_of(self.stretches, lambda stretch: stretch.requests_per_s)

    def row(self, case: Case) -> Row:
        """Return medians, for the table."""
        serving = [sum(s.cpu_us(role) for role in ("front end", "scheduler", "supervisor")) for s in self.stretches]
        return {
            "traces": str(case),
            "requests/s": self.requests_per_s,
            "CPU us per request, serving": statistics.median(serving),
            "exporter": median_of(self.stretches, lambda stretch: stretch.cpu_us("exporter")),
        }


@contextmanager
def servers(repository: Path) -> Iterator[Mapping[str, LiveServer]]:
    """One server per mode. Only one is asked something at a time, so the others cost nothing."""
    with ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
        collector = stack.enter_context(OtlpCollector())
        flags = {
            "no flags": [],
            "triton": [f"--trace-config=triton,file={folder}/trace.json"],
            "opentelemetry": ["--trace-config=mode=opentelemetry", f"--trace-config=opentelemetry,url={collector.url}"],
        }
        yield {mode: stack.enter_context(live_server(repository, given)) for mode, given in flags.items()}


def pids_of(server: LiveServer) -> dict[str, list[int]]:
    """Return the processes by role, its exporter with them."""
    return {**server.pids(), "exporter": running_below(server.process.pid, "gangway.server.tracing.exporter")}


def measure(server: LiveServer, case: Case, example: Example, clients: int, seconds: float, measured: Measured) -> None:
    """Run one stretch of a case."""
    with triton.InferenceServerClient(server.url) as client:
        if case.server != "no flags":
            client.update_trace_settings(settings={"trace_level": [case.level], "trace_rate": str(case.rate)})
        load = Load(server.url, example.request, example.outputs, clients)
        measured.stretches.append(measure_stretch(lambda: pids_of(server), load, seconds))
        if case.server != "no flags":
            client.update_trace_settings(settings={"trace_level": ["OFF"]})


def run(report: Report, repository: Path, rounds: int, clients: int, seconds: float) -> None:
    """Measure every case; they take turns, so that all of them see the same machine."""
    example = example_of(MODEL, onnx_file(repository, MODEL))
    found = {case: Measured() for case in CASES}
    with servers(repository) as running:
        for _ in range(rounds):
            for case, measured in found.items():
                measure(running[case.server], case, example, clients, seconds, measured)
    report.table(f"{MODEL}, {clients} clients, medians", [measured.row(case) for case, measured in found.items()])
    for mode in ("triton", "opentelemetry"):
        off = found[Case(mode)].requests_per_s
        sampled = found[Case(mode, "TIMESTAMPS", 1000)].requests_per_s
        report.target(f"{mode}: share of requests/s lost at rate 1000", 1 - sampled / off, MAX_SHARE_LOST)


def main() -> int:
    """Run the benchmark; return 1 when a target is missed."""
    parser = option_parser(__doc__ or "")
    add_repository_option(parser)
    parser.add_argument("--rounds", type=int, default=9, help="rounds of each case, taking turns")
    parser.add_argument("--clients", type=int, default=8, help="requests under way")
    parser.add_argument("--seconds", type=float, default=2, help="length of each load in a round")
    options = parser.parse_args()
    report = start_report("what traces cost")
    run(report, ensure_zoo(options.repository), options.rounds, options.clients, options.seconds)
    return report.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
