"""Batches that the default policy and the real former make, in a scheduler's process that is killed at times."""

import itertools
import time

import pytest

from gangway.artifact.profile import LayerProfile, Profile, ProfiledMachine, write_profile
from gangway.executor.slots import SlotStatus
from gangway.scheduler import messages
from tests.helpers.tiny_model import TASKS
from tests.scheduler.conftest import LAYERS, Server


@pytest.fixture
def joining(tiny_model, request):
    """A server whose model's requests are joined whenever they wait together."""
    server = Server(
        *tiny_model, policy="gangway", max_rows=16, joins=True, max_delay_us=0.0, **getattr(request, "param", {})
    )
    yield server
    server.kill_all()


def await_batch(server):
    """Let requests wait for one that hangs; return them when they run together, and the first one of them hangs."""
    first = server.request(hang=1)
    server.await_running(first)
    others = [server.request(hang=index == 0) for index in range(10)]
    server.await_heard()
    server.hurry(first)
    assert server.outcome(first).status is SlotStatus.OK
    for request in others[1:]:
        server.await_running(request)
    return others


def test_what_waits_together_runs_together(joining):
    requests = await_batch(joining)
    for request in requests:
        joining.hurry(request)
    outcomes = [joining.outcome(request) for request in requests]
    assert {outcome.status for outcome in outcomes} == {SlotStatus.OK}
    assert {joining.executed(request) for request in requests} == {joining.executed(requests[0])}
    assert all(joining.counters(request) == {1} for request in requests)
    assert sum(outcome.batch_rows > 1 for outcome in outcomes) >= 8
    assert sum(outcome.leads for outcome in outcomes) <= 4


def test_what_must_not_be_joined_is_not(joining):
    first = joining.request(hang=1)
    joining.await_running(first)
    alone = [joining.request(alone=True) for _ in range(5)]
    joining.hurry(first)
    for request in alone:
        outcome = joining.outcome(request)
        assert (outcome.status, outcome.leads) == (SlotStatus.OK, True)
        assert outcome.batch_rows in (0, 1)


def test_a_killed_scheduler_loses_no_member_of_a_batch(joining):
    requests = await_batch(joining)
    waiting = [joining.request(task_us=20) for _ in range(10)]

    def hurry():
        for request in requests:
            joining.hurry(request)

    joining.kill_scheduler(meanwhile=hurry)
    for request in requests:
        outcome = joining.outcome(request)
        assert outcome.status is SlotStatus.OK
        assert outcome.attempts == 1 or outcome.batch_rows in (0, 1), "what runs again runs alone"
    for request in waiting:
        assert joining.outcome(request).status is SlotStatus.OK
        assert joining.counters(request) == {1}
    joining.expect(messages.Recovered)


def test_a_killed_worker_in_the_middle_of_a_batch(joining):
    requests = await_batch(joining)
    waiting = [joining.request(task_us=20) for _ in range(10)]
    joining.kill_worker(0)
    joining.await_lease(lambda progress: progress.aborted)
    for request in requests:
        joining.hurry(request)
    for request in requests:
        outcome = joining.outcome(request)
        assert (outcome.status, outcome.attempts) == (SlotStatus.OK, 2)
        assert outcome.batch_rows in (0, 1)
    for request in waiting:
        assert joining.outcome(request).status is SlotStatus.OK


@pytest.mark.long
def test_batches_survive_many_deaths_of_everything(joining):
    requests = [joining.request(task_us=50, rows=1 + index % 3) for index in range(60)]
    for _ in range(4):
        joining.kill_scheduler()
        joining.kill_worker(0)
        joining.kill_worker(1)
        requests += [joining.request(task_us=50) for _ in range(5)]
    for request in requests:
        with request:
            outcome = joining.outcome(request)
            assert outcome.status is SlotStatus.OK or (outcome.status, outcome.attempts) == (SlotStatus.UNAVAILABLE, 3)
    for _ in range(20):
        with joining.request() as request:
            assert joining.outcome(request).status is SlotStatus.OK
            assert joining.counters(request) == {1}
    joining.stop()


@pytest.mark.parametrize("joining", [{"preserve_ordering": True}], indirect=True)
def test_order_is_preserved(joining):
    begin_ns = time.monotonic_ns()
    requests = [joining.request(task_us=20, rows=1 + index % 3, arrival_ns=begin_ns + index) for index in range(40)]
    outcomes = [joining.outcome(request) for request in requests]
    assert {outcome.status for outcome in outcomes} == {SlotStatus.OK}
    assert sum(outcome.leads for outcome in outcomes) < 30, "some were joined"
    spans = [(outcome.queue_us, outcome.queue_us + outcome.compute_us) for outcome in outcomes]
    for (begin_us, end_us), (next_us, _) in itertools.pairwise(spans):
        assert abs(next_us - begin_us) < 1 or next_us > end_us - 1, "of the same batch, or of one after it"


@pytest.fixture
def in_rounds(tiny_model, tmp_path):
    """A server whose model is measured: four rows take four times as long as one, 16 rows 64 times, on both cores."""
    batches, factors = (1, 2, 4, 8, 16), (1, 2, 4, 16, 64)
    alone, beside = (
        tuple(tuple(us * factor for factor in factors) for us in times) for times in ((9e3, 5e3), (2e4, 5e3))
    )
    layers = (LayerProfile("layer", (tuple(tuple(us / LAYERS for us in times) for times in alone),), 0.0, 0.0, (), ()),)
    machine, runs = ProfiledMachine("0" * 12, "a CPU", 2, "baseline", 1.0, 1.0), (9,) * len(batches)
    profile = Profile(
        tiny_model[1], "tiny", machine, (1, 2), batches, layers * LAYERS, alone, beside, (), 0, runs, 0.001, 1.0
    )
    server = Server(*tiny_model, policy="gangway", max_rows=16, joins=True)
    server.tell(messages.UseProfile(7, str(write_profile(tmp_path, profile))))
    server.await_heard()
    yield server
    server.kill_all()


def counters_of(request, first_row, rows):
    """Distinct values of the counters of some rows' tasks."""
    tasks = LAYERS * TASKS
    return set(request.outputs[0].cast("i")[first_row * tasks : (first_row + rows) * tasks])


def test_parts_of_a_large_request_run_one_after_the_other(in_rounds):
    request = in_rounds.open(rows=16)
    in_rounds.order(request, 0, hang=1)
    request.submit()
    in_rounds.await_running(request)
    assert counters_of(request, 4, 12) == {0}, "nothing of it runs beside its first part"
    in_rounds.hurry(request)
    outcome = in_rounds.outcome(request)
    assert (outcome.status, outcome.counts.blocks, outcome.batch_rows) == (SlotStatus.OK, 4, 16)
    assert in_rounds.counters(request) == {1}


def test_when_a_worker_is_killed_only_the_part_that_ran_runs_again(in_rounds):
    request = in_rounds.open(rows=16)
    in_rounds.order(request, 5, hang=1)
    request.submit()
    while not any(counters_of(request, 4, 4)):
        time.sleep(0.0005)
    in_rounds.kill_worker(0)
    in_rounds.hurry(request)
    outcome = in_rounds.outcome(request)
    assert (outcome.status, outcome.attempts) == (SlotStatus.OK, 2)
    assert counters_of(request, 0, 4) == counters_of(request, 8, 8) == {1}
