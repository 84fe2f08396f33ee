"""Predicted shares of requests in time on one machine: by a queueing formula, and by the simulator."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from gangway.cluster.placement import Loads
from gangway.scheduler.policies.registry import DEFAULT_POLICY, make_policy
from gangway.scheduler.profiles import ModelProfile
from gangway.simulator.loop import simulate
from gangway.simulator.machine import Machine, Overheads
from gangway.simulator.measured import MeasuredModel
from gangway.simulator.results import SimulationLimits
from gangway.simulator.scaling import scale_model
from gangway.simulator.scenario import isolated_us, level_per_demand
from gangway.workload.arrivals import poisson
from gangway.workload.mix import Mix, MixModel
from gangway.workload.outcomes import summarise
from gangway.workload.qos import Qos

REQUESTS = 200  # of one simulation
SEED = 1
LEAST_TARGET = 1.5  # times a model's latency alone: a target that cannot be met tells nothing about the load
REQUEST_US = 300.0  # of a request beside its model: front end, scheduler, client
NO_TARGET = Qos(multiple=10.0)  # what a model without a target is placed by
MOST_BUSY = 0.98  # beyond it the formula has no tail
WAITING = 100  # requests a core: then the machine is overloaded, and the rest of the simulation tells nothing new


@dataclass(frozen=True)
class PredictedModel:
    """A model as predictions need it: its times on one machine, which are scaled to others, and its target."""

    measured: MeasuredModel
    target: Qos | None = None


@dataclass(frozen=True)
class ModelTimes:
    """A model on a machine. `work_us`: CPU of a request; `alone_us`: its latency on all cores.

    `target_us`: its target, or `LEAST_TARGET` times its latency if that is more."""

    work_us: float
    alone_us: float
    target_us: float


class SimulatorPredictor:
    """A `Predictor` by the simulator and the default policy. Raises WorkloadError for a target that has no meaning."""

    def __init__(self, models: Mapping[str, PredictedModel], requests: int = REQUESTS) -> None:
        self._models = models
        self._requests = requests
        self._profile = cache(self._make_profile)
        self.times = cache(self._make_times)  # of a model on so many cores

    def work_us(self, model: str) -> float:
        """Return what a request costs on one core."""
        return self.times(model, 1).work_us

    def estimate(self, cores: int, loads: Loads) -> tuple[float, ...]:
        """Return shares in time as if all cores were one fast server (M/G/1 with an exponential tail).

        P(wait > t) = rho exp(-(1 - rho) t / r), r the mean residual time of what runs. Beyond saturation the share
        falls as 1 / rho squared, so that relief is a gain there, too.
        """
        if not loads:
            return ()
        times = [self.times(name, cores) for name, _ in loads]
        rates = [rate_per_s / 1e6 for _, rate_per_s in loads]
        shared_us = [each.work_us / cores for each in times]
        busy = math.fsum(rate * time_us for rate, time_us in zip(rates, shared_us, strict=True))
        square = math.fsum(rate * time_us * time_us for rate, time_us in zip(rates, shared_us, strict=True))
        rho = min(busy, MOST_BUSY)
        tail_us = square / busy / 2 / (1 - rho)
        served = min(1.0, MOST_BUSY / busy) ** 2
        slacks_us = (each.target_us - each.alone_us for each in times)
        return tuple(0.0 if t < 0 else served * (1 - rho * math.exp(-t / tail_us)) for t in slacks_us)

    def simulate(self, cores: int, loads: Loads) -> tuple[float, ...]:
        """Return shares in time of some hundred requests, always the same ones."""
        if not loads:
            return ()
        names = [name for name, _ in loads]
        rate_per_s = math.fsum(rate for _, rate in loads)
        mix = Mix("machine", tuple(MixModel(name, rate / rate_per_s) for name, rate in loads))
        profiles = {number: self._profile(name, cores, number) for number, name in enumerate(names)}
        arrivals = poisson(mix, rate_per_s, self._requests, SEED)
        overheads = Overheads(REQUEST_US / 2, REQUEST_US / 2)
        machine = Machine(cores, overheads, level_per_demand(cores))
        limits = SimulationLimits(
            range(self._requests), self._requests, (self._requests,) * len(names), WAITING * cores
        )
        result = simulate(make_policy(DEFAULT_POLICY), profiles, arrivals, machine, limits=limits)
        targets = {"target": [profile.qos_us for profile in profiles.values()]}
        rows = summarise(result.outcomes, targets).models
        # Of a seldom model there may be no request among them.
        total = summarise(result.outcomes, targets).total.satisfied["target"] or 0.0
        shares = (row.satisfied["target"] for row in rows)
        return tuple(total if share is None else share for share in shares)

    def _make_profile(self, name: str, cores: int, number: int) -> ModelProfile:
        return scale_model(self._models[name].measured, cores, number, self.times(name, cores).target_us)

    def _make_times(self, name: str, cores: int) -> ModelTimes:
        model = self._models[name]
        profile = scale_model(model.measured, cores, 0)
        alone_us = isolated_us(profile) + REQUEST_US
        target_us = max((model.target or NO_TARGET).resolve_us(alone_us), LEAST_TARGET * alone_us)
        return ModelTimes(profile.work_us(1) + REQUEST_US, alone_us, target_us)
