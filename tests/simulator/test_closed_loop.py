"""A closed loop: as many requests are under way as there are clients, and each follows an answer."""

import numpy as np
import pytest

from gangway.scheduler.policies.registry import make_policy
from gangway.simulator.loop import simulate
from gangway.simulator.machine import Machine
from gangway.workload.arrivals import closed_loop
from gangway.workload.mix import Mix, MixModel
from tests.scheduler.policies.test_gangway import LONG, MODELS, SHORT

MIX = Mix("m", (MixModel("short", 3.0), MixModel("long", 1.0)))
COUNT = 300


@pytest.mark.parametrize("policy", ["gangway", "model_fcfs", "triton", "layerweaver_plus"])
@pytest.mark.parametrize("clients", [1, 2, 7])
def test_a_client_asks_again_when_it_has_an_answer(policy: str, clients: int) -> None:
    models = {SHORT: MODELS[SHORT], LONG: MODELS[LONG]}
    arrivals = closed_loop(MIX, clients, COUNT, seed=1)
    outcomes = simulate(make_policy(policy), models, arrivals, Machine(2)).outcomes
    begin_us = outcomes.scheduled_us
    end_us = np.sort(begin_us + outcomes.latency_us)
    assert (begin_us[:clients] == 0).all()
    assert begin_us[clients:] == pytest.approx(end_us[: COUNT - clients])
    assert (arrivals.times_us == 0).all(), "what was given stays as it was"


def test_same_seed_same_models() -> None:
    one, other = closed_loop(MIX, 2, COUNT, seed=1), closed_loop(MIX, 5, COUNT, seed=1)
    assert (one.models == other.models).all() and 0.2 < one.models.mean() < 0.3
