"""Request slots: states, races, waiting."""

import struct
import threading
import time

import pytest

from gangway.executor import _native
from gangway.executor.control import ControlLayout, ControlSegment
from gangway.executor.messages import Submit, unpack
from gangway.executor.segment import SLOT, Segment
from gangway.executor.slots import (
    INLINE_PLACES,
    MAX_PARTS,
    SLOT_BYTES,
    SlotCounts,
    SlotRequest,
    SlotState,
    SlotStatus,
    SlotTable,
    SlotTerms,
    places_bytes,
)

REQUEST = SlotRequest(
    3,
    2,
    (4096, 8192),
    (65536,),
    priority=-1,
    arrival_ns=123,
    deadline_ns=456,
    frame_bytes=(64, 128),
    limit_ns=789,
    rejects_late=True,
    max_queue=5,
    join_key=1 << 63 | 7,
)


@pytest.fixture
def table():
    segment = Segment.create(1 << 16, "slots")
    made = SlotTable(segment, 8)
    made.init()
    yield made
    segment.close()


def test_life_of_a_request(table):
    slot = table.acquire()
    assert table.entry(slot).state is SlotState.FILLING
    assert list(table.scan()) == []
    table.fill(slot, REQUEST)
    generation = table.submit(slot)
    assert [(entry.slot, entry.generation) for entry in table.scan()] == [(slot, generation)]
    assert list(table.in_use()) == [(SlotState.SUBMITTED, 3)]
    seen = table.request(slot)
    assert (seen.model_id, seen.rows, seen.priority) == (3, 2, -1)
    assert (seen.arrival_ns, seen.deadline_ns, seen.limit_ns) == (123, 456, 789)
    assert (seen.frame_bytes, seen.rejects_late, seen.max_queue) == ((64, 128), True, 5)
    assert seen.join_key == 1 << 63 | 7
    assert table.terms(slot) == SlotTerms(3, 2, -1, 123, 456, 789, True, 5, 1 << 63 | 7)
    assert seen.input_offsets[:3] == (4096, 8192, 0)
    assert seen.output_offsets[:2] == (65536, 0)
    assert table.start(slot, generation)
    assert not table.start(slot, generation)
    assert table.requeue(slot, generation)
    assert table.start(slot, generation)
    assert table.attempts(slot) == 2
    assert not table.cancelled(slot)
    table.cancel(slot)
    assert table.cancelled(slot)
    assert table.finish(slot, generation, SlotStatus.CANCELLED)
    assert not table.finish(slot, generation, SlotStatus.OK)
    assert table.wait(slot, 0)
    assert table.outcome(slot).status is SlotStatus.CANCELLED
    assert list(table.in_use()) == [(SlotState.DONE, 3)]
    assert table.release(slot)
    assert not table.release(slot)


def test_places_that_a_slot_has_no_room_for_are_listed(table):
    """Inputs first; a side with few tensors needs no list."""
    slot, at = table.acquire(), SLOT_BYTES * 8
    many, few = tuple(range(64, 64 * (INLINE_PLACES + 2), 64)), tuple(range(0, 64 * INLINE_PLACES, 64))

    def listed(inputs, outputs):
        table.fill(slot, SlotRequest(1, 1, inputs, outputs, places_at=at))
        seen, count = table.request(slot), places_bytes(len(inputs), len(outputs)) // 8
        return seen.input_offsets, seen.output_offsets, struct.unpack_from(f"<{count}Q", table.view, at)

    assert listed(few, few) == (few, few, ())
    inputs, outputs, places = listed(many, few)
    assert (inputs[0], outputs, places) == (at, few, many)
    inputs, outputs, places = listed(few, many)
    assert (inputs, outputs[0], places) == (few, at, many)
    inputs, outputs, places = listed(many, many)
    assert (inputs[0], outputs[0], places) == (at, at + 8 * len(many), many + many)
    for places_at in ((1 << 16) - 64, at + 4, 1 << 63):
        with pytest.raises((ValueError, OverflowError)):
            table.fill(slot, SlotRequest(1, 1, many, few, places_at=places_at))
    with pytest.raises(ValueError, match="at most"):
        table.fill(slot, SlotRequest(1, 1, (0,) * (_native.MAX_TENSORS + 1), few, places_at=at))


def test_counts_belong_to_one_request(table):
    slot = table.acquire()
    table.fill(slot, REQUEST)
    table.count(slot, SlotCounts(blocks=3, conflicts=1, preemptions=2, versions=0b101))
    assert table.outcome(slot).counts == SlotCounts(3, 1, 2, 5)
    assert table.request(slot).rejects_late, "its neighbours stay"
    assert table.request(slot).limit_ns == 789
    table.fill(slot, REQUEST)
    assert table.outcome(slot).counts == SlotCounts()


