"""Leases of several members and requests in several parts, on real workers with a model that counts its tasks."""

import struct
from dataclasses import dataclass

import pytest

from gangway.executor.leases import MAX_MEMBERS, LeaseControl, Member, PhaseKind
from gangway.executor.messages import LeftReason
from gangway.executor.slots import SlotRequest, SlotStatus
from testing.waiting import until

WAIT_US = 10_000_000
PLACE_BYTES = 1 << 16  # of one request in the io segment: its input, its output 8 KiB later
OUTPUT = 1 << 13
ORDER_BYTES = 64


@dataclass(frozen=True)
class Running:
    """A request whose slot is RUNNING."""

    slot: int
    generation: int
    rows: int
    at: int

    def member(self, first_row=0, rows=None, part=0):
        return Member(0, self.slot, self.generation, first_row, self.rows if rows is None else rows, part)


def begin(harness, number, rows, parts=1):
    """Start request `number`, whose tasks take no time, in so many parts."""
    executor, at = harness.executor, (1 + number) * PLACE_BYTES
    executor.io.view[at : at + PLACE_BYTES] = bytes(PLACE_BYTES)
    slot, generation = executor.begin(SlotRequest(1, rows, (at,), (at + OUTPUT,)), parts)
    return Running(slot, generation, rows, at)


def order(harness, request, task_ns=0, hang=0, layer=0, first_row=0):
    """Say what the tasks of all rows from `first_row` on shall do."""
    for row in range(first_row, request.rows):
        at = request.at + row * ORDER_BYTES
        struct.pack_into("<4i", harness.executor.io.view, at, task_ns, hang, 0, layer)


def counters(harness, request, first_row=0, rows=None):
    """Distinct values of the counters of these rows; {1}: every task was executed once."""
    row_count = harness.model.layers * harness.model.tasks
    at = request.at + OUTPUT + 4 * first_row * row_count
    count = (request.rows - first_row if rows is None else rows) * row_count
    return set(struct.unpack_from(f"<{count}i", harness.executor.io.view, at))


def start(harness, members, workers, lease=0, arena_row=0, **changes):
    """Start a lease of these members, whose rows lie in the arena from row `arena_row` on."""
    spec = harness.spec(tuple(members), max(1, len(workers)), harness.model.row_bytes)
    spec = spec._replace(arena_offset=arena_row * harness.model.row_bytes, **changes)
    harness.executor.start(lease, spec, workers)


def clear_arena(harness, rows):
    harness.executor.arena.view[: rows * harness.model.row_bytes] = bytes(rows * harness.model.row_bytes)


def left(harness, workers):
    return {message.reason for message in harness.executor.left(workers)}


def is_answered(harness, request):
    return harness.executor.slots.is_done(request.slot)


def status(harness, request):
    return harness.executor.slots.outcome(request.slot).status


@pytest.mark.parametrize("workers", [[0], [0, 1]])
@pytest.mark.parametrize("batch_rows", [0, 3])
def test_requests_of_one_lease_are_each_computed_once(make_harness, workers, batch_rows):
    harness = make_harness(layers=5, batch_rows=batch_rows)
    for sizes in ((1, 1), (2, 3, 1), (1,) * 12, (7, 9)):
        clear_arena(harness, sum(sizes))
        requests = [begin(harness, number, rows) for number, rows in enumerate(sizes)]
        start(harness, [request.member() for request in requests], workers)
        assert left(harness, workers) == {LeftReason.DONE}
        for request in requests:
            assert status(harness, request) is SlotStatus.OK
            assert counters(harness, request) == {1}
            assert harness.executor.slots.release(request.slot)


def test_a_batch_kernel_takes_rows_of_several_requests_together(make_harness):
    harness = make_harness(layers=3, batch_rows=4)
    clear_arena(harness, 8)
    requests = [begin(harness, number, rows) for number, rows in enumerate((1, 3, 2, 2))]
    start(harness, [request.member() for request in requests], [0, 1])
    assert left(harness, [0, 1]) == {LeftReason.DONE}
    arena, row_bytes = harness.executor.arena.view, harness.model.row_bytes
    assert [struct.unpack_from("<i", arena, row * row_bytes + 4)[0] for row in range(8)] == [4] * 8


