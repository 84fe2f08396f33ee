"""Requests that begin without a decision: what becomes of them is what becomes of others."""

import os
import signal
import time

import pytest

from gangway.executor.leases import PhaseKind
from gangway.executor.slots import SlotStatus
from gangway.scheduler import fast_path, loop, messages
from gangway.scheduler.policy import LoneStart, Start
from tests.helpers.sampled import sampled
from tests.scheduler.conftest import LAYERS, Script, ScriptedServer, Server


class Host(Script):
    """Lets requests take the fast path on so many cores, and starts others on all free ones."""

    lone = LoneStart(1)

    def decide(self, snapshot):
        super().decide(snapshot)
        free = snapshot.free_cores
        return [Start(snapshot.waiting[0].query_id, LAYERS, free)] if snapshot.waiting and free else []

    def lone_start(self, model, core_count, level):
        return self.lone


class OpenServer(ScriptedServer):
    policy = Host
    traced = False

    def open_model(self, lone):
        """Have the model begin like that without a decision, by a request that is decided about."""
        self.script.lone = lone  # type: ignore[attr-defined] # of Host
        assert self.outcome(self.request()).status is SlotStatus.OK
        self.until(lambda: self.live.fast_path.models and self.is_asleep(skips_completions=True))
        for seen in (self.script.seen, self.script.came, self.script.done):
            seen.clear()


@pytest.fixture
def host(tiny_model, request):
    """A server whose model is for one core; its parameter says how long a layer is expected to take (us)."""
    server = OpenServer(*tiny_model, max_ranks=1, layer_us=(getattr(request, "param", 1.0),) * LAYERS)
    server.open_model(LoneStart(1))
    yield server
    server.kill_all()


@pytest.fixture
def wide(tiny_model):
    """A server whose model is for both cores."""
    server = OpenServer(*tiny_model)
    server.open_model(LoneStart(2))
    yield server
    server.kill_all()


def test_nobody_is_asked_about_them_but_all_is_noted(host):
    requests = []
    for _ in range(100):
        requests.append(host.request(deadline_ns=time.monotonic_ns() + 10**9))
        assert host.outcome(requests[-1]).status is SlotStatus.OK
        assert host.counters(requests[-1]) == {1}
    host.ask()
    host.until(lambda: len(host.script.done) == 100)
    assert not any(seen.waiting for seen in host.script.seen)
    assert host.script.came == host.script.done
    counters = host.live.accounts.counters.of("tiny")
    assert (counters.blocks, counters.layers) == (101, 101 * LAYERS)  # the one that opened the model, too


def test_each_begins_on_a_core_of_its_own_while_there_are_any(host):
    requests = [host.request(hang=2) for _ in range(2)]
    for request in requests:
        host.await_running(request)
    for request in requests:
        host.hurry(request)
        assert host.outcome(request).ranks == 1
    assert not host.script.seen


@pytest.mark.parametrize("host", [20_000.0], indirect=True)
def test_who_has_to_wait_longer_is_decided_about_and_what_is_under_way_is_seen(host):
    running = [host.request(hang=2) for _ in range(2)]
    for request in running:
        host.await_running(request)
    waiting = host.request()
    seen = host.await_snapshot(lambda snapshot: snapshot.waiting)
    assert sorted(block.cores for block in seen.running) == [(0,), (1,)]
    assert seen.free_cores == ()
    for request in (*running, waiting):
        host.hurry(request)
        assert host.outcome(request).status is SlotStatus.OK
    host.await_ends(3)
    assert sorted(host.script.came) == sorted(host.script.done)


def test_of_a_model_with_one_instance_one_is_under_way(tiny_model):
    server = OpenServer(*tiny_model, max_ranks=1, layer_us=(1.0,) * LAYERS, limits=(("instances", 1, 1),))
    try:
        server.open_model(LoneStart(1))
        for _ in range(10):
            assert server.outcome(server.request()).status is SlotStatus.OK
            server.until(
                lambda: server.workers_are_asleep() and server.is_asleep(skips_completions=True)
            )  # it has left
        assert not server.script.seen
        for _ in range(3):
            first = server.request(hang=2)
            server.await_running(first)
            second = server.request(hang=2)
            server.await_snapshot(lambda snapshot: len(snapshot.running) == 1)  # the first, which is a gang's now
            server.hurry(first)
            assert server.outcome(first).status is SlotStatus.OK
            server.await_running(second)
            server.hurry(second)
            assert server.outcome(second).status is SlotStatus.OK
        assert all(len(snapshot.running) + len(snapshot.waiting) <= 1 for snapshot in server.script.seen)
    finally:
        server.kill_all()


