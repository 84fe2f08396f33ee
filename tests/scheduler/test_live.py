"""The live scheduler: a real process over real shared memory with real workers."""

import os
import signal
import time

import pytest
from msgspec import structs

from gangway.executor.slots import SlotStatus
from gangway.scheduler import messages
from gangway.server.control.supervisor.shared_memory import FRONT_END
from tests.helpers.busy_core import busy_core
from tests.helpers.sampled import sampled
from tests.helpers.start_time import back_within_s
from tests.helpers.tiny_model import TASKS
from tests.scheduler.conftest import Server

TIMEOUT_SECONDS = 20
STOPPED = ((1_000_000, 0), (0, 1))  # of a query: how long its tasks last, which one hangs


def test_many_requests_are_each_computed_once(server):
    for rows in (1, 4):
        requests = [server.request(rows=rows) for _ in range(100)]
        for request in requests:
            with request:
                outcome = server.outcome(request)
                assert (outcome.status, outcome.attempts) == (SlotStatus.OK, 1)
                assert server.counters(request) == {1}
    server.stop()


def test_a_query_has_all_cores_and_the_next_one_waits_for_them(server):
    arrivals_ns = [time.monotonic_ns(), time.monotonic_ns()]
    first, second = server.request(hang=1, arrival_ns=arrivals_ns[0]), server.request(arrival_ns=arrivals_ns[1])
    server.await_gang(2)
    assert not any(second.outputs[0])
    server.hurry(first)
    ended, waited = server.outcome(first), server.outcome(second)
    assert ended.ranks == 2
    end_us = arrivals_ns[0] / 1e3 + ended.queue_us + ended.compute_us
    assert arrivals_ns[1] / 1e3 + waited.queue_us >= end_us - 1, "it began after the other one's end"


def test_cancelled_while_waiting_and_while_running(server):
    running, waiting = server.request(hang=1), server.request()
    server.await_gang(2)
    waiting.cancel()
    assert server.outcome(waiting).status is SlotStatus.CANCELLED
    assert not any(waiting.outputs[0])
    running.cancel()
    server.await_heard()
    server.hurry(running)
    assert server.outcome(running).status is SlotStatus.CANCELLED
    assert server.executed(running) == TASKS, "stops at the next layer boundary"
    assert server.outcome(server.request()).status is SlotStatus.OK


def test_a_limit_that_passes_in_the_queue(server):
    running = server.request(hang=1)
    late = server.request(limit_ns=time.monotonic_ns() + 5_000_000)
    assert server.outcome(late).status is SlotStatus.DEADLINE
    server.hurry(running)
    assert server.outcome(running).status is SlotStatus.OK


@pytest.mark.parametrize("victim", sampled([0, 1], [1]))
def test_a_killed_worker_costs_an_attempt(server, victim):
    running, waiting = server.request(hang=1), server.request()
    server.await_gang(2)
    server.kill_worker(victim)
    server.await_lease(lambda progress: progress.aborted)
    server.hurry(running)
    assert server.outcome(running).status is SlotStatus.OK
    assert server.outcome(running).attempts == 2
    assert server.outcome(waiting).status is SlotStatus.OK
    assert server.counters(waiting) == {1}
    deadline = time.monotonic() + 10
    while server.outcome(server.request(task_us=100)).ranks < 2:
        assert time.monotonic() < deadline, "the successor takes no part"


def test_a_query_that_kills_workers_is_given_up(server):
    poison = server.request(crash=1)
    healthy = server.request()
    for _ in range(2):  # the second time shows that it was no chance
        assert server.replace_dead_worker() == -signal.SIGILL
    assert server.outcome(poison).status is SlotStatus.CRASHED
    assert server.outcome(healthy).status is SlotStatus.OK
    assert server.counters(healthy) == {1}


def test_a_model_whose_queries_kill_workers_again_and_again_is_given_up(server):
    for _ in range(3):
        poison = server.request(crash=1)
        for _ in range(2):
            server.replace_dead_worker()
        assert server.outcome(poison).status is SlotStatus.CRASHED
    failed = server.expect(messages.ModelFailed)
    assert failed.at_fault and failed.reason == "its requests ended 6 worker processes within 60 seconds"
    assert server.expect(messages.ModelUnloaded).model_id == 7
    server.tell(server.specs[0])
    server.expect(messages.ModelLoaded)
    assert server.outcome(server.request()).status is SlotStatus.OK