def submitted(table):
    """A request that waits: slot, generation."""
    slot = table.acquire()
    table.fill(slot, REQUEST)
    return slot, table.submit(slot)


def test_an_outcome_says_in_which_batch_a_request_was(table):
    for fields, expected in (((), (2, True)), ((1, 8, False), (8, False)), ((3, 16, True), (16, True))):
        slot, generation = submitted(table)
        assert table.start(slot, generation, *fields)
        table.finish(slot, generation, SlotStatus.OK)
        outcome = table.outcome(slot)
        assert (outcome.batch_rows, outcome.leads) == expected
        table.release(slot)
    slot, generation = submitted(table)
    table.finish(slot, generation, SlotStatus.CANCELLED)
    outcome = table.outcome(slot)
    assert (outcome.batch_rows, outcome.leads) == (0, False), "it was never started"


def test_only_a_running_request_leads(table):
    slot, generation = submitted(table)
    assert not table.lead(slot, generation)
    assert table.start(slot, generation, 1, 8, False)
    assert not table.lead(slot, generation - 1)
    assert table.lead(slot, generation) and table.outcome(slot).leads
    assert table.lead(slot, generation, False) and not table.outcome(slot).leads
    table.finish(slot, generation, SlotStatus.OK)
    assert not table.lead(slot, generation) and not table.outcome(slot).leads


@pytest.mark.parametrize("parts", [0, MAX_PARTS + 1])
def test_parts_that_a_request_cannot_have(table, parts):
    slot, generation = submitted(table)
    with pytest.raises(ValueError, match="parts"):
        table.start(slot, generation, parts)
    assert table.see(slot, generation)


def test_the_scheduler_leaves_instants_for_traces(table):
    slot, generation = submitted(table)
    assert not table.see(slot, generation - 1)
    assert table.outcome(slot).seen_ns == 0, "another use of the slot"
    begin_ns = time.monotonic_ns()
    assert table.see(slot, generation)
    assert table.start(slot, generation)
    assert not table.see(slot, generation)
    table.finish(slot, generation, SlotStatus.OK)
    outcome = table.outcome(slot)
    assert begin_ns <= outcome.seen_ns <= outcome.started_ns <= time.monotonic_ns()
    table.release(slot)
    slot, _ = submitted(table)
    assert table.outcome(slot).seen_ns == 0


def set_parts_done(table, slot, mask):
    struct.pack_into("<Q", table.view, slot * SLOT_BYTES + SLOT.offset("parts_done"), mask)


def test_parts_done_belong_to_one_attempt(table):
    slot, generation = submitted(table)
    table.start(slot, generation, parts=3)
    set_parts_done(table, slot, 0b101)
    assert [table.part_done(slot, generation, part) for part in range(3)] == [True, False, True]
    table.requeue(slot, generation)
    assert not table.part_done(slot, generation, 0)
    table.start(slot, generation, parts=3)
    assert [table.part_done(slot, generation, part) for part in range(3)] == [False] * 3
    table.finish(slot, generation, SlotStatus.CANCELLED)
    assert table.part_done(slot, generation, 1)


def test_a_rank_that_died_after_the_last_part_is_completed(table):
    slot, generation = submitted(table)
    table.start(slot, generation, parts=MAX_PARTS)
    set_parts_done(table, slot, (1 << MAX_PARTS) - 1)
    waiter = threading.Thread(target=table.wait, args=(slot, 60_000_000))
    waiter.start()
    time.sleep(0.05)  # asleep in the kernel now, or it sees DONE by itself
    assert table.part_done(slot, generation, 63)
    waiter.join(10)
    assert not waiter.is_alive()
    assert table.outcome(slot).status is SlotStatus.OK


def test_old_sequence_cannot_touch_the_next_request(table):
    slot = table.acquire()
    table.fill(slot, REQUEST)
    old = table.submit(slot)
    table.finish(slot, old, SlotStatus.UNAVAILABLE)
    table.release(slot)
    for _ in range(table.slots):  # round to the same slot
        again = table.acquire()
        table.fill(again, REQUEST)
        table.submit(again)
    assert not table.start(slot, old)
    assert not table.finish(slot, old, SlotStatus.OK)
    assert table.entry(slot).state is SlotState.SUBMITTED
    assert not table.cancelled(slot)


def test_all_slots_taken(table):
    assert sorted(table.acquire() for _ in range(8)) == list(range(8))
    assert table.acquire() is None
    table.release(5)
    assert table.acquire() == 5


