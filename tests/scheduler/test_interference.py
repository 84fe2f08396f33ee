"""The level of interference that finished units tell of."""

from dataclasses import replace

from gangway.scheduler.interference import FinishedBlock, Interference
from gangway.scheduler.policy_config import INTERFERENCE
from gangway.scheduler.profiles import ModelProfile

MODEL = ModelProfile(
    model_id=0,
    name="m",
    layers=4,
    max_ranks=2,
    latency_us=(((400.0, 200.0), (800.0, 400.0)),) * 4,
    slope=((0.5, 0.25),) * 4,
    measured=True,
)


def unit(factor: float, **changes: object) -> FinishedBlock:
    """Layers 1 and 2 on two cores, so many times as slow as alone."""
    return replace(FinishedBlock(MODEL, 1, 3, 2, 1, (), factor * 400.0), **changes)


def test_the_level_is_the_slowdown_by_the_slope() -> None:
    interference = Interference()
    assert interference.level(0.0) == 0.0
    interference.finished(unit(INTERFERENCE.tolerance_factor + 0.5 * 0.6), 1000.0)
    assert abs(interference.level(1000.0) - 0.6) < 1e-9
    assert interference.level(1001.0 + INTERFERENCE.window_us) == 0.0, "that is long ago"


def test_versions_have_their_own_times_and_slopes() -> None:
    interference = Interference()
    interference.finished(unit(0, versions=(1, 1), time_us=800.0 * (INTERFERENCE.tolerance_factor + 0.25 * 0.8)), 0.0)
    assert abs(interference.level(0.0) - 0.8) < 1e-9


def test_one_unit_that_lost_its_core_changes_nothing() -> None:
    interference = Interference()
    for factor in (1.0, 1.0, 30.0, 1.0):
        interference.finished(unit(factor), 0.0)
    assert interference.level(0.0) == 0.0


def test_units_that_say_nothing_are_left_out() -> None:
    interference = Interference()
    for model in (replace(MODEL, measured=False), replace(MODEL, slope=()), replace(MODEL, slope=((0.1, 0.1),) * 4)):
        interference.finished(unit(3.0, model=model), 0.0)
    interference.finished(unit(3.0, model=replace(MODEL, latency_us=(((20.0, 10.0),),) * 4)), 0.0)
    assert interference.level(0.0) == 0.0
