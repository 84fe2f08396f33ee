"""Queue policies on real gangs: full queues, and queries that are certain to be late, waiting or running."""

import time

from gangway.executor.slots import SlotStatus
from gangway.scheduler import admission
from gangway.scheduler.messages import SetProfile
from gangway.scheduler.policy import Reject, Start, Stop

LAYERS = 6


def run_all(snapshot):
    """Start the oldest query on both cores."""
    if not snapshot.waiting or snapshot.free_cores != (0, 1):
        return []
    return [Start(snapshot.waiting[0].query_id, LAYERS, (0, 1))]


def run_one(snapshot):
    """Start the oldest query on core 0: the policy is asked only while a core is free."""
    return [Start(snapshot.waiting[0].query_id, LAYERS, (0,))] if snapshot.waiting and not snapshot.running else []


def in_ms(milliseconds):
    return time.monotonic_ns() + int(milliseconds * 1e6)


def executed(request):
    """Tasks of the query that have been executed."""
    return sum(request.outputs[0].cast("i"))


def test_a_queue_that_is_full_refuses(scripted):
    waiting = [scripted.request(max_queue=2) for _ in range(2)]
    refused = scripted.request(max_queue=2)
    other_class = scripted.request(max_queue=2, priority=1)
    patient = scripted.request()
    assert scripted.outcome(refused).status is SlotStatus.QUEUE_FULL
    assert not executed(refused)
    scripted.script.answer = run_all
    scripted.ask()
    for request in (*waiting, other_class, patient):
        assert scripted.outcome(request).status is SlotStatus.OK
    assert scripted.outcome(scripted.request(max_queue=2)).status is SlotStatus.OK


def test_the_hopeless_make_room_for_newcomers(scripted):
    """With 1024 slots 896 requests may wait; one more, and 64 that nobody can help any more are refused."""
    late = [scripted.request(deadline_ns=in_ms(-1)) for _ in range(40)]
    hopeful = [scripted.request(deadline_ns=in_ms(60_000)) for _ in range(400)]
    best_effort = [scripted.request() for _ in range(456)]
    begun = scripted.request(deadline_ns=in_ms(60_000))
    refused = [*late, *best_effort[-24:]]
    assert {scripted.outcome(request).status for request in refused} == {SlotStatus.CROWDED}
    scripted.script.answer = run_all
    scripted.ask()
    answered = [*hopeful, *best_effort[:-24], begun]
    assert {scripted.outcome(request).status for request in answered} == {SlotStatus.OK}


def test_what_has_begun_waits_in_no_queue(scripted):
    scripted.script.answer = run_one
    first = scripted.request(task_us=1500, max_queue=1)
    scripted.await_running(first)
    query_id = scripted.script.seen[-1].waiting[0].query_id
    scripted.script.answer = lambda snapshot: [Stop(query_id)] if snapshot.running else []
    scripted.ask()
    scripted.await_snapshot(lambda snapshot: any(query.started for query in snapshot.waiting))
    second = scripted.request(max_queue=1)
    third = scripted.request(max_queue=1)
    assert scripted.outcome(third).status is SlotStatus.QUEUE_FULL
    scripted.script.answer = run_all
    scripted.ask()
    assert [scripted.outcome(request).status for request in (first, second)] == [SlotStatus.OK] * 2


def test_a_late_query_is_refused_in_the_queue_if_that_is_its_policy(scripted):
    begin_ns = time.monotonic_ns()
    refused = scripted.request(deadline_ns=in_ms(20), rejects_late=True)
    patient = scripted.request(deadline_ns=in_ms(20))
    assert scripted.outcome(refused).status is SlotStatus.LATE
    assert time.monotonic_ns() - begin_ns >= 20e6
    assert not executed(refused)
    scripted.script.answer = run_all
    scripted.ask()
    assert scripted.outcome(patient).status is SlotStatus.OK


def test_a_late_query_is_stopped_at_the_next_layer(scripted):
    scripted.script.answer = run_all
    refused = scripted.request(task_us=15_000, deadline_ns=in_ms(500), rejects_late=True)
    scripted.await_running(refused)
    assert scripted.outcome(refused).status is SlotStatus.LATE
    done = executed(refused)
    assert 0 < done < 24 * LAYERS
    assert done % 24 == 0, "not inside a layer"
    following = scripted.request()
    assert scripted.outcome(following).status is SlotStatus.OK
    assert executed(refused) == done, "nobody went on with it"
    assert not scripted.script.seen[-1].running


def test_a_late_query_that_was_stopped_is_refused_while_it_waits(scripted):
    scripted.script.answer = run_one
    refused = scripted.request(task_us=5000, deadline_ns=in_ms(500), rejects_late=True)
    scripted.await_running(refused)
    query_id = scripted.script.seen[-1].waiting[0].query_id
    scripted.script.answer = lambda snapshot: [Stop(query_id)] if snapshot.running else []
    scripted.ask()
    assert scripted.outcome(refused).status is SlotStatus.LATE
    scripted.script.answer = run_all
    assert scripted.outcome(scripted.request()).status is SlotStatus.OK
    assert scripted.script.seen[-1].free_leases == scripted.script.seen[0].free_leases


