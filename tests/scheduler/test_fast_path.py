"""Requests that begin without a decision: what becomes of them is what becomes of others."""

import time

import pytest

from gangway.executor.slots import SlotStatus
from gangway.scheduler import messages as slow
from gangway.scheduler.policy import Start
from tests.scheduler.conftest import LAYERS, Script, ScriptedServer, Server


class Host(Script):
    """Lets requests take the fast path, and starts others on all free cores."""

    fast_path = True

    def decide(self, snapshot):
        super().decide(snapshot)
        free = snapshot.free_cores
        return [Start(snapshot.waiting[0].query_id, LAYERS, free)] if snapshot.waiting and free else []


class OpenServer(ScriptedServer):
    policy = Host
    traced = False

    def await_open(self):
        """Wait until the fast path is open: nothing else is under way then."""
        self.until(lambda: self.live.fast_path.models and self.is_asleep(skips_completions=True))
        self.script.seen.clear()


@pytest.fixture
def host(tiny_model, request):
    """A server whose model is for one core; its parameter says how long a layer is expected to take (us)."""
    server = OpenServer(*tiny_model, max_ranks=1, layer_us=(getattr(request, "param", 1.0),) * LAYERS)
    server.await_open()
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
    assert not host.script.seen
    assert host.script.came == host.script.done
    counters = host.live.accounts.counters.of("tiny")
    assert (counters.blocks, counters.layers) == (100, 100 * LAYERS)


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


@pytest.mark.parametrize("fields", [{"rows": 2}, {"rejects_late": 1, "deadline_ns": 2**62}])
def test_others_are_decided_about(host, fields):
    assert host.outcome(host.request(**fields)).status is SlotStatus.OK
    assert host.script.seen


def test_a_model_for_several_cores_is_decided_about(tiny_model):
    server = OpenServer(*tiny_model)
    try:
        assert server.outcome(server.request()).status is SlotStatus.OK
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
    host.tell(slow.UnloadModel(7))
    host.hurry(request)
    assert host.outcome(request).status is SlotStatus.OK
    assert host.expect(slow.ModelUnloaded).model_id == 7
    assert host.outcome(host.request()).status is SlotStatus.UNAVAILABLE


def test_a_front_end_is_quiet_when_they_have_ended(host):
    request = host.request(hang=2)
    host.await_running(request)
    host.tell(slow.FrontEndDied(1))
    host.until(lambda: host.is_asleep(skips_completions=False))
    assert host.link.receive() is None
    host.hurry(request)
    assert host.expect(slow.FrontEndQuiet).front_end == 1


def test_a_killed_scheduler_loses_none(tiny_model):
    server = Server(*tiny_model, "gangway", max_ranks=1)
    try:
        requests = [server.request(hang=2) for _ in range(4)]
        for request in requests[:2]:
            server.await_running(request)
        server.kill_scheduler(lambda: [server.hurry(request) for request in requests])
        assert [server.outcome(request).status for request in requests] == [SlotStatus.OK] * 4
    finally:
        server.kill_all()
