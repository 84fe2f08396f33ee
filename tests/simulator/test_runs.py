"""Policies at a rate on 64 cores, and at the highest one."""

import math

import pytest

from gangway.scheduler.policies.registry import DEFAULT_POLICY
from gangway.simulator.runs import TARGET, Goal, RateEstimate, estimate_rate, one_core_rate, run_policy, search_rate
from gangway.simulator.scenario import make_scenario
from gangway.workload.mix import read_mix


def test_thousands_of_queries_on_64_cores():
    scenario = make_scenario(read_mix("mix"), 64)
    run = run_policy(DEFAULT_POLICY, scenario, 0.1 * one_core_rate(scenario), 3000, seed=2)
    assert run.summary.total.queries == 3000
    assert (run.summary.total.satisfied[TARGET] or 0) > 0.95, "a tenth of what the cores could do"
    assert 0.05 < run.core_use < 0.5
    assert run.result.outcomes.answered.all()


def test_each_model_is_a_harder_goal_than_all_queries():
    scenario = make_scenario(read_mix("medium"), 16)
    total, _ = search_rate("edf", scenario, Goal(0.95), 400, seed=1)
    each, probes = search_rate("edf", scenario, Goal(0.95, each=True), 400, seed=1)
    assert 0 < each <= total
    assert any(probe.share >= 0.95 for probe in probes) and any(probe.share < 0.95 for probe in probes)


def test_rates_of_several_seeds_have_an_interval():
    """Student's t for five values is 2.78: 2.78 x 1.581 / sqrt(5)."""
    found = RateEstimate((98.0, 99.0, 100.0, 101.0, 102.0))
    assert (found.mean_per_s, found.half_per_s) == (100.0, pytest.approx(1.966, abs=1e-3))
    assert str(found) == "100 ± 2"
    assert math.isinf(RateEstimate((98.0,)).half_per_s)
    assert found.over(RateEstimate((49.0, 0.0, 50.0, 50.5, 51.0))).rates_per_s == (2.0, 2.0, 2.0, 2.0)


def test_each_seed_is_searched_from_the_rate_before():
    scenario = make_scenario(read_mix("medium"), 16)
    found = estimate_rate("edf", scenario, Goal(0.95), 200, range(1, 4))
    assert len(found.rates_per_s) == 3 and min(found.rates_per_s) > 0
    alone, _ = search_rate("edf", scenario, Goal(0.95), 200, 3)
    assert found.rates_per_s[2] == pytest.approx(alone, rel=0.05)
    assert len(found.probes[2]) < len(found.probes[0])
