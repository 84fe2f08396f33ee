"""What is measured in which time: settings, numbers of rows, rounds."""

from gangway.artifact.format import Layer, Manifest, TargetSpec, Version
from gangway.measure.profiler import (
    MAX_ROWS,
    MeasurementPlan,
    RunSetting,
    batches_that_fit,
    core_counts,
    least_runs,
    runs_in_round,
    together_us,
)


def manifest(*versions: int) -> Manifest:
    layers = tuple(
        Layer(f"layer {index}", "Op", "", (), tuple(Version("kernel", 1, "") for _ in range(count)), 0, 0, max_ranks=4)
        for index, count in enumerate(versions)
    )
    target = TargetSpec("baseline", "x86-64", 4, ())
    return Manifest("0" * 64, "model", True, (), (), layers, arena_bytes=0, target=target, files={})


def test_core_counts() -> None:
    assert core_counts(1) == (1,)
    assert core_counts(6) == (1, 2, 4, 6)
    assert core_counts(8) == (1, 2, 4, 8)
    assert core_counts(6, every_count=True) == (1, 2, 3, 4, 5, 6)


def test_every_version_alone_and_the_first_one_together() -> None:
    plan = MeasurementPlan(manifest(1, 2), core_counts(6), room_rows=100)
    assert plan.settings(3) == [
        *(RunSetting(3, ranks, 0) for ranks in (1, 2, 4, 6)),
        *(RunSetting(3, ranks, 1) for ranks in (1, 2, 4, 6)),
        RunSetting(3, 1, 0, gangs=6),
        RunSetting(3, 2, 0, gangs=3),
    ]
    assert MeasurementPlan(manifest(1), (1,), 100).settings(2) == [RunSetting(2, 1)]


def test_gangs_need_room() -> None:
    plan = MeasurementPlan(manifest(1), core_counts(4), room_rows=8)
    assert plan.together(2, 1) == RunSetting(2, 1, 0, gangs=4)
    assert plan.together(4, 1) is None
    assert plan.together(4, 2) == RunSetting(4, 2, 0, gangs=2)
    assert plan.together(1, 4) is None, "it is alone anyway"


def test_batches_follow_the_time() -> None:
    assert batches_that_fit(row_us=1e5, left_us=1e4, max_rows=64) == (1,)
    assert batches_that_fit(row_us=1e5, left_us=1.5e6, max_rows=64) == (1, 2, 4, 8)
    assert batches_that_fit(row_us=1e5, left_us=1.4e6, max_rows=64) == (1, 2, 4)
    assert batches_that_fit(row_us=1e5, left_us=16.5e6, max_rows=64) == (1, 2, 4, 8), (
        "16 rows four times, and a third more"
    )
    assert batches_that_fit(row_us=1e5, left_us=16.6e6, max_rows=64) == (1, 2, 4, 8, 16)
    assert batches_that_fit(row_us=1e5, left_us=1e9, max_rows=20) == (1, 2, 4, 8, 16)
    assert batches_that_fit(row_us=1e5, left_us=1e9, max_rows=1) == (1,)


def test_small_batches_run_more_often_once_all_have_run() -> None:
    first = range(least_runs(MAX_ROWS))
    assert [[runs_in_round(number, rows) for rows in (1, 4, 64)] for number in first] == [[1, 1, 1]] * len(first)
    assert [runs_in_round(len(first), rows) for rows in (1, 2, 4, 8, 16, 64)] == [8, 4, 2, 1, 1, 1]


def test_what_lacked_memory_is_slowed_down_like_what_did_not() -> None:
    plan = MeasurementPlan(manifest(1), (1, 2), room_rows=4)
    isolated = ((10.0, 20.0, 40.0), (6.0, 12.0, 24.0))
    measured = {RunSetting(1, 1, gangs=2): 12.0, RunSetting(2, 1, gangs=2): 25.0}
    assert together_us(plan, (1, 2, 4), isolated, measured) == ((12.0, 25.0, 50.0), isolated[1])
    assert together_us(MeasurementPlan(manifest(1), (1, 2), 1), (1,), ((10.0,), (6.0,)), {}) == ((10.0,), (6.0,))
