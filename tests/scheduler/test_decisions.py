"""Every decision of the policy interface on real gangs: two workers, and the test as policy."""

import itertools
import json
import time
from dataclasses import replace

from gangway.executor.slots import NEVER_JOINED, SlotCounts, SlotStatus
from gangway.scheduler import messages
from gangway.scheduler.observability import SchedulerCounters
from gangway.scheduler.policy import PlannedBlock, Reject, Replan, Resize, Start, StartOver, Stop, Wake
from gangway.server.control.supervisor.shared_memory import FRONT_END
from tests.helpers.tiny_model import TASKS
from tests.scheduler.chaos import Chaos
from tests.scheduler.conftest import LAYERS


def begin(snapshot, end_layer=LAYERS, cores=(0, 1), versions=()):
    """Start the oldest query on these cores if they are free."""
    if not snapshot.waiting or not set(cores) <= set(snapshot.free_cores):
        return []
    return [Start(snapshot.waiting[0].query_id, end_layer, cores, versions)]


def once(decisions):
    """A policy that starts whole queries on both cores, and makes these decisions first, as soon as it can."""
    left = list(decisions)

    def answer(snapshot):
        return left.pop(0)(snapshot) if left else begin(snapshot)

    return answer


def is_complete(server, request):
    return server.outcome(request).status is SlotStatus.OK and server.counters(request) == {1}


