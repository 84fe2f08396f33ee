"""A rate is that of a load that lasts: what counts, the capacity bound, and what a search says of itself."""

import math
from dataclasses import replace

import numpy as np
import pytest

from gangway.scheduler.policies.registry import DEFAULT_POLICY
from gangway.simulator.batching import Batching
from gangway.simulator.contention import Contention
from gangway.simulator.rates import (
    LASTING,
    QUERIES,
    RateEstimate,
    RateGoal,
    capacity_bound,
    estimate_both,
    estimate_rate,
    one_core_rate,
    search_rate,
    share_in_time,
    window,
)
from gangway.simulator.runs import run_policy, run_steady
from gangway.simulator.scenario import Requests, Scenario, make_scenario
from gangway.workload.mix import BUILTIN, parse_mix, read_mix
from gangway.workload.qos import Qos

MIXES = sorted(BUILTIN)


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("rate_per_s", [10.0, 200.0, 5000.0])
def test_a_load_lasts(mix: str, rate_per_s: float) -> None:
    """Long enough for the slowest model, and for enough queries, with arrivals before and after those that count."""
    scenario = make_scenario(read_mix(mix), 64)
    longest_s = max(target for target in scenario.targets_us if target) / 1e6
    counts = window(scenario, rate_per_s)
    assert len(counts.counted) >= max(QUERIES, LASTING * longest_s * rate_per_s)
    assert counts.counted.start >= longest_s * rate_per_s
    assert counts.arrivals - counts.counted.stop >= longest_s * rate_per_s


def test_only_what_arrives_in_the_window_counts() -> None:
    scenario = make_scenario(read_mix("medium"), 16)
    rate_per_s = 0.5 * one_core_rate(scenario)
    counts = window(scenario, rate_per_s, 300)
    steady = run_steady(DEFAULT_POLICY, scenario, rate_per_s, 300, 1)
    whole = run_policy(DEFAULT_POLICY, scenario, rate_per_s, counts.arrivals, 1)
    assert steady.summary.total.queries == len(counts.counted) < whole.summary.total.queries == counts.arrivals
    np.testing.assert_array_equal(steady.result.outcomes.latency_us, whole.result.outcomes.latency_us)
    of_window = counts.of(whole.result.outcomes)
    assert of_window.scheduled_us[0] == whole.result.outcomes.scheduled_us[counts.counted.start]


def test_a_burst_is_no_rate() -> None:
    """What 60 queries meet on idle cores at more than the machine can do, is missed by a load that lasts."""
    scenario = make_scenario(read_mix("heavy"), 64)
    rate_per_s = 1.1 * capacity_bound(scenario)
    burst = run_policy(DEFAULT_POLICY, scenario, rate_per_s, 60, 1).summary.total.satisfied["target"]
    assert (burst or 0) > 0.95
    assert share_in_time(DEFAULT_POLICY, scenario, RateGoal(each=True), rate_per_s, QUERIES, 1) < 0.95


@pytest.mark.parametrize("contention", [None, Contention()])
@pytest.mark.parametrize("batch", [None, 4])
@pytest.mark.parametrize("mix", MIXES)
def test_the_bound_is_core_time(mix: str, batch: int | None, contention: Contention | None) -> None:
    """Queries on one core each are within it; with batches it is higher, by what rows share."""
    requests = Requests(batching=Batching(batch) if batch else None)
    scenario = make_scenario(read_mix(mix), 64, requests=requests, contention=contention)
    assert capacity_bound(scenario) >= 0.99 * one_core_rate(scenario)
    assert capacity_bound(scenario) == pytest.approx(2 * capacity_bound(_halved(scenario)))


def test_a_model_in_bf16_bounds_as_its_faster_form() -> None:
    exact = make_scenario(parse_mix("resnet50=1"), 4)
    model = exact.models[0]
    halves = tuple(tuple(tuple(us / 2 for us in times) for times in layer) for layer in model.latency_us)
    either = replace(exact, models={0: replace(model, in_bf16=replace(model, latency_us=halves))})
    assert capacity_bound(either) == pytest.approx(2 * capacity_bound(exact))


def _halved(scenario: Scenario) -> Scenario:
    return replace(scenario, machine=replace(scenario.machine, cores=scenario.machine.cores // 2))


def test_no_search_exceeds_the_bound_and_it_says_so() -> None:
    scenario = make_scenario(parse_mix("mobilenetv2=1").with_qos(Qos(milliseconds=100)), 2)
    found = estimate_rate(DEFAULT_POLICY, scenario, RateGoal(0.01), 50, [1])
    assert found.limited == 1, "a hundredth is in time at any rate"
    assert 0.97 * capacity_bound(scenario) <= found.mean_per_s <= capacity_bound(scenario)


def test_a_search_begins_at_the_bound_at_most_and_below_its_usual_limit_if_told_to() -> None:
    scenario = make_scenario(read_mix("medium"), 16)
    bound_per_s = capacity_bound(scenario)
    high = search_rate(DEFAULT_POLICY, scenario, RateGoal(0.95), 50, 1, start_per_s=100 * bound_per_s)
    low = search_rate(DEFAULT_POLICY, scenario, RateGoal(0.95), 50, 1, start_per_s=bound_per_s / 1e4)
    assert high.probes[0].rate_per_s == pytest.approx(bound_per_s)
    assert low.probes[0].rate_per_s == pytest.approx(bound_per_s / 1e4)
    assert high.rate_per_s == pytest.approx(low.rate_per_s, rel=0.07) and high.rate_per_s > 0


def test_two_goals_are_searched_with_shared_runs() -> None:
    """The rates are those of searches of their own."""
    scenario = make_scenario(read_mix("medium"), 16)
    both = estimate_both("edf", scenario, 0.95, 200, [1])
    alone = [estimate_rate("edf", scenario, RateGoal(0.95, each), 200, [1]) for each in (False, True)]
    assert [one.rates_per_s for one in both] == [one.rates_per_s for one in alone]


def test_each_model_is_a_harder_goal_than_all_queries():
    scenario = make_scenario(read_mix("medium"), 16)
    total = search_rate("edf", scenario, RateGoal(0.95), 400, seed=1).rate_per_s
    each = search_rate("edf", scenario, RateGoal(0.95, each=True), 400, seed=1)
    assert 0 < each.rate_per_s <= total
    assert {probe.share >= 0.95 for probe in each.probes} == {True, False}


def test_rates_of_several_seeds_have_an_interval():
    """Student's t for five values is 2.78: 2.78 x 1.581 / sqrt(5)."""
    found = RateEstimate((98.0, 99.0, 100.0, 101.0, 102.0))
    assert (found.mean_per_s, found.half_per_s) == (100.0, pytest.approx(1.966, abs=1e-3))
    assert str(found) == "100 ± 2"
    assert math.isinf(RateEstimate((98.0,)).half_per_s)
    assert found.over(RateEstimate((49.0, 0.0, 50.0, 50.5, 51.0))).rates_per_s == (2.0, 2.0, 2.0, 2.0)


def test_each_seed_is_searched_from_the_rate_before():
    scenario = make_scenario(read_mix("medium"), 16)
    found = estimate_rate("edf", scenario, RateGoal(0.95), 200, range(1, 4))
    assert len(found.rates_per_s) == 3 and min(found.rates_per_s) > 0
    alone = search_rate("edf", scenario, RateGoal(0.95), 200, 3)
    assert found.rates_per_s[2] == pytest.approx(alone.rate_per_s, rel=0.05)
    assert len(found.probes[2]) < len(found.probes[0])
