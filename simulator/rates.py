"""The highest rate that a policy carries: which requests of a run count, what bounds it, and how it is searched.

A rate is claimed for a load that lasts. A burst is carried at any rate, by cores that are idle before and after it. So:

- A run warms up, counts, and drains. At least QUERIES requests count, and they arrive for LASTING longest targets at
  least. Requests go on arriving while those that count are under way.
- No rate exceeds the capacity bound: what all cores could do if each query took its least core time.
- Several seeds have an interval, and say what the search tried.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from statistics import fmean, stdev

from gangway.scheduler.policies.registry import make_policies
from gangway.scheduler.profiles import ModelProfile
from gangway.simulator.loop import simulate
from gangway.simulator.results import SimulationLimits
from gangway.simulator.scenario import Scenario
from gangway.workload.outcomes import Outcomes, summarise
from gangway.workload.search import Measure, Probe, SearchResult, highest_rate

TARGET = "target"
QUERIES = 2000  # that count, at least
LASTING = 20  # longest targets that they arrive for, at least
WARM_UP, DRAIN = 5, 2  # longest targets before and after
START_SHARE = 0.3  # of what all cores could do if every query ran on one
LEAST_SHARE = START_SHARE / 100  # of the same: no lower rate is searched
WAITING_PER_CORE = 200  # more than that cannot be in time
RATE_STEP = 1.03
SEEDS = 5
# Quantiles of Student's t for intervals of 95 %, by the number of rates less one (Fisher and Yates, table III).
T_95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)


@dataclass(frozen=True)
class RateGoal:
    """`share` of all queries in time, or of each model's."""

    share: float = 0.95
    each: bool = False


@dataclass(frozen=True)
class CountedWindow:
    """Which of a run's `arrivals` requests count, by their number in the order of arrival."""

    counted: range
    arrivals: int

    def of(self, outcomes: Outcomes) -> Outcomes:
        """Return what became of those that count."""
        return outcomes.between(self.counted.start, self.counted.stop)


def window(scenario: Scenario, rate_per_s: float, queries: int = QUERIES) -> CountedWindow:
    """Return the window of a run at a rate, of which so many requests count at least."""
    longest_s = max((target for target in scenario.targets_us if target), default=0.0) / 1e6
    first = math.ceil(WARM_UP * longest_s * rate_per_s)
    end = first + max(queries, math.ceil(LASTING * longest_s * rate_per_s))
    return CountedWindow(range(first, end), end + math.ceil(DRAIN * longest_s * rate_per_s))


@dataclass(frozen=True)
class RateEstimate:
    """The highest rate at which a policy reaches a goal, for each seed; 0: at none.

    `searches[i]`: of seed i. Empty where rates come from elsewhere.
    """

    rates_per_s: tuple[float, ...]
    searches: tuple[SearchResult, ...] = ()

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

    @property
    def probes(self) -> tuple[tuple[Probe, ...], ...]:
        """What each search tried."""
        return tuple(search.probes for search in self.searches)

    @property
    def limited(self) -> int:
        """How many searches ended at the capacity bound: there the load is too easy to tell policies apart."""
        return sum(search.limited for search in self.searches)

    def __str__(self) -> str:
        """Return mean and interval in short."""
        half = f" ± {_digits(self.half_per_s, 2)}" if math.isfinite(self.half_per_s) else ""
        return f"{_digits(self.mean_per_s, 3)}{half}"

    def over(self, other: "RateEstimate") -> "RateEstimate":
        """Return the ratios to another policy's rates, seed by seed; those without a rate are left out."""
        pairs = zip(self.rates_per_s, other.rates_per_s, strict=True)
        return RateEstimate(tuple(mine / theirs for mine, theirs in pairs if theirs) or (math.inf,))


def estimate_rate(
    policy: str,
    scenario: Scenario,
    goal: RateGoal,
    queries: int,
    seeds: Sequence[int],
    start_per_s: float | None = None,
) -> RateEstimate:
    """Search the highest rate for each seed, from the one that was found before on."""
    searches = []
    for seed in seeds:
        found = search_rate(policy, scenario, goal, queries, seed, start_per_s)
        start_per_s = found.rate_per_s or start_per_s
        searches.append(found)
    return _estimate(searches)


def _estimate(searches: Sequence[SearchResult]) -> RateEstimate:
    return RateEstimate(tuple(found.rate_per_s for found in searches), tuple(searches))


def estimate_both(
    policy: str, scenario: Scenario, share: float, queries: int, seeds: Sequence[int]
) -> tuple[RateEstimate, RateEstimate]:
    """Search the highest rates at which such a share is in time: of all queries, and of each model's.

    Both searches of a seed share their runs: what misses the first goal misses the second one, too.
    """
    searches: list[tuple[SearchResult, SearchResult]] = []
    start_per_s = None
    for seed in seeds:
        searches.append(search_both(policy, scenario, share, queries, seed, start_per_s))
        start_per_s = searches[-1][0].rate_per_s or start_per_s
    in_all, in_each = zip(*searches, strict=True)
    return _estimate(in_all), _estimate(in_each)


