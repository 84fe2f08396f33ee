"""By how much blocks take longer than predicted."""

import pytest

from gangway.scheduler.interference import FinishedBlock, PredictionErrors
from gangway.scheduler.policy_config import ERROR
from gangway.scheduler.profiles import ModelProfile


def model(measured: bool = True, layer_us: float = 1000.0) -> ModelProfile:
    """Ten layers that slow down by a half at level 1."""
    return ModelProfile(
        model_id=0,
        name="model",
        layers=10,
        max_ranks=1,
        latency_us=(((layer_us,),),) * 10,
        isolated_us=10_000.0,
        qos_us=None,
        measured=measured,
        slope=((0.5,),) * 10,
    )


def unit(time_us: float, of: ModelProfile | None = None) -> FinishedBlock:
    return FinishedBlock(of or model(), 0, 10, 1, 1, (), time_us)


def test_nothing_is_known_at_first() -> None:
    assert PredictionErrors().factors == {}


def test_steady_times_give_their_ratio() -> None:
    errors = PredictionErrors()
    for _ in range(50):
        errors.finished(3, unit(13_000.0), level=0.0)
    assert errors.factors == {3: pytest.approx(1.3)}


def test_varying_times_give_more_than_their_mean() -> None:
    errors = PredictionErrors()
    for turn in range(100):
        errors.finished(3, unit(11_000.0 if turn % 2 else 15_000.0), level=0.0)
    assert errors.factors[3] == pytest.approx(1.5, abs=0.05)  # mean 1.3, deviation 0.2


def of_width(cores: int, time_us: float) -> FinishedBlock:
    return FinishedBlock(model(), 0, 10, cores, 1, (), time_us)


def test_gangs_of_several_cores_may_lose_more_than_those_of_one() -> None:
    errors = PredictionErrors()
    assert errors.gang_slowdown == 1.0
    for _ in range(200):
        errors.finished(3, of_width(1, 12_000.0), level=0.0)
        errors.finished(4, of_width(2, 18_000.0), level=0.0)
    assert errors.gang_slowdown == pytest.approx(1.5, abs=0.02)
    for _ in range(200):
        errors.finished(4, of_width(2, 10_000.0), level=0.0)
    assert errors.gang_slowdown == 1.0


def test_what_interference_explains_is_left_out() -> None:
    errors = PredictionErrors()
    errors.finished(3, unit(15_000.0), level=1.0)
    assert errors.factors == {3: pytest.approx(1.0)}


def test_it_is_never_below_one_and_bounded() -> None:
    errors = PredictionErrors()
    errors.finished(3, unit(5_000.0), level=0.0)
    errors.finished(4, unit(500_000.0), level=0.0)
    assert errors.factors == {3: 1.0, 4: ERROR.max_factor}


def test_short_blocks_and_models_without_a_profile_say_nothing() -> None:
    errors = PredictionErrors()
    errors.finished(3, unit(900.0, of=model(layer_us=40.0)), level=0.0)
    errors.finished(3, unit(20_000.0, of=model(measured=False)), level=0.0)
    assert errors.factors == {}


def test_a_model_is_forgotten() -> None:
    errors = PredictionErrors()
    errors.finished(3, unit(13_000.0), level=0.0)
    errors.forget(3)
    assert errors.factors == {}
