"""Batches that the default policy and the real former make, in a scheduler's process that is killed at times."""

import itertools
import time

import pytest
from gangway.executor.slots import SlotStatus
from gangway.scheduler import control as slow

from tests.scheduler.conftest import Server


@pytest.fixture
def joining(tiny_model, request):
    """A server whose model's requests are joined whenever they wait together."""
    server = Server(*tiny_model, "gangway", max_rows=16, joins=True, max_delay_us=0.0, **getattr(request, "param", {}))
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
    joining.expect(slow.Recovered)


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