def search_both(
    policy: str, scenario: Scenario, share: float, queries: int, seed: int, start_per_s: float | None = None
) -> tuple[SearchResult, SearchResult]:
    """Search the highest rates at which such a share is in time: of all queries, and of each model's."""
    shares = cache(partial(shares_in_time, policy, scenario, RateGoal(share), queries=queries, seed=seed))

    def of_all(rate_per_s: float, _attempt: int) -> float:
        return shares(rate_per_s).of_all

    def of_each(rate_per_s: float, _attempt: int) -> float:
        return shares(rate_per_s).of_each

    return _search(scenario, share, of_all, start_per_s), _search(scenario, share, of_each, start_per_s)


def search_rate(
    policy: str, scenario: Scenario, goal: RateGoal, queries: int, seed: int, start_per_s: float | None = None
) -> SearchResult:
    """Search the highest rate at which a policy reaches the goal, up to the capacity bound.

    The same seed at each rate: the same trace, stretched. `start_per_s`: what is tried first.
    """

    def measure(rate_per_s: float, _attempt: int) -> float:
        return share_in_time(policy, scenario, goal, rate_per_s, queries, seed)

    return _search(scenario, goal.share, measure, start_per_s)


def _search(scenario: Scenario, share: float, measure: Measure, start_per_s: float | None) -> SearchResult:
    usual_per_s, highest_per_s = one_core_rate(scenario), capacity_bound(scenario)
    start_per_s = min(start_per_s or START_SHARE * usual_per_s, highest_per_s)
    lowest_per_s = min(LEAST_SHARE * usual_per_s, start_per_s)
    return highest_rate(measure, share, start_per_s, RATE_STEP, lowest_per_s=lowest_per_s, highest_per_s=highest_per_s)


@dataclass(frozen=True)
class SharesInTime:
    """The shares of counted queries in time: of all, and of the worst model."""

    of_all: float
    of_each: float


def share_in_time(policy: str, scenario: Scenario, goal: RateGoal, rate_per_s: float, queries: int, seed: int) -> float:
    """Return the share of counted queries in time that the goal is about. Less than a goal that is missed."""
    shares = shares_in_time(policy, scenario, goal, rate_per_s, queries, seed)
    return shares.of_each if goal.each else shares.of_all


def shares_in_time(
    policy: str, scenario: Scenario, goal: RateGoal, rate_per_s: float, queries: int, seed: int
) -> SharesInTime:
    """Return the shares of counted queries in time. A simulation ends as soon as it is certain that a goal is missed.

    Then both shares are less than the goal.
    """
    counts = window(scenario, rate_per_s, queries)
    arrivals = scenario.arrivals(rate_per_s, counts.arrivals, seed)
    models = arrivals.models[counts.counted.start : counts.counted.stop].tolist()
    late = math.floor(len(counts.counted) * (1 - goal.share))
    late_of = [math.floor(models.count(index) * (1 - goal.share)) for index in scenario.models]
    limits = SimulationLimits(
        counts.counted,
        late,
        tuple(late_of) if goal.each else (len(models),) * len(late_of),
        waiting=late + WAITING_PER_CORE * scenario.machine.cores,
    )
    result = simulate(
        make_policies(policy, scenario.machine.scheduler_nodes),
        scenario.models,
        arrivals,
        scenario.machine,
        limits=limits,
        batching=scenario.requests.batching,
        details=scenario.details,
    )
    summary = summarise(counts.of(result.outcomes), {TARGET: scenario.targets_us})
    in_time = summary.total.satisfied[TARGET]
    most = math.nextafter(goal.share, 0) if result.gave_up else 1.0
    return SharesInTime(min(most, 1.0 if in_time is None else in_time), min(most, summary.least_satisfied(TARGET)))


def one_core_rate(scenario: Scenario) -> float:
    """Return how many queries a second all cores would do if every query ran on one core, undisturbed."""
    pairs, rows = zip(scenario.mix.shares, scenario.models.values(), strict=True), scenario.requests.rows
    return scenario.machine.cores * 1e6 / math.fsum(share * model.rows_us(1, rows) for share, model in pairs)


def capacity_bound(scenario: Scenario) -> float:
    """Return the queries a second that no policy exceeds: of all cores, each query in its least core time."""
    batching = scenario.requests.batching
    rows, most_rows = scenario.requests.rows, batching.max_rows if batching else scenario.requests.rows
    least_us = []
    for model in scenario.models.values():
        either = [model] if model.in_bf16 is None else [model, model.in_bf16]
        least_us.append(min(_least_core_us(each, rows, most_rows) for each in either))
    shares = scenario.mix.shares
    mean_us = math.fsum(share * time_us for share, time_us in zip(shares, least_us, strict=True))
    return scenario.machine.cores * 1e6 / mean_us


def _least_core_us(model: ModelProfile, rows: int, most_rows: int) -> float:
    """Return the least core time of a request of so many rows, in a batch of `most_rows` at most.

    Each layer in its cheapest version, on its cheapest number of cores, undisturbed.
    """
    one_row_us = math.fsum(
        min(cores * time_us for times in layer for cores, time_us in enumerate(times, 1)) for layer in model.latency_us
    )
    together = (row for row in {*model.batches, rows, most_rows} if rows <= row <= most_rows)
    a_row = min(model.rows_scale(cores, row) / row for row in together for cores in range(1, model.cores + 1))
    return one_row_us * rows * a_row


def _digits(value: float, count: int) -> str:
    """Return a number with so many digits that count, and no exponent."""
    return f"{float(f'{value:.{count}g}'):.10g}"