def test_times_and_ranks_are_those_of_the_lease(make_harness):
    harness = make_harness(layers=5)
    requests = [begin(harness, number, 2) for number in range(3)]
    start(harness, [request.member() for request in requests], [0])
    harness.executor.left([0])
    lease = harness.executor.lease(0)
    span_us = (lease.layer_end_ns(4, 5)[0] - lease.start_ns()) / 1e3
    outcomes = [harness.executor.slots.outcome(request.slot) for request in requests]
    assert [outcome.compute_us for outcome in outcomes] == [pytest.approx(span_us)] * 3
    assert {outcome.ranks for outcome in outcomes} == {1}


def test_most_members(make_harness):
    harness = make_harness(layers=2)
    request = begin(harness, 0, MAX_MEMBERS, parts=MAX_MEMBERS)
    parts = [request.member(row, 1, part=row) for row in range(MAX_MEMBERS)]
    with pytest.raises(ValueError, match="65 requests"):
        start(harness, [*parts, parts[0]], [])
    with pytest.raises(ValueError, match="0 requests"):
        start(harness, [], [])
    with pytest.raises(ValueError, match="no such member"):
        start(harness, [request.member(rows=0)], [])
    start(harness, parts, [0, 1])
    assert left(harness, [0, 1]) == {LeftReason.DONE}
    assert status(harness, request) is SlotStatus.OK
    assert counters(harness, request) == {1}


@pytest.mark.parametrize("batch_rows", [0, 4])
def test_a_request_is_answered_when_its_last_part_is_done(make_harness, batch_rows):
    harness = make_harness(layers=4, batch_rows=batch_rows)
    request = begin(harness, 0, 8, parts=2)
    start(harness, [request.member(3, 5, part=1)], [0])
    assert left(harness, [0]) == {LeftReason.DONE}
    assert not is_answered(harness, request)
    assert (counters(harness, request, 0, 3), counters(harness, request, 3, 5)) == ({0}, {1})
    first = harness.executor.lease(0).start_ns()
    start(harness, [request.member(0, 3, part=0)], [0, 1])
    assert left(harness, [0, 1]) == {LeftReason.DONE}
    assert status(harness, request) is SlotStatus.OK
    assert counters(harness, request) == {1}
    outcome = harness.executor.slots.outcome(request.slot)
    last = harness.executor.lease(0).layer_end_ns(3, 4)[0]
    assert outcome.compute_us == pytest.approx((last - first) / 1e3), "from the first part's first task to the last end"


@pytest.mark.parametrize("batch_rows", [0, 4])
def test_a_number_that_a_kernel_refuses_fails_its_own_request(make_harness, batch_rows):
    harness = make_harness(layers=4, batch_rows=batch_rows, checks=("no number", "not {}, {}"))
    for bad, reason in ((-1, "no number"), (-2, "not -2, {}"), (-3, "")):
        clear_arena(harness, 9)
        requests = [begin(harness, number, 3) for number in range(3)]
        struct.pack_into("<i", harness.executor.io.view, requests[1].at + ORDER_BYTES + 12, bad)
        start(harness, [request.member() for request in requests], [0, 1])
        assert left(harness, [0, 1]) == {LeftReason.DONE}
        outcomes = [harness.executor.slots.outcome(request.slot) for request in requests]
        refused = SlotStatus.INVALID if reason else SlotStatus.OK  # there is no such check
        assert [outcome.status for outcome in outcomes] == [SlotStatus.OK, refused, SlotStatus.OK]
        assert [outcome.reason for outcome in outcomes] == ["", reason, ""]
        assert [counters(harness, request) for request in requests] == [{1}] * 3
        assert all(harness.executor.slots.release(request.slot) for request in requests)


def test_a_part_that_is_refused_fails_the_whole_request_and_not_the_next_one(make_harness):
    harness = make_harness(layers=3, checks=("no {}",))
    for bad, expected in ((-1, (SlotStatus.INVALID, "no -1")), (0, (SlotStatus.OK, ""))):
        request = begin(harness, 0, 4, parts=2)
        struct.pack_into("<i", harness.executor.io.view, request.at + 12, bad)
        for part in (0, 1):
            start(harness, [request.member(2 * part, 2, part=part)], [0])
            assert left(harness, [0]) == {LeftReason.DONE}
        outcome = harness.executor.slots.outcome(request.slot)
        assert (outcome.status, outcome.reason) == expected
        assert harness.executor.slots.release(request.slot)


