"""What `gangway route` adds to a small call: latency and CPU, over gRPC and HTTP, direct and through it by turns.

Two servers of one core each, `simple`, one client that calls again when it has its answer.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
import tritonclient.grpc as triton
import tritonclient.http as triton_http

from testing.live_router import live_router, server_flag
from testing.live_server import live_server
from testing.processes import descendants_of, process_cpu_ns
from testing.report import Row, option_parser, start_report
from testing.repository import GANGWAY

ADDED_MS = 0.7
ROUNDS = 20


def main() -> int:
    """Run the benchmark; status 0 if every target is met, else 1."""
    parser = option_parser("latency and CPU that the router adds to a call of `simple`")
    parser.add_argument("--calls", type=int, default=200, help="in each of the rounds, by each way")
    options = parser.parse_args()
    report = start_report("the router")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        models = folder / "models"
        subprocess.run([*GANGWAY, "zoo", str(models), "simple"], check=True, stdout=subprocess.DEVNULL)
        cores = sorted(os.sched_getaffinity(0))
        servers = [stack.enter_context(live_server(models, [f"--cores={core}"])) for core in (cores[0], cores[-1])]
        flags = [server_flag(f"server{number}", server) for number, server in enumerate(servers)]
        router = stack.enter_context(live_router(folder, flags))
        rows: list[Row] = []
        for protocol, module, direct, routed in (
            ("gRPC", triton, servers[0].url, router.url),
            ("HTTP", triton_http, servers[0].http_url, router.http_url),
        ):
            inputs = [module.InferInput(name, [1, 16], "INT32") for name in ("INPUT0", "INPUT1")]
            for tensor in inputs:
                tensor.set_data_from_numpy(np.ones((1, 16), np.int32))
            clients = [stack.enter_context(module.InferenceServerClient(url)) for url in (direct, routed)]
            ways: list[Callable[[], object]] = [partial(client.infer, "simple", inputs) for client in clients]
            medians: tuple[list[float], list[float]] = ([], [])
            haproxy_s = 0.0
            for _ in range(ROUNDS):
                for way, times in zip(ways, medians, strict=True):
                    before_s = _cpu_s(router.process.pid)
                    times.append(median_ms(way, options.calls))
                    haproxy_s += _cpu_s(router.process.pid) - before_s
            added_ms = statistics.median(b - a for a, b in zip(*medians, strict=True))
            rows.append(
                {
                    "protocol": protocol,
                    "direct, ms": statistics.median(medians[0]),
                    "routed, ms": statistics.median(medians[1]),
                    "added, ms": added_ms,
                    "CPU of HAProxy a call, ms": haproxy_s * 1e3 / (ROUNDS * options.calls),
                }
            )
            report.target(f"{protocol}: added latency, ms", added_ms, ADDED_MS)
    report.table("calls", rows)
    return report.finish(options.json)


def median_ms(call: Callable[[], object], count: int) -> float:
    """Return the median time of so many calls, one after the other."""
    times = []
    for _ in range(count):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return statistics.median(times) * 1e3


def _cpu_s(pid: int) -> float:
    """Return the CPU that HAProxy, a descendant of `gangway route`, has used."""
    return sum(map(process_cpu_ns, descendants_of(pid))) / 1e9


if __name__ == "__main__":
    sys.exit(main())
