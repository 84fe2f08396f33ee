"""What watching a server costs: scrapes of its metrics, watchers of its state, and traces, beside none of them.

All cases take turns. A busy server shows what throughput is lost; a light load what processor time is added. Scrapes
come many times a second, since what one a second takes drowns in the machine's noise: costs are divided by the rate.
"""

import statistics
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from urllib.request import Request, urlopen

import tritonclient.grpc as triton

from testing.cost import Stretch, measure_stretch, median_of
from testing.live_server import LiveServer, live_server
from testing.load import Load, running
from testing.otlp_collector import OtlpCollector
from testing.processes import running_below
from testing.reference import example_of
from testing.report import Report, Row, add_repository_option, option_parser, start_report
from testing.repository import ensure_zoo, onnx_file

MODEL, COPIES = "mlp", 20  # the smaller the model, the larger the share
BUSY_CLIENTS, LIGHT_PAUSE_S = 8, 0.05
SERVING = ("front end", "scheduler", "supervisor")
SCRAPES_PER_S = 10
TIMEOUT_S = 10
COST_AT_MOST = 0.01  # of throughput, or of a core


@dataclass(frozen=True)
class Case:
    """Who watches: scrapes a second, watchers, or traces of one of `trace_rate` requests, on the server of a mode."""

    server: str = "no flags"
    scrapes_per_s: int = 0
    watchers: int = 0
    trace_rate: int = 0  # 0: none

    def __str__(self) -> str:
        if self.scrapes_per_s or self.watchers:
            return f"{self.scrapes_per_s} scrapes/s" if self.scrapes_per_s else f"{self.watchers} watchers"
        return f"{self.server}, {f'rate {self.trace_rate}' if self.trace_rate else 'nobody watches'}"


NOBODY, SCRAPED, WATCHED = Case(), Case(scrapes_per_s=SCRAPES_PER_S), Case(watchers=1)
MODES = ("triton", "opentelemetry")
CASES = (
    NOBODY,
    SCRAPED,
    WATCHED,
    Case(watchers=8),
    *(Case(mode, trace_rate=n) for mode in MODES for n in (0, 1000, 1)),
)


@dataclass
class Measured:
    """All stretches of a case: of a busy server, and beside a light load."""

    busy: list[Stretch] = field(default_factory=list)
    light: list[Stretch] = field(default_factory=list)

    @property
    def requests_per_s(self) -> float:
        """The busy server's, median."""
        return median_of(self.busy, lambda one: one.requests_per_s)

    def row(self, case: Case) -> Row:
        """Return medians, for the table."""
        return {
            "case": str(case),
            "requests/s": self.requests_per_s,
            "p99 ms": median_of(self.busy, lambda one: one.latency_ms(0.99)),
            "CPU us per request": median_of(self.busy, lambda one: sum(map(one.cpu_us, SERVING))),
            "exporter": median_of(self.busy, lambda one: one.cpu_us("exporter")),
            "light load: CPU ms per s of the front end": 1e3 * statistics.median(map(front_end_share, self.light)),
        }


def front_end_share(stretch: Stretch) -> float:
    """Return the front end's CPU seconds per second."""
    return stretch.cpu_ns["front end"] / stretch.elapsed_ns


def scrape(url: str, over: threading.Event, per_s: int) -> None:
    """Ask as Prometheus does, so many times a second."""
    while not over.wait(1 / per_s):
        with urlopen(Request(url, headers={"Accept-Encoding": "gzip"}), timeout=TIMEOUT_S) as response:
            response.read()


def watch(url: str, over: threading.Event) -> None:
    """Read the stream of states."""
    with closing(HTTPConnection(url, timeout=TIMEOUT_S)) as connection:
        connection.request("GET", "/v2/gangway/events")
        with connection.getresponse() as response:
            while not over.is_set() and response.readline():
                pass


@contextmanager
def watched(server: LiveServer, case: Case) -> Iterator[None]:
    """Watch a server as a case says while the block lasts."""
    over = threading.Event()
    loops: list[Callable[[], None]] = [partial(watch, server.http_url, over)] * case.watchers
    if case.scrapes_per_s:
        loops.append(partial(scrape, server.metrics_url, over, case.scrapes_per_s))
    with triton.InferenceServerClient(server.url) as client, running(loops, over):
        if case.trace_rate:
            client.update_trace_settings(settings={"trace_level": ["TIMESTAMPS"], "trace_rate": str(case.trace_rate)})
        yield
        if case.trace_rate:
            client.update_trace_settings(settings={"trace_level": ["OFF"]})


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
    """Return the processes by role, the exporter of traces with them."""
    return {**server.pids(), "exporter": running_below(server.process.pid, "gangway.server.tracing.exporter")}


def repository_of(folder: Path, zoo: Path) -> Path:
    """Make a repository with copies of the model, the first of its own name."""
    for number in range(COPIES):
        copy = folder / (f"{MODEL}_{number}" if number else MODEL)
        copy.mkdir()
        (copy / "1").symlink_to((zoo / MODEL / "1").resolve())
    return folder


def report_costs(report: Report, found: Mapping[Case, Measured]) -> None:
    """Add what scrapes, watchers and traces take, each beside what there is without them in the same round."""

    def lost(case: Case, without: Case) -> float:
        pairs: Sequence[tuple[Stretch, Stretch]] = list(zip(found[case].busy, found[without].busy, strict=True))
        return statistics.median(1 - one.requests_per_s / other.requests_per_s for one, other in pairs)

    def added(case: Case) -> float:
        pairs = zip(found[case].light, found[NOBODY].light, strict=True)
        return statistics.median(front_end_share(one) - front_end_share(other) for one, other in pairs)

    report.target("throughput lost at one scrape a second", lost(SCRAPED, NOBODY) / SCRAPES_PER_S, COST_AT_MOST)
    report.target("CPU of one scrape, as a share of a second", added(SCRAPED) / SCRAPES_PER_S, COST_AT_MOST)
    report.target("CPU of one watcher, as a share of a core", added(WATCHED), COST_AT_MOST)
    for mode in MODES:
        what = f"{mode}: throughput lost at trace rate 1000"
        report.target(what, lost(Case(mode, trace_rate=1000), Case(mode)), COST_AT_MOST)


def main() -> int:
    """Run the benchmark; return 1 when a target is missed."""
    parser = option_parser(__doc__ or "")
    add_repository_option(parser)
    parser.add_argument("--rounds", type=int, default=7, help="rounds of each case, taking turns")
    parser.add_argument("--seconds", type=float, default=2, help="length of each load in a round")
    options = parser.parse_args()
    report = start_report("what watching a server costs")
    zoo = ensure_zoo(options.repository)
    example = example_of(MODEL, onnx_file(zoo, MODEL))
    found = {case: Measured() for case in CASES}
    with tempfile.TemporaryDirectory() as folder, servers(repository_of(Path(folder), zoo)) as live:
        for _ in range(options.rounds):
            for case, measured in found.items():
                server = live[case.server]
                busy = Load(server.url, example.request, example.outputs, BUSY_CLIENTS)
                light = Load(server.url, example.request, example.outputs, 1, pause_s=LIGHT_PAUSE_S)
                with watched(server, case):
                    for load, stretches in ((busy, measured.busy), (light, measured.light)):
                        stretches.append(measure_stretch(partial(pids_of, server), load, options.seconds))
    rows = [measured.row(case) for case, measured in found.items()]
    report.table(f"{COPIES} copies of {MODEL}, {BUSY_CLIENTS} clients, medians", rows)
    report_costs(report, found)
    return report.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