def test_a_missing_worker_is_not_waited_for(server):
    server.workers[1].kill()
    server.workers[1].wait(TIMEOUT_SECONDS)
    server.memory.control.forget_worker(1)
    server.tell(messages.WorkerDied(1, server.workers[1].pid))
    server.tell(structs.replace(server.specs[0], model_id=8))
    server.tell(messages.WorkerMissing(1))
    assert server.expect(messages.ModelLoaded).model_id == 8
    assert server.outcome(server.request(model_id=8)).status is SlotStatus.OK
    server.replace_worker(1)
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while (outcome := server.outcome(server.request(task_us=1000))).ranks < 2:
        assert outcome.status is SlotStatus.OK and time.monotonic() < deadline


def test_a_killed_scheduler_loses_and_doubles_nothing(server):
    requests = [server.request(hang=1), *(server.request(task_us=100) for _ in range(19))]
    server.await_gang(2)
    server.kill_scheduler(meanwhile=lambda: server.hurry(requests[0]))
    late = server.request()
    for request in (*requests, late):
        assert server.outcome(request).status is SlotStatus.OK
    assert [server.counters(request) for request in (*requests[1:], late)] == [{1}] * 20
    assert server.expect(messages.Recovered).requests >= 19


@pytest.mark.alone
def test_a_killed_scheduler_is_back_within_a_second(server):
    bound_s = back_within_s("gangway.scheduler.process", 1)
    running, waiting = server.request(hang=1), server.request()
    server.await_gang(2)
    begin = time.monotonic()
    server.kill_scheduler(meanwhile=lambda: server.hurry(running))
    assert server.outcome(waiting).status is SlotStatus.OK
    assert time.monotonic() - begin < bound_s


@pytest.mark.parametrize("server", ["fixed_block:1"], indirect=True)  # most queries are between two blocks
def test_requests_survive_many_deaths_of_everything(server):
    requests = [server.request(task_us=50) for _ in range(60)]
    for _ in range(5):
        server.kill_scheduler()
        server.kill_worker(0)
        server.kill_worker(1)
        requests += [server.request(task_us=50) for _ in range(5)]
    for request in requests:
        with request:
            outcome = server.outcome(request)
            assert outcome.status in (SlotStatus.OK, SlotStatus.UNAVAILABLE)
            assert outcome.status is SlotStatus.OK or outcome.attempts == 3
    for _ in range(20):
        with server.request() as request:
            assert server.outcome(request).status is SlotStatus.OK
            assert server.counters(request) == {1}
    server.stop()


def test_a_dead_front_end_is_forgotten(server):
    running = server.request(task_us=3000)
    for _ in range(50):
        server.request()
    server.await_running(running)
    server.tell(messages.FrontEndDied(FRONT_END))
    assert server.expect(messages.FrontEndQuiet).front_end == FRONT_END
    assert server.memory.control.submit_rings[FRONT_END].pending() == 0
    assert not list(server.memory.tables[FRONT_END].scan())
    server.new_front_end()
    with server.request() as request:
        assert server.outcome(request).status is SlotStatus.OK


def test_a_dead_front_end_and_a_dead_scheduler(server):
    running = server.request(task_us=1000)
    server.await_running(running)
    server.kill_scheduler()
    server.tell(messages.FrontEndDied(FRONT_END))
    server.expect(messages.FrontEndQuiet)
    assert not list(server.memory.tables[FRONT_END].scan())


def test_unloading_gives_memory_back(server):
    running, waiting = server.request(task_us=200), server.request()
    server.await_running(running)
    server.tell(messages.UnloadModel(7))
    assert server.outcome(waiting).status is SlotStatus.UNAVAILABLE
    assert server.outcome(running).status is SlotStatus.OK
    assert server.expect(messages.ModelUnloaded).model_id == 7
    assert os.fstat(server.memory.arenas.fd).st_blocks == 0
    assert server.outcome(server.request()).status is SlotStatus.UNAVAILABLE
    server.tell(server.specs[0])
    server.expect(messages.ModelLoaded)
    assert server.outcome(server.request()).status is SlotStatus.OK


@pytest.mark.parametrize("server", ["gangway"], indirect=True)
def test_others_wait_for_the_cores_of_a_model_that_is_unloaded(server):
    server.tell(structs.replace(server.specs[0], model_id=8, max_ranks=1))
    assert server.expect(messages.ModelLoaded).model_id == 8
    running = server.request(hang=1, model_id=8)
    server.await_gang(1)
    server.tell(messages.UnloadModel(8))
    others = [server.request() for _ in range(8)]
    assert {server.outcome(other).status for other in others} == {SlotStatus.OK}
    server.hurry(running)
    assert server.outcome(running).status is SlotStatus.OK
    assert server.expect(messages.ModelUnloaded).model_id == 8