@pytest.mark.parametrize("fields", [{"rows": 2}, {"rejects_late": 1, "deadline_ns": 2**62}])
def test_others_are_decided_about(host, fields):
    assert host.outcome(host.request(**fields)).status is SlotStatus.OK
    assert host.script.seen


def test_the_first_request_of_a_model_is_decided_about(tiny_model):
    server = OpenServer(*tiny_model)
    try:
        assert server.outcome(server.request()).status is SlotStatus.OK
        assert server.script.seen
    finally:
        server.kill_all()


def test_a_model_that_is_not_asked_for_long_is_closed(tiny_model, monkeypatch):
    server = OpenServer(*tiny_model)
    try:
        server.open_model(LoneStart(2))
        monkeypatch.setattr(fast_path, "REST_US", 0.0)
        server.until(lambda: not server.live.fast_path.models)
        assert server.outcome(server.request()).status is SlotStatus.OK
        assert server.script.seen
    finally:
        server.kill_all()


def test_a_gang_begins_on_all_its_cores(tiny_model, monkeypatch):
    monkeypatch.setattr(loop, "WATCH_WAIT_US", 1_500_000)  # what is under way then becomes a gang like others
    server = OpenServer(*tiny_model)
    try:
        server.open_model(LoneStart(2))
        for _ in range(10):
            request = server.request(hang=2)
            server.await_lease(lambda lease: lease.kind is PhaseKind.OPEN and lease.present == 0b11)
            server.hurry(request)
            outcome = server.outcome(request)
            assert (outcome.status, outcome.ranks) == (SlotStatus.OK, 2)
            assert server.counters(request) == {1}
        server.ask()
        server.until(lambda: len(server.script.done) == 10)
        assert not any(seen.waiting for seen in server.script.seen)
        assert server.script.came == server.script.done
    finally:
        server.kill_all()


def test_a_gang_that_finds_too_few_cores_is_decided_about_and_the_other_one_is_seen(wide):
    first = wide.request(hang=2)
    wide.await_gang(2)
    second = wide.request()
    seen = wide.await_snapshot(lambda snapshot: snapshot.waiting)
    assert [block.cores for block in seen.running] == [(0, 1)]
    assert seen.free_cores == ()
    for request in (first, second):
        wide.hurry(request)
        assert wide.outcome(request).status is SlotStatus.OK
        assert wide.counters(request) == {1}
    wide.await_ends(2)


@pytest.mark.parametrize("index", sampled([0, 1], [1]))
def test_a_gang_one_of_whose_workers_dies_runs_again(wide, index):
    request = wide.request(hang=2)
    wide.await_gang(2)
    wide.workers[index].kill()
    wide.hurry(request)
    wide.replace_worker(index)
    assert wide.outcome(request).status is SlotStatus.OK
    assert wide.outcome(wide.request()).status is SlotStatus.OK


def test_a_worker_that_stands_still_keeps_nobody_waiting(wide):
    """Its ranks come too late, when the others have done all; it is not given more than two at a time."""
    os.kill(wide.workers[1].pid, signal.SIGSTOP)
    try:
        for _ in range(4):
            request = wide.request()
            assert wide.outcome(request).status is SlotStatus.OK
            assert wide.counters(request) == {1}
        wide.await_snapshot(lambda snapshot: snapshot.waiting and snapshot.free_cores == (0,))
    finally:
        os.kill(wide.workers[1].pid, signal.SIGCONT)
    wide.await_ends(4)
    wide.until(lambda: wide.live.gangs.count == 0)
    assert wide.script.came == sorted(wide.script.done)


def test_while_one_may_grow_others_are_decided_about(tiny_model):
    server = OpenServer(*tiny_model)
    try:
        server.open_model(LoneStart(1, may_grow=True))
        first = server.request(hang=2)
        server.await_running(first)
        second = server.request()
        seen = server.await_snapshot(lambda snapshot: snapshot.waiting)
        assert [block.cores for block in seen.running] == [(0,)]
        server.hurry(first)
        assert [server.outcome(request).status for request in (first, second)] == [SlotStatus.OK] * 2
    finally:
        server.kill_all()


def test_one_that_is_near_its_deadline_is_decided_about_if_it_could_have_more_cores(tiny_model):
    server = OpenServer(*tiny_model)
    try:
        server.open_model(LoneStart(1, may_grow=True, min_slack_us=1e6))
        for seconds in (0, 10):
            deadline_ns = seconds and time.monotonic_ns() + seconds * 10**9
            assert server.outcome(server.request(deadline_ns=deadline_ns)).status is SlotStatus.OK
            assert not server.script.seen
        assert server.outcome(server.request(deadline_ns=time.monotonic_ns() + 10**9)).status is SlotStatus.OK
        assert server.script.seen
    finally:
        server.kill_all()