def test_two_gangs_at_the_same_time(make_harness):
    harness = make_harness(layers=6, batch_rows=3)
    for _ in range(30):
        clear_arena(harness, 10)
        large, small = begin(harness, 0, 8, parts=2), begin(harness, 1, 2)
        start(harness, [large.member(0, 5, part=0)], [0], lease=0)
        start(harness, [large.member(5, 3, part=1), small.member()], [1], lease=1, arena_row=5)
        for request in (large, small):
            assert harness.executor.slots.wait(request.slot, WAIT_US)
            assert status(harness, request) is SlotStatus.OK
            assert counters(harness, request) == {1}
        assert left(harness, [0, 1]) == {LeftReason.DONE}
        for request in (large, small):
            harness.executor.slots.release(request.slot)


def test_a_part_that_runs_twice_counts_once(make_harness):
    harness = make_harness(layers=3)
    request = begin(harness, 0, 3, parts=2)
    for runs in (1, 2):
        start(harness, [request.member(0, 2, part=0)], [0])
        assert left(harness, [0]) == {LeftReason.DONE}
        assert not is_answered(harness, request)
        assert counters(harness, request, 0, 2) == {runs}
    start(harness, [request.member(2, 1, part=1)], [0])
    assert left(harness, [0]) == {LeftReason.DONE}
    assert status(harness, request) is SlotStatus.OK


def test_a_part_lost_to_a_dead_worker_runs_again_alone(make_harness):
    harness = make_harness(layers=3)
    executor, table = harness.executor, harness.executor.slots
    request, other = begin(harness, 0, 4, parts=2), begin(harness, 1, 1)
    order(harness, request, hang=1, first_row=2)
    start(harness, [request.member(0, 2, part=0)], [0], lease=0)
    start(harness, [request.member(2, 2, part=1), other.member()], [1], lease=1, arena_row=2)
    until(lambda: executor.lease(1).progress().present == 1)
    assert left(harness, [0]) == {LeftReason.DONE}
    executor.restart(1)
    executor.load(1, harness.model.key, [1])
    assert table.part_done(request.slot, request.generation, 0)
    assert not table.part_done(request.slot, request.generation, 1)
    assert not table.part_done(other.slot, other.generation, 0)
    order(harness, request)
    for member in (request.member(2, 2, part=1), other.member()):  # one request at a time
        start(harness, [member], [1], lease=1)
        assert left(harness, [1]) == {LeftReason.DONE}
    assert [status(harness, each) for each in (request, other)] == [SlotStatus.OK] * 2
    assert counters(harness, request, 0, 2) == {1}
    assert table.part_done(request.slot, request.generation, 1)
    assert table.part_done(other.slot, other.generation, 0)


def test_a_gang_stops_before_rows_are_packed(make_harness):
    harness = make_harness(layers=3, batch_rows=4)
    clear_arena(harness, 4)
    requests = [begin(harness, number, 2) for number in range(2)]
    lease = harness.executor.lease(0)
    start(harness, [request.member() for request in requests], [])
    lease.set_control(LeaseControl.STOP_NOW)
    harness.executor.join(0, 0, 0)
    assert left(harness, [0]) == {LeftReason.STOPPED}
    progress = lease.progress()
    assert (progress.kind, progress.next_layer, progress.finished_tasks) == (PhaseKind.PACK, 0, 0)
    lease.resume(harness.model.layers, 2)
    for worker in (0, 1):
        harness.executor.join(0, worker, worker)
    assert left(harness, [0, 1]) == {LeftReason.DONE}
    assert all(counters(harness, request) == {1} for request in requests)


