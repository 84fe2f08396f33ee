"""Requests that are joined and split on the virtual clock, by the live server's former and policy."""

import itertools
from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest

from gangway.scheduler.policies.gangway import Gangway
from gangway.scheduler.policies.registry import make_policy
from gangway.scheduler.profiles import ModelProfile
from gangway.simulator.batching import Batching
from gangway.simulator.loop import simulate
from gangway.simulator.machine import Machine, Overheads
from gangway.simulator.results import REFUSED
from gangway.workload.arrivals import Arrivals
from tests.simulator.conftest import Ledger, profile

CORES = 4
BATCHES = (1, 2, 4, 8, 16, 32, 64)


def model(row_us: float = 100.0, first_us: float = 900.0, serial: float = 0.2, **fields) -> ModelProfile:
    """Ten layers; b rows take first_us + b row_us on one core, of which a share is serial. Gangs do not disturb."""
    whole = profile([(first_us + row_us) / 10] * 10, CORES)
    by_cores = [serial + (1 - serial) / cores for cores in range(1, CORES + 1)]
    latency_us = tuple((tuple((first_us + row_us) / 10 * part for part in by_cores),) for _ in range(10))
    factors = tuple((first_us + rows * row_us) / (first_us + row_us) for rows in BATCHES)
    return replace(
        whole,
        latency_us=latency_us,
        isolated_us=(first_us + row_us) * by_cores[-1],
        batches=BATCHES,
        rows_factor=(factors,) * CORES,
        together_factor=(factors,) * CORES,
        **fields,
    )


def requests(*queries: tuple[float, int]) -> Arrivals:
    """Requests of model 0 as (time, rows)."""
    times = np.array([time_us for time_us, _ in queries], float)
    return Arrivals(times, np.zeros(len(queries), np.int64), np.array([rows for _, rows in queries], np.int64))


UP_TO_64 = Batching(64)


def run(known, arrivals, batching: Batching | None = UP_TO_64, ledger=None):
    return simulate(Gangway(), {0: known}, arrivals, Machine(CORES), ledger, batching=batching)


def test_what_waits_is_joined():
    """One runs, eight come meanwhile; joined they take 900 + 800 us of a core, one by one 8 times 1000."""
    arrivals = requests((0, 1), *((10.0 + number, 1) for number in range(8)))
    apart, joined = run(model(), arrivals, None), run(model(), arrivals)
    assert apart.counters.batches == 0 < joined.counters.batches
    assert joined.end_us < 0.6 * apart.end_us
    assert joined.outcomes.latency_us.mean() < apart.outcomes.latency_us.mean()
    assert joined.outcomes.answered.all()


def test_a_large_request_is_split_over_gangs(ledger):
    """Rows cost, gangs waste a fifth: four gangs of one core with 16 rows each beat one of four with 64."""
    known = model(row_us=1000.0, first_us=0.0)
    whole, split = run(known, requests((0, 64)), None), run(known, requests((0, 64)), Batching(64), ledger)
    assert whole.outcomes.latency_us.tolist() == [pytest.approx(64_000 * (0.2 + 0.8 / 4))]
    assert split.outcomes.latency_us.tolist() == [pytest.approx(16_000)]
    assert split.counters.batch_units == CORES and split.counters.batch_rows == 64
    assert sorted(cores for _, cores, *_ in ledger.stretches) == [(0,), (1,), (2,), (3,)]


def leaving_the_cache() -> ModelProfile:
    """Eight rows take eight times as long as one, 64 rows 128 times; gangs disturb each other."""
    factors = tuple(float(rows) if rows <= 8 else 2.0 * rows for rows in BATCHES)
    disturbed = tuple(8 * factor for factor in factors)
    return replace(
        model(row_us=1000.0, first_us=0.0, serial=0.0),
        rows_factor=(factors,) * CORES,
        together_factor=(disturbed,) * CORES,
    )


def test_a_large_request_is_done_in_rounds(ledger):
    """Eight rows on four cores take 2 ms, and there are eight times as many."""
    known = leaving_the_cache()
    whole, rounds = run(known, requests((0, 64)), None), run(known, requests((0, 64)), UP_TO_64, ledger)
    assert whole.outcomes.latency_us.tolist() == [pytest.approx(32_000)]
    assert rounds.outcomes.latency_us.tolist() == [pytest.approx(16_000)]
    assert (rounds.counters.batches, rounds.counters.batch_units, rounds.counters.batch_rows) == (1, 8, 64)
    begins = [begin_us for *_, begin_us, _ in ledger.stretches]
    assert begins == sorted(begins) and {cores for _, cores, *_ in ledger.stretches} == {(0, 1, 2, 3)}


def test_others_go_between_rounds_and_no_round_waits_for_company(ledger):
    """A row with a deadline comes while the third round runs: it is stopped, or followed, but not all of the batch."""
    large = leaving_the_cache()
    small = replace(model(row_us=1000.0, first_us=0.0, serial=0.0, qos_us=5000.0), model_id=1)
    arrivals = Arrivals(np.array([0.0, 5000.0]), np.array([0, 1]), np.array([64, 1]))
    result = simulate(Gangway(), {0: large, 1: small}, arrivals, Machine(CORES), ledger, batching=UP_TO_64)
    assert result.outcomes.latency_us[1] <= 5000
    assert result.outcomes.latency_us[0] == pytest.approx(16_000, rel=0.1)


