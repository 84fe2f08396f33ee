"""One policy at one rate, or at several."""

from collections.abc import Sequence
from dataclasses import dataclass

from gangway.scheduler.policies.registry import make_policies
from gangway.simulator.loop import simulate
from gangway.simulator.machine import Observer
from gangway.simulator.rates import TARGET, CountedWindow, RateEstimate, window
from gangway.simulator.results import Result
from gangway.simulator.scenario import Scenario
from gangway.workload.outcomes import Summary, summarise


@dataclass(frozen=True)
class PolicyRun:
    """What a policy did. `core_use`: share of time that the cores were held.

    `in_all`, `in_each`: the highest rates at which the goal holds for all queries, and for each model's, if they were
    searched for.
    """

    policy: str
    rate_per_s: float
    result: Result
    summary: Summary
    core_use: float
    in_all: RateEstimate | None = None
    in_each: RateEstimate | None = None
    curve: tuple["CurvePoint", ...] = ()


def run_policy(
    policy: str,
    scenario: Scenario,
    rate_per_s: float,
    queries: int,
    seed: int,
    observer: Observer | None = None,
    counts: CountedWindow | None = None,
) -> PolicyRun:
    """Simulate a policy, by its name, at a rate, or in the scenario's closed loop, which finds one.

    `counts`: which queries the summary is of, in place of `queries` that all count. Raises ValueError for a policy that
    is not known.
    """
    queries = counts.arrivals if counts else queries
    arrivals = scenario.arrivals(rate_per_s, queries, seed)
    batching = scenario.requests.batching
    result = simulate(
        make_policies(policy, scenario.machine.scheduler_nodes),
        scenario.models,
        arrivals,
        scenario.machine,
        observer,
        batching=batching,
        details=scenario.details,
    )
    outcomes = counts.of(result.outcomes) if counts else result.outcomes
    summary = summarise(outcomes, {TARGET: scenario.targets_us}, scenario.isolated_us)
    core_use = result.counters.core_busy_us / (result.end_us * scenario.machine.cores)
    rate_per_s = rate_per_s if scenario.requests.clients is None else summary.total.qps
    return PolicyRun(policy, rate_per_s, result, summary, core_use)


def run_steady(policy: str, scenario: Scenario, rate_per_s: float, queries: int, seed: int) -> PolicyRun:
    """Simulate a policy under a load that lasts, of which so many queries count at least (`rates.py`)."""
    return run_policy(policy, scenario, rate_per_s, queries, seed, counts=window(scenario, rate_per_s, queries))


@dataclass(frozen=True)
class CurvePoint:
    """The share of queries in time at a rate: of all, and of the worst model."""

    rate_per_s: float
    in_time: float
    least: float


def share_curve(
    policy: str, scenario: Scenario, rates_per_s: Sequence[float], queries: int, seed: int
) -> tuple[CurvePoint, ...]:
    """Return the share in time at each rate; 1 where no model has a target."""
    points = []
    for rate_per_s in rates_per_s:
        summary = run_steady(policy, scenario, rate_per_s, queries, seed).summary
        in_time = summary.total.satisfied[TARGET]
        points.append(CurvePoint(rate_per_s, 1.0 if in_time is None else in_time, summary.least_satisfied(TARGET)))
    return tuple(points)
