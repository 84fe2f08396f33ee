"""What a policy is shown of waiting requests. Times are microseconds."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from gangway.executor.slots import NEVER_JOINED
from gangway.scheduler.batching.former import BatchFormer
from gangway.scheduler.policies.gangway import candidates
from gangway.scheduler.policy import Query, RunningBlock
from gangway.scheduler.units import Batch, Unit
from tests.scheduler.batching.forming import (
    CLOSE,
    CORES,
    FLAT,
    LINEAR,
    MAX_ROWS,
    MODELS,
    STEEP,
    STRANGE,
    WHOLE,
    Former,
    batches,
    profile,
    query,
    queue,
    spec,
)


def begin(unit: Unit) -> Sequence[Unit]:
    """Begin its batch; return all units."""
    assert unit.batch
    return unit.batch.begin()


def test_waiting_requests_are_joined() -> None:
    waiting = [query(number) for number in range(1, 6)]
    formed = Former(spec(FLAT)).form(waiting)
    [shown] = formed.queries
    unit = formed.units[shown.query_id]
    assert unit.query is shown
    assert (shown.query_id, shown.rows, shown.arrival_us, shown.cores, shown.formed) == (1, 5, 100.0, 0, True)
    assert unit.pieces == tuple((number, 0, 1, 0) for number in range(1, 6))
    assert unit.batch and (unit.batch.rows, unit.batch.number) == (5, 1)


def test_dispatches_are_saved_for_requests_without_a_target() -> None:
    # Rows of LINEAR gain nothing together; but each dispatch takes as long as a row.
    def rows(dispatch_us: float, deadline_us: float | None = None) -> int:
        waiting = [query(number, LINEAR, deadline_us=deadline_us) for number in range(16)]
        return max(shown.rows for shown in Former(spec(LINEAR), dispatch_us=dispatch_us).form(waiting).queries)

    assert rows(0.0) == 1
    assert rows(20_000.0) > 1
    assert rows(20_000.0, deadline_us=1e9) == 1


def test_a_large_request_is_split() -> None:
    formed = Former(spec(LINEAR)).form([query(1, LINEAR, 7)])
    assert [(shown.query_id, shown.rows, shown.cores) for shown in formed.queries] == [(1, 4, 1), (1000, 3, 1)]
    first, second = formed.units[1], formed.units[1000]
    assert (first.pieces, second.pieces) == (((1, 0, 4, 0),), ((1, 4, 3, 1),))
    assert first.batch and first.batch is second.batch and first.batch.rows == 7


def test_of_a_batch_in_rounds_the_first_is_shown_and_the_others_come_with_it() -> None:
    former = Former(spec(STEEP))
    formed = former.form([query(1, STEEP, 8, deadline_us=1e6)])
    [shown] = formed.queries
    assert (shown.query_id, shown.rows, shown.cores, shown.round) == (1, 4, 2, 0)
    first, second = begin(formed.units[shown.query_id])
    assert (first.query, second.query) == (shown, replace(shown, query_id=1000, round=1, deadline_us=1e6))
    assert (first.pieces, second.pieces) == (((1, 0, 4, 0),), ((1, 4, 4, 1),))
    assert shown.deadline_us == pytest.approx(1e6 - 40_000), "the other half is to follow"
    assert first.batch and first.batch is second.batch and first.batch.rows == 8


def test_the_next_round_is_shown_when_all_of_the_one_before_have_started() -> None:
    former = Former(spec(STEEP), spec(FLAT))
    parts = [query(number, STEEP, 2, formed=True, batch=7, round=number // 2) for number in range(6)]
    other = query(9, STEEP, 2, formed=True, batch=8, round=3)

    def shown(*waiting: Query) -> list[int]:
        return [each.query_id for each in former.form(waiting).queries]

    assert shown(*parts, other) == [0, 1, 9]
    assert shown(*parts[1:], other) == [1, 9]
    assert shown(*parts[2:], other) == [2, 3, 9]
    stopped = replace(parts[0], started=True)
    assert shown(stopped, *parts[2:]) == [0, 2, 3], "one that was stopped has started"
    assert former.form(last := parts[4:]).queries == last


def test_requests_that_are_joined_and_done_in_rounds_have_their_own_deadlines() -> None:
    former = Former(spec(STEEP, max_delay_us=0.0))
    deadlines = [500_000.0, 600_000.0, None, 700_000.0, 650_000.0, None, None, None]
    waiting = [query(number, STEEP, deadline_us=at_us) for number, at_us in enumerate(deadlines, 1)]
    formed = former.form(waiting)
    [shown] = formed.queries
    first, second = begin(formed.units[shown.query_id])
    assert [piece.request_id for piece in first.pieces] == [1, 2, 5, 4], "by deadline"
    assert (first.query.deadline_us, second.query.deadline_us) == (500_000.0, None)


def test_a_joined_batch_is_split_across_requests() -> None:
    waiting = [query(1, LINEAR, 3), query(2, LINEAR, 1), query(3, LINEAR, 4)]
    former = Former(spec(LINEAR, max_delay_us=0.0))
    assert batches(former.form(waiting)) == [[1, 2], [3]]
    formed = former.form([replace(waiting[0], rows=2), waiting[1], waiting[2]])
    assert [unit.pieces for unit in formed.units.values()] == [
        ((1, 0, 2, 0), (2, 0, 1, 0), (3, 0, 1, 0)), ((3, 1, 3, 1),)
    ]  # fmt: skip


def test_requests_that_have_a_gang_each_remain_what_they_are_on_the_cores_that_are_planned() -> None:
    waiting = [query(1, LINEAR, 4), query(2, LINEAR, 4)]
    formed = Former(spec(LINEAR, max_delay_us=0.0)).form(waiting)
    assert not formed.units
    assert formed.queries == [replace(one, cores=1) for one in waiting]


@pytest.mark.parametrize(("error", "gangs"), [(1.0, [[1, 2]]), (1.5, [[1], [2]])])
def test_where_others_take_the_cores_rows_go_apart_unless_one_gang_gains_much(
    error: float, gangs: list[list[int]]
) -> None:
    former = Former(spec(CLOSE, max_delay_us=0.0)).former
    waiting = [query(1, CLOSE), query(2, CLOSE)]
    assert batches(former.form(queue(waiting), 1000.0, MODELS, CORES, CORES, prediction_errors={CLOSE: error})) == gangs


def test_what_is_left_over_waits_while_others_can_take_all_cores() -> None:
    former = Former(spec(CLOSE))
    waiting = [query(number, CLOSE) for number in range(1, 12)]
    assert batches(former.form(waiting)) == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert batches(former.form(waiting[8:])) == [[9, 10, 11]]
    in_time = [replace(one, deadline_us=1e6) for one in waiting]
    assert batches(former.form(in_time)) == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11]]
    configured = Former(spec(CLOSE, max_delay_us=0.0))
    assert batches(configured.form(waiting)) == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11]]


def test_rows_that_take_longer_than_predicted_are_a_higher_load() -> None:
    former = Former(spec(FLAT)).former
    arrived = [query(number, arrival_us=16_000.0 * number) for number in range(400)]
    for one in arrived:
        former.arrived(one)
    waiting = queue(arrived[-6:])
    models = {FLAT: profile(FLAT, 6.6, 3.0)}  # in batches of eight a row takes 8.25 ms: a load of 0.52

    def first(error: float) -> int:
        return len(batches(former.form(waiting, 7e6, models, CORES, CORES, prediction_errors={FLAT: error}))[0])

    assert (first(1.0), first(1.5)) == (3, 4)


@pytest.mark.parametrize(
    "waiting",
    [
        [],
        [query(1)],
        [query(1, LINEAR)],
        [query(1, STRANGE), query(2, STRANGE, 8)],
        [query(1), query(2, LINEAR), query(3, WHOLE)],
        [query(1, started=True), query(2, started=True)],
        [query(1, formed=True, cores=1), query(2, formed=True, rows=4)],
        [query(1, priority=1), query(2)],
        [query(1, rejects_late=True), query(2)],
        [query(1, join_key=1), query(2, join_key=2)],
        [query(1, join_key=NEVER_JOINED), query(2, join_key=NEVER_JOINED)],
        [query(number, WHOLE) for number in range(1, 9)],  # not measured: joining may be worth nothing
    ],
)
def test_where_nothing_is_joined_or_split_the_queue_itself_is_shown(waiting: list[Query]) -> None:
    formed = Former(spec(FLAT), spec(LINEAR), spec(WHOLE)).form(waiting)
    assert formed.queries == waiting
    assert not formed.units and formed.wake_us is None


def test_equal_keys_are_joined_and_different_ones_apart() -> None:
    waiting = [query(number, join_key=number % 2) for number in range(1, 7)]
    assert batches(Former(spec(FLAT)).form(waiting)) == [[1, 3, 5], [2, 4, 6]]


def test_what_must_not_be_joined_may_be_split() -> None:
    waiting = [query(1, LINEAR, 4, join_key=NEVER_JOINED), query(2, LINEAR, join_key=NEVER_JOINED)]
    assert batches(Former(spec(LINEAR)).form(waiting)) == [[1], [1], [2]]


@pytest.mark.parametrize(
    "changes", [{"joins": False, "splits": False}, {"joins": False, "limits": (("instances", 1, 1),)}]
)
def test_switched_off(changes: dict[str, object]) -> None:
    waiting = [query(1, LINEAR, 8), query(2, LINEAR), query(3, LINEAR)]
    assert Former(spec(LINEAR, **changes)).form(waiting).queries == waiting


def test_a_model_with_instances_is_joined_and_not_split() -> None:
    former = Former(spec(LINEAR, limits=(("instances", 1, 1),), max_delay_us=0.0))
    formed = former.form([query(1, LINEAR, 4), query(2, LINEAR, 4)])
    assert batches(formed) == [[1, 2]]
    assert formed.queries[0].cores == 0


def test_after_it_is_unloaded_a_model_is_let_alone() -> None:
    former = Former(spec(FLAT))
    former.former.remove(FLAT)
    waiting = [query(1), query(2)]
    assert former.form(waiting).queries == waiting


# -- deadlines


def test_nobody_who_would_be_in_time_alone_is_made_late() -> None:
    # Eight rows take 11 ms, one 10: with 10.9 ms left, less 4 %, a member bears five others at most.
    waiting = [query(number, deadline_us=1000.0 + 10_900.0) for number in range(1, 9)]
    [first, *rest] = batches(Former(spec(FLAT)).form(waiting))
    assert 1 < len(first) < 8
    largest_us = 10_000.0 * (1 + 0.1 * (len(first) - 1) / 7)
    assert largest_us * 1.04 <= 10_900.0 < (largest_us + 10_000.0 * 0.1 / 7) * 1.04
    assert first == list(range(1, len(first) + 1)) and rest


def test_those_that_can_be_in_time_go_first_and_are_topped_up_with_late_ones() -> None:
    late = [query(number, deadline_us=1500.0) for number in range(1, 4)]
    punctual = [query(4, deadline_us=90_000.0), query(5, deadline_us=80_000.0)]
    formed = Former(spec(FLAT)).form([*late, *punctual])
    assert batches(formed) == [[5, 4, 1, 2, 3]]
    assert (formed.queries[0].deadline_us, formed.queries[0].arrival_us) == (80_000.0, 100.0)


def test_where_rows_gain_little_together_late_ones_do_not_fill_up_the_batch_of_others() -> None:
    late = [query(number, LINEAR, deadline_us=1500.0) for number in range(1, 4)]
    punctual = [query(4, LINEAR, deadline_us=900_000.0), query(5, LINEAR, deadline_us=800_000.0)]
    together = batches(Former(spec(LINEAR)).form([*late, *punctual]))
    assert not any({4, 5} & set(batch) and {1, 2, 3} & set(batch) for batch in together)
    configured = batches(Former(spec(LINEAR, max_delay_us=0.0)).form([*late, *punctual]))
    assert any({4, 5} & set(batch) and {1, 2, 3} & set(batch) for batch in configured), "as Triton does it"


def test_a_batch_of_late_ones_has_the_earliest_deadline() -> None:
    formed = Former(spec(FLAT)).form([query(1, deadline_us=1500.0), query(2, deadline_us=1200.0), query(3)])
    assert formed.queries[0].deadline_us == 1200.0


def test_a_part_of_a_batch_knows_its_largest_request() -> None:
    joined = Former(spec(FLAT)).form([query(1), query(2, rows=3), query(3)])
    assert [(shown.rows, shown.request_rows) for shown in joined.queries] == [(5, 3)]
    split = Former(spec(LINEAR)).form([query(1, LINEAR, 7)])
    assert [(shown.rows, shown.request_rows) for shown in split.queries] == [(4, 4), (3, 3)]


def test_one_that_is_late_as_things_usually_go_does_not_bind_the_others() -> None:
    waiting = [query(1, deadline_us=11_200.0), *(query(number, deadline_us=99_000.0) for number in range(2, 9))]
    [first] = batches(Former(spec(FLAT)).form(waiting))
    assert first == list(range(1, 9))


def test_the_way_back_is_kept() -> None:
    waiting = [query(1, deadline_us=12_400.0), query(2, deadline_us=12_400.0)]
    former = Former(spec(FLAT))
    assert batches(former.form(waiting)) == [[1, 2]]
    hasty = BatchFormer(iter(range(9)).__next__, way_back_us=900.0)
    hasty.add(spec(FLAT))
    assert not hasty.form(queue(waiting), 1000.0, MODELS, CORES, CORES).units


def test_what_is_not_measured_is_no_reason_to_think_a_request_late() -> None:
    waiting = [query(number, WHOLE, deadline_us=11_001.0) for number in range(1, 9)]
    assert batches(Former(spec(WHOLE, max_delay_us=0.0)).form(waiting)) == [list(range(1, 9))]


def test_who_waits_for_a_model_that_is_being_loaded_is_not_shown() -> None:
    assert list(Former(spec(LINEAR)).form([query(1, 77), query(2, LINEAR)]).queries) == [query(2, LINEAR)]


# -- long queues


@pytest.mark.parametrize("seed", range(5))
def test_of_a_long_queue_all_are_shown_that_the_policy_would_choose_from(seed: int) -> None:
    rng = random.Random(seed)
    waiting = [
        query(
            number,
            rng.choice((LINEAR, STRANGE)),
            deadline_us=rng.choice((None, rng.uniform(0, 1e5))),
            priority=rng.choice((0, 0, 0, 1)),
            started=rng.random() < 0.02,
        )
        for number in range(1, 1000)
    ]
    shown = Former(spec(LINEAR, joins=False)).form(waiting, now_us=5e4).queries
    assert len(shown) < len(waiting) / 2
    assert list(candidates(shown, 5e4, CORES, MODELS)) == list(candidates(waiting, 5e4, CORES, MODELS))


def test_of_a_long_queue_the_next_batches_are_shown_and_one_of_the_late_ones() -> None:
    late = [query(number) for number in range(1, 101)]
    punctual = [query(number, deadline_us=1e6 + number) for number in range(101, 201)]
    formed = Former(spec(FLAT)).form([*late, *punctual])
    assert batches(formed) == [list(range(1, 9)), *(list(range(at, at + 8)) for at in (101, 109, 117, 125))]


def test_of_many_who_are_late_those_are_shown_who_can_begin() -> None:
    late = [query(number, deadline_us=500.0) for number in range(1, 33)]
    assert len(batches(Former(spec(FLAT)).form(late, now_us=1e6))) == 4
    more = [query(number, deadline_us=500.0) for number in range(33, 101)]
    assert batches(Former(spec(FLAT)).form([*late, *more], now_us=1e6)) == [list(range(1, 9)), list(range(9, 17))]


def test_of_many_who_are_late_as_many_are_shown_as_cores_are_free() -> None:
    late = [query(number, deadline_us=500.0) for number in range(1, 101)]
    punctual = query(101, deadline_us=2e6)
    former = Former(spec(FLAT))
    filled_up, next_ones = [101, *range(1, 8)], list(range(8, 16))
    assert batches(former.form([*late, punctual], now_us=1e6, free=1)) == [filled_up, next_ones]
    assert batches(former.form([*late, punctual], now_us=1e6, free=0)) == [filled_up]
    assert batches(former.form(late, now_us=1e6, free=0)) == []


def test_of_units_that_have_not_started_as_many_late_ones_are_shown_as_cores_are_free() -> None:
    stopped = query(1, started=True, deadline_us=500.0)
    units = [query(number, formed=True, batch=number, deadline_us=500.0) for number in range(2, 50)]
    punctual = query(50, formed=True, batch=50, deadline_us=2e6)
    for free, shown in ((0, [[1], [50]]), (1, [[1], [2], [50]])):
        assert batches(Former(spec(FLAT)).form([stopped, *units, punctual], now_us=1e6, free=free)) == shown


def test_who_is_late_is_shown_if_somebody_of_a_lower_class_can_make_room() -> None:
    late = [query(number, deadline_us=500.0) for number in range(1, 101)]
    blocks = [RunningBlock(query(200, LINEAR, priority=1), 1, (0, 1), 0.0)]
    shown = batches(Former(spec(FLAT)).form(late, now_us=1e6, free=0, running=blocks))
    assert shown == [list(range(1, 9)), list(range(9, 17))]


def test_who_is_late_is_shown_if_it_takes_next_to_nothing() -> None:
    """Others make room for it."""
    late = [query(number, deadline_us=500.0) for number in range(1, 101)]
    brief = {FLAT: replace(MODELS[FLAT], latency_us=(((200.0, 100.0),),))}
    former = Former(spec(FLAT)).former
    assert batches(former.form(queue(late), 1e6, brief, CORES, 0)) == [list(range(1, 9)), list(range(9, 17))]
    assert batches(former.form(queue(late), 1e6, MODELS, CORES, 0)) == []


def test_no_batch_has_more_rows_or_requests_than_allowed() -> None:
    former = Former(spec(FLAT, max_rows=1024))
    assert [len(batch) for batch in batches(former.form([query(number) for number in range(1, 301)]))][:2] == [64, 64]
    rng = random.Random(1)
    for _ in range(50):
        waiting = [query(number, rows=rng.randint(1, 8)) for number in range(1, rng.randint(2, 12))]
        formed = Former(spec(FLAT)).form(waiting)
        assert all(shown.rows <= MAX_ROWS for shown in formed.queries)


# -- order


def test_batches_of_a_model_that_keeps_order_run_one_after_the_other() -> None:
    former = Former(spec(FLAT, preserve_ordering=True))
    waiting = [query(1, deadline_us=1e9), query(2, deadline_us=1e8), query(3, priority=1), query(4)]
    assert batches(former.form(waiting)) == [[1, 2]]
    begun = replace(waiting[0], started=True)
    assert batches(former.form([begun, *waiting[1:]])) == [[1]]
    block = RunningBlock(replace(waiting[0], formed=True), 1, (0,), 500.0)
    assert batches(former.form(waiting[2:], free=1, running=[block])) == []
    assert batches(former.form(waiting[2:])) == [[3]]


def test_a_model_that_keeps_order_may_be_split() -> None:
    former = Former(spec(LINEAR, preserve_ordering=True))
    formed = former.form([query(1, LINEAR, 8), query(2, LINEAR, 8)])
    assert batches(formed) == [[1], [1]]


# -- anything


@pytest.mark.parametrize("seed", range(20))
def test_batches_are_closed_and_nothing_is_shown_twice(seed: int) -> None:
    rng = random.Random(seed)
    delay_us = rng.choice((None, 0.0, 300.0))
    specs = [spec(FLAT, max_delay_us=delay_us), spec(LINEAR, preserve_ordering=rng.random() < 0.3), spec(WHOLE)]
    former = Former(*specs)
    waiting = [
        query(
            number,
            rng.choice((FLAT, LINEAR, WHOLE, STRANGE)),
            rng.randint(1, MAX_ROWS) if rng.random() < 0.5 else 1,
            deadline_us=rng.choice((None, rng.uniform(0, 1e5))),
            priority=rng.choice((0, 0, 1)),
            join_key=rng.choice((0, 0, 7, NEVER_JOINED)),
            started=(begun := rng.random() < 0.1),
            formed=begun,
        )
        for number in range(1, rng.randint(2, 60))
    ]
    formed = former.form(waiting, now_us=3000.0)
    known = {each.query_id: each for each in waiting}
    rows_shown = dict.fromkeys(known, 0)
    batch_of: dict[int, Batch | None] = {}
    for shown in formed.queries:
        unit = formed.units.get(shown.query_id)
        if unit is None:
            assert replace(shown, cores=0) == known[shown.query_id]
            rows_shown[shown.query_id] += shown.rows
            continue
        assert shown.rows == sum(piece.rows for piece in unit.pieces)
        assert len({known[piece.request_id].model_id for piece in unit.pieces} | {shown.model_id}) == 1
        for piece in unit.pieces:
            assert piece.first_row == rows_shown[piece.request_id]
            rows_shown[piece.request_id] += piece.rows
            assert batch_of.setdefault(piece.request_id, unit.batch) == unit.batch
    for each in waiting:
        assert rows_shown[each.query_id] in (0, each.rows)
        if each.started:
            assert rows_shown[each.query_id] == each.rows


def test_of_a_long_queue_the_earliest_deadlines_that_can_be_met_are_found() -> None:
    rng = random.Random(2)
    hopeless = [query(number, deadline_us=5000.0 + number) for number in range(1, 400)]
    hopeful = [query(number, deadline_us=rng.uniform(2e5, 9e5)) for number in range(400, 800)]
    formed = Former(spec(FLAT)).form([*hopeless, *hopeful], now_us=1000.0)
    first = next(
        shown for shown in formed.queries if shown.deadline_us == min(each.deadline_us or 0 for each in hopeful)
    )
    pieces = [piece.request_id for piece in formed.units[first.query_id].pieces]
    assert pieces == [each.query_id for each in sorted(hopeful, key=lambda each: each.deadline_us or 0)[:8]]
    assert [1, 2, 3, 4, 5, 6, 7, 8] in batches(formed)
