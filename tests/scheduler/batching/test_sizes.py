"""How many rows the next batch takes, against all ways to serve a queue, and whether it waits for the next request."""

import random
from collections.abc import Iterator

import pytest

from gangway.scheduler.batching.sizes import BatchSizes, batch_sizes, is_worth_waiting
from gangway.scheduler.policy_config import BATCHING
from gangway.scheduler.profiles import ModelProfile


def ways(rows: int) -> Iterator[list[int]]:
    """All sequences of batches with so many rows together."""
    if rows == 0:
        yield []
    for first in range(1, rows + 1):
        for rest in ways(rows - first):
            yield [first, *rest]


def completion_sum(batches: list[int], times: list[float]) -> float:
    now_us, total_us = 0.0, 0.0
    for batch in batches:
        now_us += times[batch]
        total_us += batch * now_us
    return total_us


@pytest.mark.parametrize("seed", range(10))
def test_no_other_way_has_a_lower_mean_latency(seed: int) -> None:
    rng = random.Random(seed)
    times = [0.0]
    for _ in range(9):
        times.append(times[-1] + rng.choice((5.0, 20.0, 60.0, 100.0)))
    sizes = BatchSizes(lambda rows: times[rows], 9, batch_us=0.0)
    for rows in range(1, 10):
        found, left = [], rows
        while left:
            found.append(sizes.next_rows(left))
            left -= found[-1]
        best_us = min(completion_sum(way, times) for way in ways(rows))
        assert completion_sum(found, times) == pytest.approx(best_us)


def test_a_short_queue_goes_one_by_one_and_a_long_one_together() -> None:
    # 100 us for the batch and 100 for each row: 8 rows in 900 instead of 1600.
    sizes = BatchSizes(lambda rows: 100.0 + 100.0 * rows, 8, batch_us=0.0)
    found = [sizes.next_rows(rows) for rows in (1, 2, 4, 100, 1000)]
    assert found == sorted(found)
    assert (found[0], found[1], found[-1]) == (1, 1, 8)


def test_what_a_batch_costs_beside_its_execution_makes_batches_of_a_long_queue() -> None:
    # Rows gain nothing together, but each dispatch takes a quarter of a row's time.
    sizes = BatchSizes(lambda rows: 1000.0 * rows, 8, batch_us=250.0)
    assert [sizes.next_rows(rows) for rows in (1, 2, 3)] == [1, 1, 1]
    assert sizes.next_rows(8, load=0.95) > sizes.next_rows(8) > 1


def test_rows_that_gain_nothing_together_go_one_by_one() -> None:
    sizes = BatchSizes(lambda rows: 1000.0 * rows, 64, batch_us=0.0)
    assert {sizes.next_rows(rows) for rows in (1, 2, 3, 64, 65, 1000)} == {1}


def test_rows_that_cost_nothing_more_go_together() -> None:
    sizes = BatchSizes(lambda rows: 1000.0, 16, batch_us=0.0)
    assert [sizes.next_rows(rows) for rows in (1, 2, 7, 16)] == [1, 2, 7, 16]
    assert sizes.next_rows(40) in (8, 16)  # 8, then two full ones, or any other order: but never 17


def test_under_load_batches_are_those_of_the_rows_that_will_have_come() -> None:
    sizes = BatchSizes(lambda rows: 100.0 + 100.0 * rows, 8, batch_us=0.0)
    assert [sizes.next_rows(2, load) for load in (0.0, 0.9, 3.0)] == [1, 2, 2]
    assert [sizes.next_rows(4, load) for load in (0.0, 0.5)] == [sizes.next_rows(4), sizes.next_rows(8)]
    assert sizes.row_us == pytest.approx(900 / 8)


def test_load_does_not_join_rows_that_gain_nothing_together() -> None:
    sizes = BatchSizes(lambda rows: 1000.0 * rows, 64, batch_us=0.0)
    assert {sizes.next_rows(rows, 2.0) for rows in (1, 2, 3, 64, 1000)} == {1}


