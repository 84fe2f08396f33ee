"""Joined and split requests on real gangs: two workers; the test decides what is joined and cut, and who runs."""

import json
import struct
import time
from dataclasses import replace

import pytest

from gangway.executor.segment import SLOT
from gangway.executor.slots import NEVER_JOINED, SLOT_BYTES, SlotStatus
from gangway.scheduler import messages
from gangway.scheduler.policy import Reject, Start, Stop
from gangway.server.control.supervisor.shared_memory import FRONT_END
from tests.helpers.sampled import sampled
from tests.helpers.tiny_model import TASKS, make_artifact
from tests.scheduler.chaos import Chaos
from tests.scheduler.conftest import LAYERS
from tests.scheduler.scripted_batches import BatchingServer, ChaosServer


@pytest.fixture(scope="session")
def staged_model(tmp_path_factory):
    """Every other layer of it takes three rows at once, so that rows of several requests are copied side by side."""
    made = make_artifact(tmp_path_factory.mktemp("staged"), LAYERS, batch_rows=3)
    return made.cache_dir, made.key


@pytest.fixture
def batching(tiny_model):
    server = BatchingServer(*tiny_model)
    yield server
    server.kill_all()


@pytest.fixture(params=sampled(["tiny_model", "staged_model"], ["staged_model"]))
def either(request):
    """A server of either model. Ranks of the staged one see inputs, and clients outputs, only as they were copied."""
    server = BatchingServer(*request.getfixturevalue(request.param))
    yield server
    server.kill_all()


def begin(snapshot, end_layer=LAYERS):
    """Start waiting queries on one core each."""
    pairs = zip(snapshot.waiting, snapshot.free_cores, strict=False)
    return [Start(query.query_id, end_layer, (core,)) for query, core in pairs]


def on_core(core):
    """Start the first waiting query on this core, if that is free."""

    def answer(snapshot):
        can = snapshot.waiting and core in snapshot.free_cores
        return [Start(snapshot.waiting[0].query_id, LAYERS, (core,))] if can else []

    return answer


@pytest.mark.parametrize(
    ("rows", "cut"),
    [
        ((1, 1, 1), ()),
        ((1, 2, 1), ()),
        ((4,), (2,)),
        ((3, 3), (2, 2)),
        ((1, 5, 2), (1, 3, 3)),
        ((7,), (1,) * 6),
    ],
)
def test_joined_and_split_each_row_is_computed_once(either, rows, cut):
    either.script.answer = begin
    requests = either.submit(*rows, cut=cut, task_us=5)
    outcomes = [either.outcome(request) for request in requests]
    assert [outcome.status for outcome in outcomes] == [SlotStatus.OK] * len(rows)
    assert [either.counters(request) for request in requests] == [{1}] * len(rows)
    assert [outcome.batch_rows for outcome in outcomes] == [sum(rows)] * len(rows)
    assert sum(outcome.leads for outcome in outcomes) == 1
    either.await_ends(len(cut) + 1)
    either.until(lambda: either.live.gangs.count == 0)


def test_a_split_request_counts_the_blocks_of_all_its_parts(either):
    either.script.answer = lambda snapshot: [
        replace(start, end_layer=query.next_layer + 3)
        for start, query in zip(begin(snapshot), snapshot.waiting, strict=False)
    ]
    (request,) = either.submit(4, cut=(2,), task_us=20)
    assert either.is_complete(request)
    assert either.outcome(request).counts.blocks == 4
    assert either.outcome(request).counts.preemptions == 0


def test_a_batch_stops_and_goes_on_elsewhere(either):
    either.script.answer = on_core(0)
    requests = either.submit(1, 2, 1, task_us=300)
    either.await_lease(lambda progress: progress.finished_tasks)
    stopped = []

    def answer(snapshot):
        if not stopped and snapshot.running:
            stopped.append(snapshot.running[0].query.query_id)
            return [Stop(stopped[0], at_once=True)]
        return on_core(1)(snapshot)

    either.script.answer = answer
    either.ask()
    assert all(either.is_complete(request) for request in requests)
    assert {either.outcome(request).counts[:3] for request in requests} == {(2, 0, 1)}
    started = [query for snapshot in either.script.seen for query in snapshot.waiting if query.started]
    assert {(query.rows, query.query_id) for query in started} == {(4, stopped[0])}


