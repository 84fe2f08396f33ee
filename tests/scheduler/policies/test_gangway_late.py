"""Late queries wait for a bounded time, and a target costs no throughput. Times are microseconds."""

from dataclasses import replace

import numpy as np
import pytest

from gangway.scheduler.policies.gangway import Gangway
from gangway.scheduler.policies.veltair import ModelFcfs
from gangway.scheduler.policy import Query, Snapshot, Start
from gangway.scheduler.policy_config import DEFAULT, PolicyConfig
from gangway.scheduler.profiles import ModelProfile
from gangway.simulator.loop import simulate
from gangway.simulator.machine import Machine
from gangway.simulator.results import Result
from gangway.workload.arrivals import closed_loop, poisson
from gangway.workload.mix import Mix, MixModel
from tests.helpers.sampled import sampled
from tests.scheduler.policies.test_gangway import LAZY, LONG, MODELS, SHORT, model, query

SETTLED = 200  # queries of a closed loop, of which the first ones came together
WITHOUT = DEFAULT.without("late_bound")


def in_closed_loop(policy: Gangway | ModelFcfs, clients: int, count: int = 2000, *models: ModelProfile) -> Result:
    """Let so many clients ask the models, all of them alike."""
    known = dict(enumerate(models or (MODELS[SHORT],)))
    mix = Mix("m", tuple(MixModel(one.name, 1.0) for one in known.values()))
    return simulate(policy, known, closed_loop(mix, clients, count, 1), Machine(2))


def rate(result: Result) -> float:
    """Return answers per second."""
    return len(result.outcomes.latency_us) / result.end_us * 1e6


def in_time(result: Result, target_us: float) -> float:
    """Return the share of the requests that are."""
    return float((result.outcomes.latency_us <= target_us).mean())


@pytest.mark.parametrize("clients", [4, 8, 30])
def test_late_ones_wait_three_times_as_long_as_in_order_of_arrival(clients: int) -> None:
    """SHORT takes 4000 on both cores, and its target is three times that: of 4 clients or more some are always late."""
    ours, in_order = in_closed_loop(Gangway(), clients), in_closed_loop(ModelFcfs(), clients)
    assert ours.outcomes.latency_us[SETTLED:].max() <= 3.3 * in_order.outcomes.latency_us[SETTLED:].max()
    assert rate(ours) >= 0.97 * rate(in_order)
    # So late ones need a third of the machine at most, and the others are in time.
    assert in_time(ours, MODELS[SHORT].qos_us or 0.0) >= 0.64


def test_without_the_rule_they_starve() -> None:
    free, bound = in_closed_loop(Gangway(WITHOUT), 8), in_closed_loop(Gangway(), 8)
    assert free.outcomes.latency_us[SETTLED:].max() > 4 * bound.outcomes.latency_us[SETTLED:].max()


def test_the_wait_of_several_models_counts_by_work() -> None:
    models = (MODELS[SHORT], model(1, 4000.0, 20, 120_000.0))
    ours = in_closed_loop(Gangway(), 8, 2000, *models)
    in_order = in_closed_loop(ModelFcfs(), 8, 2000, *models)
    for number in (0, 1):
        chosen = ours.outcomes.models == number
        longest_us = ours.outcomes.latency_us[chosen][SETTLED:].max()
        assert longest_us <= 3.5 * in_order.outcomes.latency_us[SETTLED:].max()


@pytest.mark.parametrize("load", sampled([0.8, 0.95, 2.0], [0.95]))
def test_who_is_in_time_stays_so(load: float) -> None:
    """In an open loop below capacity the bound is seldom reached; in an overload it does not hold."""
    mix = Mix("m", (MixModel("short", 10.0), MixModel("long", 1.0)))
    models = {SHORT: MODELS[SHORT], LONG: MODELS[LONG]}
    mean_us = (10 * 4000.0 + 40_000.0) / 11

    def share(config: PolicyConfig) -> float:
        shares = []
        for seed in (1, 2):
            arrivals = poisson(mix, load * 1e6 / mean_us, 4000, seed)
            result = simulate(Gangway(config), models, arrivals, Machine(2))
            targets_us = np.array([models[number].qos_us for number in (SHORT, LONG)])[arrivals.models]
            shares.append((result.outcomes.latency_us <= targets_us).mean())
        return float(np.mean(shares))

    assert share(DEFAULT) >= share(WITHOUT) - 0.015


