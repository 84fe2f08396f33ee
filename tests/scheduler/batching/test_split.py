"""Packrat's optimiser against all possible lists of gangs, and on tables of the paper's shape."""

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest

from gangway.artifact.profile import LayerProfile, Profile, ProfiledMachine
from gangway.measure.profiler import core_counts
from gangway.scheduler.batching.planner import SplitPlan, SplitTable, plan_table, side_by_side, split_table
from gangway.scheduler.policy_config import BATCHING
from gangway.scheduler.profiles import ModelProfile, policy_profile
from tests.scheduler.batching import largest_table

GAIN = BATCHING.min_gang_gain_share


def lists_of_gangs(cores: int, rows: int, widest: int) -> Iterator[list[tuple[int, int]]]:
    """All lists of (cores, rows) with so many rows on at most so many cores."""
    if rows == 0:
        yield []
    for width, taken in product(range(1, min(cores, widest) + 1), range(1, rows + 1)):
        for rest in lists_of_gangs(cores - width, rows - taken, width):
            yield [(width, taken), *rest]


def gangs_of(plan: SplitPlan) -> list[tuple[int, int]]:
    return [(part.cores, part.rows) for part in plan.parts]


def random_times(seed: int, cores: int, rows: int) -> list[list[float]]:
    """L that falls with cores and rises with rows, otherwise anyhow."""
    rng = random.Random(seed)
    times = [[0.0] * (rows + 1) for _ in range(cores + 1)]
    for width, taken in product(range(1, cores + 1), range(1, rows + 1)):
        longer = times[width][taken - 1]
        shorter = times[width - 1][taken] if width > 1 else float("inf")
        times[width][taken] = min(shorter, longer + rng.choice((0.0, 1.0, 2.0, 5.0)) * 100)
    return times


@pytest.mark.parametrize("seed", range(8))
def test_no_other_list_of_gangs_is_done_sooner(seed: int) -> None:
    cores, most = 5, 5
    times = random_times(seed, cores, most)

    def latency_us(width: int, taken: int) -> float:
        return times[width][taken]

    table = SplitTable(cores, most, lambda width, taken: 1e9, latency_us, gang_us=0.0)
    for count, rows in product(range(2, cores + 1), range(2, most + 1)):
        found = table.best(count, rows)
        gangs = gangs_of(found)
        best_us = min(max(latency_us(*gang) for gang in others) for others in lists_of_gangs(count, rows, count))
        assert found.latency_us == best_us == table.latency_us(count, rows)
        assert max(latency_us(*gang) for gang in gangs) == best_us
        assert sum(taken for _, taken in gangs) == rows
        assert sum(width for width, _ in gangs) <= count
        assert gangs == sorted(gangs, reverse=True)


def bert(cores: int, rows: int) -> float:
    """A table of the shape of the paper's: a power of two of rows per kernel, and few numbers of cores that help.

    A gang of 4 with 4 rows is where cores do most; odd numbers of cores do no more than the next lower one.
    """
    batch = 1 << (rows - 1).bit_length()
    helping = max(count for count in (1, 2, 4, 6, 8, 12, 16) if count <= cores)
    lost = {1: 1.45, 2: 1.25, 4: 1.0, 6: 0.96, 8: 1.1, 12: 1.25, 16: 1.5}[helping]
    fixed = 1.0 if batch < 4 else 0.0
    return 1000.0 * (fixed + lost * batch / helping * 4)


@pytest.mark.parametrize(
    ("cores", "rows", "gangs"),
    [
        (16, 8, "<2, 8, 4>"),
        (16, 16, "<4, 4, 4>"),
        (16, 32, "<4, 4, 8>"),
        (16, 64, "<4, 4, 16>"),
        (14, 16, "<1, 6, 8>, <2, 4, 4>"),
        (14, 32, "<1, 6, 16>, <2, 4, 8>"),
        (14, 64, "<1, 6, 32>, <2, 4, 16>"),
    ],
)
def test_table_2_of_the_paper(cores: int, rows: int, gangs: str) -> None:
    split = SplitTable(cores, rows, bert, bert).best(cores, rows)
    assert str(split) == gangs
    assert split.latency_us < bert(cores, rows)


