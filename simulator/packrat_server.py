"""Packrat's way to serve (2024, sections 3.7 and 3.8): one configuration <i, t, b> at a time, changed in seconds.

Requests are gathered to batches of the size that the configuration is for, fewer if fewer wait. The estimator sees the
queue's depth whenever a batch begins. When it says another size, the configuration for that is there after `change_s`;
until then batches run in the old one, `slowdown` times as long, because both are on the cores. To compare with: the
live server and the engine decide batch by batch (`scheduler/batching/`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from gangway.scheduler.batching.estimator import BatchSizeEstimator
from gangway.scheduler.batching.split import Split, split_table
from gangway.scheduler.model_profile import ModelProfile
from gangway.workload.arrivals import Floats


@dataclass(frozen=True)
class Change:
    """What a change of configuration takes. `change_s` infinite: there is none."""

    change_s: float
    slowdown: float = 1.0


class PackratServer:
    """Serves one-row requests of one model with all `cores` cores."""

    def __init__(self, profile: ModelProfile, cores: int, batch: int, most_rows: int, change: Change) -> None:
        self._profile = profile
        self._cores = cores
        self._table = split_table(profile, cores, most_rows)
        self._most_rows = most_rows
        self._change = change
        self._estimator = BatchSizeEstimator()
        self._batch = batch
        self._next_batch = batch
        self._ready_us = float("inf")  # when the next configuration is there

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
            self._reconfigure(now_us, arrived - done)
            rows = min(arrived - done, self._batch)
            now_us += self.batch_us(rows, now_us)
            latencies_us += [now_us - arrival_us for arrival_us in arrivals[done : done + rows]]
        return latencies_us

    def batch_us(self, rows: int, now_us: float = 0.0) -> float:
        """Return how long so many rows take in the present configuration."""
        changing = now_us < self._ready_us < float("inf")
        return latency_us(self._profile, self._table.best(self._cores, self._batch), rows) * (
            self._change.slowdown if changing else 1.0
        )

    def _reconfigure(self, now_us: float, depth: int) -> None:
        wanted = min(self._estimator.observe(depth), self._most_rows)
        if self._ready_us <= now_us:
            self._batch, self._ready_us = self._next_batch, float("inf")
        if wanted != self._batch and self._ready_us == float("inf"):
            self._next_batch = wanted
            self._ready_us = now_us + self._change.change_s * 1e6


def latency_us(profile: ModelProfile, split: Split, rows: int) -> float:
    """Return how long a configuration takes for at most as many rows as it is for: the first gangs have the rows."""
    gangs = split.gangs
    if len(gangs) == 1:
        return profile.rows_us(gangs[0][0], rows)
    before = accumulate((taken for _, taken in gangs), initial=0)
    used = [(cores, min(most, rows - first)) for (cores, most), first in zip(gangs, before, strict=False)]
    return max(profile.together_us(cores, taken) for cores, taken in used if taken > 0)


def mean_by_burst(latencies_us: Sequence[float], sizes: Sequence[int]) -> list[float]:
    """Return the mean latency of the requests that came together; `sizes` of the bursts, in order."""
    ends = list(accumulate(sizes))
    return [sum(latencies_us[end - size : end]) / size for size, end in zip(sizes, ends, strict=True)]
