"""Layerweaver+'s evaluation (IEICE Transactions E105-D, 2022, section 3): pairs of streams on one accelerator.

A compute-intensive model with a target of 15 ms and a memory-intensive one with 130 ms; the highest total rate with
under 1 % of all requests late, for arrival ratios from 64:1 to 1:64. At a given ratio the paper's system throughput is
proportional to the rate, so rates over the baseline's are its normalised throughput.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.papers.npu_models import Npu, npu_model
from benchmarks.papers.simulated_npu import SCHEDULERS, Tenant, serve
from gangway.workload.arrivals import Arrivals, Floats, poisson
from gangway.workload.mix import Mix, MixModel
from gangway.workload.search import highest_rate

VISION = ("inception_v3", "mobilenetv2", "resnet50")
LANGUAGE = ("bert_base", "bert_large", "xlnet_base")
QOS_US = {**dict.fromkeys(VISION, 15_000.0), **dict.fromkeys(LANGUAGE, 130_000.0)}
GOAL = 0.99
RATE_STEP = 1.02
LARGEST_BATCH = 8  # the zoo's max_batch_size; the paper says that requests are batched, not how many


@dataclass(frozen=True)
class Pair:
    """Two streams; `ratio` is how many requests of the language model come for one of the vision model."""

    vision: str
    language: str
    ratio: float

    @property
    def mix(self) -> Mix:
        """The streams as a mix, vision first."""
        return Mix(f"{self.vision}+{self.language}", (MixModel(self.vision, 1.0), MixModel(self.language, self.ratio)))

    def tenants(self, npu: Npu) -> list[Tenant]:
        """Return the models on this accelerator, with their targets."""
        return [Tenant(npu_model(name, npu), QOS_US[name]) for name in (self.vision, self.language)]


@dataclass(frozen=True)
class Study:
    """How the pairs are examined."""

    npu: Npu = field(default_factory=Npu)
    largest_batch: int = LARGEST_BATCH
    queries: int = 1500
    seed: int = 1

    def latencies(self, scheduler: str, pair: Pair, rate_per_s: float) -> tuple[Arrivals, Floats]:
        """Return the requests and their latencies [Q] in microseconds at a total rate."""
        arrivals = poisson(pair.mix, rate_per_s, self.queries, self.seed)
        return arrivals, serve(scheduler, pair.tenants(self.npu), arrivals, self.npu, self.largest_batch)

    def sustained_per_s(self, scheduler: str, pair: Pair, start_per_s: float) -> float:
        """Return the highest total rate with under 1 % late, searched from `start_per_s`."""
        tenants = pair.tenants(self.npu)
        targets_us = [tenant.qos_us for tenant in tenants]
        allowed = math.floor(self.queries * (1 - GOAL))

        def in_time(rate_per_s: float, _attempt: int) -> float:
            arrivals = poisson(pair.mix, rate_per_s, self.queries, self.seed)
            late = allowed + 1
            latency_us = serve(scheduler, tenants, arrivals, self.npu, self.largest_batch, give_up=late)
            return satisfied(arrivals, latency_us, targets_us)

        return highest_rate(in_time, GOAL, start_per_s, RATE_STEP).rate_per_s

    def rates_per_s(self, pair: Pair) -> dict[str, float]:
        """Return each scheduler's sustained total rate, in requests per second."""
        rate = self.capacity_per_s(pair) * 0.8
        rates = {}
        for scheduler in SCHEDULERS:
            rate = rates[scheduler] = self.sustained_per_s(scheduler, pair, rate)
        return rates

    def capacity_per_s(self, pair: Pair) -> float:
        """Return the total rate of an accelerator that runs one request at a time and does not wait for arrivals."""
        times_us = [tenant.model.remaining_us(1)[0] for tenant in pair.tenants(self.npu)]
        return 1e6 / sum(share * time_us for share, time_us in zip(pair.mix.shares, times_us, strict=True))


def satisfied(arrivals: Arrivals, latency_us: Floats, targets_us: Sequence[float]) -> float:
    """Return the share of all requests that were in time."""
    late = sum(
        int((latency_us[arrivals.models == index] > target_us).sum()) for index, target_us in enumerate(targets_us)
    )
    return 1 - late / len(arrivals)