@pytest.mark.parametrize("rows", [1, 4])
def test_a_stream_of_shorter_ones_does_not_put_off_a_long_one(rows: int) -> None:
    """They go ahead for as long again as it has waited when it is due: six times the wait in order of arrival."""
    policy, long = Gangway(), replace(query(0, LONG if rows == 1 else SHORT, 2.0), rows=rows)
    first_start(policy, 0.0, [query(999_999, SHORT, 0.0)])
    policy.arrived(long)
    now_us, begun = 130_000.0, -1  # it is late
    while begun != 0 and now_us < 2e6:
        newcomer = query(1 + int(now_us), SHORT, now_us)
        policy.arrived(newcomer)
        begun = first_start(policy, now_us, [long, newcomer])
        now_us += 4000.0
        if begun:
            policy.finished(newcomer, now_us)
    assert begun == 0 and now_us <= 130_000.0 + 6.5 * 170_000.0


def test_equal_requests_that_came_later_do_not_overtake_a_batch() -> None:
    """Best effort, where a longer query is due later."""
    batch = replace(query(0, LAZY, 0.0), rows=4, formed=True, request_rows=1)
    assert first_start(Gangway(), 150_000.0, [batch, query(5, LAZY, 100_000.0)]) == 0
    assert first_start(Gangway(), 150_000.0, [replace(batch, request_rows=4), query(5, LAZY, 100_000.0)]) == 5


def first_start(policy: Gangway, now_us: float, waiting: list[Query]) -> int:
    """Return who begins first on two free cores."""
    starts = policy.decide(Snapshot(now_us, waiting, [], (0, 1), 2, MODELS))
    return next(each.query_id for each in starts if isinstance(each, Start))


@pytest.mark.parametrize("cancelled", [0, 100])
def test_a_late_one_goes_first_once_it_has_waited_for_long(cancelled: int) -> None:
    """A newcomer comes whenever one is answered, so order of arrival would have begun with the late one.

    It would not have waited for requests that came before and were cancelled.
    """
    policy = Gangway()
    first_start(policy, 0.0, [query(999, SHORT, 0.0)])  # the policy knows the models from now on
    for number in range(cancelled):
        policy.arrived(query(100 + number, SHORT, 1.0))
    late, now_us, begun = query(0, SHORT, 2.0), 2.0, -1
    policy.arrived(late)
    while begun != 0 and now_us < 100_000.0:
        newcomer = query(1 + int(now_us), SHORT, now_us)
        policy.arrived(newcomer)
        chosen = first_start(policy, now_us, [late, newcomer])
        begun = chosen if now_us > 12_000.0 else newcomer.query_id  # at first it is let down
        now_us += 4000.0
        if begun:
            policy.finished(newcomer, now_us)
    assert begun == 0 and 12_000.0 < now_us <= 8 * 4000.0


def test_in_a_long_queue_late_ones_do_not_go_first() -> None:
    """Otherwise an overload serves in order of arrival, and nobody is in time."""
    policy = Gangway()
    first_start(policy, 0.0, [query(999, SHORT, 0.0)])
    late, now_us = query(0, SHORT, 2.0), 2.0
    policy.arrived(late)
    for number in range(1, 30):
        newcomers = [query(1000 * number + index, SHORT, now_us) for index in range(DEFAULT.late_bound.max_waiting)]
        policy.arrived(newcomers[0])
        if now_us > 12_000.0:
            assert first_start(policy, now_us, [late, *newcomers]) != 0
        now_us += 4000.0
        policy.finished(newcomers[0], now_us)
