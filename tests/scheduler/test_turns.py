"""When the scheduler wakes up, and what it hears then: a turn costs more by its cold caches than by what it does."""

import os
import signal
from pathlib import Path

import pytest

from gangway.executor.slots import SlotStatus
from gangway.scheduler import loop as live
from gangway.scheduler import messages
from gangway.scheduler.policies import turns
from gangway.scheduler.policy import Resize, Start
from gangway.server.control.supervisor.shared_memory import SUPERVISOR
from gangway.server.requests import data_plane
from tests.helpers.tiny_model import TASKS
from tests.scheduler.conftest import LAYERS, ScriptedServer

LATE_NS = 1 << 62  # a deadline that nobody misses


@pytest.fixture(autouse=True)
def _no_turns_by_the_clock(monkeypatch):
    monkeypatch.setattr(live, "IDLE_WAIT_US", 60_000_000)
    monkeypatch.setattr(live, "WATCH_WAIT_US", 60_000_000)


def on_both(snapshot):
    return (
        [Start(snapshot.waiting[0].query_id, LAYERS, (0, 1))]
        if snapshot.waiting and len(snapshot.free_cores) == 2
        else []
    )


def hang_on_both(server):
    """Return a request that has all cores until it is told to hurry."""
    server.script.answer = on_both
    request = server.request(hang=1)
    server.await_gang(2)
    return request


def one_core_each(snapshot):
    return [
        Start(query.query_id, LAYERS, (core,))
        for query, core in zip(snapshot.waiting, snapshot.free_cores, strict=False)
    ]


def on_first(snapshot):
    """Start queries on core 0, and let one that runs there have core 1, too, if nobody waits."""
    if snapshot.waiting:
        return [Start(snapshot.waiting[0].query_id, LAYERS, (0,))] if 0 in snapshot.free_cores else []
    return [Resize(block.query.query_id, (0, 1)) for block in snapshot.running if block.cores == (0,)]


def test_patient_while_one_gang_works_and_nobody_waits(scripted):
    scripted.script.answer = on_both
    scripted.until(lambda: scripted.is_asleep(skips_completions=True))
    first = scripted.request(hang=1)
    scripted.await_gang(2)
    scripted.until(lambda: scripted.is_asleep(skips_completions=True))
    second = scripted.request()
    scripted.until(lambda: scripted.is_asleep(skips_completions=False))
    scripted.hurry(first)
    assert [scripted.outcome(request).status for request in (first, second)] == [SlotStatus.OK] * 2


def test_the_end_of_a_query_costs_no_turn_and_is_heard_at_the_next_arrival(scripted):
    scripted.script.answer = on_both
    turns = []
    step = scripted.live.step
    request = scripted.request(hang=1)
    scripted.await_gang(2)
    scripted.until(lambda: scripted.is_asleep(skips_completions=True))
    scripted.live.step = lambda: (turns.append(1), step())
    scripted.hurry(request)
    assert scripted.outcome(request).status is SlotStatus.OK
    scripted.until(lambda: all(scripted.memory.control.quiet(core) for core in (0, 1)))
    assert not turns
    assert not scripted.script.done
    assert scripted.outcome(scripted.request()).status is SlotStatus.OK
    assert turns
    assert scripted.script.done


def test_the_end_of_a_query_is_heard_by_the_clock(scripted, monkeypatch):
    monkeypatch.setattr(live, "WATCH_WAIT_US", 10_000)
    scripted.script.answer = on_both
    assert scripted.outcome(scripted.request()).status is SlotStatus.OK
    scripted.await_ends(1)


def test_an_unload_does_not_wait_for_the_clock(scripted):
    request = hang_on_both(scripted)
    scripted.until(lambda: scripted.is_asleep(skips_completions=True))
    scripted.tell(messages.UnloadModel(7))
    scripted.until(lambda: scripted.is_asleep(skips_completions=False))
    scripted.hurry(request)
    assert scripted.expect(messages.ModelUnloaded).model_id == 7