def test_a_batch_in_rounds_is_late_as_a_whole():
    """It would take 16 ms and has 15. Each of its rounds could be in time, but they are not preferred to who can be."""
    large = replace(leaving_the_cache(), qos_us=15_000.0)
    small = replace(model(row_us=10_000.0, first_us=0.0, serial=0.0, qos_us=16_000.0), model_id=1)
    arrivals = Arrivals(np.array([0.0, 10.0]), np.array([0, 1]), np.array([64, 1]))
    result = simulate(Gangway(), {0: large, 1: small}, arrivals, Machine(CORES), batching=UP_TO_64)
    assert result.outcomes.latency_us[1] <= 16_000
    assert result.outcomes.latency_us[0] <= 18_500 + 500


def test_where_batches_gain_nothing_nothing_is_joined():
    result = run(model(row_us=10_000.0, first_us=0.0, serial=0.0), requests(*((0.0, 1) for _ in range(12))))
    assert result.counters.batches == 0
    assert result.end_us == pytest.approx(12 * 10_000 / CORES)


@pytest.mark.parametrize("load", [0.2, 0.5, 0.8, 0.95])
@pytest.mark.parametrize(
    ("gains", "doubt"), [((0.0, 0.0, 0.0), 0.0), ((0.01, 0.015, 0.018), 0.0), ((0.05, -0.02, 0.06), 0.08)]
)
def test_where_batches_gain_next_to_nothing_they_cost_nothing(gains, doubt, load):
    """`gains`: what 2, 4 and 8 rows together seem to gain over one by one."""
    factors = (1.0, *(rows * (1 - gain) for rows, gain in zip((2, 4, 8), gains, strict=True)))
    known = replace(
        model(row_us=10_000.0, first_us=0.0, serial=0.0),
        batches=(1, 2, 4, 8),
        rows_factor=(factors,) * CORES,
        together_factor=(factors,) * CORES,
        doubt=(doubt,) * 4,
    )
    count = 400
    for seed in (1, 2):
        gaps_us = np.random.default_rng(seed).exponential(10_000.0 / CORES / load, count)
        arrivals = Arrivals(np.cumsum(gaps_us), np.zeros(count, np.int64), np.ones(count, np.int64))
        apart, joined = (run(known, arrivals, batching).outcomes.latency_us for batching in (None, Batching(8)))
        assert joined.mean() <= apart.mean()
        assert np.percentile(joined, 95) <= np.percentile(apart, 95)


def test_policies_that_are_not_shown_batches_serve_requests_one_by_one():
    arrivals = requests((0, 4), (0, 4), (0, 4))
    result = simulate(make_policy("model_fcfs"), {0: model()}, arrivals, Machine(CORES), batching=Batching(64))
    assert result.counters.batches == 0 and result.counters.blocks == 3


def random_requests(seed: int, count: int = 200) -> Arrivals:
    generator = np.random.default_rng(seed)
    times_us = np.cumsum(generator.choice([0.0, 0.0, 300.0, 2000.0], count))
    return Arrivals(times_us, np.zeros(count, np.int64), generator.choice([1, 1, 2, 7, 16], count))


@pytest.mark.parametrize(
    "machine",
    [Machine(CORES), Machine(CORES, Overheads(20, 30, 5, 8, 15, 60, 40), level_per_demand=0.4, leases=6)],
    ids=["bare", "overheads"],
)
@pytest.mark.parametrize("batching", [Batching(64), Batching(16, 500.0), Batching(32, 0.0, (4, 8))], ids=repr)
def test_every_row_is_computed_once_and_no_core_has_two_gangs(machine, batching):
    arrivals, ledger = random_requests(3), Ledger()
    rows_us: dict[int, float] = {}

    class Rows(Ledger):
        def ran(self, block, begin_layer, end_layer, begin_us, end_us):
            ledger.ran(block, begin_layer, end_layer, begin_us, end_us)
            rows_us[block.query.query_id] = block.query.rows

    known = model(serial=0.0)
    result = simulate(Gangway(), {0: known}, arrivals, machine, Rows(), batching=batching)
    assert result.outcomes.answered.all() and not np.isnan(result.queue_us).any()
    assert sum(rows_us.values()) == arrivals.rows.sum()
    by_core = defaultdict(list)
    for _, cores, _, _, begin_us, end_us in ledger.stretches:
        for core in cores:
            by_core[core].append((begin_us, end_us))
    for stretches in by_core.values():
        stretches.sort()
        assert all(begin >= end - 1e-6 for (_, end), (begin, _) in itertools.pairwise(stretches))
    assert (result.outcomes.latency_us >= 0).all()


def test_a_seed_means_one_result():
    first, second = (run(model(), random_requests(5)) for _ in range(2))
    np.testing.assert_array_equal(first.outcomes.latency_us, second.outcomes.latency_us)
    assert first.counters == second.counters


def test_requests_of_batches_that_are_certain_to_be_late_are_refused():
    """80 rows keep the machine for 2 ms; of those who wait behind, refused are those whose time is over, no others."""
    known = model(qos_us=3000.0, rejects_late=True)
    arrivals = requests(*((10.0 * number, 16) for number in range(20)))
    result = run(known, arrivals)
    refused = result.outcomes.status == REFUSED
    assert 0 < refused.sum() < 20
    assert (result.outcomes.latency_us[~refused] <= 3000 + 500).all()


def test_a_request_must_fit_into_a_batch():
    with pytest.raises(ValueError, match="request of 8 rows"):
        run(model(), requests((0, 8)), Batching(4))


def test_a_delay_is_waited_for_company():
    """Two requests 300 us apart: with a delay of 500 us the first waits for the second, but not longer."""
    arrivals = requests((0, 1), (300, 1))
    result = run(model(), arrivals, Batching(2, 500.0))
    assert result.queue_us.tolist() == [300, 0]
    alone = run(model(), requests((0, 1)), Batching(2, 500.0))
    assert alone.queue_us.tolist() == [500]
