"""Packrat's estimator of the batch size beside a decision at every dispatch, when the load steps up or climbs."""

from collections.abc import Callable, Mapping
from functools import cache
from itertools import pairwise

import numpy as np

from benchmarks.batching.queue_model import Change, Dispatcher, Packrat, PerDispatch, arrivals_at, serve
from benchmarks.batching.setup import MAX_ROWS, Setting, model_profile
from benchmarks.papers.packrat_estimator import BatchSizeEstimator
from gangway.scheduler.batching.sizes import BatchSizes, batch_sizes
from gangway.scheduler.policy_config import BATCHING
from gangway.workload.arrivals import Floats
from testing.report import Report, Row

MODELS = ("resnet50", "mobilenetv2")
QUERIES = 8000
SEED = 1
# Shares of the time, and of capacity: the most rows per second that any batch size gives.
LOADS: Mapping[str, tuple[tuple[float, float], ...]] = {
    "step": ((0.0, 0.2), (0.5, 0.2), (0.5, 0.9), (1.0, 0.9)),
    "ramp": ((0.0, 0.1), (1.0, 0.95)),
}
CHANGES = {"changes are free": Change(0.0, 1.0, 0.0), "a change takes 5 s": Change(5e6, 2.0, 10e6)}
OURS = "each dispatch"
MEAN_AT_MOST = 1.0


def run_estimator(report: Report, setting: Setting) -> None:
    """Simulate every load with the measured times of each model."""
    for model in setting.models_or(MODELS):
        sizes = batch_sizes(model_profile(setting.repository, model), len(setting.cores), MAX_ROWS)
        rows: list[Row] = []
        for load in LOADS:
            latencies_us = compare(sizes, load)
            rows += [_row(load, way, found, latencies_us[OURS]) for way, found in latencies_us.items()]
            for way in CHANGES:
                ratio = float(latencies_us[OURS].mean() / latencies_us[way].mean())
                report.target(f"estimator: {model}, {load}: mean latency over Packrat's, {way}", ratio, MEAN_AT_MOST)
        report.table(f"{model}: batch size by Packrat's estimator and at each dispatch, simulated", rows)


def compare(sizes: BatchSizes, load: str, queries: int = QUERIES) -> dict[str, Floats]:
    """Return the latencies of each way under one load. Packrat has the timeout that is best for it."""
    batch_us = cache(lambda rows: sizes.latency_us(rows) + BATCHING.gang_us)
    arrivals_us = arrivals_of(load, batch_us, queries)

    def rows_of(depth: int, rows_per_us: float) -> int:
        return sizes.next_rows(depth, rows_per_us * sizes.row_us)

    found = {OURS: serve(arrivals_us, PerDispatch(rows_of, batch_us))}
    for name, change in CHANGES.items():
        timeouts_us = (0.0, batch_us(1), batch_us(MAX_ROWS))
        ways = (serve(arrivals_us, _packrat(batch_us, timeout_us, change)) for timeout_us in timeouts_us)
        found[name] = min(ways, key=lambda latencies_us: float(latencies_us.mean()))
    return found


def _packrat(batch_us: Callable[[int], float], timeout_us: float, change: Change) -> Dispatcher:
    return Packrat(BatchSizeEstimator(), batch_us, timeout_us, change, MAX_ROWS)


def arrivals_of(load: str, batch_us: Callable[[int], float], queries: int) -> Floats:
    """Return so many arrivals, or nearly, of one of LOADS."""
    capacity_per_s = max(rows / batch_us(rows) for rows in range(1, MAX_ROWS + 1)) * 1e6
    knots = [(share, rate * capacity_per_s) for share, rate in LOADS[load]]
    mean_per_s = sum((b[0] - a[0]) * (a[1] + b[1]) / 2 for a, b in pairwise(knots))
    return arrivals_at(knots, queries / mean_per_s, SEED)


def _row(load: str, way: str, latencies_us: Floats, ours_us: Floats) -> Row:
    p50, p99 = (np.percentile(latencies_us, (50, 99)) / 1000).tolist()
    return {
        "load": load,
        "batch size": way if way == OURS else f"Packrat, {way}",
        "mean ms": float(latencies_us.mean()) / 1000,
        "p50 ms": p50,
        "p99 ms": p99,
        "ours over it": float(ours_us.mean() / latencies_us.mean()),
    }