@pytest.mark.parametrize("cancelled", [0, 1, 2])
def test_a_member_is_cancelled_and_the_others_go_on(batching, cancelled):
    batching.script.answer = on_core(0)
    requests = batching.submit(1, 1, 1, hang=1)
    batching.await_lease(lambda progress: progress.present)
    victim, *others = requests[cancelled], *requests[:cancelled], *requests[cancelled + 1 :]
    victim.cancel()
    batching.await_heard()
    assert victim.wait(time.monotonic_ns()) is None, "ranks may still write into it"
    for request in requests:
        batching.hurry(request)
    assert all(batching.is_complete(request) for request in others)
    assert batching.outcome(victim).status in (SlotStatus.OK, SlotStatus.CANCELLED)
    assert sum(batching.outcome(request).leads for request in others) == 1, "one execution, though its leader is gone"


def test_all_members_are_cancelled_and_the_gang_stops(batching):
    batching.script.answer = on_core(0)
    requests = batching.submit(1, 1, hang=1)
    batching.await_lease(lambda progress: progress.present)
    for request in requests:
        request.cancel()
    batching.await_heard()
    for request in requests:
        batching.hurry(request)
    assert [batching.outcome(request).status for request in requests] == [SlotStatus.CANCELLED] * 2
    assert sum(batching.executed(request) for request in requests) <= 2 * TASKS, "stops at the next layer boundary"
    batching.former.count = 1
    assert batching.is_complete(batching.request())


@pytest.mark.parametrize(("victim", "left"), [(2, 1), (1, 2)])
def test_what_has_not_begun_of_a_cancelled_request_ends_at_once(batching, victim, left):
    """Two rows of each of three requests, cut in the middle: the second unit waits while the first one hangs."""
    batching.script.answer = on_core(0)
    requests = batching.submit(2, 2, 2, cut=(3,), hang=1)
    batching.await_lease(lambda progress: progress.present)
    requests[victim].cancel()
    batching.await_heard()
    ended = requests[victim].wait(time.monotonic_ns())
    assert (ended is not None) == (victim == 2), "one that has begun ends with the unit that has begun"
    batching.ask()
    batching.until(lambda: [query.rows for query in batching.script.seen[-1].waiting] == [left])
    batching.script.answer = begin
    for request in requests:
        batching.hurry(request)
    assert batching.outcome(requests[victim]).status is SlotStatus.CANCELLED
    for request in requests:
        assert request is requests[victim] or batching.is_complete(request)


def test_a_stopped_batch_ends_when_nobody_needs_it(batching):
    batching.script.answer = lambda snapshot: [] if any(q.started for q in snapshot.waiting) else begin(snapshot, 1)
    first, second = batching.submit(1, 1)
    batching.await_snapshot(lambda snapshot: any(query.started for query in snapshot.waiting))
    first.cancel()
    batching.await_heard()
    assert first.wait(time.monotonic_ns()) is None, "it has begun, and another one needs the batch"
    second.cancel()
    assert [batching.outcome(request).status for request in (first, second)] == [SlotStatus.CANCELLED] * 2
    batching.until(lambda: batching.live.gangs.count == 0)


def test_a_killed_worker_costs_its_batch_an_attempt_and_nobody_joins_them_again(batching):
    batching.script.answer = on_core(0)
    requests = batching.submit(1, 2, 1, hang=1)
    batching.await_lease(lambda progress: progress.present)
    batching.kill_worker(0)
    for request in requests:
        batching.hurry(request)
    batching.script.answer = begin
    for request in requests:
        outcome = batching.outcome(request)
        assert (outcome.status, outcome.attempts, outcome.leads) == (SlotStatus.OK, 2, True)
        assert outcome.batch_rows in (0, outcome_rows(request)), "alone now"
    last = {query.query_id: query for query in batching.former.seen}
    assert len(last) == 3 and all(query.join_key & NEVER_JOINED for query in last.values())


def outcome_rows(request):
    """How many rows a request has."""
    return len(request.inputs[0]) // 64


