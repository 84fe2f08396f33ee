"""Packrat's way to serve (2024, section 3.7): one configuration <i, t, b> at a time, changed in seconds.

Requests are gathered to batches of the size that the configuration is for, fewer if fewer wait. While the configuration
changes batches run in the old one, `slowdown` times as long, because both are on the cores. To compare with: the live
server and the engine decide batch by batch (`scheduler/batching/`). When Packrat would change is its estimator's part
(`packrat_estimator.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean

from gangway.scheduler.batching.planner import SplitPlan, split_table
from gangway.scheduler.profiles import ModelProfile
from gangway.workload.arrivals import Floats


@dataclass(frozen=True)
class Change:
    """The configuration for `batch` rows is prepared from `begin_us` on, and used from `end_us` on."""

    batch: int
    begin_us: float
    end_us: float
    slowdown: float = 1.0


class PackratServer:
    """Serves one-row requests of one model with all `cores` cores, at first in the configuration for `batch` rows."""

    def __init__(self, profile: ModelProfile, cores: int, batch: int, change: Change | None = None) -> None:
        self._profile = profile
        self._change = change
        table = split_table(profile, cores, max(batch, change.batch if change else 1))
        self._batch, self._split = batch, table.best(cores, batch)
        self._next_split = table.best(cores, change.batch) if change else self._split

    def serve(self, times_us: Floats) -> list[float]:
        """Return each request's latency in microseconds; `times_us` ascend."""
        arrivals, now_us = times_us.tolist(), 0.0
        latencies_us: list[float] = []
        arrived = 0
        while len(latencies_us) < len(arrivals):
            done = len(latencies_us)
            now_us = max(now_us, arrivals[done])
            while arrived < len(arrivals) and arrivals[arrived] <= now_us:
                arrived += 1
            rows, time_us = self._batch_from(now_us, arrived - done)
            now_us += time_us
            latencies_us += [now_us - arrival_us for arrival_us in arrivals[done : done + rows]]
        return latencies_us

    def _batch_from(self, now_us: float, depth: int) -> tuple[int, float]:
        """Return how many of so many waiting rows go now, and how long they take."""
        change, batch, split, slowdown = self._change, self._batch, self._split, 1.0
        if change is not None and now_us >= change.end_us:
            batch, split = change.batch, self._next_split
        elif change is not None and now_us >= change.begin_us:
            slowdown = change.slowdown
        rows = min(depth, batch)
        return rows, slowdown * latency_us(self._profile, split, rows)


def latency_us(profile: ModelProfile, split: SplitPlan, rows: int) -> float:
    """Return how long a configuration takes for at most as many rows as it is for: the first gangs have the rows."""
    parts = split.parts
    if len(parts) == 1:
        return profile.rows_us(parts[0].cores, rows)
    before = accumulate((part.rows for part in parts), initial=0)
    used = [(part.cores, min(part.rows, rows - first)) for part, first in zip(parts, before, strict=False)]
    return max(profile.together_us(cores, taken) for cores, taken in used if taken > 0)


def by_burst(latencies_us: Sequence[float], sizes: Sequence[int]) -> list[tuple[float, float]]:
    """Return (mean, longest) latency of the requests that came together; `sizes` of the bursts, in order."""
    bursts = [latencies_us[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True)]
    return [(fmean(burst), max(burst)) for burst in bursts]
