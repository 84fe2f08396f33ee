"""Compound tasks by schedule around any policy, on the modelled machine: the rules, and what holds for any load."""

import random

import numpy as np
import pytest

from gangway.scheduler.policies.registry import make_policy
from gangway.scheduler.policy import Query, Snapshot, Start
from gangway.scheduler.stages.compound_policy import MISSING_US, SCHEDULE_BITS, CompoundPolicy, Fallback, StagePlan
from gangway.scheduler.stages.ir import schedule, schedule_us
from gangway.simulator.loop import LoadDetails, simulate
from gangway.simulator.machine import Machine
from gangway.workload.arrivals import Arrivals
from tests.simulator.conftest import Ledger, profile
from tests.simulator.test_invariants import _check_cores, _check_layers

CORES = 4
FIRST, SECOND, THIRD, URGENT, BULK = range(5)
SCHEDULE = 3


def models(urgent_us: float = 400.0):
    return {
        FIRST: profile([200.0] * 6, CORES, FIRST),
        SECOND: profile([300.0, 100.0] * 4, CORES, SECOND),
        THIRD: profile([50.0, 700.0], CORES, THIRD),
        URGENT: profile([100.0, 100.0], CORES, URGENT, urgent_us),
        BULK: profile([500.0] * 4, CORES, BULK),
    }


def plan(known, pointers=((2, 4), (3, 8), (0, 1))):
    streams = tuple(known[number] for number in (FIRST, SECOND, THIRD))
    stages = schedule(streams, pointers, CORES)
    return StagePlan((FIRST, SECOND, THIRD), stages, CORES, schedule_us(streams, stages))


def former(known, policy="gangway", **changes):
    made = CompoundPolicy(make_policy(policy))
    made.use(SCHEDULE, plan(known, **changes))
    return made


def load(*entries):
    """Arrivals and compound tasks of (time, "task" or a model)."""
    times, numbers, compounds = [], [], {}
    for count, (time_us, what) in enumerate(sorted(entries, key=lambda entry: entry[0]), 1):
        for model in (FIRST, SECOND, THIRD) if what == "task" else (what,):
            if what == "task":
                compounds[len(times)] = SCHEDULE << SCHEDULE_BITS | count
            times.append(float(time_us))
            numbers.append(model)
    return Arrivals(np.array(times), np.array(numbers, np.int64)), compounds


def run(policy, known, *entries):
    arrivals, compounds = load(*entries)
    ledger = Ledger()
    result = simulate(policy, known, arrivals, Machine(CORES), ledger, details=LoadDetails(compounds))
    assert result.outcomes.answered.all(), "somebody waits for ever"
    _check_cores(ledger)
    _check_layers(ledger, arrivals, known)
    return result.outcomes.latency_us


def test_a_task_alone_takes_the_time_of_its_schedule():
    known = models()
    policy = former(known)
    latency_us = run(policy, known, (0, "task"))
    assert max(latency_us) == pytest.approx(plan(known).time_us)
    assert policy.results() == (1, 0, 0, 0, 0, 0)


def test_tasks_run_one_after_the_other():
    known = models()
    policy = former(known)
    latency_us = run(policy, known, *[(number, "task") for number in range(5)])
    time_us = plan(known).time_us
    for number, latest in enumerate(latency_us.reshape(5, 3).max(axis=1)):
        assert latest == pytest.approx((number + 1) * time_us - number)
    assert policy.results() == (5, 0, 0, 0, 0, 0)


@pytest.mark.parametrize("at_us", [1.0, 200.0, 500.0, 700.0])
def test_an_urgent_query_is_in_time_and_the_task_is_broken_up(at_us):
    known = models()
    policy = former(known)
    latency_us = run(policy, known, (0, "task"), (at_us, URGENT))
    assert latency_us[3] <= 400.0
    assert policy.results() == (0, 0, 0, 1, 0, 0)
    assert max(latency_us[:3]) < 2 * plan(known).time_us


def test_who_has_time_does_not_break_up_a_task():
    known = models(urgent_us=5000.0)
    policy = former(known)
    latency_us = run(policy, known, (0, "task"), (10, URGENT))
    assert latency_us[3] <= 5000.0 and max(latency_us[:3]) == pytest.approx(plan(known).time_us)
    assert policy.results() == (1, 0, 0, 0, 0, 0)


