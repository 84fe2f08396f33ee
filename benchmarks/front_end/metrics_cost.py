"""What metrics cost: processor time of a scrape, and throughput and latency of a busy server while it is scraped.

The scraper asks many times a second, since what one scrape a second takes away drowns in the noise of the machine; the
loss is divided by the rate.
"""

import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.request import Request, urlopen

from testing.live_server import LiveServer, live_server
from testing.load import Load, LoadProcess, run_for
from testing.processes import process_cpu_ns
from testing.reference import Example, example_of
from testing.report import Report, Row, add_repository_option, option_parser, start_report
from testing.repository import ensure_zoo, onnx_file

MODEL = "mlp"
IDLE_SCRAPES = 200
WARM_UP_S = 1.0
TIMEOUT_S = 10
LOSS_AT_MOST = 0.01  # of throughput, at one scrape a second


@dataclass(frozen=True)
class Stretch:
    """Some seconds of load: answers per second, and the latency that 99 of 100 do not exceed."""

    requests_per_s: float
    p99_ms: float
    scrapes: int


def scrape(url: str) -> bytes:
    """Ask as Prometheus does; return the text, which is compressed."""
    with urlopen(Request(url, headers={"Accept-Encoding": "gzip"}), timeout=TIMEOUT_S) as response:
        body: bytes = response.read()
        return body


def idle_row(server: LiveServer, models: int) -> Row:
    """Scrape a server that does nothing else."""
    (front_end,) = server.pids()["front end"]
    size = len(scrape(server.metrics_url))
    cpu, begin_ns = process_cpu_ns(front_end), time.monotonic_ns()
    durations_ms = []
    for _ in range(IDLE_SCRAPES):
        start_ns = time.monotonic_ns()
        scrape(server.metrics_url)
        durations_ms.append((time.monotonic_ns() - start_ns) / 1e6)
    elapsed_ms = (time.monotonic_ns() - begin_ns) / 1e6
    return {
        "models": models,
        "compressed bytes": size,
        "scrape ms, median": statistics.median(durations_ms),
        "CPU ms per scrape": (process_cpu_ns(front_end) - cpu) / 1e6 / IDLE_SCRAPES,
        "scrapes/s": IDLE_SCRAPES / elapsed_ms * 1e3,
    }


@contextmanager
def scraping(url: str, per_s: float) -> Iterator[list[int]]:
    """Scrape so often while the block lasts; collects the sizes."""
    sizes: list[int] = []
    over = threading.Event()

    def loop() -> None:
        while per_s and not over.wait(1 / per_s):
            sizes.append(len(scrape(url)))

    thread = threading.Thread(target=loop)
    thread.start()
    try:
        yield sizes
    finally:
        over.set()
        thread.join()


def measure(server: LiveServer, load: Load, seconds: float, per_s: float) -> Stretch:
    """Run a load for some time, scraped so often. Raises RuntimeError when an answer is wrong or an error."""
    with LoadProcess(load) as process, scraping(server.metrics_url, per_s) as sizes:
        time.sleep(seconds)
        result = process.stop()
    if bad := {outcome.result for outcome in result.outcomes} - {"right"}:
        raise RuntimeError(f"answers were {', '.join(bad)}")
    latencies = sorted(result.latencies_ms())
    rate = len(result.outcomes) / result.elapsed_ns * 1e9
    return Stretch(rate, latencies[len(latencies) * 99 // 100], len(sizes))


def load_row(per_s: float, stretches: Sequence[Stretch]) -> Row:
    """Return the medians."""
    return {
        "scrapes/s wanted": per_s,
        "scrapes": sum(stretch.scrapes for stretch in stretches),
        "requests/s": statistics.median(stretch.requests_per_s for stretch in stretches),
        "p99 ms": statistics.median(stretch.p99_ms for stretch in stretches),
    }


def repository_of(folder: Path, zoo: Path, models: int) -> Path:
    """Make a repository with so many copies of the model, the first of its own name."""
    for number in range(models):
        copy = folder / (f"{MODEL}_{number}" if number else MODEL)
        copy.mkdir()
        (copy / "1").symlink_to((zoo / MODEL / "1").resolve())
    return folder


def run(report: Report, zoo: Path, models: int, rounds: int, seconds: float, per_s: float, clients: int) -> None:
    """Measure; loads with and without scrapes take turns, so that both see the same machine."""
    example: Example = example_of(MODEL, onnx_file(zoo, MODEL))
    found: dict[float, list[Stretch]] = {0.0: [], 1.0: [], per_s: []}
    with tempfile.TemporaryDirectory() as folder, live_server(repository_of(Path(folder), zoo, models)) as server:
        load = Load(server.url, example.request, example.outputs, clients)
        run_for(load, WARM_UP_S)
        idle = idle_row(server, models)
        for _ in range(rounds):
            for rate, stretches in found.items():
                stretches.append(measure(server, load, seconds, rate))
    report.table("scrapes of an idle server", [idle])
    report.table(f"{MODEL}, {clients} clients", [load_row(rate, stretches) for rate, stretches in found.items()])
    pairs = zip(found[0.0], found[per_s], strict=True)
    lost = statistics.median(
        (without.requests_per_s - scraped.requests_per_s) / without.requests_per_s / (scraped.scrapes / seconds)
        for without, scraped in pairs
    )
    report.target("share of throughput lost at one scrape a second", lost, LOSS_AT_MOST)
    report.target("CPU of one scrape, as a share of a second", float(idle["CPU ms per scrape"]) / 1e3, LOSS_AT_MOST)


def main() -> int:
    """Run the benchmark; return 1 when a target is missed."""
    parser = option_parser(__doc__ or "")
    add_repository_option(parser)
    parser.add_argument("--models", type=int, default=20, help="copies of the model that are served")
    parser.add_argument("--rounds", type=int, default=7, help="rounds of each load, taking turns")
    parser.add_argument("--seconds", type=float, default=2, help="length of each load in a round")
    parser.add_argument("--per-second", type=float, default=10, help="scrapes per second")
    parser.add_argument("--clients", type=int, default=16, help="requests under way at once")
    options = parser.parse_args()
    report = start_report("Metrics: what a scrape costs")
    zoo = ensure_zoo(options.repository)
    run(report, zoo, options.models, options.rounds, options.seconds, options.per_second, options.clients)
    return report.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
