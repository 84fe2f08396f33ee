"""The book of requests over real slot tables: what waits as what, and what the slots say of it."""

import pytest

from gangway.executor.segment import Segment
from gangway.executor.slots import NEVER_JOINED, SlotRequest, SlotStatus, SlotTable
from gangway.scheduler.batching.planner import Part
from gangway.scheduler.requests import MAX_ATTEMPTS, RequestTable
from gangway.scheduler.units import Batch


@pytest.fixture
def table():
    segment = Segment.create(1 << 16, "requests")
    table = SlotTable(segment, 16)
    table.init()
    yield table
    segment.close()


@pytest.fixture
def book(table):
    return RequestTable([table])


def submit(book, table, rows):
    """Queue a request of so many rows."""
    slot = table.acquire()
    table.fill(slot, SlotRequest(1, rows, (), (), arrival_ns=1000 * (slot + 1)))
    return book.admit(0, slot, table.submit(slot))


def form(book, *rows, of):
    """Make a batch of these requests, with units of so many rows; return the units."""
    batch = Batch(1, [request.query for request in of], [Part(1, count) for count in rows], None, book.next_id)
    book.form(batch)
    return batch.units


def test_pieces_are_numbered_within_their_request(book, table):
    first, second = submit(book, table, 3), submit(book, table, 3)
    units = form(book, 2, 2, 2, of=[first, second])
    members = [member for unit in units for member in book.members(unit)]
    assert [(m.slot, m.first_row, m.rows, m.part) for m in members] == [
        (0, 0, 2, 0), (0, 2, 1, 1), (1, 0, 1, 0), (1, 1, 2, 1)
    ]  # fmt: skip
    assert (first.piece_count, second.piece_count) == (2, 2)
    assert [unit.batch_part.part for unit in units] == [1, 2, 3]
    assert [query.rows for query in book.queries.in_order] == [2, 2, 2]
    assert book.queued_like(first) == 2
    assert book.start(units[1])
    assert book.queued_like(first) == 0, "both have begun"


def test_without_memory_for_a_batch_its_pieces_wait_one_by_one(book, table):
    first, second = submit(book, table, 2), submit(book, table, 3)
    (unit, _) = form(book, 3, 2, of=[first, second])
    book.break_up(unit)
    assert sorted((query.rows, query.formed) for query in book.queries.in_order) == [(1, True), (2, False), (2, True)]
    (whole,) = [query for query in book.queries.in_order if not query.formed]
    assert whole.join_key == NEVER_JOINED and whole.query_id == first.query.query_id
    assert len(second.units) == 2
    for waiting in list(book.waiting):
        assert book.start(waiting)
    assert not list(book.waiting)


def test_a_part_that_is_lost_is_given_up_after_so_many_attempts(book, table):
    request = submit(book, table, 4)
    unit, other = form(book, 2, 2, of=[request])
    assert book.start(unit) and book.start(other)
    for _ in range(MAX_ATTEMPTS - 1):
        (piece,) = unit.pieces
        request.units.remove(unit)
        assert book.run_again(piece, unit)
        (unit,) = book.waiting
        assert (unit.query.rows, unit.pieces[0].number) == (2, 0)
        assert book.start(unit)
    request.units.remove(unit)
    assert not book.run_again(unit.pieces[0], unit)
    assert request.units == [other]
    assert table.attempts(request.slot) == MAX_ATTEMPTS


def leaders(table, *requests):
    """Which of them stand for their batch."""
    return [table.outcome(request.slot).leads for request in requests]


def test_who_leaves_a_batch_does_not_stand_for_it_any_more(book, table):
    first, second, third = (submit(book, table, 1) for _ in range(3))
    unit, rest = form(book, 2, 1, of=[first, second, third])
    assert book.start(unit)
    assert leaders(table, first, second) == [True, False]
    book.leave_batch(second)
    assert leaders(table, first, second) == [True, False]
    book.leave_batch(first)
    assert leaders(table, first, second) == [False, False], "the third has not begun"
    assert book.start(rest)
    assert leaders(table, first, second, third) == [False, False, True]


def test_answered_requests_do_not_begin_to_stand_for_their_batch(book, table):
    first, second, third = (submit(book, table, 1) for _ in range(3))
    (unit,) = form(book, 3, of=[first, second, third])
    assert book.start(unit)
    table.finish(second.slot, second.generation, SlotStatus.OK)
    book.leave_batch(first)
    assert leaders(table, first, second, third) == [False, False, True]


def test_requests_of_a_lost_batch_count_for_themselves(book, table):
    first, second = submit(book, table, 1), submit(book, table, 1)
    (unit,) = form(book, 2, of=[first, second])
    assert book.start(unit)
    for piece, request in zip(unit.pieces, (first, second), strict=True):
        request.units.remove(unit)
        assert book.run_again(piece, unit)
    for waiting in list(book.waiting):
        assert book.start(waiting)
    assert leaders(table, first, second) == [True, True]
    assert first.batch is None


def test_what_is_withdrawn_leaves_its_units_with_fewer_rows(book, table):
    first, second, third = (submit(book, table, 2) for _ in range(3))
    unit, rest = form(book, 3, 3, of=[first, second, third])
    assert book.start(unit)
    assert not book.withdraw(second), "a part of it has begun"
    assert [(query.rows, query.query_id) for query in book.queries.in_order] == [(2, rest.query.query_id)]
    assert book.withdraw(third)
    assert not book.queries and third.units == []
    assert book.finish(third, SlotStatus.CANCELLED)
    assert book.get(third.query.query_id) is None
    assert book.queued_like(third) == 0


def test_requests_of_a_batch_that_starts_over_wait_for_themselves(book, table):
    first, second, third = (submit(book, table, 1) for _ in range(3))
    (unit,) = form(book, 3, of=[first, second, third])
    assert book.start(unit)
    book.pause(unit, 3, 100.0)
    second.dropped = True
    assert book.start_over(unit) == [second]
    waiting = book.queries.in_order
    assert [(query.query_id, query.next_layer, query.started) for query in waiting] == [
        (first.query.query_id, 0, False), (third.query.query_id, 0, False)
    ]  # fmt: skip
    assert {query.join_key for query in waiting} == {NEVER_JOINED}
    assert book.queued_like(first) == book.queued_count(0) == 2
    assert leaders(table, first, third) == [False, False]
    for again in list(book.waiting):
        assert book.start(again)
    assert (table.attempts(first.slot), table.attempts(third.slot)) == (1, 1)
    assert leaders(table, first, third) == [True, True]
    assert book.queued_count(0) == 0


def test_a_part_that_starts_over_stays_a_part(book, table):
    request = submit(book, table, 4)
    unit, other = form(book, 2, 2, of=[request])
    assert book.start(unit) and book.start(other)
    book.pause(unit, 3, 100.0)
    assert book.start_over(unit) == []
    (again,) = book.waiting
    assert (again.query.rows, again.query.next_layer, again.query.formed, again.pieces[0].number) == (2, 0, True, 0)
    assert again in request.units and other in request.units
    assert book.start(again)
    assert table.attempts(request.slot) == 1
    assert book.queued_count(0) == 0