def test_of_the_rows_that_are_there_those_go_that_are_quickest_together() -> None:
    even = BatchSizes(lambda rows: 1000.0 * (rows // 2 + rows % 2), 8, batch_us=0.0)  # a core for every other row
    assert [even.next_rows(rows, 0.9) for rows in (1, 2, 3)] == [1, 2, 2]
    eights = BatchSizes(lambda rows: 1000.0 + rows, 16, allowed=(8, 16))
    assert [eights.next_rows(rows, 0.9) for rows in (3, 9, 40)] == [3, 8, 16]


def test_each_batch_costs_something_itself() -> None:
    tiny = BatchSizes(lambda rows: 20.0 * rows, 8)
    assert tiny.next_rows(8) > 1
    assert BatchSizes(lambda rows: 20_000.0 * rows, 8).next_rows(8) == 1


def test_only_preferred_sizes_except_for_the_last_rows() -> None:
    sizes = BatchSizes(lambda rows: 1000.0 + rows, 16, allowed=(4, 8, 32))
    assert [sizes.next_rows(rows) for rows in (1, 2, 3, 4, 8)] == [1, 2, 3, 4, 8]
    assert {sizes.next_rows(rows) for rows in range(4, 40)} == {4, 8}


def test_a_queue_of_any_length_has_an_answer() -> None:
    sizes = BatchSizes(lambda rows: 1000.0 + 10 * rows, 8)
    assert sizes.next_rows(50 * BATCHING.max_queue_rows) == sizes.next_rows(BATCHING.max_queue_rows) == 8


def test_a_model_whose_batches_may_be_split_has_other_sizes() -> None:
    model = ModelProfile(
        model_id=1,
        name="model",
        layers=1,
        max_ranks=1,
        latency_us=(((10_000.0, 10_000.0),),),
        rows_factor=((1.0, 2.0, 8.0),) * 2,
        batches=(1, 2, 8),
        measured=True,
    )
    assert batch_sizes(model, 2, 8).next_rows(2) == 2  # one row on each core
    assert batch_sizes(model, 2, 8, splits=False).next_rows(2) == 1
    assert batch_sizes(model, 2, 8) is batch_sizes(model, 2, 8)


@pytest.mark.parametrize(("doubt", "together"), [(0.05, True), (0.15, False)])
def test_gains_within_the_doubt_of_the_profile_are_none(doubt: float, together: bool) -> None:
    model = ModelProfile(
        model_id=1,
        name="model",
        layers=1,
        max_ranks=1,
        latency_us=(((10_000.0,),),),
        rows_factor=((1.0, 1.8, 3.6),),
        batches=(1, 2, 4),
        doubt=(doubt,) * 3,
        measured=True,
    )
    sizes = batch_sizes(model, 1, 4)
    assert (sizes.next_rows(4, load=0.9) > 1) == together
    assert sizes.latency_us(4) == (36_000.0 if together else 40_000.0)


# -- waiting for the next request


def flat(rows: int) -> float:
    """A batch takes no longer than one row."""
    return 1000.0


def linear(rows: int) -> float:
    """Rows gain nothing together."""
    return 1000.0 * rows


def test_one_row_waits_for_half_its_time_if_company_is_free() -> None:
    assert is_worth_waiting(1, 1, 499.0, flat)
    assert not is_worth_waiting(1, 1, 501.0, flat)


@pytest.mark.parametrize("gap_us", [0.0, 1.0, 500.0])
@pytest.mark.parametrize("rows", [1, 2, 8])
def test_nobody_waits_where_rows_gain_nothing_together(rows: int, gap_us: float) -> None:
    assert not is_worth_waiting(rows, 1, gap_us, linear)


@pytest.mark.parametrize("clients", [2, 4, 8, 16])
def test_when_all_clients_of_a_closed_loop_have_come_nobody_waits(clients: int) -> None:
    gap_us = 1000.0 / clients  # all of them once in each batch's time
    assert not is_worth_waiting(clients, 1, gap_us, flat)
    assert clients < 4 or is_worth_waiting(clients // 2, 1, gap_us, flat)


def test_what_waiting_saves_and_costs_is_counted_in_rows() -> None:
    assert is_worth_waiting(1, 8, 800.0, flat)  # eight would wait for the whole of the first batch
    assert not is_worth_waiting(8, 1, 200.0, flat)