def run_two_beside_each_other(server, skips_completions):
    server.script.answer = one_core_each
    requests = [server.request(hang=2) for _ in range(2)]
    for request in requests:
        server.await_running(request)
    server.until(lambda: server.is_asleep(skips_completions=skips_completions))
    for request in requests:
        server.hurry(request)
        assert server.outcome(request).status is SlotStatus.OK


def test_gangs_that_cannot_grow_leave_the_scheduler_patient(tiny_model):
    server = ScriptedServer(*tiny_model, max_ranks=1)
    try:
        run_two_beside_each_other(server, skips_completions=True)
    finally:
        server.kill_all()


def test_not_patient_while_another_gang_could_grow(scripted):
    run_two_beside_each_other(scripted, skips_completions=False)


def test_while_no_core_is_free_newcomers_wait_for_the_next_decision(scripted, monkeypatch):
    scripted.configure("decision_gap", min_gap_factor=1e9)
    scripted.configure("decision_gap", max_gap_us=60e6)
    first = hang_on_both(scripted)
    scripted.until(lambda: scripted.is_asleep(skips_completions=True))
    decisions = len(scripted.script.seen)
    second = scripted.request(deadline_ns=LATE_NS)
    scripted.until(lambda: scripted.is_asleep(skips_completions=False))
    assert len(scripted.script.seen) == decisions
    scripted.hurry(first)
    assert [scripted.outcome(request).status for request in (first, second)] == [SlotStatus.OK] * 2


def test_but_not_longer_than_a_few_times_what_a_decision_takes(scripted, monkeypatch):
    scripted.configure("decision_gap", min_gap_factor=1e9)
    scripted.configure("decision_gap", max_gap_us=20_000)
    first = hang_on_both(scripted)
    second = scripted.request(deadline_ns=LATE_NS)
    scripted.await_snapshot(lambda snapshot: snapshot.running and snapshot.waiting)
    scripted.hurry(first)
    assert [scripted.outcome(request).status for request in (first, second)] == [SlotStatus.OK] * 2


def decided_about(server, first, newcomer, skips_best_effort=False):
    """Return whether there is a decision about a newcomer before the one that has all cores has ended."""
    decisions = len(server.script.seen)
    second = server.request(**newcomer)
    server.until(
        lambda: len(server.live.requests.queries) == 1 and server.is_asleep(skips_best_effort=skips_best_effort)
    )
    decided = len(server.script.seen) > decisions
    server.hurry(first)
    assert [server.outcome(request).status for request in (first, second)] == [SlotStatus.OK] * 2
    return decided


@pytest.mark.parametrize("hurried", [{"deadline_ns": LATE_NS}, {"priority": -1}])
def test_who_can_take_no_cores_from_others_waits_longer(scripted, monkeypatch, hurried):
    scripted.configure("decision_gap", min_gap_factor=0.0)
    scripted.configure("best_effort_gap", gap_us=60e6)
    first = hang_on_both(scripted)
    scripted.until(lambda: scripted.is_asleep(skips_completions=True))
    decisions = len(scripted.script.seen)
    second = scripted.request()
    scripted.until(lambda: scripted.is_asleep(skips_best_effort=True))
    assert len(scripted.script.seen) == decisions
    third = scripted.request(**hurried)
    scripted.await_snapshot(lambda snapshot: len(snapshot.waiting) == 2)
    scripted.hurry(first)
    assert [scripted.outcome(request).status for request in (first, second, third)] == [SlotStatus.OK] * 3


def calm(server, monkeypatch):
    """Return two requests: one has all cores, and the scheduler does not want to hear of others like the other one."""
    server.configure("best_effort_gap", gap_us=60e6)
    requests = [hang_on_both(server)]
    server.until(lambda: server.is_asleep(skips_completions=True))
    requests.append(server.request())
    server.until(lambda: server.is_asleep(skips_best_effort=True))
    return requests


