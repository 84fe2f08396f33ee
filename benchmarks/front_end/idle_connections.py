"""What idle and stalled clients cost the server: memory and CPU of the front end, and the latency of one busy client.

Idle ones have connected and said hello. Stalled ones have each sent half a request. Both are threads of nobody else:
the latency of the client that goes on is what it was.
"""

import resource
import statistics
import struct
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from testing.live_server import LiveServer, live_server
from testing.load import raw_channel, raw_infer
from testing.processes import cpu_ns, memory_of, open_descriptors
from testing.raw_connection import RawConnection
from testing.reference import Example, example_of
from testing.report import Row, add_repository_option, option_parser, start_report
from testing.repository import ensure_zoo, onnx_file

MODEL = "mlp"
REQUESTS = 2000
TIMEOUT_S = 10
SETTLE_S = 2.0
HALF_BYTES = 60
MEMORY_KB_AT_MOST = 100.0  # of a connection
CPU_PERCENT_AT_MOST = 1.0  # of a core, all connections together
LATENCY_RATIO_AT_MOST = 1.2


@dataclass(frozen=True)
class View:
    """The front end while clients of one kind are there: bytes, descriptors, CPU share when nobody asks, latencies."""

    private_bytes: int
    descriptors: int
    idle_cpu_percent: float
    latencies_ms: Sequence[float]

    def row(self, clients: str) -> Row:
        """Return a line of the table."""
        return {
            "other clients": clients,
            "front end MB": self.private_bytes / 1e6,
            "descriptors": self.descriptors,
            "idle CPU, % of a core": self.idle_cpu_percent,
            "p50 ms": statistics.median(self.latencies_ms),
            "p99 ms": sorted(self.latencies_ms)[int(0.99 * len(self.latencies_ms))],
        }


def look(server: LiveServer, example: Example, seconds: float) -> View:
    """Be idle for some seconds, then be the only client that asks."""
    (pid,) = server.pids()["front end"]
    time.sleep(SETTLE_S)
    begin_ns, begin = cpu_ns(pid), time.monotonic()
    time.sleep(seconds)
    idle_percent = (cpu_ns(pid) - begin_ns) / (time.monotonic() - begin) / 1e7
    latencies_ms = []
    with raw_channel(server.url) as channel:
        infer = raw_infer(channel)
        for number in range(REQUESTS + 100):
            start = time.monotonic()
            infer(example.request, timeout=TIMEOUT_S)
            if number >= 100:  # the first ones warm up
                latencies_ms.append((time.monotonic() - start) * 1e3)
    return View(memory_of(pid).private_bytes, open_descriptors(pid), idle_percent, latencies_ms)


def stall(connection: RawConnection, request: bytes) -> None:
    """Send the first bytes of a request."""
    connection.send(connection.begin("ModelInfer"), (struct.pack(">BI", 0, len(request)) + request)[:HALF_BYTES])


def main() -> int:
    """Measure alone, with idle connections, with stalled calls, and alone again."""
    parser = option_parser(__doc__ or "")
    add_repository_option(parser)
    parser.add_argument("--connections", type=int, default=1000, metavar="N", help="idle ones (1000)")
    parser.add_argument("--stalled", type=int, default=200, metavar="N", help="calls half sent, one a connection (200)")
    parser.add_argument("--seconds", type=float, default=10.0, help="of looking at idle CPU (10)")
    options = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    repository = ensure_zoo(options.repository, (MODEL,))
    example = example_of(MODEL, onnx_file(repository, MODEL))
    report = start_report("idle and stalled connections")
    with live_server(repository) as server, ExitStack() as clients:
        look(server, example, 1.0)  # warm
        alone = look(server, example, options.seconds)
        for _ in range(options.connections):
            clients.enter_context(RawConnection(server.url)).read()
        idle = look(server, example, options.seconds)
        for _ in range(options.stalled):
            stall(clients.enter_context(RawConnection(server.url)), example.request)
        stalled = look(server, example, options.seconds)
        clients.close()
        after = look(server, example, options.seconds)
    views = {
        "none": alone,
        f"{options.connections} idle": idle,
        f"and {options.stalled} stalled": stalled,
        "none, afterwards": after,
    }
    report.table(f"front end; one client asks {MODEL}", [view.row(clients) for clients, view in views.items()])
    kilobytes = (idle.private_bytes - alone.private_bytes) / options.connections / 1e3
    report.target("memory of an idle connection, KB", kilobytes, MEMORY_KB_AT_MOST)
    report.target("CPU of them all, % of a core", idle.idle_cpu_percent - alone.idle_cpu_percent, CPU_PERCENT_AT_MOST)
    for what, view in (("idle", idle), ("stalled", stalled)):
        ratio = statistics.median(view.latencies_ms) / statistics.median(alone.latencies_ms)
        report.target(f"p50 beside {what} clients, over alone", ratio, LATENCY_RATIO_AT_MOST)
    return report.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
