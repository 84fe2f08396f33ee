"""How long waiting requests are held back from the policy: for company, or as configured. Times are microseconds."""

import random

import pytest

from gangway.executor.slots import NEVER_JOINED
from gangway.scheduler.policy import Query
from tests.scheduler.batching.forming import (
    CORES,
    FLAT,
    LINEAR,
    MODELS,
    WHOLE,
    Former,
    batches,
    query,
    queue,
    spec,
)

# -- company


def test_a_request_waits_for_the_next_one_if_that_is_worth_waiting() -> None:
    former = Former(spec(FLAT))
    waiting = [query(number) for number in range(1, 3)]
    for each in waiting:
        former.former.arrived(each)
    held = former.form(waiting[1:], now_us=210.0)
    assert (list(held.queries), held.wake_us) == ([], 300.0)
    assert former.form(waiting[1:], now_us=300.0).queries == waiting[1:]


@pytest.mark.parametrize(
    ("waiting", "free"),
    [
        ([query(2), query(3, LINEAR)], CORES),  # somebody else wants the cores
        ([query(2)], CORES - 1),
        ([query(2, join_key=NEVER_JOINED)], CORES),
        ([query(2, deadline_us=10_700.0)], CORES),  # it would be late
    ],
)
def test_a_request_does_not_wait_for_company(waiting: list[Query], free: int) -> None:
    former = Former(spec(FLAT), spec(LINEAR))
    for number in (1, 2):
        former.former.arrived(query(number))
    formed = former.form(waiting, now_us=210.0, free=free)
    assert formed.queries == waiting and formed.wake_us is None


def test_nobody_waits_for_company_that_can_have_a_core_of_its_own() -> None:
    former = Former(spec(LINEAR))
    for number in (1, 2):
        former.former.arrived(query(number, LINEAR))
    assert former.form(waiting := [query(2, LINEAR)], now_us=210.0).queries == waiting


# -- configured


def test_whatever_waits_goes_together_without_a_delay() -> None:
    former = Former(spec(WHOLE, max_delay_us=0.0))
    waiting = [query(number, WHOLE) for number in range(1, 11)]
    assert batches(former.form(waiting)) == [list(range(1, 9)), [9, 10]]
    assert batches(former.form(waiting[:1])) == [[1]]


def test_a_delay_is_kept_unless_a_batch_is_full() -> None:
    former = Former(spec(FLAT, max_delay_us=5000.0))
    waiting = [query(number) for number in range(1, 12)]
    held = former.form(waiting[:7], now_us=1000.0)
    assert (list(held.queries), held.wake_us) == ([], 5100.0)
    assert batches(former.form(waiting[:7], now_us=5100.0)) == [list(range(1, 8))]
    full = former.form(waiting, now_us=1200.0)
    assert (batches(full), full.wake_us) == ([list(range(1, 9))], 5900.0)


def test_a_delay_ends_where_a_deadline_begins() -> None:
    former = Former(spec(FLAT, max_delay_us=50_000.0))
    held = former.form([query(1, deadline_us=20_000.0), query(2)], now_us=1000.0)
    assert held.wake_us == pytest.approx(20_000.0 - 1.04 * 10_000.0 * (1 + 0.1 / 7))


def test_preferred_sizes() -> None:
    former = Former(spec(FLAT, max_delay_us=5000.0, preferred_rows=(2, 4)))
    waiting = [query(number) for number in range(1, 8)]
    formed = former.form(waiting)
    assert (batches(formed), formed.wake_us) == ([[1, 2, 3, 4], [5, 6]], 5700.0)
    assert batches(former.form(waiting, now_us=5700.0)) == [[1, 2, 3, 4], [5, 6], [7]]


# -- lone requests


def test_who_may_hold_a_lone_request() -> None:
    for held in (spec(FLAT, preserve_ordering=True), spec(FLAT, max_delay_us=1.0)):
        assert Former(held).former.may_delay(MODELS[FLAT], CORES)
    for free in (spec(FLAT), spec(FLAT, max_delay_us=0.0), spec(FLAT, max_rows=1, max_delay_us=1.0), spec(LINEAR)):
        assert not Former(free).former.may_delay(MODELS[free.model_id], CORES)


def test_a_lone_request_goes_at_once_unless_it_may_be_held() -> None:
    """Whatever the gaps between requests have been so far, and whether they have deadlines."""
    source = random.Random(1)
    held = 0
    for kind in (FLAT, LINEAR, WHOLE):
        former, now_us = Former(spec(kind)).former, 0.0
        gap_us = 1e4
        for number in range(600):
            if number % 50 == 0:
                gap_us = source.choice([100.0, 3000.0, 30_000.0])
            now_us += gap_us * source.uniform(0.5, 1.5)
            deadline_us = source.choice([None, now_us + 5000.0, now_us + 50_000.0])
            lone = Query(number, kind, 1, now_us, deadline_us)
            if former.may_delay(MODELS[kind], CORES):
                held += 1
            else:
                formed = former.form(queue([lone]), now_us + 5.0, MODELS, CORES, source.randint(1, CORES))
                assert (list(formed.queries), formed.wake_us) == ([lone], None)
            former.arrived(lone)
    assert 0 < held < 900
