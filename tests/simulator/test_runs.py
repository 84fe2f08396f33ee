"""Policies at a rate on 64 cores."""

from gangway.scheduler.policies.registry import DEFAULT_POLICY
from gangway.simulator.rates import TARGET, one_core_rate
from gangway.simulator.runs import run_policy
from gangway.simulator.scenario import make_scenario
from gangway.workload.mix import read_mix


def test_thousands_of_queries_on_64_cores():
    scenario = make_scenario(read_mix("mix"), 64)
    run = run_policy(DEFAULT_POLICY, scenario, 0.1 * one_core_rate(scenario), 3000, seed=2)
    assert run.summary.total.queries == 3000
    assert (run.summary.total.satisfied[TARGET] or 0) > 0.95, "a tenth of what the cores could do"
    assert 0.05 < run.core_use < 0.5
    assert run.result.outcomes.answered.all()