def test_who_can_wait_wakes_nobody(scripted, monkeypatch):
    requests = calm(scripted, monkeypatch)
    bell = scripted.memory.control.scheduler_bell
    strokes = bell.seen()
    requests.append(scripted.request())
    assert bell.seen() == strokes
    assert scripted.is_asleep(skips_best_effort=True)
    scripted.hurry(requests[0])
    assert [scripted.outcome(request).status for request in requests] == [SlotStatus.OK] * 3


@pytest.mark.parametrize("terms", [{"deadline_ns": LATE_NS}, {"priority": -1}, {"max_queue": 5}])
def test_who_cannot_wait_wakes_the_scheduler(scripted, monkeypatch, terms):
    requests = calm(scripted, monkeypatch)
    requests.append(scripted.request(**terms))
    scripted.until(lambda: scripted.live.requests.queries.in_order[-1].query_id == 2)
    scripted.hurry(requests[0])
    assert [scripted.outcome(request).status for request in requests] == [SlotStatus.OK] * 3


def test_where_slots_run_out_nobody_waits(scripted, monkeypatch):
    requests = calm(scripted, monkeypatch)
    monkeypatch.setattr(data_plane, "ROOMY", 0.0)
    requests.append(scripted.request())
    scripted.until(lambda: not scripted.is_asleep(skips_best_effort=True) or len(scripted.live.requests.queries) == 2)
    scripted.hurry(requests[0])
    assert [scripted.outcome(request).status for request in requests] == [SlotStatus.OK] * 3


def test_nobody_waits_behind_a_lower_class(scripted, monkeypatch):
    scripted.configure("best_effort_gap", gap_us=60e6)
    scripted.script.answer = on_both
    first = scripted.request(hang=1, priority=1)
    scripted.await_gang(2)
    scripted.until(lambda: scripted.is_asleep(skips_completions=True))
    second = scripted.request(priority=1)
    scripted.until(scripted.is_asleep)
    scripted.hurry(first)
    assert [scripted.outcome(request).status for request in (first, second)] == [SlotStatus.OK] * 2


@pytest.fixture
def stopped(scripted):
    """A query of which worker 0 has some tasks; worker 1 is stopped while it waits for them."""
    return stopped_query(scripted)


def stopped_query(server):
    server.script.answer = on_first
    request = server.request(hang=2)
    server.await_running(request)
    server.ask()
    server.await_gang(2)
    pid = server.workers[1].pid
    server.until(lambda: server.executed(request) > TASKS / 2 and state(pid) == "S")
    os.kill(pid, signal.SIGSTOP)
    server.until(lambda: state(pid) == "T")
    return request