def test_best_effort_queries_wait_for_few_tasks():
    """Tasks come faster than they can run, from before to long after."""
    known = models()
    policy = former(known)
    time_us = plan(known).time_us
    tasks = [(number * 0.9 * time_us, "task") for number in range(30)]
    latency_us = run(policy, known, *tasks, (5 * time_us, BULK))
    bulk_us = latency_us[3 * 6]
    assert bulk_us <= 4 * time_us, "it goes after the tasks that came before it"
    assert policy.planned >= 20


def test_tasks_with_targets_do_not_keep_best_effort_queries_for_ever():
    known = models()
    targets = {number: profile([200.0] * 6, CORES, number, 5e3) for number in (FIRST, SECOND)}
    known |= targets
    policy = CompoundPolicy(make_policy("gangway"))
    stages = schedule((known[FIRST], known[SECOND]), ((6,), (6,)), CORES)
    policy.use(SCHEDULE, StagePlan((FIRST, SECOND), stages, CORES, 600.0))
    times, numbers, compounds = [10.0], [BULK], {}
    for count in range(600):
        for model in (FIRST, SECOND):
            compounds[len(times)] = SCHEDULE << SCHEDULE_BITS | count
            times.append(count * 590.0 + 11.0)
            numbers.append(model)
    arrivals = Arrivals(np.array(times), np.array(numbers, np.int64))
    result = simulate(policy, known, arrivals, Machine(CORES), details=LoadDetails(compounds))
    assert result.outcomes.latency_us[0] < 150e3
    assert policy.planned > 500


@pytest.mark.parametrize("policy", ["gangway", "model_fcfs", "edf", "veltair"])
@pytest.mark.parametrize("seed", range(6))
def test_any_load_ends_and_no_core_is_used_twice(policy, seed):
    generator, now, entries = random.Random(seed), 0.0, []
    for _ in range(120):
        now += generator.choice([0.0, generator.expovariate(1 / 700), generator.expovariate(1 / 2500)])
        entries.append((now, generator.choice(["task", "task", FIRST, URGENT, BULK])))
    cut = sorted(generator.choices(range(7), k=2)), sorted(generator.choices(range(9), k=2)), (0, 2)
    known = models()
    made = former(known, policy, pointers=tuple(map(tuple, cut)))
    run(made, known, *entries)
    assert sum(made.results()) == sum(what == "task" for _, what in entries), "each is counted once"


def snapshot(known, waiting, now_us=0.0, **fields):
    defaults = {"running": (), "free_cores": tuple(range(CORES)), "core_count": CORES}
    return Snapshot(now_us, waiting, models=known, **(defaults | fields))


def members(*numbers, compound=1, **fields):
    return [
        Query(10 * compound + model, model, 1, 0.0, None, compound=SCHEDULE << SCHEDULE_BITS | compound, **fields)
        for model in numbers
    ]


def started(decisions):
    return [decision.query_id for decision in decisions if isinstance(decision, Start)]


def test_a_missing_member_is_waited_for_and_others_are_not_kept():
    known = models()
    policy = former(known)
    other = Query(5, BULK, 1, 0.0, None)
    decisions = policy.decide(snapshot(known, [*members(FIRST, SECOND), other]))
    assert started(decisions) == [5]
    assert decisions[-1].at_us == MISSING_US
    late = policy.decide(snapshot(known, members(FIRST, SECOND), MISSING_US))
    assert started(late) and all(Fallback.MISSING.value in start.reason for start in late)
    again = policy.decide(snapshot(known, members(FIRST, SECOND, THIRD), MISSING_US + 1))
    assert "by its schedule" not in again[0].reason, "once broken up, always"


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"core_count": CORES - 1, "free_cores": (0, 1, 2)}, Fallback.CORE),
        ({"free_leases": 2}, Fallback.BUSY),
    ],
)
def test_what_the_schedule_lacks_makes_ordinary_queries(fields, why):
    known = models()
    policy = former(known)
    decisions = policy.decide(snapshot(known, members(FIRST, SECOND, THIRD), **fields))
    assert started(decisions) and policy.fallen == {why: 1}
    assert all(why.value in start.reason for start in decisions if isinstance(start, Start))


def test_without_schedules_the_policy_is_asked_as_it_is():
    known = models()
    seen = []
    policy = CompoundPolicy(make_policy("gangway"))
    policy._inner.decide = lambda shown: seen.append(shown) or []
    shown = snapshot(known, members(FIRST, SECOND, THIRD))
    assert policy.decide(shown) == [] and seen == [shown]
    policy.use(SCHEDULE, None)
    assert policy.decide(shown) == [] and seen[1] is shown
