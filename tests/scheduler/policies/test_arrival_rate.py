"""How often a model is asked."""

import pytest

from gangway.scheduler.policies.arrival_rate import ArrivalRate
from gangway.scheduler.policy_config import ARRIVALS


def test_the_rate_is_smoothed() -> None:
    rate = ArrivalRate()
    assert rate.gap_us is None
    rate.arrived(1000.0, 1)
    assert rate.gap_us is None
    rate.arrived(1100.0, 1)
    assert (rate.gap_us, rate.rows) == (100.0, 1)
    rate.arrived(1300.0, 1)
    assert rate.gap_us == pytest.approx(112.5)
    for number in range(100):
        rate.arrived(2000.0 + 50.0 * number, 4)
    assert rate.gap_us == pytest.approx(50.0, rel=0.01)
    assert rate.rows == 4


def test_the_load_is_that_of_some_tens_of_requests_and_a_burst_is_none() -> None:
    rate = ArrivalRate()
    assert rate.rows_per_us <= 1e-6
    for number in range(300):
        rate.arrived(1000.0 * number, 2)
    assert rate.rows_per_us == pytest.approx(2e-3, rel=0.1)
    bursts = ArrivalRate()
    for number in range(100):
        for _ in range(8):
            bursts.arrived(8000.0 * number, 1)
    assert bursts.rows_per_us == pytest.approx(1e-3, rel=0.2)


def test_the_first_requests_load_is_known_after_some_tens() -> None:
    rate = ArrivalRate()
    for _ in range(32):
        rate.arrived(0.0, 1)
    assert rate.rows_per_us < 50e-6
    for number in range(32):
        rate.arrived(24_000.0 * number, 1)
    assert rate.rows_per_us == pytest.approx(1 / 24_000, rel=0.3)


def test_a_pause_is_soon_forgotten_and_time_never_runs_backwards() -> None:
    rate = ArrivalRate()
    for at_us in (0.0, 100.0, 1e12, 1e12 - 5.0):
        rate.arrived(at_us, 1)
    assert rate.gap_us is not None and 0 < rate.gap_us < ARRIVALS.max_gap_us / 4


def test_a_pause_counts_before_it_is_over() -> None:
    rate = ArrivalRate()
    assert rate.rows_per_us_at(5.0) <= 1e-6
    for number in range(200):
        rate.arrived(1000.0 * number, 1)
    assert rate.rows_per_us_at(200_000.0) == rate.rows_per_us == pytest.approx(1e-3, rel=0.2)
    before = rate.rows_per_us
    later = rate.rows_per_us_at(1_200_000.0)
    assert later < before / 20
    rate.arrived(1_200_000.0, 1)
    assert rate.rows_per_us == pytest.approx(later, rel=0.05)