def test_one_that_is_cancelled_ends_at_the_next_boundary(host):
    request = host.request(hang=2)
    host.await_running(request)
    request.cancel()
    host.await_heard()
    host.hurry(request)
    assert host.outcome(request).status is SlotStatus.CANCELLED


def test_one_whose_worker_dies_runs_again(host):
    request = host.request(hang=2)
    host.await_running(request)
    host.hurry(request)
    host.workers[0].kill()
    host.replace_worker(0)
    assert host.outcome(request).status is SlotStatus.OK


def test_the_model_is_unloaded_when_they_have_ended(host):
    request = host.request(hang=2)
    host.await_running(request)
    host.tell(messages.UnloadModel(7))
    host.hurry(request)
    assert host.outcome(request).status is SlotStatus.OK
    assert host.expect(messages.ModelUnloaded).model_id == 7
    assert host.outcome(host.request()).status is SlotStatus.UNAVAILABLE


def test_a_front_end_is_quiet_when_they_have_ended(host):
    request = host.request(hang=2)
    host.await_running(request)
    host.tell(messages.FrontEndDied(1))
    host.until(lambda: host.is_asleep(skips_completions=False))
    assert host.link.receive() is None
    host.hurry(request)
    assert host.expect(messages.FrontEndQuiet).front_end == 1


def test_a_killed_scheduler_loses_none(tiny_model):
    server = Server(*tiny_model, policy="gangway", max_ranks=1)
    try:
        requests = [server.request(hang=2) for _ in range(4)]
        for request in requests[:2]:
            server.await_running(request)
        server.kill_scheduler(lambda: [server.hurry(request) for request in requests])
        assert [server.outcome(request).status for request in requests] == [SlotStatus.OK] * 4
    finally:
        server.kill_all()


def test_more_than_workers_have_slots_for_wait_a_moment(host):
    """They begin when others end, unless these take long: on a busy machine some bursts are decided about."""
    bursts = 100
    for _ in range(bursts):
        requests = [host.request(last=number == 7) for number in range(8)]
        assert [host.outcome(request).status for request in requests] == [SlotStatus.OK] * 8
        host.until(lambda: host.live.gangs.count == 0 and host.is_asleep(skips_completions=True))
    assert sum(len(snapshot.waiting) > 0 for snapshot in host.script.seen) < bursts / 2


def test_of_more_than_that_the_policy_makes_batches(host):
    for _ in range(20):
        requests = [host.request(last=number == 11) for number in range(12)]
        assert [host.outcome(request).status for request in requests] == [SlotStatus.OK] * 12
    assert any(len(snapshot.waiting) > 1 for snapshot in host.script.seen)


@pytest.mark.alone  # nothing else may keep it from a core
def test_it_gets_on_with_all_else_while_gangs_end_one_after_the_other(host):
    """The supervisor takes a scheduler that does not for one that hangs."""
    heartbeats, oldest_ns, limit_ns = host.memory.control.heartbeats, 0, 6 * 10**8
    end_ns = time.monotonic_ns() + 3 * limit_ns // 2
    running = [host.request() for _ in range(6)]
    while time.monotonic_ns() < end_ns:
        with running.pop(0) as request:
            assert host.outcome(request).status is SlotStatus.OK
        running.append(host.request())
        oldest_ns = max(oldest_ns, time.monotonic_ns() - heartbeats.last_ns(heartbeats.scheduler))
    for request in running:
        host.outcome(request)
    assert oldest_ns < limit_ns


@pytest.mark.alone  # the other worker must not begin late, too
def test_a_worker_that_begins_late_comes_after_others(host):
    """Something else has its core, like the front end."""

    def runs():
        return [host.memory.control.status(core).runs for core in range(2)]

    before = runs()
    os.kill(host.workers[0].pid, signal.SIGSTOP)
    late = host.request()
    time.sleep(0.03)
    os.kill(host.workers[0].pid, signal.SIGCONT)
    assert host.outcome(late).status is SlotStatus.OK
    for _ in range(5):
        host.until(host.workers_are_asleep)
        assert host.outcome(host.request()).status is SlotStatus.OK
    host.until(host.workers_are_asleep)
    assert [after - count for after, count in zip(runs(), before, strict=True)] == [1, 5]


def test_a_worker_that_gets_no_core_is_given_no_more(host):
    os.kill(host.workers[0].pid, signal.SIGSTOP)
    try:
        requests = [host.request(), host.request(hang=2)]
        host.await_running(requests[1])
        time.sleep(0.01)  # both should have ended long ago
        requests.append(host.request())
        host.await_snapshot(lambda snapshot: snapshot.waiting)
        for request in requests[1:]:
            host.hurry(request)
            assert host.outcome(request).status is SlotStatus.OK
    finally:
        os.kill(host.workers[0].pid, signal.SIGCONT)
    assert host.outcome(requests[0]).status is SlotStatus.OK
