"""One policy at one rate, or at the highest rate it carries."""

import math
from dataclasses import dataclass

from gangway.scheduler.policies.registry import make_policy
from gangway.simulator.loop import simulate
from gangway.simulator.machine import Observer
from gangway.simulator.results import Limits, Result
from gangway.simulator.scenario import Scenario
from gangway.workload.outcomes import Summary, summarise
from gangway.workload.search import Probe, highest_rate

TARGET = "target"
START_SHARE = 0.3  # of what all cores could do if every query ran on one
WAITING_PER_CORE = 200  # more than that cannot be in time
RATE_STEP = 1.02


@dataclass(frozen=True)
class Goal:
    """`share` of all queries in time, or of each model's."""

    share: float = 0.95
    each: bool = False


@dataclass(frozen=True)
class PolicyRun:
    """What a policy did. `probes`: of the search that found the rate, if there was one. `core_use`: share of time."""

    policy: str
    rate_per_s: float
    result: Result
    summary: Summary
    core_use: float
    probes: tuple[Probe, ...] = ()


def run_policy(
    policy: str, scenario: Scenario, rate_per_s: float, queries: int, seed: int, observer: Observer | None = None
) -> PolicyRun:
    """Simulate a policy, by its name, at a rate, or in the scenario's closed loop, which finds one.

    Raises ValueError for a policy that is not known.
    """
    arrivals = scenario.arrivals(rate_per_s, queries, seed)
    batching = scenario.requests.batching
    result = simulate(make_policy(policy), scenario.models, arrivals, scenario.machine, observer, batching=batching)
    summary = summarise(result.outcomes, {TARGET: scenario.targets_us}, scenario.isolated_us)
    core_use = result.counters.core_busy_us / (result.end_us * scenario.machine.cores)
    rate_per_s = rate_per_s if scenario.requests.clients is None else summary.total.qps
    return PolicyRun(policy, rate_per_s, result, summary, core_use)


def search_rate(
    policy: str, scenario: Scenario, goal: Goal, queries: int, seed: int
) -> tuple[float, tuple[Probe, ...]]:
    """Return the highest rate at which a policy reaches the goal (0: at none), and what was tried.

    The same seed at each rate: the same trace, stretched.
    """
    targets = {TARGET: scenario.targets_us}

    def measure(rate_per_s: float, _attempt: int) -> float:
        arrivals = scenario.arrivals(rate_per_s, queries, seed)
        late_of = [math.floor(count * (1 - goal.share)) for count in _counts(scenario, arrivals.models.tolist())]
        late = math.floor(queries * (1 - goal.share))
        limits = Limits(
            late,
            tuple(late_of) if goal.each else (queries,) * len(late_of),
            waiting=late + WAITING_PER_CORE * scenario.machine.cores,
        )
        batching = scenario.requests.batching
        result = simulate(
            make_policy(policy), scenario.models, arrivals, scenario.machine, limits=limits, batching=batching
        )
        summary = summarise(result.outcomes, targets)
        share = summary.least_satisfied(TARGET) if goal.each else summary.total.satisfied[TARGET]
        share = 1.0 if share is None else share
        return min(share, math.nextafter(goal.share, 0)) if result.gave_up else share

    found = highest_rate(measure, goal.share, START_SHARE * one_core_rate(scenario), RATE_STEP)
    return found.rate_per_s, found.probes


def one_core_rate(scenario: Scenario) -> float:
    """Return how many queries a second all cores would do if every query ran on one core, undisturbed."""
    pairs, rows = zip(scenario.mix.shares, scenario.models.values(), strict=True), scenario.requests.rows
    return scenario.machine.cores * 1e6 / math.fsum(share * model.rows_us(1, rows) for share, model in pairs)


def _counts(scenario: Scenario, models: list[int]) -> list[int]:
    return [models.count(index) for index in scenario.models]
