"""Versions whose absence costs least go first: cases computed by hand."""

import pytest

from gangway.scheduler.profiles import absence_loss, drop_versions, mean_loss, thin_out

# Versions by rows: alone, under some, under much interference.
CROSSING = [[10.0, 20.0, 40.0], [12.0, 15.0, 20.0], [11.0, 16.0, 30.0]]


def test_absence_costs_what_the_next_best_is_slower() -> None:
    everybody = (0, 1, 2)
    assert absence_loss(0, everybody, [CROSSING]) == pytest.approx(0.1)  # 11 for 10
    assert absence_loss(1, everybody, [CROSSING]) == pytest.approx(0.5)  # 30 for 20
    assert absence_loss(2, everybody, [CROSSING]) == 0.0


def test_a_loss_must_be_in_every_table() -> None:
    calm = [[10.0, 20.0, 20.0], [12.0, 15.0, 20.0], [11.0, 16.0, 30.0]]
    assert absence_loss(1, (0, 1, 2), [CROSSING, calm]) == pytest.approx(1 / 15)


def test_what_is_not_missed_is_dropped() -> None:
    assert drop_versions([CROSSING], always=0, least_loss=0.1, most=5) == (0, 1)
    assert drop_versions([CROSSING], always=0, least_loss=0.0, most=5) == (0, 1, 2)
    assert drop_versions([CROSSING], always=0, least_loss=0.0, most=1) == (0,)
    assert drop_versions([CROSSING], always=0, least_loss=1.5, most=5) == (0,)
    assert drop_versions([[[10.0], [11.0]]], always=1, least_loss=0.2, most=5) == (1,)  # the first one stays
    assert drop_versions([[[7.0]]], always=0, least_loss=0.1, most=5) == (0,)


def test_two_alike_do_not_both_go() -> None:
    """Neither of two equal versions is missed, but after one has gone, the other one is."""
    alike = [[10.0, 40.0], [12.0, 20.0], [12.0, 20.0]]
    assert drop_versions([alike], always=0, least_loss=0.1, most=5) == (0, 2)


def test_thinning_and_mean_loss() -> None:
    sets = [kept for kept, _ in thin_out([CROSSING], always=0)]
    assert sets == [(0, 1, 2), (0, 1), (0,)]
    assert mean_loss((0, 1, 2), [CROSSING]) == 0.0
    assert mean_loss((0,), [CROSSING]) == pytest.approx((0 + 1 / 3 + 1) / 3)
    assert mean_loss((0,), [CROSSING, [[1.0, 2.0, 2.0], [2.0, 1.5, 2.0], [2.0] * 3]]) == pytest.approx(1 / 9)