def state(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_core_is_given_on_at_once_if_something_waits_for_it(scripted, stopped):
    waiting = scripted.request()
    scripted.until(lambda: scripted.is_asleep(skips_completions=False))
    scripted.hurry(stopped)
    assert scripted.outcome(waiting).status is SlotStatus.OK, "with the other rank still in the first one's lease"
    os.kill(scripted.workers[1].pid, signal.SIGCONT)
    scripted.until(lambda: scripted.memory.control.quiet(1))
    scripted.ask()
    scripted.await_ends(2)


def test_a_core_that_nobody_waits_for_costs_no_turn(scripted, stopped):
    turns = []
    step = scripted.live.step
    scripted.live.step = lambda: (turns.append(1), step())
    scripted.until(lambda: scripted.is_asleep(skips_completions=True))
    scripted.hurry(stopped)
    assert scripted.outcome(stopped).status is SlotStatus.OK
    scripted.until(lambda: scripted.memory.control.quiet(0))
    assert not turns
    os.kill(scripted.workers[1].pid, signal.SIGCONT)
    scripted.until(lambda: scripted.memory.control.quiet(1))
    scripted.ask()
    scripted.await_ends(1)
    assert turns


def test_the_supervisor_is_heard_in_the_turn_in_which_others_are(scripted):
    def answer(snapshot):
        if not told:
            scripted.tell(messages.FrontEndDied(SUPERVISOR))
            told.append(scripted.request())
        else:
            heard.append(scripted.link.receive())
        return on_both(snapshot)

    told, heard = [], []
    scripted.script.answer = answer
    assert scripted.outcome(scripted.request()).status is SlotStatus.OK
    assert scripted.outcome(told[0]).status is SlotStatus.OK
    assert heard[0] == messages.FrontEndQuiet(SUPERVISOR)


def test_the_last_rank_of_a_query_that_is_done_frees_no_instance_and_asks_nobody(tiny_model):
    server = ScriptedServer(*tiny_model, limits=(("instances", 1, 2),))
    try:
        first = stopped_query(server)
        server.script.answer = lambda snapshot: []
        second = server.request()
        server.hurry(first)
        assert server.outcome(first).status is SlotStatus.OK
        server.await_snapshot(lambda snapshot: snapshot.waiting and not snapshot.running)
        server.until(server.is_asleep)
        decisions = len(server.script.seen)
        os.kill(server.workers[1].pid, signal.SIGCONT)
        server.until(lambda: not server.live.gangs.count and server.is_asleep())
        assert len(server.script.seen) == decisions
        server.script.answer = on_both
        server.ask()
        assert server.outcome(second).status is SlotStatus.OK
    finally:
        server.kill_all()


def test_the_end_of_a_turn_asks_nobody_if_nothing_has_come(tiny_model, monkeypatch):
    monkeypatch.setattr(turns, "DUE_TURN_US", 500_000.0)
    server = ScriptedServer(*tiny_model, yields=True)
    try:
        server.script.answer = one_core_each
        running = [server.request(hang=2) for _ in range(2)]
        for request in running:
            server.await_running(request)
        waiting = server.request(deadline_ns=LATE_NS)
        server.await_snapshot(lambda snapshot: len(snapshot.running) == 2 and snapshot.waiting)
        decisions = len(server.script.seen)
        server.until(lambda: any(gang.stopping for gang in server.live.gangs.all()))
        server.until(server.is_asleep)
        assert len(server.script.seen) == decisions
        for request in (*running, waiting):
            server.hurry(request)
            assert server.outcome(request).status is SlotStatus.OK
    finally:
        server.kill_all()


@pytest.mark.parametrize(("turn_us", "decided"), [(60e6, False), (0.0, True)])
def test_newcomers_behind_a_python_model_wait_until_its_turn_may_be_over(tiny_model, monkeypatch, turn_us, decided):
    monkeypatch.setattr(turns, "TURN_US", turn_us)
    server = ScriptedServer(*tiny_model, yields=True)
    try:
        server.configure("decision_gap", min_gap_factor=0.0)
        server.configure("best_effort_gap", gap_us=60e6)
        first = hang_on_both(server)
        server.until(lambda: server.is_asleep(skips_completions=True))
        assert decided_about(server, first, {}, skips_best_effort=not decided) == decided
    finally:
        server.kill_all()


def test_a_newcomer_that_waits_for_an_instance_asks_nobody(tiny_model):
    server = ScriptedServer(*tiny_model, limits=(("instances", 1, 1),))
    try:
        server.script.answer = one_core_each
        requests = [server.request(hang=2)]
        server.await_running(requests[0])
        requests.append(server.request())
        server.until(lambda: len(server.live.requests.queries) == 1 and server.is_asleep())
        decisions = len(server.script.seen)
        requests.append(server.request())
        server.until(lambda: len(server.live.requests.queries) == 2 and server.is_asleep())
        assert len(server.script.seen) == decisions
        requests[1].cancel()
        assert server.outcome(requests[1]).status is SlotStatus.CANCELLED
        server.until(lambda: len(server.script.seen) > decisions)  # of those that wait another one is the first
        server.hurry(requests[0])
        assert [server.outcome(requests[number]).status for number in (0, 2)] == [SlotStatus.OK] * 2
    finally:
        server.kill_all()
