"""What the load generator costs: CPU time of the client for a call, and how it keeps time, beside grpcio's three ways.

Each way sends the same requests at the same times to the same server, in turns, each in a process of its own.
"""

import asyncio
import multiprocessing as mp
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import grpc
import numpy as np

from gangway.clients.connection import SERVICE, UNLIMITED_MESSAGES, ServerConnection
from gangway.clients.open_loop import GRPCIO, RAW, drive
from gangway.clients.perf.prepare import prepare_requests
from gangway.workload.arrivals import Arrivals
from gangway.workload.outcomes import summarise
from testing.live_server import live_server
from testing.load import raw_channel, raw_infer
from testing.report import Report, Row, add_repository_option, option_parser, start_report
from testing.repository import ensure_zoo

RATES_PER_S = {"mlp": 200.0, "mobilenetv2": 40.0}  # well below what the server carries
TIMEOUT_S = 30
THREADS = 16
METHOD = SERVICE + "ModelInfer"


@dataclass(frozen=True)
class Cost:
    """Of one run: microseconds of CPU for a call, milliseconds of latency, how late requests left."""

    cpu_us: float
    p50_ms: float
    late_p99_ms: float


Way = Callable[[str, bytes, float, int], Cost]


def ours(url: str, request: bytes, rate_per_s: float, count: int, client: str = RAW) -> Cost:
    """`gangway perf`: by default the library ngh2 on one connection, in one thread."""
    arrivals = Arrivals(np.arange(count) / rate_per_s * 1e6, np.zeros(count, dtype=np.int64))
    run = drive(url, {"model": request}, arrivals, TIMEOUT_S, client=client)
    p50_us = summarise(run.outcomes, {}).total.p50_us
    assert p50_us is not None
    return Cost(run.cpu_s / count * 1e6, p50_us / 1000, float(np.percentile(run.lag_us, 99)) / 1000)


def futures(url: str, request: bytes, rate_per_s: float, count: int) -> Cost:
    """grpcio: futures with callbacks."""
    with raw_channel(url) as channel:
        infer = raw_infer(channel)
        infer(request, timeout=TIMEOUT_S)
        schedule, left = _Schedule(rate_per_s, count), threading.Semaphore(0)

        def ended(number: int) -> None:
            schedule.end(number)
            left.release()

        for number in schedule:
            infer.future(request, timeout=TIMEOUT_S).add_done_callback(lambda call, number=number: ended(number))
        for _ in range(count):
            left.acquire()
        return schedule.cost()


def threads(url: str, request: bytes, rate_per_s: float, count: int) -> Cost:
    """grpcio: blocking calls in threads."""
    with raw_channel(url) as channel, ThreadPoolExecutor(THREADS) as pool:
        infer = raw_infer(channel)
        infer(request, timeout=TIMEOUT_S)
        schedule = _Schedule(rate_per_s, count)

        def call(number: int) -> None:
            infer(request, timeout=TIMEOUT_S)
            schedule.end(number)

        for done in [pool.submit(call, number) for number in schedule]:
            done.result()
        return schedule.cost()


def aio(url: str, request: bytes, rate_per_s: float, count: int) -> Cost:
    """grpcio: asyncio."""

    async def run() -> Cost:
        async with grpc.aio.insecure_channel(url, options=UNLIMITED_MESSAGES) as channel:
            infer = channel.unary_unary(METHOD)
            await infer(request, timeout=TIMEOUT_S)
            schedule = _Schedule(rate_per_s, count)

            async def call(number: int) -> None:
                await infer(request, timeout=TIMEOUT_S)
                schedule.end(number)

            tasks = []
            for number in range(count):
                await asyncio.sleep(max(schedule.due_s[number] - time.monotonic(), 0))
                schedule.sent_s[number] = time.monotonic()
                tasks.append(asyncio.create_task(call(number)))
            await asyncio.gather(*tasks)
            return schedule.cost()

    return asyncio.run(run())


class _Schedule:
    """When calls are due, left and ended. Iterating waits for each call's time."""

    def __init__(self, rate_per_s: float, count: int) -> None:
        self._cpu_s = time.process_time()
        begin_s = time.monotonic() + 0.02
        self.due_s = [begin_s + number / rate_per_s for number in range(count)]
        self.sent_s = [0.0] * count
        self._ended_s = [0.0] * count

    def __iter__(self) -> Iterator[int]:
        for number, due_s in enumerate(self.due_s):
            time.sleep(max(due_s - time.monotonic(), 0))
            self.sent_s[number] = time.monotonic()
            yield number

    def end(self, number: int) -> None:
        self._ended_s[number] = time.monotonic()

    def cost(self) -> Cost:
        count = len(self.due_s)
        latency_s = [ended - due for ended, due in zip(self._ended_s, self.due_s, strict=True)]
        late_s = [sent - due for sent, due in zip(self.sent_s, self.due_s, strict=True)]
        cpu_us = (time.process_time() - self._cpu_s) / count * 1e6
        return Cost(cpu_us, statistics.median(latency_s) * 1000, float(np.percentile(late_s, 99)) * 1000)


WAYS: dict[str, Way] = {
    "gangway perf": ours,
    "gangway perf --client grpcio": partial(ours, client=GRPCIO),
    "grpcio, threads": threads,
    "grpcio, asyncio": aio,
    "grpcio, futures": futures,
}


def measure(report: Report, url: str, seconds: float, repeats: int) -> None:
    """Let the ways take turns on each model; report medians over the repeats."""
    with ServerConnection(url, TIMEOUT_S) as connection:
        requests = prepare_requests(connection, list(RATES_PER_S), "random", 0)
    rows: list[Row] = []
    with mp.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:  # each run in a fresh process
        for model, rate_per_s in RATES_PER_S.items():
            costs: dict[str, list[Cost]] = {way: [] for way in WAYS}
            for _ in range(repeats):
                for way, run in WAYS.items():
                    costs[way].append(pool.apply(run, (url, requests[model], rate_per_s, int(rate_per_s * seconds))))
            rows += [_row(model, len(requests[model]), way, runs) for way, runs in costs.items()]
            own, *others = (statistics.median(cost.cpu_us for cost in runs) for runs in costs.values())
            report.target(f"CPU a call over the cheapest of grpcio's ways, {model}", own / min(others), 1.0)
    report.table("one client, evenly spaced calls", rows)


def _row(model: str, size_bytes: int, way: str, runs: Sequence[Cost]) -> Row:
    return {
        "model": model,
        "request KB": round(size_bytes / 1024),
        "client": way,
        "CPU us a call": statistics.median(cost.cpu_us for cost in runs),
        "p50 ms": statistics.median(cost.p50_ms for cost in runs),
        "late p99 ms": statistics.median(cost.late_p99_ms for cost in runs),
    }


def main() -> int:
    """Run the benchmark; return 1 when a target is missed."""
    parser = option_parser(__doc__ or "")
    add_repository_option(parser)
    parser.add_argument("--seconds", type=float, default=3, help="length of a run")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each way")
    options = parser.parse_args()
    report = start_report("the load generator's own cost")
    with live_server(ensure_zoo(options.repository, list(RATES_PER_S))) as server:
        measure(report, server.url, options.seconds, options.repeats)
    return report.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
