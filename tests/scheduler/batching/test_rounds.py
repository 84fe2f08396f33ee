"""Parts of a batch that run one after the other, against all ways to cut it. Times are microseconds."""

from dataclasses import replace
from itertools import product

import pytest

from gangway.executor.slots import MAX_PARTS
from gangway.scheduler.batching.planner import (
    Latency,
    Part,
    PlanTable,
    SplitTable,
    known_rows,
    one_after_the_other,
    plan_table,
    side_by_side,
)
from gangway.scheduler.batching.sizes import batch_sizes
from gangway.scheduler.policy_config import BATCHING
from gangway.scheduler.profiles import ModelProfile
from tests.scheduler.batching import largest_table
from tests.scheduler.batching.test_split import lists_of_gangs, random_times

WELL = 0.001  # what times that are known well must gain


def table(
    alone_us: Latency, together_us: Latency | None, cores: int = 2, rows: int = 64, known: int | None = None
) -> PlanTable:
    """Of times that are all known well, up to `known` rows."""

    def gain(rows: int) -> float:
        return WELL

    splits = SplitTable(cores, rows, alone_us, together_us, gang_us=0.0, min_gain=gain)
    return PlanTable(splits, gain, rows if known is None else known)


@pytest.mark.parametrize("seed", range(8))
def test_no_other_number_of_rounds_is_done_sooner(seed: int) -> None:
    cores, most = 3, 6
    fat, narrow = random_times(seed, cores, most), random_times(seed + 100, cores, most)

    def at_once_us(count: int, rows: int) -> float:
        if count == 1 or rows == 1:
            return fat[count][rows]
        ways = lists_of_gangs(count, rows, count)
        return min(fat[count][rows], *(max(narrow[width][taken] for width, taken in gangs) for gangs in ways))

    found = table(
        lambda width, taken: fat[width][taken] + 100, lambda width, taken: narrow[width][taken] + 100, cores, most
    )
    for count, rows in product(range(1, cores + 1), range(1, most + 1)):
        ways_us = []
        for rounds in (1, 2, 4):
            if rounds <= rows:
                least, more = divmod(rows, rounds)
                sizes = [least + 1] * more + [least] * (rounds - more)
                ways_us.append(sum(at_once_us(count, size) + 100 for size in sizes) + BATCHING.round_us * (rounds - 1))
        plan = found.best(count, rows)
        assert min(ways_us) <= plan.latency_us <= min(ways_us) / (1 - WELL) ** 2
        assert plan.latency_us == pytest.approx(found.latency_us(count, rows))
        assert sum(part.rows for part in plan.parts) == rows
        for number in range(len(plan.rounds_us)):
            assert sum(part.cores for part in plan.parts if part.round == number) <= count


