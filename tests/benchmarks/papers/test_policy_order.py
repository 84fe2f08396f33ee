"""Which policy carries more: what the papers' page says, by its rates of loads that last, and by other seeds."""

from pathlib import Path

import pytest

from benchmarks.papers.veltair_rates import DEFAULT, GOALS, MACHINES, MIXES, of_goal, read_rates, scenario_of
from gangway.simulator.rates import QUERIES, TARGET
from gangway.simulator.runs import run_steady

RATES = read_rates(Path(__file__).parents[3] / "docs" / "measurements" / "figures")
PLACES = [(machine, mix) for machine in MACHINES for mix in MIXES]
HELD_OUT_SEEDS = (11, 12)  # the rates are of the first ones


def over(machine: str, mix: str, goal: str, policy: str, other: str) -> tuple[float, ...]:
    """The policy's rate over the other's, for each seed that both have; none if one was not searched."""
    found = of_goal(RATES, machine, mix, goal)
    if not {policy, other} <= set(found):
        return ()
    pairs = zip(found[policy].rates_per_s, found[other].rates_per_s, strict=False)
    return tuple(rate / others for rate, others in pairs)


@pytest.mark.parametrize("goal", GOALS)
@pytest.mark.parametrize(("machine", "mix"), PLACES)
def test_the_default_carries_more_than_each_other_policy(machine: str, mix: str, goal: str) -> None:
    others = set(of_goal(RATES, machine, mix, goal)) - {DEFAULT}
    assert "protean" in others
    for other in others:
        assert min(over(machine, mix, goal, DEFAULT, other)) > 1.1, other


@pytest.mark.parametrize("goal", GOALS)
def test_where_cores_contend_versions_carry_most_and_blocks_with_them_more_than_without(goal: str) -> None:
    """`protean` has versions of whole models, `veltair` of blocks, the others none."""
    compared = 0
    for mix in MIXES:
        for ratios in (
            over("contended", mix, goal, "protean", "veltair"),
            over("contended", mix, goal, "veltair", "fixed_block:11"),
            over("contended", mix, goal, "veltair", "model_fcfs"),
            over("contended", mix, goal, "veltair", "planaria"),
        ):
            compared += len(ratios)
            assert all(ratio > 1 for ratio in ratios), mix
    assert compared >= 2 * 3, "two mixes at least"


@pytest.mark.parametrize("goal", GOALS)
def test_on_the_measured_machine_blocks_and_whole_models_carry_about_as_much(goal: str) -> None:
    for mix in MIXES:
        ratios = over("measured", mix, goal, "fixed_block:11", "model_fcfs")
        assert ratios and all(0.85 < ratio < 1.15 for ratio in ratios), mix
        assert all(0.85 < ratio < 1.15 for ratio in over("measured", mix, goal, "protean", "model_fcfs")), mix


def test_fixed_blocks_fall_behind_whole_models_where_models_are_short() -> None:
    for machine in MACHINES:
        assert max(over(machine, "light", "all", "fixed_block:11", "model_fcfs")) < 1
        assert min(over(machine, "medium", "all", "fixed_block:11", "model_fcfs")) > 1


@pytest.mark.parametrize(
    ("machine", "mix"),
    [place if place == ("measured", "light") else pytest.param(*place, marks=pytest.mark.long) for place in PLACES],
)
def test_at_the_rate_of_the_default_the_best_others_are_later(machine: str, mix: str) -> None:
    """Of arrivals that no rate was searched with: the order holds beyond those, where the rates differ by the seed."""
    found = of_goal(RATES, machine, mix, "each")
    rate_per_s, scenario = found[DEFAULT].mean_per_s, scenario_of(machine, mix)
    best = max(set(found) - {DEFAULT}, key=lambda policy: found[policy].mean_per_s)
    for seed in HELD_OUT_SEEDS:
        late = {
            policy: 1 - run_steady(policy, scenario, rate_per_s, QUERIES, seed).summary.least_satisfied(TARGET)
            for policy in {DEFAULT, best, "protean"}
        }
        ours = late.pop(DEFAULT)
        assert 2 * ours < min(late.values()), (seed, ours, late)
