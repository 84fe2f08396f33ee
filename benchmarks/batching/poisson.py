"""Latency at half of the capacity with batching and without: waiting for company must not cost the median."""

import multiprocessing as mp
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor

import numpy as np

from benchmarks.batching.setup import TIMEOUT_S, Client, Setting, counted, with_and_without
from gangway.clients.open_loop import drive
from gangway.workload.arrivals import Floats, poisson_for
from gangway.workload.mix import Mix, MixModel
from testing.reference import Example, repeated
from testing.report import Report, Row

MODELS = ("resnet50", "mobilenetv2")
SHARE = 0.5  # of capacity
LONE_QUERIES = 20
CHUNK_S = 6.0
LEAST_CHUNKS = 2
P50_AT_MOST = 1.05
ON, OFF = "gangway", "gangway, batching off"

Send = Callable[[str, int], Floats]  # a trace, by its seed, to the server of this name; latencies in milliseconds


def run_poisson(report: Report, setting: Setting) -> None:
    """Send the same traces to a server with batching and one without, in turns."""
    rows: list[Row] = []
    with ProcessPoolExecutor(1, mp_context=mp.get_context("spawn")) as client:
        for model in setting.models_or(MODELS):
            rows += _measure(report, setting, model, client)
    report.table(f"Poisson arrivals at {SHARE:.1f} of capacity", rows)


def _measure(report: Report, setting: Setting, model: str, client: ProcessPoolExecutor) -> list[Row]:
    example = repeated(setting.example(model), 1)
    mix = Mix(model, (MixModel(model, weight=1.0),))
    with with_and_without(setting, model) as servers:
        urls: dict[str, str] = dict(zip((ON, OFF), (server.url for server in servers), strict=True))
        rate_per_s = SHARE * _capacity_per_s(urls, model, example)

        def send(name: str, seed: int) -> Floats:
            arrivals = poisson_for(mix, rate_per_s, CHUNK_S, seed)
            run = client.submit(drive, urls[name], {model: example.request}, arrivals, TIMEOUT_S).result()
            if not run.outcomes.answered.all():
                raise RuntimeError(f"{name}: not every query was answered: {run.messages}")
            return run.outcomes.latency_us / 1000

        before = {name: counted(url, model) for name, url in urls.items()}
        chunks = alternate(send, list(urls), setting.seconds)
        sizes = {name: counted(url, model).rows_per_execution(before[name]) for name, url in urls.items()}
    ratio = p50_ratio(chunks[ON], chunks[OFF])
    report.target(f"poisson: {model}: p50 over the same without batching", ratio, P50_AT_MOST)
    return [_row(model, rate_per_s, name, chunks[name], sizes[name]) for name in urls]


def alternate(
    send: Send, names: Sequence[str], seconds: float, clock: Callable[[], float] = time.monotonic
) -> dict[str, list[Floats]]:
    """Send one trace to every server, then the next one, until the time is over; return latencies by server.

    Who comes first changes from trace to trace.
    """
    chunks: dict[str, list[Floats]] = {name: [] for name in names}
    end_s, seed = clock() + seconds, 1
    while seed <= LEAST_CHUNKS or clock() < end_s:
        for name in names if seed % 2 else reversed(names):
            chunks[name].append(send(name, seed))
        seed += 1
    return chunks


def p50_ratio(ours: Sequence[Floats], theirs: Sequence[Floats]) -> float:
    """Return the median over traces of the ratio of medians."""
    return statistics.median(float(np.median(a) / np.median(b)) for a, b in zip(ours, theirs, strict=True))


def _capacity_per_s(urls: Mapping[str, str], model: str, example: Example) -> float:
    """Return 1 / what a lone query takes in the server without batching. Both have been asked then."""
    lone_ms = {}
    for name, url in urls.items():
        with Client(url, model) as client:
            client.check(example)
            lone_ms[name] = statistics.median(client.served_ms(example.request) for _ in range(LONE_QUERIES))
    return 1000 / lone_ms[OFF]


def _row(model: str, rate_per_s: float, name: str, chunks: Sequence[Floats], batch_rows: float) -> Row:
    latencies_ms = np.concatenate(chunks)
    p50, p95, p99 = np.percentile(latencies_ms, (50, 95, 99)).tolist()
    return {
        "model": model,
        "queries/s": rate_per_s,
        "server": name,
        "queries": len(latencies_ms),
        "mean ms": float(latencies_ms.mean()),
        "p50 ms": p50,
        "p95 ms": p95,
        "p99 ms": p99,
        "rows a batch": batch_rows,
    }
