"""One queue, one machine, batches: when they begin, how large they are, what a change costs."""

import numpy as np
import pytest

from benchmarks.batching.queue_model import Change, Dispatch, Dispatcher, Packrat, PerDispatch, arrivals_at, serve

FREE = Change(0.0, 1.0, 0.0)


class Fixed:
    """An estimator that says what it is told, batch by batch, then the last again and again."""

    def __init__(self, *rows: int) -> None:
        self._rows = list(rows)
        self.depths: list[int] = []

    def observe(self, depth: int) -> int:
        self.depths.append(depth)
        return self._rows[min(len(self.depths), len(self._rows)) - 1]


def batch_us(rows: int) -> float:
    return 8.0 + rows


def test_all_that_wait_are_one_batch() -> None:
    latencies = serve(np.array([0.0, 1.0, 2.0, 3.0, 50.0]), PerDispatch(lambda depth, rate: depth, batch_us))
    assert latencies.tolist() == [9, 9 + 11 - 1, 9 + 11 - 2, 9 + 11 - 3, 9]


def test_batches_are_of_the_oldest() -> None:
    latencies = serve(np.zeros(3), PerDispatch(lambda depth, rate: min(depth, 2), batch_us))
    assert latencies.tolist() == [10, 10, 19]


def test_packrat_waits_for_a_full_batch_but_not_for_ever() -> None:
    estimator = Fixed(2)
    latencies = serve(np.array([0.0, 20.0, 24.0, 100.0]), Packrat(estimator, batch_us, 5.0, FREE))
    assert latencies.tolist() == [9, 4 + 10, 10, 5 + 9]  # a configuration for one row, then for two
    assert estimator.depths == [1, 2, 1]


def test_a_change_takes_its_time_and_slows_batches_meanwhile() -> None:
    packrat = Packrat(Fixed(4), batch_us, 0.0, Change(25.0, 2.0, 0.0))
    taken = [packrat.decide(now_us, 4, 0.0) for now_us in (0.0, 18.0, 36.0)]
    assert taken == [Dispatch(1, 18.0), Dispatch(1, 18.0), Dispatch(4, 12.0)]


def test_free_changes_hold_at_once() -> None:
    packrat = Packrat(Fixed(64), batch_us, 0.0, FREE, max_rows=4)
    assert packrat.decide(0.0, 9, 0.0) == Dispatch(4, 12.0)


def test_configuration_and_estimate_are_compared_now_and_then() -> None:
    packrat = Packrat(Fixed(1, 4), batch_us, 0.0, Change(0.0, 1.0, 100.0))
    rows = [packrat.decide(now_us, 4, 0.0).rows for now_us in (0.0, 50.0, 120.0)]  # type: ignore[union-attr]
    assert rows == [1, 1, 4]


def test_who_waits_for_nothing_is_told_so() -> None:
    class Stuck(Dispatcher):
        def decide(self, now_us: float, depth: int, oldest_us: float) -> Dispatch | float:
            return now_us

    with pytest.raises(ValueError, match="asked to wait"):
        serve(np.zeros(1), Stuck())


def test_the_rate_of_arrivals_follows_the_knots() -> None:
    times_s = arrivals_at([(0.0, 100.0), (0.5, 100.0), (0.5, 400.0), (1.0, 400.0)], seconds=20, seed=1) / 1e6
    assert np.all(np.diff(times_s) > 0)
    assert times_s[-1] < 20
    assert (times_s < 10).sum() == pytest.approx(1000, rel=0.1)
    assert (times_s >= 10).sum() == pytest.approx(4000, rel=0.05)