def test_a_query_runs_in_blocks_and_waits_between_them(scripted):
    def answer(snapshot):
        waiting = snapshot.waiting
        return begin(snapshot, waiting[0].next_layer + 2, (waiting[0].next_layer // 2 % 2,)) if waiting else []

    scripted.script.answer = answer
    for _ in range(20):
        with scripted.request(task_us=20, rows=2) as request:
            assert is_complete(scripted, request)
    queries = [snapshot.waiting[0] for snapshot in scripted.script.seen if snapshot.waiting]
    assert [(query.next_layer, query.started) for query in queries[:3]] == [(0, False), (2, True), (4, True)]
    assert queries[2].ran_us > queries[1].ran_us > 2 * 24 * 2 * 20
    assert queries[0].arrival_us == queries[2].arrival_us
    scripted.await_ends(20)
    assert scripted.script.came == scripted.script.done == [queries[0].query_id + index for index in range(20)]


def await_stopping(scripted):
    """Wait until the policy has seen that the one running block is to stop, or has stopped."""

    def is_stopping(snapshot):
        return any(block.stopping for block in snapshot.running) or any(query.started for query in snapshot.waiting)

    def seen():
        scripted.ask()
        return any(map(is_stopping, list(scripted.script.seen)))

    scripted.until(seen)


def test_stop_at_a_boundary_and_go_on_elsewhere(scripted):
    scripted.script.answer = lambda snapshot: begin(snapshot, cores=(0,))
    request = scripted.request(hang=TASKS)
    scripted.await_running(request)
    query_id = scripted.script.seen[-1].waiting[0].query_id
    scripted.script.answer = lambda snapshot: (
        [Stop(query_id)] if snapshot.running and not snapshot.running[0].stopping else []
    )
    await_stopping(scripted)
    scripted.hurry(request)
    paused = scripted.await_snapshot(lambda snapshot: any(query.started for query in snapshot.waiting))
    assert paused.free_cores == (0, 1) and not paused.running
    assert paused.waiting[0].next_layer == 1
    assert request.wait(time.monotonic_ns()) is None
    scripted.script.answer = lambda snapshot: begin(snapshot, cores=(1,))
    scripted.ask()
    assert is_complete(scripted, request)


def test_stop_at_once_inside_a_layer(scripted):
    scripted.script.answer = lambda snapshot: begin(snapshot, cores=(0,))
    request = scripted.request(task_us=100_000)
    scripted.await_running(request)
    query_id = scripted.script.seen[-1].waiting[0].query_id
    scripted.script.answer = lambda snapshot: [Stop(query_id, at_once=True)] if snapshot.running else []
    await_stopping(scripted)
    scripted.hurry(request)
    paused = scripted.await_snapshot(lambda snapshot: any(query.started for query in snapshot.waiting))
    assert paused.waiting[0].next_layer == 0
    scripted.script.answer = lambda snapshot: begin(snapshot, cores=(1,))
    scripted.ask()
    assert is_complete(scripted, request)


def test_a_gang_grows_and_shrinks_and_grows_again(scripted):
    steps = iter([(0, 1), (0,), (0, 1), (0,), (0, 1)])
    wanted = [next(steps)]

    def resize(snapshot):
        if not snapshot.running:
            return begin(snapshot, cores=(0,))
        block = snapshot.running[0]
        if block.stopping:
            return []
        if block.cores == wanted[0]:
            wanted[0] = next(steps, (0, 1))
        return [Resize(block.query.query_id, wanted[0])] if block.cores != wanted[0] else []

    def answer(snapshot):
        return [*resize(snapshot), Wake(snapshot.now_us + 500)]

    scripted.script.answer = answer
    request = scripted.request(task_us=8000)  # a layer takes long, whatever happens to the scheduler
    assert is_complete(scripted, request)
    blocks = [snapshot.running[0] for snapshot in scripted.script.seen if snapshot.running]
    assert {block.cores for block in blocks} == {(0,), (0, 1)}
    assert any(block.leaving == 1 and block.cores == (0, 1) for block in blocks)
    assert scripted.outcome(request).ranks == 2
    layers = [block.layer for block in blocks]
    assert layers == sorted(layers) and layers[-1] >= 2, "it has shrunk twice, at boundaries"
    assert all(
        block.layer_started_us <= snapshot.now_us for snapshot in scripted.script.seen for block in snapshot.running
    )


def test_an_urgent_query_takes_the_cores_of_another(scripted):
    def answer(snapshot):
        if snapshot.free_cores == (0, 1):
            urgent = min(snapshot.waiting, key=lambda query: query.priority, default=None)
            return [Start(urgent.query_id, LAYERS, (0, 1))] if urgent else []
        if any(query.priority < block.query.priority for query in snapshot.waiting for block in snapshot.running):
            return [Stop(snapshot.running[0].query.query_id)]
        return []

    scripted.script.answer = answer
    long = scripted.request(task_us=20_000)
    scripted.await_running(long)
    urgent = scripted.request(priority=-1)
    assert is_complete(scripted, urgent)
    assert long.wait(time.monotonic_ns()) is None, "the other one has not ended"
    scripted.hurry(long)
    assert is_complete(scripted, long)
    assert scripted.outcome(long).counts == SlotCounts(blocks=2, conflicts=0, preemptions=1, versions=1)
    assert scripted.outcome(urgent).counts == SlotCounts(blocks=1, versions=1)


def test_what_is_written_down(scripted):
    """Three blocks: one that got too few cores, and two with versions. The kernels have one version only."""

    def answer(snapshot):
        if not snapshot.waiting:
            return []
        query = snapshot.waiting[0]
        if query.next_layer == 0:
            return [Start(query.query_id, 2, (1,), wanted=2, reason="too few")]
        return [Start(query.query_id, query.next_layer + 2, (0, 1), (1, query.next_layer))]

    scripted.script.answer = answer
    request = scripted.request(task_us=100)
    assert is_complete(scripted, request)
    assert scripted.outcome(request).counts == SlotCounts(blocks=3, conflicts=1, preemptions=0, versions=0b10111)
    scripted.await_ends(1)
    scripted.stop()
    total = scripted.live.accounts.counters.total()
    assert total == SchedulerCounters(blocks=3, conflicts=1, layers=LAYERS, versions=4)
    lines = [json.loads(line) for line in scripted.trace.path.read_text().splitlines()]
    assert [line["decision"] for line in lines] == ["Start"] * 3
    assert lines[0]["reason"] == "too few" and lines[0]["waiting"] == {"tiny": 1}
    events = json.loads(scripted.timeline_path.read_text())["traceEvents"]
    work = [event for event in events if event["ph"] == "X"]
    assert sorted((event["tid"], event["args"]["layers"]) for event in work) == [
        (0, "2-4"), (0, "4-6"), (1, "0-2"), (1, "2-4"), (1, "4-6")
    ]  # fmt: skip
    for core in (0, 1):
        mine = sorted((event["ts"], event["dur"]) for event in work if event["tid"] == core)
        assert all(begin + length <= after for (begin, length), (after, _) in itertools.pairwise(mine))


def test_the_policy_is_asked_when_something_has_changed_and_when_it_wanted_to_be(scripted):
    begin_us = time.monotonic_ns() / 1e3
    scripted.script.answer = once([lambda snapshot: [Wake(begin_us + 30_000)]])
    request = scripted.request()
    assert is_complete(scripted, request)
    asked = len(scripted.script.seen)
    assert scripted.script.seen[1].now_us >= begin_us + 30_000
    assert asked == 2, "no free core or waiting query came after that"
    scripted.memory.control.scheduler_bell.ring()
    scripted.ask()
    scripted.expect(messages.FrontEndQuiet)
    assert len(scripted.script.seen) == asked, "nothing runs, nothing waits"


def test_decisions_that_come_too_late_or_make_no_sense_are_ignored(scripted):
    wrong = [Stop(99), Resize(99, (0,)), Reject(99), Start(99, LAYERS, (0,))]

    def answer(snapshot):
        for query in snapshot.waiting:
            wrong.append(Start(query.query_id, LAYERS + 1, (0,)))
            wrong.append(Start(query.query_id, LAYERS, (0, 0)))
            wrong.append(Start(query.query_id, LAYERS, (7,)))
            wrong.append(Start(query.query_id, LAYERS, ()))
            wrong.append(Start(query.query_id, LAYERS, (0,), versions=(1,)))
        for block in snapshot.running:
            wrong.append(Resize(block.query.query_id, (1, 0)))
            wrong.append(Reject(block.query.query_id))
        return [*wrong, *begin(snapshot, cores=(0,))]

    scripted.script.answer = answer
    requests = [scripted.request(task_us=20) for _ in range(5)]
    for request in requests:
        assert is_complete(scripted, request)


def test_without_free_leases_what_has_begun_goes_on(scripted):
    """One query after the other is begun and stopped after a layer, until there is no lease."""

    def answer(snapshot):
        fresh = [query for query in snapshot.waiting if not query.started]
        if fresh and snapshot.free_cores == (0, 1):
            return [Start(fresh[0].query_id, 1, (0, 1))]
        return []

    scripted.script.answer = answer
    leases = len(scripted.memory.control.leases)
    requests = [scripted.request() for _ in range(leases + 4)]
    full = scripted.await_snapshot(lambda snapshot: snapshot.free_leases == 0 and not snapshot.running)
    assert sum(query.started for query in full.waiting) == leases
    scripted.script.answer = begin
    scripted.ask()
    for request in requests:
        assert is_complete(scripted, request)


def test_what_starts_over_gives_its_lease_back(scripted):
    """It is stopped after its first layer. That has been executed twice in the end, the others once."""
    scripted.script.answer = lambda snapshot: (
        [] if any(query.started for query in snapshot.waiting) else begin(snapshot, 1)
    )
    request = scripted.request()
    [stopped] = scripted.await_snapshot(lambda snapshot: any(query.started for query in snapshot.waiting)).waiting
    leases = len(scripted.memory.control.leases)
    scripted.script.answer = lambda snapshot: [StartOver(query.query_id) for query in snapshot.waiting if query.started]
    scripted.ask()
    fresh = scripted.await_snapshot(lambda seen: [query.join_key for query in seen.waiting] == [NEVER_JOINED])
    assert list(fresh.waiting) == [replace(stopped, next_layer=0, started=False, ran_us=0.0, join_key=NEVER_JOINED)]
    assert fresh.free_leases == leases
    scripted.script.answer = begin
    scripted.ask()
    outcome = scripted.outcome(request)
    assert (outcome.status, outcome.attempts) == (SlotStatus.OK, 1)
    assert list(request.outputs[0].cast("i")) == [2] * TASKS + [1] * TASKS * (LAYERS - 1)


def test_any_decisions_while_workers_die(scripted):
    scripted.script.answer = Chaos(5, starts_over=True)
    requests = [scripted.request(task_us=50, rows=1 + index % 3) for index in range(40)]
    for victim in (0, 1, 0, 1):
        time.sleep(0.1)  # that much work between two deaths
        scripted.kill_worker(victim)
    for request in requests:
        with request:
            outcome = scripted.outcome(request)
            assert outcome.status is SlotStatus.OK or (outcome.status, outcome.attempts) == (SlotStatus.UNAVAILABLE, 3)
    scripted.script.answer = Chaos(5)  # who starts over executes its first tasks twice
    for _ in range(40):
        with scripted.request(task_us=10) as request:
            assert is_complete(scripted, request)
    total = scripted.live.accounts.counters.total()
    assert min(total.preemptions, total.grown, total.shrunk) > 0


def test_blocks_of_a_cancelled_query_end(scripted):
    """Cancelled while it is stopped between two blocks: it is answered at once and gives back what it holds."""
    scripted.script.answer = lambda snapshot: (
        [] if any(query.started for query in snapshot.waiting) else begin(snapshot, 1)
    )
    request = scripted.request()
    scripted.await_snapshot(lambda snapshot: any(query.started for query in snapshot.waiting))
    request.cancel()
    assert scripted.outcome(request).status is SlotStatus.CANCELLED
    scripted.script.answer = begin
    assert is_complete(scripted, scripted.request())
    assert scripted.script.seen[-1].free_leases == len(scripted.memory.control.leases)


def test_a_front_end_dies_while_its_queries_are_stopped(scripted):
    scripted.script.answer = lambda snapshot: begin(snapshot, 1) if snapshot.free_leases > 12 else []
    for _ in range(8):
        scripted.request()
    scripted.await_snapshot(lambda snapshot: sum(query.started for query in snapshot.waiting) > 0)
    scripted.tell(messages.FrontEndDied(FRONT_END))
    assert scripted.expect(messages.FrontEndQuiet).front_end == FRONT_END
    assert not list(scripted.memory.tables[FRONT_END].scan())
    scripted.new_front_end()
    scripted.script.answer = begin
    assert is_complete(scripted, scripted.request())


def test_a_planned_block_frees_a_core_without_a_decision(scripted):
    """The first query has both cores in its first block, and one after that: then the second query has the other."""
    seen = []

    def answer(snapshot):
        seen.append([block.cores for block in snapshot.running])
        if not snapshot.running:
            return [
                replace(start, blocks=(PlannedBlock(1, 1), PlannedBlock(3, 1))) for start in begin(snapshot, LAYERS)
            ]
        return begin(snapshot, LAYERS, cores=(1,))

    scripted.script.answer = answer
    first = scripted.request(task_us=5_000)
    scripted.await_gang(2)
    second = scripted.request(task_us=10)
    assert is_complete(scripted, second)
    assert first.wait(time.monotonic_ns()) is None, "the other one has not ended"
    assert seen[-1][0] == (0,)
    scripted.hurry(first)
    assert is_complete(scripted, first)
    assert scripted.outcome(first).counts == SlotCounts(blocks=3, versions=1)
    scripted.await_ends(2)
    scripted.stop()
    assert scripted.live.accounts.counters.total() == SchedulerCounters(blocks=4, layers=2 * LAYERS, planned_blocks=2)


def test_a_plan_changes_while_its_query_runs(scripted):
    """Versions of later layers, and blocks that are not to come; a larger gang has its own plan."""
    decided = []

    def answer(snapshot):
        if not snapshot.running:
            return [replace(start, blocks=(PlannedBlock(1, 1),)) for start in begin(snapshot, cores=(0,))]
        query_id = snapshot.running[0].query.query_id
        if len(decided) == 0:
            decided.append(Replan(query_id, (0, 0, 1, 2, 2, 0), ()))
        elif len(decided) == 1:
            assert snapshot.running[0].versions == (0, 0, 1, 2, 2, 0) and snapshot.running[0].blocks == ()
            decided.append(Resize(query_id, (0, 1), "", (0, 0, 3, 3, 3, 3)))
        else:
            return []
        return [decided[-1], Wake(snapshot.now_us + 1000)]

    scripted.script.answer = answer
    request = scripted.request(hang=1)
    scripted.await_gang(1)
    scripted.ask()
    scripted.await_gang(2)
    scripted.hurry(request)
    assert is_complete(scripted, request)
    assert scripted.outcome(request).counts == SlotCounts(blocks=1, versions=0b1001)
    scripted.await_ends(1)
    scripted.stop()
    assert scripted.live.accounts.counters.total() == SchedulerCounters(blocks=1, grown=1, layers=LAYERS, versions=4)