def test_a_gang_stops_between_packing_and_its_first_layer(make_harness):
    harness = make_harness(layers=3, batch_rows=4)
    clear_arena(harness, 4)
    requests = [begin(harness, number, 2) for number in range(2)]
    lease = harness.executor.lease(0)
    start(harness, [request.member() for request in requests], [])
    lease.set_control(LeaseControl.STOP)
    harness.executor.join(0, 0, 0)
    assert left(harness, [0]) == {LeftReason.STOPPED}
    progress = lease.progress()
    assert (progress.kind, progress.next_layer) == (PhaseKind.STOPPED, 0)
    assert counters(harness, requests[0]) == {0}
    lease.resume(harness.model.layers, 1)
    harness.executor.join(0, 0, 1)
    assert left(harness, [1]) == {LeftReason.DONE}
    assert all(counters(harness, request) == {1} for request in requests)


def test_a_gang_stops_before_rows_are_unpacked(make_harness):
    harness = make_harness(layers=3, batch_rows=4)
    clear_arena(harness, 4)
    model, arena = harness.model, harness.executor.arena.view
    staged_input = 64  # behind the arena: tasks look for orders there
    staged_counters = staged_input + ORDER_BYTES
    last_task = 3 * model.tasks - 1
    requests = [begin(harness, number, 2) for number in range(2)]
    order(harness, requests[0], hang=model.tasks, layer=2, first_row=1)  # the last task of the last layer, in row 1
    lease = harness.executor.lease(0)
    start(harness, [request.member() for request in requests], [0])
    until(lambda: struct.unpack_from("<i", arena, staged_counters + 4 * last_task)[0])  # row 0, in the same call
    lease.set_control(LeaseControl.STOP_NOW)
    struct.pack_into("<4i", arena, model.row_bytes + staged_input, 0, 0, 0, 0)
    assert left(harness, [0]) == {LeftReason.STOPPED}
    progress = lease.progress()
    assert (progress.kind, progress.next_layer, progress.finished_tasks) == (PhaseKind.UNPACK, 2, 0)
    assert counters(harness, requests[0]) == {0}
    lease.resume(model.layers, 2)
    for worker in (0, 1):
        harness.executor.join(0, worker, worker)
    assert left(harness, [0, 1]) == {LeftReason.DONE}
    assert all(counters(harness, request) == {1} for request in requests)


HOSTILE = [
    {"first_row": 3},
    {"first_row": 0xFFFFFFFF},
    {"rows": 0xFFFFFFFF},
    {"first_row": 1, "rows": 0xFFFFFFFF},
    {"part": 2},
    {"part": 0xFFFFFFFF},
    {"front_end": 1},
    {"slot": 1 << 30},
    {"generation": 0xFFFFFFFF},
]


@pytest.mark.parametrize("changes", HOSTILE, ids=str)
def test_a_member_that_leads_outside_spoils_the_lease(harness, changes):
    good, bad = begin(harness, 0, 2), begin(harness, 1, 4, parts=2)
    member = bad.member(2, 2, part=1)
    start(harness, [good.member(), member], [])
    start(harness, [good.member(), member._replace(**changes)], [0, 1])
    assert left(harness, [0, 1]) == {LeftReason.INVALID}
    assert counters(harness, good) == {0}
    start(harness, [good.member(), member], [0, 1])
    assert left(harness, [0, 1]) == {LeftReason.DONE}


def test_rows_of_several_requests_need_room_for_what_is_staged(make_harness):
    harness = make_harness(layers=3, batch_rows=2)
    requests = [begin(harness, number, 2) for number in range(2)]
    assert harness.model.row_bytes > 64
    start(harness, [request.member() for request in requests], [0], arena_stride=64)
    assert left(harness, [0]) == {LeftReason.INVALID}
    start(harness, [requests[0].member()], [0], arena_stride=64)
    assert left(harness, [0]) == {LeftReason.DONE}


def test_a_late_rank_finds_the_end_of_a_batch(make_harness):
    harness = make_harness(layers=3)
    requests = [begin(harness, number, 1) for number in range(2)]
    start(harness, [request.member() for request in requests], [0])
    assert left(harness, [0]) == {LeftReason.DONE}
    harness.executor.slots.release(requests[1].slot)
    harness.executor.join(0, 1, worker=1)
    assert left(harness, [1]) == {LeftReason.DONE}