def test_only_the_part_of_a_split_request_that_was_lost_runs_again(batching):
    batching.script.answer = begin
    batching.former.count, batching.former.cut = 1, (2,)
    request = batching.open(rows=4)
    for row in (0, 1):
        batching.order(request, row, hang=1)
    request.submit()
    done = slice(2 * LAYERS * TASKS, 4 * LAYERS * TASKS)
    batching.until(lambda: set(request.outputs[0].cast("i")[done]) == {1})
    batching.until(lambda: len(batching.live.gangs.all()) == 1)
    (gang,) = batching.live.gangs.all()
    batching.kill_worker(gang.cores[0])
    batching.hurry(request)
    outcome = batching.outcome(request)
    assert (outcome.status, outcome.attempts, outcome.batch_rows) == (SlotStatus.OK, 2, 4)
    assert set(request.outputs[0].cast("i")[done]) == {1}, "the other part did not run again"


def test_a_request_that_kills_workers_takes_no_other_with_it(batching):
    batching.script.answer = begin
    healthy = [batching.open(rows=1), batching.open(rows=2)]
    poison = batching.open(rows=1)
    batching.order(poison, 0, crash=1)
    batching.former.count = 3
    for request in (healthy[0], poison, healthy[1]):
        request.submit()
    for _ in range(2):
        batching.replace_dead_worker()
    assert batching.outcome(poison).status is SlotStatus.CRASHED
    for request in healthy:
        assert batching.outcome(request).status is SlotStatus.OK
        assert batching.outcome(request).attempts == 2


def test_a_part_that_kills_workers_gives_up_its_whole_request(batching):
    batching.script.answer = begin
    batching.former.count, batching.former.cut = 2, (2,)
    healthy, poison = batching.open(rows=1), batching.open(rows=3)
    batching.order(poison, 2, crash=1)
    healthy.submit()
    poison.submit()
    for _ in range(2):
        batching.replace_dead_worker()
    assert batching.outcome(poison).status is SlotStatus.CRASHED
    assert batching.outcome(healthy).status is SlotStatus.OK
    batching.until(lambda: batching.live.gangs.count == 0)


def test_a_request_that_no_worker_can_run_fails_alone(batching):
    requests = batching.submit(1, 2, 1)
    batching.await_snapshot(lambda snapshot: any(query.rows == 4 for query in snapshot.waiting))
    view = batching.memory.io[FRONT_END].view
    struct.pack_into(
        "<Q", view, requests[1].slot * SLOT_BYTES + SLOT.offset("input_offset"), 1 << 40
    )  # outside of the segment
    batching.script.answer = begin
    batching.ask()
    assert [batching.outcome(request).status for request in requests] == [
        SlotStatus.OK, SlotStatus.INTERNAL, SlotStatus.OK
    ]  # fmt: skip
    batching.until(lambda: batching.live.gangs.count == 0)


def test_a_limit_passes_while_a_unit_waits(batching):
    batching.script.answer = on_core(0)
    limits_ns = [0, time.monotonic_ns() + 50_000_000]
    batching.former.count, batching.former.cut = 2, (1,)
    first = batching.request(hang=1)
    second = batching.request(limit_ns=limits_ns[1])
    assert batching.outcome(second).status is SlotStatus.DEADLINE
    batching.hurry(first)
    assert batching.is_complete(first)


def test_members_that_are_certain_to_be_late_are_refused(batching):
    """One unit waits beside a running one: both are late, the running one has another member that is not."""
    batching.script.answer = on_core(0)
    at_ns = time.monotonic_ns() + 100_000_000
    batching.former.count, batching.former.cut = 3, (2,)
    patient = batching.request(hang=1)
    running, waiting = (batching.request(deadline_ns=at_ns, rejects_late=True) for _ in range(2))
    assert batching.outcome(waiting).status is SlotStatus.LATE
    assert running.wait(time.monotonic_ns()) is None
    batching.hurry(patient)
    assert batching.is_complete(patient)
    assert batching.outcome(running).status in (SlotStatus.OK, SlotStatus.LATE)


def test_a_late_request_of_which_a_part_runs_does_not_make_room_for_others(batching):
    """Of 41 late requests those go that have not begun: of the oldest one half hangs, and the other half waits."""
    batching.tell(messages.SetProfile(7, isolated_us=1e6))
    batching.script.answer = on_core(0)
    (split,) = batching.submit(2, cut=(1,), hang=1, deadline_ns=time.monotonic_ns() - 1)
    batching.await_lease(lambda progress: progress.present)
    batching.former.count = 0
    late = [batching.request(deadline_ns=time.monotonic_ns() - 1) for _ in range(40)]
    assert {batching.outcome(request).status for request in late[:8]} == {SlotStatus.CROWDED}
    batching.hurry(split)
    batching.script.answer = begin
    batching.ask()
    assert batching.is_complete(split)