def test_what_has_waited_too_long_is_refused(scripted):
    """Only waiting counts: what has begun in time may take as long as it takes."""
    scripted.script.answer = run_one
    begun = scripted.request(task_us=3000, queue_end_ns=in_ms(100))
    scripted.await_running(begun)
    begin_ns = time.monotonic_ns()
    refused = scripted.request(queue_end_ns=in_ms(30))
    patient = scripted.request(queue_end_ns=in_ms(60_000))
    assert scripted.outcome(refused).status is SlotStatus.LATE
    assert time.monotonic_ns() - begin_ns >= 30e6
    assert not executed(refused)
    assert [scripted.outcome(request).status for request in (begun, patient)] == [SlotStatus.OK] * 2


def test_what_was_stopped_does_not_wait_in_the_queue(scripted):
    scripted.script.answer = run_one
    begun = scripted.request(task_us=1500, queue_end_ns=in_ms(150))
    scripted.await_running(begun)
    query_id = scripted.script.seen[-1].waiting[0].query_id
    scripted.script.answer = lambda snapshot: [Stop(query_id)] if snapshot.running else []
    scripted.ask()
    scripted.await_snapshot(lambda snapshot: any(query.started for query in snapshot.waiting))
    other = scripted.request(queue_end_ns=in_ms(200))
    assert scripted.outcome(other).status is SlotStatus.LATE, "whose time was up later"
    scripted.script.answer = run_all
    scripted.ask()
    assert scripted.outcome(begun).status is SlotStatus.OK


def test_what_has_waited_too_long_may_go_behind_others(scripted):
    delayed = scripted.request(queue_end_ns=in_ms(20), delays=True)

    def is_late(snapshot):
        return any(query.deadline_us and query.deadline_us <= snapshot.now_us for query in snapshot.waiting)

    scripted.until(lambda: scripted.ask() or any(map(is_late, list(scripted.script.seen))))
    scripted.script.answer = run_all
    scripted.ask()
    assert scripted.outcome(delayed).status is SlotStatus.OK


def test_an_estimate_does_not_refuse_for_ever(scripted, monkeypatch):
    """One request is served although the estimate says that it is late; its run shows the estimate to be wrong."""
    monkeypatch.setattr(admission, "PROBE_US", 1.2e6)
    scripted.tell(SetProfile(7, isolated_us=1e6))

    def ask():
        with scripted.request(deadline_ns=in_ms(500), rejects_late=True) as request:
            return scripted.outcome(request).status

    assert ask() is SlotStatus.LATE, "nobody runs it, whatever is known"
    scripted.script.answer = run_all
    begin_s = time.monotonic()
    while (status := ask()) is SlotStatus.LATE:
        assert time.monotonic() < begin_s + 30
    assert status is SlotStatus.OK
    assert time.monotonic() > begin_s + 1, "it was trusted for a while"
    scripted.await_ends(1)
    assert [ask() for _ in range(20)] == [SlotStatus.OK] * 20


def test_a_policy_may_refuse_only_what_rejects_late(scripted):
    scripted.script.answer = lambda snapshot: [Reject(query.query_id) for query in snapshot.waiting]
    patient = scripted.request()
    refused = scripted.request(deadline_ns=in_ms(60_000), rejects_late=True)
    assert scripted.outcome(refused).status is SlotStatus.LATE
    assert not executed(refused)
    scripted.script.answer = run_all
    scripted.ask()
    assert scripted.outcome(patient).status is SlotStatus.OK


def test_a_successor_refuses_what_its_predecessor_would_have(server):
    running = server.request(task_us=6000)
    server.await_running(running)
    refused = server.request(deadline_ns=in_ms(300), rejects_late=True)
    patient = server.request(deadline_ns=in_ms(300))
    impatient = server.request(queue_end_ns=in_ms(300))
    server.kill_scheduler()
    assert [server.outcome(request).status for request in (refused, impatient)] == [SlotStatus.LATE] * 2
    assert [server.outcome(request).status for request in (running, patient)] == [SlotStatus.OK] * 2


def test_of_late_requests_that_would_wait_in_vain_the_oldest_are_refused(scripted):
    """Each takes the machine a second, and two seconds of them may wait: where 32 wait, one is left."""
    scripted.tell(SetProfile(7, isolated_us=1e6))
    late = [scripted.request(deadline_ns=in_ms(-1)) for _ in range(60)]
    assert {scripted.outcome(request).status for request in late[:31]} == {SlotStatus.CROWDED}
    scripted.script.answer = run_all
    scripted.ask()
    assert {scripted.outcome(request).status for request in late[-1:]} == {SlotStatus.OK}
