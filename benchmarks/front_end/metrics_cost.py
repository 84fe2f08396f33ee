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
from pathlib import Path
from urllib.request import Request, urlopen

from testing.cost import Stretch, measure_stretch, median_of
from testing.live_server import LiveServer, live_server
from testing.load import Load, run_for
from testing.processes import process_cpu_ns
from testing.reference import Example, example_of
from testing.report import Report, Row, add_repository_option, option_parser, start_report
from testing.repository import ensure_zoo, onnx_file

MODEL = "mlp"
IDLE_SCRAPES = 200
WARM_UP_S = 1.0
TIMEOUT_S = 10
LOSS_AT_MOST = 0.01  # of throughput, at one scrape a second


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


def measure(server: LiveServer, load: Load, seconds: float, per_s: float) -> tuple[Stretch, float]:
    """Run a load for some time, scraped so often; return with it the scrapes a second that there were."""
    with scraping(server.metrics_url, per_s) as sizes:
        begin_s = time.monotonic()
        stretch = measure_stretch(server.pids, load, seconds)
        return stretch, len(sizes) / (time.monotonic() - begin_s)


def load_row(per_s: float, measured: Sequence[tuple[Stretch, float]]) -> Row:
    """Return the medians."""
    stretches = [stretch for stretch, _ in measured]
    return {
        "scrapes/s wanted": per_s,
        "scrapes/s": statistics.median(scrapes_per_s for _, scrapes_per_s in measured),
        "requests/s": median_of(stretches, lambda one: one.requests_per_s),
        "p99 ms": median_of(stretches, lambda one: one.latency_ms(0.99)),
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
    found: dict[float, list[tuple[Stretch, float]]] = {0.0: [], 1.0: [], per_s: []}
    with tempfile.TemporaryDirectory() as folder, live_server(repository_of(Path(folder), zoo, models)) as server:
        load = Load(server.url, example.request, example.outputs, clients)
        run_for(load, WARM_UP_S)
        idle = idle_row(server, models)
        for _ in range(rounds):
            for rate, measured in found.items():
                measured.append(measure(server, load, seconds, rate))
    report.table("scrapes of an idle server", [idle])
    report.table(f"{MODEL}, {clients} clients", [load_row(rate, measured) for rate, measured in found.items()])
    lost = statistics.median(
        (1 - scraped.requests_per_s / without.requests_per_s) / scrapes_per_s
        for (without, _), (scraped, scrapes_per_s) in zip(found[0.0], found[per_s], strict=True)
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
