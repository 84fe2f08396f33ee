"""When a batch waits for the next request, and when it does not."""

import pytest

from gangway.scheduler.batching.sizes import is_worth_waiting


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
