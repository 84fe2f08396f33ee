"""The engine against traces worked out by hand."""

from dataclasses import replace

import pytest

from gangway.scheduler.policies.registry import make_policy
from gangway.scheduler.policy import Reject, Resize, Start, StartOver, Stop, Wake
from gangway.simulator.loop import ARRIVALS_AT_ONCE, ContractError, LoadDetails, simulate
from gangway.simulator.machine import Machine, Overheads
from gangway.simulator.results import REFUSED, UNFINISHED, SimulationLimits
from tests.simulator.conftest import Scripted, profile, trace

WHOLE = {0: profile([100.0, 200.0, 100.0])}  # 400 us on one core, 200 on two


def script(*steps):
    """One list of decisions for each call of the policy; nothing afterwards."""
    left = iter(steps)
    return Scripted(lambda snapshot: next(left, []))


def test_two_queries_one_after_the_other():
    result = simulate(make_policy("model_fcfs"), WHOLE, trace((0, 0), (50, 0)), Machine(2))
    assert result.outcomes.latency_us.tolist() == [200, 350]
    assert result.queue_us.tolist() == [0, 150]
    assert result.outcomes.answered.all()
    assert (result.counters.blocks, result.counters.core_busy_us, result.end_us) == (2, 800, 400)


def test_all_of_many_queries_arrive():
    count = 2 * ARRIVALS_AT_ONCE + 1
    result = simulate(make_policy("model_fcfs"), WHOLE, trace(*((1000.0 * i, 0) for i in range(count))), Machine(2))
    assert set(result.outcomes.latency_us.tolist()) == {200.0}
    assert result.counters.blocks == count


def test_overheads_are_where_they_belong():
    overheads = Overheads(submit_us=10, dispatch_us=5, leave_us=7, answer_us=20)
    result = simulate(make_policy("model_fcfs"), WHOLE, trace((0, 0), (0, 0)), Machine(2, overheads))
    first = 10 + 5 + 200
    assert result.outcomes.latency_us.tolist() == [first + 20, first + 7 + 5 + 200 + 20]


def test_where_front_end_and_workers_share_the_cores():
    # The second arrives at 100, while the gang has both cores: its way takes 30 us longer, and the gang loses 15 us.
    machine = Machine(2, Overheads(submit_us=10, stolen_us=30))
    result = simulate(make_policy("edf"), WHOLE, trace((0, 0), (100, 0)), machine)
    assert result.outcomes.latency_us.tolist() == [10 + 200 + 15, 225 + 200 - 100]
    assert result.queue_us.tolist() == [10, 225 - 100]
    late = simulate(make_policy("edf"), WHOLE, trace((0, 0), (200, 0)), machine)
    assert late.queue_us.tolist() == [10, 40]


def test_large_requests_take_longer_on_their_way_and_take_more_from_the_workers():
    # As above, with requests of half a million bytes: 15 us longer on the way, of which 10 are taken from both cores.
    machine = Machine(2, Overheads(submit_us=5, submit_us_per_mb=10, stolen_us=20, stolen_us_per_mb=20))
    result = simulate(
        make_policy("edf"), WHOLE, trace((0, 0), (100, 0)), machine, details=LoadDetails(row_bytes={0: 500_000})
    )
    assert result.outcomes.latency_us.tolist() == [10 + 200 + 15, 225 + 200 - 100]
    small = simulate(make_policy("edf"), WHOLE, trace((0, 0), (100, 0)), machine)
    assert small.outcomes.latency_us.tolist() == [5 + 200 + 10, 215 + 200 - 100]


def test_stopped_at_a_boundary_and_resumed(ledger):
    seen = []

    def decide(snapshot):
        seen.append((snapshot.now_us, [(q.query_id, q.next_layer, q.started, q.ran_us) for q in snapshot.waiting]))
        match len(seen):
            case 1:
                return [Start(0, 3, (0,))]
            case 2:  # the second comes at 150, in the second layer
                block = snapshot.running[0]
                assert (block.layer, block.layer_started_us, block.stopping) == (1, 100, False)
                return [Stop(0)]
            case 3:
                return [Start(1, 3, (0, 1))]
            case 4:
                return [Start(0, 3, (1,))]
        return []

    result = simulate(Scripted(decide), WHOLE, trace((0, 0), (150, 0)), Machine(2), ledger)
    assert seen == [(0, [(0, 0, False, 0)]), (150, [(1, 0, False, 0)]), (300, [(0, 2, True, 300), (1, 0, False, 0)]),
                    (500, [(0, 2, True, 300)]), (600, [])]  # fmt: skip
    assert result.outcomes.latency_us.tolist() == [600, 350]
    assert ledger.stretches == [(0, (0,), 0, 2, 0, 300), (1, (0, 1), 0, 3, 300, 500), (0, (1,), 2, 3, 500, 600)]
    assert result.counters.preemptions == 1