def test_init_frees_and_keeps_sequences_growing(table):
    before = [table.entry(table.acquire()).generation for _ in range(8)]
    table.init()
    after = [table.entry(table.acquire()).generation for _ in range(8)]
    assert all(new == old + 1 for old, new in zip(before, after, strict=True))


def test_wait_sees_done_and_time(table):
    slot = table.acquire()
    table.fill(slot, REQUEST)
    generation = table.submit(slot)
    begin = time.monotonic()
    assert not table.wait(slot, 30_000)
    assert time.monotonic() - begin >= 0.03
    answers = []
    waiter = threading.Thread(target=lambda: answers.append(table.wait(slot, 20_000_000)))
    waiter.start()
    table.start(slot, generation)
    table.finish(slot, generation, SlotStatus.OK)
    waiter.join(10)
    assert answers == [True]


def test_wait_for_any_of_several_sees_the_first_one_that_is_done(table):
    slots = [table.acquire() for _ in range(3)]
    for slot in slots:
        table.fill(slot, REQUEST)
    generations = [table.submit(slot) for slot in slots]
    begin = time.monotonic()
    assert not table.wait_any(slots, 30_000)
    assert time.monotonic() - begin >= 0.03
    answers = []
    waiter = threading.Thread(target=lambda: answers.append(table.wait_any(slots, 20_000_000)))
    waiter.start()
    time.sleep(0.05)  # asleep in the kernel now, or it sees DONE by itself
    table.finish(slots[1], generations[1], SlotStatus.OK)
    waiter.join(10)
    assert answers == [True]
    assert [table.is_done(slot) for slot in slots] == [False, True, False]
    assert table.wait_any(slots, 0)


@pytest.mark.parametrize("numbers", [b"", b"123", bytes(4 * 65), b"\xff\xff\xff\x7f"])
def test_wait_for_slots_that_there_are_not(table, numbers):
    with pytest.raises(ValueError, match=r"slots, not|not inside"):
        _native.slot_wait_any(table.view, numbers, 0, 1000)


@pytest.mark.parametrize("rescue", ["requeue", "finish"])
def test_answer_of_a_worker_that_died_before_waking_is_delivered(table, rescue):
    slot = table.acquire()
    table.fill(slot, REQUEST)
    generation = table.submit(slot)
    table.start(slot, generation)
    answers = []
    waiter = threading.Thread(target=lambda: answers.append(table.wait(slot, 60_000_000)))
    waiter.start()
    time.sleep(0.05)  # asleep in the kernel now, or it sees DONE by itself
    assert _native.slot_change(table.view, slot, generation, 1 << SlotState.RUNNING, SlotState.DONE, SlotStatus.OK)
    if rescue == "requeue":
        assert not table.requeue(slot, generation)
    else:
        assert not table.finish(slot, generation, SlotStatus.UNAVAILABLE)
    waiter.join(10)
    assert answers == [True]
    assert table.outcome(slot).status is SlotStatus.OK


def test_two_who_finish_at_once_have_one_winner(table):
    slot = table.acquire()
    generation = table.entry(slot).generation
    for _ in range(300):
        _native.slot_change(table.view, slot, generation, 0xFF, SlotState.RUNNING, 0)
        barrier, winners = threading.Barrier(2), []

        def finish(status, barrier=barrier, winners=winners):
            barrier.wait(10)
            if table.finish(slot, generation, status):
                winners.append(status)

        threads = [threading.Thread(target=finish, args=(status,)) for status in (SlotStatus.OK, SlotStatus.CANCELLED)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert winners == [table.entry(slot).status]


def test_table_that_does_not_fit():
    segment = Segment.create(4096, "slots")
    with pytest.raises(ValueError, match="do not fit"):
        SlotTable(segment, 5)
    segment.close()


def test_a_request_is_handed_over_at_one_go(table):
    control = ControlSegment.create(ControlLayout(workers=1, front_ends=1, leases=1))
    ring, request = control.submit_rings[0], SlotRequest(7, 3, (64,), (128,), by_bell=True)
    slot = table.acquire()
    generation = table.hand_over(slot, request, ring)
    raw = ring.receive()
    assert unpack(raw) == Submit(slot, generation)
    assert table.entry(slot).state == SlotState.SUBMITTED
    seen = table.request(slot)
    assert (seen.model_id, seen.rows, seen.input_offsets[0], seen.output_offsets[0], seen.by_bell) == (7, 3, 64, 128, 1)
    while ring.send(raw):
        pass
    refused = table.acquire()
    assert table.hand_over(refused, request, ring) is None
    assert (table.entry(refused).state, table.status(refused)) == (SlotState.DONE, SlotStatus.UNAVAILABLE)
