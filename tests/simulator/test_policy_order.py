"""Which policy carries more: the order stays as the figures of the papers say (`docs/measurements/papers.md`)."""

from statistics import fmean

import pytest

from gangway.simulator.contention import Contention
from gangway.simulator.rates import TARGET
from gangway.simulator.runs import run_policy
from gangway.simulator.scenario import Scenario, make_scenario
from gangway.workload.mix import read_mix

QUERIES = 150
SEEDS = (1,)
ORDER = ("gangway", "veltair", "fixed_block:11", "model_fcfs", "planaria")


def shares(scenario: Scenario, rate_per_s: float, *policies: str) -> dict[str, float]:
    """The share of all queries in time by policy, the mean over the seeds."""
    return {
        policy: fmean(
            run_policy(policy, scenario, rate_per_s, QUERIES, seed).summary.total.satisfied[TARGET] or 0.0
            for seed in SEEDS
        )
        for policy in policies
    }


@pytest.fixture(scope="module")
def contended() -> dict[str, float]:
    """Shares of the policies where cores contend."""
    scenario = make_scenario(read_mix("medium"), 64, contention=Contention())
    return shares(scenario, 450.0, *ORDER, "veltair:use", "veltair_ac", "veltair_as")


@pytest.mark.long
def test_where_cores_contend_the_papers_order_holds(contended: dict[str, float]) -> None:
    assert sorted(ORDER, key=lambda policy: -contended[policy]) == list(ORDER), contended


@pytest.mark.long
def test_where_cores_contend_full_exceeds_its_halves(contended: dict[str, float]) -> None:
    full = min(contended["veltair"], contended["veltair:use"])
    assert full > contended["veltair_ac"] > contended["veltair_as"] > contended["planaria"], contended


def test_on_the_measured_machine_blocks_beat_layers_and_the_default_is_first() -> None:
    found = shares(make_scenario(read_mix("medium"), 64), 1000.0, "gangway", "fixed_block:11", "veltair", "planaria")
    assert found["gangway"] > found["fixed_block:11"] > found["veltair"] > found["planaria"], found