def test_stopped_at_once_keeps_what_is_done_of_the_layer():
    machine = Machine(2, Overheads(stop_us=30))
    policy = Scripted(lambda s: {0: [Start(0, 3, (0,)), Wake(150)], 150: [Stop(0, at_once=True)],
                                 180: [Start(0, 3, (0, 1))]}.get(s.now_us, []))  # fmt: skip
    result = simulate(policy, WHOLE, trace((0, 0)), machine)
    assert result.outcomes.latency_us.tolist() == [180 + 120 / 2 + 100 / 2]


def test_grown_in_the_middle_of_a_layer(ledger):
    policy = Scripted(
        lambda s: {0: [Start(0, 3, (1,), wanted=2), Wake(200)], 200: [Resize(0, (1, 0))]}.get(s.now_us, [])
    )
    result = simulate(policy, WHOLE, trace((0, 0)), Machine(2), ledger)
    assert result.outcomes.latency_us.tolist() == [300]
    assert (result.counters.conflicts, result.counters.grown) == (1, 1)
    assert ledger.stretches == [(0, (1,), 0, 2, 0, 200), (0, (1, 0), 2, 3, 200, 300)]


def test_growing_costs_what_the_joining_ranks_would_have_done():
    policy = Scripted(lambda s: {0: [Start(0, 3, (1,)), Wake(200)], 200: [Resize(0, (1, 0))]}.get(s.now_us, []))
    result = simulate(policy, WHOLE, trace((0, 0)), Machine(2, Overheads(grow_us=40)))
    assert result.outcomes.latency_us.tolist() == [320]  # 40 us on one core are worth 20 on two


def test_shrunk_at_the_next_boundary(ledger):
    def decide(snapshot):
        if snapshot.now_us == 80:
            assert snapshot.running[0].stopping and not snapshot.free_cores
        if snapshot.now_us == 150:
            assert snapshot.free_cores == (1,) and not snapshot.running[0].stopping
        return {0: [Start(0, 3, (0, 1)), Wake(60)], 60: [Resize(0, (0,)), Wake(80)]}.get(snapshot.now_us, [])

    result = simulate(Scripted(decide), WHOLE, trace((0, 0)), Machine(2), ledger)
    assert result.outcomes.latency_us.tolist() == [250]
    assert ledger.stretches == [(0, (0, 1), 0, 2, 0, 150), (0, (0,), 2, 3, 150, 250)]


def test_blocks_that_share_memory_slow_each_other_down():
    models = {0: profile([100.0, 100.0], memory=0.5), 1: profile([300.0], model_id=1, memory=1.0)}

    def decide(snapshot):
        if snapshot.waiting:
            query = snapshot.waiting[0]
            return [Start(query.query_id, models[query.model_id].layers, snapshot.free_cores[:1])]
        return []

    machine = Machine(2, level_per_demand=0.8, level_step=0.1)
    result = simulate(Scripted(decide), models, trace((0, 0), (80, 1)), machine)
    # Beside a demand of 1.0 the level is 0.8: slope 0.5 makes layers 1.4 times as long. Beside 0.5 it is 0.4.
    first_us = 80 + (20 + 100) * 1.4
    done = (first_us - 80) / 1.4
    assert result.outcomes.latency_us == pytest.approx([first_us, first_us - 80 + 300 - done])


def test_policies_learn_of_the_level_of_requests_and_of_answers():
    models = {0: profile([100.0], memory=0.5)}
    levels = []

    def decide(snapshot):
        levels.append(snapshot.level)
        return [Start(q.query_id, 1, (core,)) for q, core in zip(snapshot.waiting, snapshot.free_cores, strict=False)]

    policy = Scripted(decide)
    simulate(policy, models, trace((0, 0), (10, 0)), Machine(2, level_per_demand=0.8))
    assert levels[:2] == [0, 0.4]
    assert policy.came == [0, 1]
    assert [query_id for query_id, _ in policy.answered] == [0, 1]


def test_refused_and_never_answered():
    result = simulate(script([Reject(0)]), WHOLE, trace((0, 0)), Machine(2))
    assert result.outcomes.status.tolist() == [REFUSED]
    with pytest.raises(ContractError, match="leaves 1 queries waiting"):
        simulate(script(), WHOLE, trace((0, 0)), Machine(2))


@pytest.mark.parametrize(
    ("decisions", "message"),
    [
        ([Start(0, 3, (0, 0))], "core 0 is not free"),
        ([Start(0, 4, (0,))], "layers end at 3"),
        ([Start(0, 0, (0,))], "the query is at 0"),
        ([Start(0, 3, ())], "no core"),
        ([Start(7, 3, (0,))], "7"),
        ([Start(0, 3, (0,)), Resize(0, (1, 0))], "its cores are"),
        ([Wake(0)], "has passed"),
        ([StartOver(0)], "has not started"),
    ],
)
def test_a_policy_that_breaks_its_contract(decisions, message):
    with pytest.raises(ContractError, match=message):
        simulate(script(decisions), WHOLE, trace((0, 0)), Machine(2))


