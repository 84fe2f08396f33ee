"""Policies at a rate on 64 cores, and at the highest one."""

from gangway.scheduler.policies.registry import DEFAULT_POLICY
from gangway.simulator.runs import TARGET, Goal, one_core_rate, run_policy, search_rate
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