@pytest.fixture
def limited(tiny_model):
    """A server with room for one of its models, which each have one core."""
    server = Server(*tiny_model, models_bytes=15, loaded_bytes=10, weights_key="a", max_ranks=1)
    yield server
    server.kill_all()


def test_above_the_limit_of_memory_no_model_rests_that_is_in_use(limited):
    limited.tell(structs.replace(limited.specs[0], model_id=8, weights_key="b"))
    assert limited.expect(messages.ModelIdle).model_id == 7
    assert limited.expect(messages.ModelLoaded).model_id == 8
    running = limited.request(hang=1, model_id=8)
    limited.await_gang(1)
    waiting = limited.request(model_id=7)
    limited.await_heard()
    assert limited.link.receive() is None, "a query of each waits or runs"
    limited.hurry(running)
    for request in (running, waiting):
        assert (limited.outcome(request).status, limited.counters(request)) == (SlotStatus.OK, {1})
    assert limited.expect(messages.ModelLoaded).model_id == 7
    assert limited.expect(messages.ModelIdle).model_id == 8


def test_what_shares_weights_takes_memory_once(limited):
    limited.tell(structs.replace(limited.specs[0], model_id=8))
    assert limited.expect(messages.ModelLoaded).model_id == 8
    for model_id in (7, 8):
        assert limited.outcome(limited.request(model_id=model_id)).status is SlotStatus.OK
    assert limited.link.receive() is None


def test_a_model_that_cannot_be_loaded(server):
    server.tell(messages.LoadModel(8, "absent", "00" * 32, 1, 1, 64, 1))
    failed = server.expect(messages.ModelFailed)
    assert failed.model_id == 8 and "cannot load the compiled model" in failed.reason
    assert server.expect(messages.ModelUnloaded).model_id == 8
    server.tell(messages.LoadModel(9, "huge", "00" * 32, 1, 1, 1 << 60, 1))
    assert "do not fit" in server.expect(messages.ModelFailed).reason
    assert server.outcome(server.request()).status is SlotStatus.OK


def test_more_models_than_a_ring_holds(server):
    specs = [messages.LoadModel(10 + i, f"copy {i}", server.specs[0].key, 6, 2, 64, 1) for i in range(50)]
    for spec in specs:
        server.tell(spec)
    assert sorted(server.expect(messages.ModelLoaded).model_id for _ in specs) == [spec.model_id for spec in specs]
    assert server.outcome(server.request(model_id=59)).status is SlotStatus.OK


@pytest.fixture(scope="module")
def stopped(tiny_model):
    """By its case: a server whose second worker has been stopped in the middle of a query, and the query.

    All at once, because it takes each scheduler seconds to be sure.
    """
    found = {}
    for task_us, hang in STOPPED:
        server = Server(*tiny_model)
        running = server.request(task_us=task_us, hang=hang)
        server.await_gang(2)
        time.sleep(0.01)  # it has a task in its hands, or has done all that it can
        os.kill(server.workers[1].pid, signal.SIGSTOP)
        server.hurry(running)
        found[task_us, hang] = server, running
    yield found
    for server, _ in found.values():
        server.kill_all()


@pytest.mark.parametrize(("task_us", "hang"), STOPPED)
def test_a_stopped_worker_is_reported_and_replaced(stopped, task_us, hang):
    server, running = stopped[task_us, hang]
    stuck = server.expect(messages.WorkerStuck)
    assert (stuck.core, stuck.pid) == (1, server.workers[1].pid)
    server.kill_worker(1)
    assert server.outcome(running).status is SlotStatus.OK
    assert server.outcome(server.request()).status is SlotStatus.OK


@pytest.mark.long
@pytest.mark.alone
def test_a_worker_that_waits_for_a_core_is_let_be(server):
    """Whatever else runs on its core, and though the other rank waits for it."""
    running = server.request(task_us=1_000_000)
    server.await_gang(2)
    worker = server.workers[1].pid
    (core,) = os.sched_getaffinity(worker)
    with busy_core(core, count=8):
        os.sched_setscheduler(worker, os.SCHED_IDLE, os.sched_param(0))
        time.sleep(0.3)  # it has lost the core
        server.hurry(running)
        time.sleep(3.5)  # more than ranks gave each other once
    outcome = server.outcome(running)
    assert (outcome.status, outcome.attempts) == (SlotStatus.OK, 1)
    assert [process.poll() for process in server.workers] == [None, None]
    assert server.link.receive() is None, "nobody is reported"
