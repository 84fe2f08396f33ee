"""The search for the highest rate, on curves whose answer is known."""

import numpy as np
import pytest

from gangway.workload.search import highest_rate


def cliff(at_per_s: float):
    return lambda rate, attempt: 1.0 if rate <= at_per_s else 0.5


@pytest.mark.parametrize("start", [2.0, 30.0, 99.0, 101.0, 1000.0])
def test_the_answer_does_not_depend_on_the_start_beyond_a_step(start):
    found = highest_rate(cliff(100), 0.95, start, step=1.05)
    assert 100 / 1.05 < found.rate_per_s <= 100
    assert found.share == 1.0
    assert not found.limited


def test_it_brackets_then_halves():
    # From 8, doubling: 16 (stride 1), 64 (stride 2) pass, 1024 (stride 4) fails, then between 64 and 1024.
    found = highest_rate(cliff(100), 0.95, 8.0, step=2.0, highest_per_s=8192.0)
    assert [probe.rate_per_s for probe in found.probes] == [8, 16, 64, 1024, 256, 128]
    assert found.rate_per_s == 64


def test_logarithmically_many_probes():
    assert len(highest_rate(cliff(100), 0.95, 5.0, step=1.05).probes) <= 14


def test_limits_are_kept_and_told():
    found = highest_rate(cliff(1e9), 0.95, 10.0, highest_per_s=50.0, step=1.1)
    assert 50 / 1.1 < found.rate_per_s <= 50
    assert found.limited
    assert all(probe.rate_per_s <= 50 for probe in found.probes)


def test_zero_when_no_rate_reaches_the_goal():
    found = highest_rate(lambda rate, attempt: 0.1, 0.95, 10.0, lowest_per_s=1.0)
    assert (found.rate_per_s, found.share, found.limited) == (0.0, 0.0, False)
    assert min(probe.rate_per_s for probe in found.probes) == pytest.approx(1.0, rel=0.05)


def test_the_lowest_rate_may_be_the_answer():
    found = highest_rate(cliff(1.01), 0.95, 10.0, lowest_per_s=1.0, step=1.05)
    assert 1.0 <= found.rate_per_s <= 1.01


@pytest.mark.parametrize("seed", range(20))
def test_votes_average_noise_away(seed):
    # share = 1.45 - rate / 200 + noise of 0.03: it crosses 0.95 at 100, where one step of 1.05 costs 0.025
    generator = np.random.default_rng(seed)
    found = highest_rate(
        lambda rate, attempt: 1.45 - rate / 200 + generator.normal(0, 0.03), 0.95, 40.0, step=1.05, votes=9
    )
    assert 88 <= found.rate_per_s <= 112
    assert found.share >= 0.95


def test_attempts_are_numbered_so_that_each_can_have_a_seed():
    seen = []

    def measure(rate, attempt):
        seen.append((rate, attempt))
        return 1.0 if rate <= 10 else 0.0

    highest_rate(measure, 0.5, 10.0, step=1.5, votes=3)
    assert len(seen) == len(set(seen))
    assert {attempt for rate, attempt in seen if rate == 10.0} == {0, 1, 2}


def test_nonsense_is_refused():
    for step, lowest in ((1.0, 1.0), (1.1, 20.0)):
        with pytest.raises((ValueError, ZeroDivisionError)):
            highest_rate(cliff(1), 0.9, 10.0, step=step, lowest_per_s=lowest)
