"""Packrat's estimator of the batch size."""

from benchmarks.papers.packrat_estimator import BatchSizeEstimator


def observe(estimator: BatchSizeEstimator, depth: int, times: int) -> list[int]:
    return [estimator.observe(depth) for _ in range(times)]


def test_the_next_lower_power_of_two() -> None:
    for depth, size in ((0, 1), (1, 1), (3, 2), (8, 8), (9, 8), (63, 32)):
        assert observe(BatchSizeEstimator(), depth, 40)[-1] == size


def test_a_step_is_followed_only_after_half_the_window() -> None:
    estimator = BatchSizeEstimator(weight=1.0, window=16)
    observe(estimator, 8, 16)
    found = observe(estimator, 64, 16)
    assert found[:7] == [8] * 7
    assert found[8:] == [64] * 8


def test_a_short_peak_changes_nothing() -> None:
    estimator = BatchSizeEstimator(weight=1.0)
    observe(estimator, 8, 16)
    assert observe(estimator, 500, 3) == [8, 8, 8]
    assert observe(estimator, 8, 1) == [8]