def test_queries_that_are_certain_to_be_late_are_refused(ledger):
    # 200 us on two cores. The first has one core only and is at 300 when its last layer cannot be in time any more; it
    # is refused at the boundary. The second never gets a core, the third could not be in time when it came.
    models = {
        0: replace(WHOLE[0], qos_us=320.0, rejects_late=True),
        1: replace(WHOLE[0], model_id=1, qos_us=150.0, rejects_late=True),
    }
    policy = Scripted(lambda s: {0: [Start(0, 3, (0,))]}.get(s.now_us, []))
    result = simulate(policy, models, trace((0, 0), (10, 0), (20, 1)), Machine(2), ledger)
    assert result.outcomes.status.tolist() == [REFUSED] * 3
    assert result.outcomes.latency_us == pytest.approx([300, 120, 0])
    assert ledger.stretches == [(0, (0,), 0, 2, 0, 300)]


def test_without_a_lease_a_query_waits():
    result = simulate(
        make_policy("model_fcfs"), {0: profile([100.0], cores=1)}, trace((0, 0), (0, 0)), Machine(1, leases=1)
    )
    assert result.outcomes.latency_us.tolist() == [100, 200]


def test_what_starts_over_gives_its_lease_to_another(ledger):
    """The first has done its first layer when the other one comes, on a machine of one lease."""
    steps = {0: [Start(0, 1, (0, 1))], 60: [StartOver(0), Start(1, 3, (0, 1))], 260: [Start(0, 3, (0, 1))]}
    policy = Scripted(lambda s: steps.get(s.now_us, []))
    result = simulate(policy, WHOLE, trace((0, 0), (60, 0)), Machine(2, leases=1), ledger)
    assert result.outcomes.latency_us.tolist() == [460, 200]
    assert ledger.stretches == [(0, (0, 1), 0, 1, 0, 50), (1, (0, 1), 0, 3, 60, 260), (0, (0, 1), 0, 3, 260, 460)]


def test_a_block_runs_the_versions_it_is_told():
    plain = WHOLE[0]
    latency_us = tuple((layer[0], tuple(3 * time_us for time_us in layer[0])) for layer in plain.latency_us)
    models = {0: replace(plain, latency_us=latency_us, slope=((0.0, 0.0),) * 3)}
    steps = {0: [Start(0, 2, (0, 1), versions=(1, 0))], 250: [Start(0, 3, (0,), versions=(1,))]}
    result = simulate(Scripted(lambda s: steps.get(s.now_us, [])), models, trace((0, 0)), Machine(2))
    assert result.outcomes.latency_us.tolist() == [3 * 50 + 100 + 3 * 100]
    assert (result.counters.blocks, result.counters.versions, result.counters.preemptions) == (2, 2, 0)


def test_a_stop_takes_the_place_of_shrinking_and_growing_that_of_it():
    steps = {
        0: [Start(0, 3, (0, 1)), Wake(10)],
        10: [Resize(0, (0,)), Wake(20)],
        20: [Stop(0)],
        50: [Start(0, 3, (0, 1)), Wake(60)],
        60: [Resize(0, (0,)), Wake(70)],
        70: [Resize(0, (0, 1, 2)), Wake(80)],
    }
    models = {0: profile([100.0, 200.0, 100.0], cores=3)}
    result = simulate(Scripted(lambda s: steps.get(s.now_us, [])), models, trace((0, 0)), Machine(3))
    assert result.outcomes.latency_us.tolist() == pytest.approx([70 + (200 - 20 * 2 + 100) / 3])
    counters = result.counters
    assert (counters.blocks, counters.preemptions, counters.grown, counters.shrunk) == (2, 1, 1, 0)


def test_a_simulation_is_given_up_when_its_limits_are_exceeded():
    models = {0: replace(WHOLE[0], qos_us=500.0)}
    arrivals = trace(*((0, 0),) * 10)
    result = simulate(
        make_policy("edf"), models, arrivals, Machine(2), limits=SimulationLimits(range(10), 2, (10,), 100)
    )
    assert result.gave_up
    statuses = result.outcomes.status.tolist()
    assert statuses.count(UNFINISHED) == 10 - 2 - 3, "two in time, and the third that is late is one too many"
    crowded = simulate(
        make_policy("edf"), models, arrivals, Machine(2), limits=SimulationLimits(range(10), 10, (10,), 5)
    )
    assert crowded.gave_up and set(crowded.outcomes.status) == {UNFINISHED}


def test_models_must_fit_the_machine():
    with pytest.raises(ValueError, match="with 4 cores"):
        simulate(script(), WHOLE, trace((0, 0)), Machine(4))
    with pytest.raises(ValueError, match="numbered from 0"):
        simulate(script(), {1: WHOLE[0]}, trace((0, 1)), Machine(2))
    with pytest.raises(ValueError, match="at least one core"):
        Machine(0)
