"""When a batch waits for the next request, and when it does not."""

import pytest
from gangway.scheduler.batching.hold import LONGEST_GAP_US, ArrivalRate, pays


def flat(rows: int) -> float:
    """A batch takes no longer than one row."""
    return 1000.0


def linear(rows: int) -> float:
    """Rows gain nothing together."""
    return 1000.0 * rows


def test_one_row_waits_for_half_its_time_if_company_is_free() -> None:
    assert pays(1, 1, 499.0, flat)
    assert not pays(1, 1, 501.0, flat)


@pytest.mark.parametrize("gap_us", [0.0, 1.0, 500.0])
@pytest.mark.parametrize("rows", [1, 2, 8])
def test_nobody_waits_where_rows_gain_nothing_together(rows: int, gap_us: float) -> None:
    assert not pays(rows, 1, gap_us, linear)


@pytest.mark.parametrize("clients", [2, 4, 8, 16])
def test_when_all_clients_of_a_closed_loop_have_come_nobody_waits(clients: int) -> None:
    gap_us = 1000.0 / clients  # all of them once in each batch's time
    assert not pays(clients, 1, gap_us, flat)
    assert clients < 4 or pays(clients // 2, 1, gap_us, flat)


def test_what_waiting_saves_and_costs_is_counted_in_rows() -> None:
    assert pays(1, 8, 800.0, flat)  # eight would wait for the whole of the first batch
    assert not pays(8, 1, 200.0, flat)


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
    assert rate.gap_us is not None and 0 < rate.gap_us < LONGEST_GAP_US / 4
