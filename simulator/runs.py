"""One policy at one rate, or at the highest rate it carries."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from gangway.scheduler.policies.registry import make_policy
from gangway.simulator.loop import simulate
from gangway.simulator.machine import Observer
from gangway.simulator.results import Limits, Result
from gangway.simulator.scenario import Scenario
from gangway.workload.outcomes import Summary, summarise
from gangway.workload.search import Probe, highest_rate

TARGET = "target"
START_SHARE = 0.3  # of what all cores could do if every query ran on one
RATE_LIMITS = (START_SHARE / 100, START_SHARE * 100)  # between which is searched
WAITING_PER_CORE = 200  # more than that cannot be in time
RATE_STEP = 1.03


@dataclass(frozen=True)
class Goal:
    """`share` of all queries in time, or of each model's."""

    share: float = 0.95
    each: bool = False


ALL_QUERIES = Goal()
EACH_MODEL = Goal(each=True)
SEEDS = 5
# Quantiles of Student's t for intervals of 95 %, by the number of rates less one (Fisher and Yates, table III).
T_95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)


@dataclass(frozen=True)
class RateEstimate:
    """The highest rate at which a policy reaches a goal, for each seed; 0: at none. `probes[i]`: of seed i's search."""

    rates_per_s: tuple[float, ...]
    probes: tuple[tuple[Probe, ...], ...] = ()

    @property
    def mean_per_s(self) -> float:
        """The mean over the seeds."""
        return fmean(self.rates_per_s)

    @property
    def half_per_s(self) -> float:
        """Half of the mean's interval of 95 %; infinite for one seed."""
        count = len(self.rates_per_s)
        if count == 1:
            return math.inf
        return T_95[min(count - 2, len(T_95) - 1)] * stdev(self.rates_per_s) / math.sqrt(count)

    def __str__(self) -> str:
        """Return mean and interval in short."""
        half = f" ± {_digits(self.half_per_s, 2)}" if math.isfinite(self.half_per_s) else ""
        return f"{_digits(self.mean_per_s, 3)}{half}"

    def over(self, other: "RateEstimate") -> "RateEstimate":
        """Return the ratios to another policy's rates, seed by seed; those without a rate are left out."""
        pairs = zip(self.rates_per_s, other.rates_per_s, strict=True)
        return RateEstimate(tuple(mine / theirs for mine, theirs in pairs if theirs) or (math.inf,))


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
    policy: str, scenario: Scenario, rate_per_s: float, queries: int, seed: int, observer: Observer | None = None
) -> PolicyRun:
    """Simulate a policy, by its name, at a rate, or in the scenario's closed loop, which finds one.

    Raises ValueError for a policy that is not known.
    """
    arrivals = scenario.arrivals(rate_per_s, queries, seed)
    batching = scenario.requests.batching
    result = simulate(
        make_policy(policy, scenario.machine.node_cores),
        scenario.models,
        arrivals,
        scenario.machine,
        observer,
        batching=batching,
        in_bf16=scenario.in_bf16,
        row_bytes=scenario.row_bytes,
    )
    summary = summarise(result.outcomes, {TARGET: scenario.targets_us}, scenario.isolated_us)
    core_use = result.counters.core_busy_us / (result.end_us * scenario.machine.cores)
    rate_per_s = rate_per_s if scenario.requests.clients is None else summary.total.qps
    return PolicyRun(policy, rate_per_s, result, summary, core_use)


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
        summary = run_policy(policy, scenario, rate_per_s, queries, seed).summary
        in_time = summary.total.satisfied[TARGET]
        points.append(CurvePoint(rate_per_s, 1.0 if in_time is None else in_time, summary.least_satisfied(TARGET)))
    return tuple(points)


def estimate_rate(
    policy: str, scenario: Scenario, goal: Goal, queries: int, seeds: Sequence[int], start_per_s: float | None = None
) -> RateEstimate:
    """Search the highest rate for each seed, from the one that was found before on."""
    rates, probes = [], []
    for seed in seeds:
        rate_per_s, tried = search_rate(policy, scenario, goal, queries, seed, start_per_s)
        start_per_s = rate_per_s or start_per_s
        rates.append(rate_per_s)
        probes.append(tried)
    return RateEstimate(tuple(rates), tuple(probes))


def search_rate(
    policy: str, scenario: Scenario, goal: Goal, queries: int, seed: int, start_per_s: float | None = None
) -> tuple[float, tuple[Probe, ...]]:
    """Return the highest rate at which a policy reaches the goal (0: at none), and what was tried.

    The same seed at each rate: the same trace, stretched. `start_per_s`: what is tried first.
    """

    def measure(rate_per_s: float, _attempt: int) -> float:
        return share_in_time(policy, scenario, goal, rate_per_s, queries, seed)

    least_per_s, most_per_s = (one_core_rate(scenario) * share for share in RATE_LIMITS)
    start_per_s = start_per_s or START_SHARE * one_core_rate(scenario)
    found = highest_rate(
        measure,
        goal.share,
        start_per_s,
        RATE_STEP,
        lowest_per_s=least_per_s,
        highest_per_s=max(most_per_s, start_per_s),
    )
    return found.rate_per_s, found.probes


def share_in_time(policy: str, scenario: Scenario, goal: Goal, rate_per_s: float, queries: int, seed: int) -> float:
    """Return the share of queries in time: of all, or of the worst model. Less than the goal where it is missed.

    A simulation ends as soon as that is certain.
    """
    arrivals = scenario.arrivals(rate_per_s, queries, seed)
    late_of = [math.floor(count * (1 - goal.share)) for count in _counts(scenario, arrivals.models.tolist())]
    late = math.floor(queries * (1 - goal.share))
    limits = Limits(
        late,
        tuple(late_of) if goal.each else (queries,) * len(late_of),
        waiting=late + WAITING_PER_CORE * scenario.machine.cores,
    )
    result = simulate(
        make_policy(policy, scenario.machine.node_cores),
        scenario.models,
        arrivals,
        scenario.machine,
        limits=limits,
        batching=scenario.requests.batching,
        in_bf16=scenario.in_bf16,
        row_bytes=scenario.row_bytes,
    )
    summary = summarise(result.outcomes, {TARGET: scenario.targets_us})
    share = summary.least_satisfied(TARGET) if goal.each else summary.total.satisfied[TARGET]
    share = 1.0 if share is None else share
    return min(share, math.nextafter(goal.share, 0)) if result.gave_up else share


def _digits(value: float, count: int) -> str:
    """Return a number with so many digits that count, and no exponent."""
    return f"{float(f'{value:.{count}g}'):.10g}"


def one_core_rate(scenario: Scenario) -> float:
    """Return how many queries a second all cores would do if every query ran on one core, undisturbed."""
    pairs, rows = zip(scenario.mix.shares, scenario.models.values(), strict=True), scenario.requests.rows
    return scenario.machine.cores * 1e6 / math.fsum(share * model.rows_us(1, rows) for share, model in pairs)


def _counts(scenario: Scenario, models: list[int]) -> list[int]:
    return [models.count(index) for index in scenario.models]