def test_mixed_gangs_need_a_profile_of_every_number_of_cores() -> None:
    # As in the paper's Table 2: T = 14, B = 16. Between powers of two, what is interpolated hides that six cores pay.
    found, batches = [], tuple(range(1, 17))
    for every_count in (True, False):
        counts = core_counts(14, every_count)
        times = tuple(tuple(bert(count, rows) for rows in batches) for count in counts)
        layer = LayerProfile("all", (times,), 0.0, 0.0, (), ())
        machine = ProfiledMachine("0" * 12, "a CPU", 14, "baseline", 1.0, 1.0)
        runs = (9,) * len(batches)
        measured = Profile("0" * 64, "bert", machine, counts, batches, (layer,), times, times, (), 0, runs, 0.0, 1.0)
        found.append(str(plan_table(policy_profile(measured, 0, "bert", 14), 14, 16).best(14, 16)))
    assert found[0] == "<1, 6, 8>, <2, 4, 4>" != found[1]


def test_one_gang_unless_a_split_gains_enough() -> None:
    def table(gain: float) -> SplitTable:
        return SplitTable(2, 8, lambda cores, rows: 1e6 * rows, lambda cores, rows: 2e6 * rows * (1 - gain))

    assert table(BATCHING.min_gain_share / 2).best(2, 8) == side_by_side([(1, 8)], 8e6)
    assert str(table(2 * BATCHING.min_gain_share).best(2, 8)) == "<2, 1, 4>"
    assert str(table(2 * BATCHING.min_gain_share).best(1, 8)) == "<1, 1, 8>"
    assert str(table(2 * BATCHING.min_gain_share).best(2, 1)) == "<1, 1, 1>"


def test_a_further_gang_costs_time() -> None:
    def table(gang_us: float) -> SplitTable:
        return SplitTable(4, 4, lambda cores, rows: 100.0 * rows, lambda cores, rows: 60.0 * rows, gang_us)

    assert str(table(0.0).best(4, 4)) == "<4, 1, 1>"
    assert table(BATCHING.gang_us).best(4, 4).latency_us == table(BATCHING.gang_us).latency_us(4, 4)
    assert len(table(200.0).best(4, 4).parts) == 1
    assert table(200.0).latency_us(4, 4) == 400.0


def test_requests_of_one_row_each_stay_apart_unless_one_gang_gains_much() -> None:
    def together_us(cores: int, rows: int) -> float:
        return 4e6 * rows / cores if cores < 4 else 1e9

    def table(gain: float) -> SplitTable:
        return SplitTable(4, 8, lambda cores, rows: 1e6 * rows * (1 - gain), together_us)

    assert str(table(0.8 * GAIN).best_of_single_rows(4, 8)) == "<2, 2, 4>", "two further gangs would only cost"
    assert str(table(0.8 * GAIN).best(4, 8)) == "<1, 1, 8>"
    assert str(table(1.2 * GAIN).best_of_single_rows(4, 8)) == "<1, 1, 8>"
    assert str(table(0.2).best_of_single_rows(4, 8, prediction_error=1.3)) == "<1, 1, 8>"
    assert str(table(0.2).best_of_single_rows(4, 8, prediction_error=1.5)) == "<2, 2, 4>", "others often take the cores"
    assert str(table(0.0).best_of_single_rows(4, 7)) == "<1, 1, 7>", "no equal gangs"
    assert table(-0.5).best_of_single_rows(4, 8) == table(-0.5).best(4, 8), "a split that gains is what it was"
    assert str(SplitTable(4, 8, lambda cores, rows: 1.0, None).best_of_single_rows(4, 8)) == "<1, 1, 8>"
    for gain in (-0.5, 0.0, 0.8 * GAIN, 1.2 * GAIN, 0.2):
        times = [
            (table(gain).latency_of_single_rows_us(4, rows), table(gain).best_of_single_rows(4, rows).latency_us)
            for rows in range(1, 9)
        ]
        assert all(found_us == pytest.approx(time_us, abs=4 * BATCHING.gang_us) for found_us, time_us in times)