def leaving_the_cache(cores: int, rows: int) -> float:
    """A row takes 4 ms of a core in batches of up to 8 rows for each core, then ever more."""
    row_us = 4000.0 * (1 + 0.1 * max(0, rows // cores - 8) ** 0.5)
    return rows * row_us / cores + 1000.0


def test_parts_of_few_rows_run_one_after_the_other() -> None:
    plans = table(leaving_the_cache, lambda cores, rows: leaving_the_cache(cores, rows) * (0.9 if cores == 1 else 1.0))
    plan = plans.best(2, 64)
    assert str(plan) == "4 times <2, 1, 8>"
    assert plan.latency_us == pytest.approx(4 * 0.9 * 33_000 + 3 * BATCHING.round_us) == plans.latency_us(2, 64)
    assert plans.one_gang_us(2, 64) == leaving_the_cache(2, 64)
    assert list(plan.parts[:3]) == [
        Part(1, 8, 0, pytest.approx(3 * 0.9 * 33_000 + 2 * BATCHING.round_us)),
        Part(1, 8, 0, pytest.approx(3 * 0.9 * 33_000 + 2 * BATCHING.round_us)),
        Part(1, 8, 1, pytest.approx(2 * 0.9 * 33_000 + BATCHING.round_us)),
    ]
    assert plan.parts[-1] == Part(1, 8, 3, pytest.approx(0.0, abs=1e-6))
    assert [part.rows for part in plans.best(2, 61).parts] == [8, 8, 8, 7, 8, 7, 8, 7]
    assert len(plans.best(2, 16).rounds_us) == 1


def test_a_plan_is_written_round_by_round() -> None:
    wide, narrow = side_by_side([(6, 8), (4, 4), (4, 4)], 1.0), side_by_side([(6, 7)], 1.0)
    assert str(one_after_the_other([wide, wide, narrow])) == "2 times <1, 6, 8>, <2, 4, 4>, then <1, 6, 7>"
    assert str(one_after_the_other([narrow])) == "<1, 6, 7>"


def test_rows_that_cost_the_same_in_any_batch_run_at_once() -> None:
    plans = table(lambda cores, rows: 5000.0 * rows / cores, None)
    assert {len(plans.best(2, rows).rounds_us) for rows in (1, 2, 7, 64)} == {1}


def test_a_round_costs_time() -> None:
    def batch_us(cores: int, rows: int) -> float:
        return row_us * rows * (1.0 if rows <= 4 else 1.2) / cores

    row_us = 5000.0
    assert len(table(batch_us, None).best(2, 8).rounds_us) == 2
    row_us = 50.0
    assert len(table(batch_us, None).best(2, 8).rounds_us) == 1


def test_a_request_lies_in_no_more_parts_than_it_can() -> None:
    def falling(cores: int, rows: int) -> float:
        return 10_000.0 * rows * rows**0.5

    for cores in (1, 2, 24, 64):
        plan = table(falling, falling, cores, 1024).best(cores, 1024)
        assert 1 < len(plan.parts) <= MAX_PARTS
        assert sum(part.rows for part in plan.parts) == 1024


def profile(doubt: tuple[float, ...] = (), large: float = 1.0, small: float = 1.0, **changes: object) -> ModelProfile:
    """A row takes 10 ms on one core or two, 20 beside another gang; 8 and 64 rows so many times as long."""
    factors = (1.0, 2.0, 8.0 * small, 64.0 * large)
    known = ModelProfile(
        model_id=1,
        name="model",
        layers=1,
        max_ranks=2,
        latency_us=(((10_000.0, 10_000.0),),),
        rows_factor=(factors,) * 2,
        together_factor=(tuple(2 * factor for factor in factors),) * 2,
        batches=(1, 2, 8, 64),
        doubt=doubt,
        measured=True,
    )
    return replace(known, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("doubt", "large", "small", "rounds"),
    [
        ((0.02, 0.02, 0.06, 0.06), 1.0, 1.0, {1}),
        ((0.02, 0.02, 0.06, 0.06), 1.05, 1.0, {1}),  # either may err by as much
        ((0.02, 0.02, 0.06, 0.06), 1.1, 1.0, {8, 16, 32, 64}),
        ((0.02, 0.02, 0.02, 0.06), 1.05, 1.0, {8, 16, 32, 64}),  # of which one is known better
        ((0.02, 0.02, 0.02, 1.0), 1.5, 1.0, {1}),  # 64 rows were run once or twice, and may have been disturbed
        ((0.02, 0.02, 0.02, 1.0), 1.5, 1.2, {16}),  # but 8 rows take longer than 2, too: so will 64
        ((0.02, 0.02, 0.02, 1.0), 0.9, 1.2, {1}),  # unless they were seen to be quick
        ((0.02, 1.0, 1.0, 1.0), 1.5, 1.2, {1}),
    ],
)
def test_only_what_is_seen_among_well_known_times_is_gained(
    doubt: tuple[float, ...], large: float, small: float, rounds: set[int]
) -> None:
    plans = plan_table(profile(doubt, large, small), 2, 64)
    assert len(plans.best(2, 64).rounds_us) in rounds


def test_how_many_rows_are_well_known() -> None:
    assert known_rows(profile()) == 64
    assert known_rows(profile((0.02, 0.02, 0.06, 1.0))) == 8
    assert known_rows(profile((1.0,) * 4)) == 0
    assert known_rows(profile(measured=False)) == known_rows(profile(indivisible=True)) == 0


def test_beyond_what_was_measured_nothing_is_well_known() -> None:
    model = replace(profile((0.01,) * 4, small=1.1), batches=(1, 2, 4, 8))
    factors = (1.0, 2.0, 4.0, 8.8)  # the last slope would go on with 1.2 of what a row takes
    rising = replace(model, rows_factor=(factors,) * 2, together_factor=(factors,) * 2)
    plan = plan_table(rising, 1, 64).best(1, 64)
    assert len(plan.rounds_us) == 16 and plan.latency_us == 640_000.0 + 15 * BATCHING.round_us
    outlier = replace(rising, doubt=(0.01, 0.01, 0.01, 1.0))
    assert len(plan_table(outlier, 1, 64).best(1, 64).rounds_us) == 1


def test_rows_that_are_requests_of_their_own_stay_apart_in_rounds_too() -> None:
    def together_us(cores: int, rows: int) -> float:
        return leaving_the_cache(cores, rows) * 1.02

    plans = table(leaving_the_cache, together_us)
    assert str(plans.best(2, 64)) == "4 times <1, 2, 16>"
    assert str(plans.best_of_single_rows(2, 64)) == "4 times <2, 1, 8>"
    assert str(plans.best_of_single_rows(2, 64, prediction_error=1.0)) == str(plans.best_of_single_rows(2, 64))


def test_sizes_of_batches_know_of_rounds() -> None:
    """One by one rows take 10 ms, two together 15, more than 8 ever longer: so 64 go as they would in small batches."""
    factors = (1.0, 1.5, 6.0, 80.0)
    model = profile(rows_factor=(factors,) * 2, together_factor=(tuple(2 * one for one in factors),) * 2)
    sizes = batch_sizes(model, 2, 64)
    plan = plan_table(model, 2, 64).best(2, 64)
    assert len(plan.rounds_us) > 1
    assert sizes.latency_us(64) == pytest.approx(plan.latency_us)
    assert sizes.next_rows(64, load=0.9) == 2, "nobody gains by being in a batch that is cut again"
    assert batch_sizes(model, 2, 64, splits=False).latency_us(64) == 800_000.0
    assert BATCHING.round_us > BATCHING.gang_us, "else large batches in rounds would be as good as small ones"


@pytest.mark.alone
def test_the_largest_table_takes_five_times_what_its_latencies_do() -> None:
    largest, cores, rows = largest_table.latency_us, largest_table.CORES, largest_table.ROWS
    assert largest_table.takes_less_than(5, lambda: len(table(largest, largest, cores, rows).best(cores, rows).parts))
