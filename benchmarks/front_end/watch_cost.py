"""What a watcher costs: CPU of the front end beside a light load, with and without one, by turns.

And what the scheduler has to do while somebody watches: note its decisions, and make a text of them once a second.
"""

import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from http.client import HTTPConnection
from pathlib import Path

from benchmarks.front_end.metrics_cost import MODEL, repository_of
from gangway.executor.control import ControlLayout, ControlSegment
from gangway.scheduler.observability import DecisionLog
from gangway.scheduler.policy import Query, Snapshot, Start
from testing.live_server import LiveServer, live_server
from testing.load import raw_channel, raw_infer, running
from testing.processes import process_cpu_ns
from testing.reference import example_of
from testing.report import Report, add_repository_option, option_parser, start_report
from testing.repository import ensure_zoo, onnx_file

TIMEOUT_S = 10
PAUSE_S = 0.05  # between two requests
COST_AT_MOST = 0.01  # of a core
DECISIONS_PER_S, WAITING, MODELS = 1000, 100, 20


@contextmanager
def watched(server: LiveServer, watchers: int) -> Iterator[None]:
    """Have so many clients read the stream of states."""
    over = threading.Event()
    with running([partial(_read, server, over)] * watchers, over):
        yield


def _read(server: LiveServer, over: threading.Event) -> None:
    with closing(HTTPConnection(server.http_url, timeout=TIMEOUT_S)) as connection:
        connection.request("GET", "/v2/gangway/events")
        with connection.getresponse() as response:
            while not over.is_set() and response.readline():
                pass


def cpu_share(server: LiveServer, request: bytes, seconds: float) -> float:
    """Return CPU seconds of the front end per second, while requests come one after the other."""
    (front_end,) = server.pids()["front end"]
    with raw_channel(server.url) as channel:
        infer = raw_infer(channel)
        infer(request, timeout=TIMEOUT_S)
        before, begin_ns = process_cpu_ns(front_end), time.monotonic_ns()
        while time.monotonic_ns() - begin_ns < seconds * 1e9:
            infer(request, timeout=TIMEOUT_S)
            time.sleep(PAUSE_S)
        return (process_cpu_ns(front_end) - before) / (time.monotonic_ns() - begin_ns)


def noting_share() -> float:
    """Return CPU seconds that the scheduler takes to note DECISIONS_PER_S decisions while requests wait."""
    control = ControlSegment.create(ControlLayout(2, 1, 1))
    log = DecisionLog(control.decision_block)
    control.decision_block.watch()
    now_us = time.monotonic_ns() / 1e3
    log.poll(now_us)
    waiting = [Query(number, number % MODELS, 1, now_us, now_us + 1e4) for number in range(WAITING)]
    snapshot = Snapshot(now_us, waiting, [], (0, 1), 2, {})
    starts = [
        [Start(number, 60, (0, 1), reason="earliest deadline of those that can be met")] for number in range(WAITING)
    ]
    begin_s = time.process_time()
    for number in range(DECISIONS_PER_S):
        log.add(starts[number % WAITING], snapshot)
    log.poll(now_us + 2e6)
    share = time.process_time() - begin_s
    assert control.decision_block.read()
    return share


def run(report: Report, zoo: Path, models: int, rounds: int, seconds: float) -> None:
    """Measure; the numbers of watchers take turns, so that all see the same machine."""
    request = example_of(MODEL, onnx_file(zoo, MODEL)).request
    found: dict[int, list[float]] = {0: [], 1: [], 8: []}
    with tempfile.TemporaryDirectory() as folder, live_server(repository_of(Path(folder), zoo, models)) as server:
        for _ in range(rounds):
            for watchers, shares in found.items():
                with watched(server, watchers):
                    time.sleep(1.0)  # until the first state
                    shares.append(cpu_share(server, request, seconds))
    medians = {watchers: statistics.median(shares) for watchers, shares in found.items()}
    rows = [{"watchers": watchers, "CPU ms per s": 1e3 * share} for watchers, share in medians.items()]
    report.table(f"front end with {models} models, {1 / PAUSE_S:.0f} requests/s", rows)
    added = statistics.median(one - none for none, one in zip(found[0], found[1], strict=True))
    report.target("CPU of one watcher, as a share of a core", added, COST_AT_MOST)
    noting = statistics.median(noting_share() for _ in range(rounds))
    what = f"CPU of noting {DECISIONS_PER_S} decisions a second while {WAITING} requests wait, as a share of a core"
    report.target(what, noting, COST_AT_MOST)


def main() -> int:
    """Run the benchmark; return 1 when a target is missed."""
    parser = option_parser(__doc__ or "")
    add_repository_option(parser)
    parser.add_argument("--models", type=int, default=20, help="copies of the model that are served")
    parser.add_argument("--rounds", type=int, default=5, help="rounds, each with every number of watchers")
    parser.add_argument("--seconds", type=float, default=6, help="length of each measurement")
    options = parser.parse_args()
    report = start_report("Watching: what a watcher costs")
    run(report, ensure_zoo(options.repository), options.models, options.rounds, options.seconds)
    return report.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