def test_one_gang_has_no_more_cores_than_help() -> None:
    split = SplitTable(8, 1, lambda cores, rows: 1000.0 / min(cores, 3), None).best(8, 1)
    assert str(split) == "<1, 3, 1>"


def test_a_slower_measurement_of_fewer_rows_counts_for_more_rows_too() -> None:
    times = {1: 100.0, 2: 900.0, 3: 300.0, 4: 400.0}
    split = SplitTable(2, 4, lambda cores, rows: 1e6, lambda cores, rows: times[rows], gang_us=0.0).best(2, 4)
    assert split.latency_us == 900.0  # two rows each: who has three has had two, too


def test_many_rows_are_counted_in_steps_and_none_is_lost() -> None:
    def latency_us(cores: int, rows: int) -> float:
        return 1000.0 * rows / cores**0.5

    table = SplitTable(6, 1024, latency_us, latency_us)
    for rows in (127, 128, 129, 255, 257, 511, 1001, 1023, 1024):
        gangs = gangs_of(table.best(6, rows))
        assert sum(taken for _, taken in gangs) == rows
        assert len(gangs) == 6
        assert max(latency_us(*gang) for gang in gangs) <= latency_us(1, -(-rows // 6)) * 1.05


@pytest.mark.parametrize(("cores", "rows"), [(0, 1), (3, 1), (1, 0), (1, 9)])
def test_what_the_table_does_not_have_is_refused(cores: int, rows: int) -> None:
    table = SplitTable(2, 8, lambda cores, rows: 1.0, None)
    with pytest.raises(ValueError, match="the table has 2 x 8"):
        table.best(cores, rows)


@pytest.mark.alone
def test_the_largest_table_takes_one_and_a_half_times_what_its_latencies_do() -> None:
    largest, cores, rows = largest_table.latency_us, largest_table.CORES, largest_table.ROWS
    assert largest_table.takes_less_than(
        1.5, lambda: len(SplitTable(cores, rows, largest, largest).best(cores, rows).parts)
    )


def profile(measured: bool = True, indivisible: bool = False) -> ModelProfile:
    """One layer that gains nothing by a second core: two gangs of half the rows take half the time."""
    return ModelProfile(
        model_id=1,
        name="model",
        layers=1,
        max_ranks=2,
        latency_us=(((10_000.0, 10_000.0),),),
        rows_factor=((1.0, 2.0, 8.0),) * 2,
        together_factor=((1.1, 2.2, 8.8), (1.0, 2.0, 8.0)),
        batches=(1, 2, 8),
        measured=measured,
        indivisible=indivisible,
    )


def test_gangs_beside_each_other_count_as_they_were_measured() -> None:
    table = split_table(model := profile(), 2, 8)
    assert table.best(2, 8) == side_by_side([(1, 4)] * 2, pytest.approx(44_000.0))
    assert table.one_gang_us(2, 8) == 80_000.0
    assert split_table(model, 2, 8) is table


@pytest.mark.parametrize("model", [profile(measured=False), profile(indivisible=True)])
def test_guesses_and_whole_models_are_not_split(model: ModelProfile) -> None:
    assert str(split_table(model, 2, 8).best(2, 8)) == "<1, 1, 8>"


def test_what_is_doubted_is_split_only_if_it_gains_more() -> None:
    gains = {
        doubt: len(split_table(replace(profile(), doubt=(0.0, 0.0, doubt)), 2, 8).best(2, 8).parts)
        for doubt in (0.4, 0.5)
    }
    assert gains == {0.4: 2, 0.5: 1}, "half of the rows take 45 % less"
    assert split_table(replace(profile(), doubt=(0.0, 0.0, 1.0)), 2, 8).latency_us(2, 8) == 80_000.0