def test_a_policy_may_refuse_a_unit(batching):
    batching.script.answer = lambda snapshot: [Reject(query.query_id) for query in snapshot.waiting]
    requests = batching.submit(1, 1, deadline_ns=time.monotonic_ns() + 60_000_000_000, rejects_late=True)
    assert batching.outcome(requests[0]).status is SlotStatus.LATE
    batching.script.answer = begin
    batching.former.count = 1
    batching.ask()
    assert batching.outcome(requests[1]).status in (SlotStatus.OK, SlotStatus.LATE)


def test_a_model_is_unloaded_while_a_batch_runs(batching):
    batching.script.answer = on_core(0)
    requests = batching.submit(1, 2, 1, cut=(2,), hang=1)
    batching.await_lease(lambda progress: progress.present)
    batching.tell(messages.UnloadModel(7))
    assert batching.outcome(requests[2]).status is SlotStatus.UNAVAILABLE
    for request in requests:
        batching.hurry(request)
    assert batching.is_complete(requests[0])
    assert batching.outcome(requests[1]).status is SlotStatus.UNAVAILABLE
    assert batching.expect(messages.ModelUnloaded).model_id == 7


def test_a_front_end_dies_while_its_batches_run_and_wait(batching):
    batching.script.answer = on_core(0)
    requests = batching.submit(1, 2, 1, cut=(2,), hang=1)
    batching.await_lease(lambda progress: progress.present)
    batching.tell(messages.FrontEndDied(FRONT_END))
    for request in requests:
        batching.hurry(request)
    assert batching.expect(messages.FrontEndQuiet).front_end == FRONT_END
    assert not list(batching.memory.tables[FRONT_END].scan())
    batching.new_front_end()
    batching.script.answer = begin
    assert all(batching.is_complete(request) for request in batching.submit(1, 1))


def test_what_is_written_down_of_a_batch(batching):
    batching.script.answer = begin
    requests = batching.submit(3, 3, cut=(2, 2), task_us=20)
    assert all(batching.is_complete(request) for request in requests)
    (alone,) = batching.submit(1)
    assert batching.is_complete(alone)
    batching.await_ends(4)
    batching.stop()
    lines = [json.loads(line) for line in batching.trace.path.read_text().splitlines()]
    of_batch = [(line["rows"], line["requests"], line["batch"], line["part"]) for line in lines[:3]]
    assert of_batch == [(2, 1, 1, "1 of 3"), (2, 2, 1, "2 of 3"), (2, 1, 1, "3 of 3")]
    events = json.loads(batching.timeline_path.read_text())["traceEvents"]
    work = [event["args"] for event in events if event["ph"] == "X"]
    assert {(each["rows"], each["requests"], each["part"]) for each in work if each.get("batch") == 1} == {
        (2, 1, "1 of 3"), (2, 2, "2 of 3"), (2, 1, "3 of 3")
    }  # fmt: skip


@pytest.mark.parametrize("model", sampled(["tiny_model", "staged_model"], ["staged_model"]))
def test_any_batches_while_workers_die_and_clients_leave(model, request):
    server = ChaosServer(*request.getfixturevalue(model))
    exact = model == "tiny_model"  # kernels of the other one count on where the batch before has left its copies

    def is_computed(each):
        counters = server.counters(each)
        return counters == {1} if exact else 0 not in counters

    try:
        server.script.answer = Chaos(5)
        requests = [server.request(task_us=50, rows=1 + index % 4) for index in range(60)]
        for cancelled in requests[::7]:
            cancelled.cancel()
        for victim in (0, 1, 0, 1):
            time.sleep(0.1)  # that much work between two deaths
            server.kill_worker(victim)
        for index, each in enumerate(requests):
            outcome = server.outcome(each)
            assert outcome.status in (SlotStatus.OK, SlotStatus.UNAVAILABLE) or index % 7 == 0
            if outcome.status is SlotStatus.OK and outcome.attempts == 1:
                assert is_computed(each)
            each.close()
        for _ in range(40):
            with server.request(task_us=10, rows=3) as each:
                assert server.outcome(each).status is SlotStatus.OK
                assert is_computed(each)
        server.until(lambda: server.live.gangs.count == 0)
        assert not server.live.requests.of_front_end(FRONT_END)
    finally:
        server.kill_all()
