"""The machine of VELTAIR's premise, and decisions that take time on the virtual clock."""

import pytest

from gangway.scheduler.policies.base import Policy
from gangway.scheduler.policies.registry import POLICIES
from gangway.scheduler.policy import Start
from gangway.simulator.contention import Contention
from gangway.simulator.decision_cost import MEASURED, MOST_WAITING, decision_cost
from gangway.simulator.loop import simulate
from gangway.simulator.machine import Machine
from gangway.simulator.scenario import SHARED_CORES, make_scenario
from gangway.workload.mix import read_mix
from tests.simulator.conftest import profile, trace


class OneCore(Policy):
    """Every query whole on a core of its own."""

    name = "one core"

    def decide(self, snapshot):
        pairs = zip(snapshot.waiting, snapshot.free_cores, strict=False)
        return [Start(query.query_id, snapshot.models[query.model_id].layers, (core,)) for query, core in pairs]


def test_layers_slow_down_by_what_they_move_and_versions_bear_it():
    premise = Contention(most_slowdown=7.0, versions=3, version_cost=0.2, tolerance=0.25)
    model = premise.apply(profile([100.0], memory=0.5))  # 50 us of memory beside 100 of computation
    assert [round(curve[0], 6) for curve in model.latency_us[0]] == [100.0, 110.0, 120.0]
    assert model.slope[0] == pytest.approx((2.0, 1.0, 0.5)), "a third of 6, then half as much for each version"
    assert premise.slope(1.0, 0.0) == 6.0 and premise.slope(0.0, 1.0) == 0.0
    with pytest.raises(ValueError, match="slowdowns"):
        Contention(least_slowdown=8.0)
    with pytest.raises(ValueError, match="tolerance"):
        Contention(tolerance=0.0)


def test_the_level_is_the_share_of_the_other_cores_that_are_busy():
    """Of three cores two are busy for 150 us: each query sees half of the other cores at work, and takes 1.5 times."""
    machine = Machine(3, level_per_demand=0.5, level_step=0.1, cores_contend=True)
    models = {0: profile([100.0], cores=3, memory=1.0)}
    result = simulate(OneCore(), models, trace((0, 0), (0, 0)), machine)
    assert result.outcomes.latency_us.tolist() == pytest.approx([150.0, 150.0])
    alone = simulate(OneCore(), models, trace((0, 0)), machine)
    assert alone.outcomes.latency_us.tolist() == pytest.approx([100.0])


def test_every_layer_has_the_stated_versions_and_the_premise_holds():
    scenario = make_scenario(read_mix("mix"), 64, contention=Contention())
    slowed = {one.name: one.span_us(0, one.layers, 1, 1, 1.0) / one.span_us(0, one.layers, 1)
              for one in scenario.models.values()}  # fmt: skip
    assert all(len(versions) == 5 for one in scenario.models.values() for versions in one.latency_us)
    assert 1.4 < slowed["resnet50"] < 2.0, "Fig. 1b: up to 1.8"
    assert all(1.0 < factor < 7.0 for factor in slowed.values())


def test_decisions_take_time_one_after_the_other():
    """Looking at one that waits and none that runs takes 4.5 us, and the decision 3.5 more."""
    models = {0: profile([100.0])}
    result = simulate(OneCore(), models, trace((0, 0), (5, 0)), Machine(2, charges_decisions=True))
    assert decision_cost("one core") is decision_cost("another policy")
    assert result.queue_us.tolist() == pytest.approx([4.5, 4.5 + 3.5 + 6.0 - 5.0])
    free = simulate(OneCore(), models, trace((0, 0), (5, 0)), Machine(2))
    assert free.queue_us.tolist() == [0.0, 0.0]


def test_costs_are_known_by_family_and_bounded():
    assert set(MEASURED) <= set(POLICIES)
    assert decision_cost("fixed_block:11") is MEASURED["fixed_block"]
    assert decision_cost("gangway:without=x") is MEASURED["gangway"]
    cost = MEASURED["gangway"]
    assert cost.before_us(MOST_WAITING, 3) == cost.before_us(10 * MOST_WAITING, 3) > cost.before_us(1, 3)
    assert make_scenario(read_mix("light"), 4).machine.charges_decisions
    assert not make_scenario(read_mix("light"), 4, overheads=SHARED_CORES).machine.charges_decisions
