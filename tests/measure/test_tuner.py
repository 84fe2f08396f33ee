"""Algorithm 1's decisions on cases computed by hand."""

from gangway.artifact.tuning import Candidate, Sample
from gangway.measure.version_choice import (
    acceptable,
    choose_finalists,
    evenly_spaced,
    fastest_alone,
    layer_qos_us,
    pareto_front,
)


def sample(blocking_bytes: int, parallelism: int, latency_us: float = 1.0) -> Sample:
    return Sample(Candidate("", "", 1, blocking_bytes, parallelism), latency_us)


def test_qos_is_shared_by_operations_and_by_bytes_where_there_are_none() -> None:
    assert layer_qos_us(100.0, [600, 300, 0], [7, 7, 100]) == (60.0, 30.0, 10.0)
    assert layer_qos_us(100.0, [0], [0]) == (0.0,)


def test_slow_samples_are_dropped() -> None:
    samples = [sample(1, 1, latency_us) for latency_us in (10.0, 21.0, 20.0, 5.0)]
    assert acceptable(samples, qos_us=20.0, slack=3.0) == (0, 2, 3)


def test_a_layer_that_cannot_meet_its_share_has_the_models_slack() -> None:
    samples = [sample(1, 1, latency_us) for latency_us in (10.0, 16.0, 14.0)]
    assert acceptable(samples, qos_us=2.0, slack=1.5) == (0, 2)
    assert acceptable(samples, qos_us=2.0, slack=0.5) == (0,)  # never nothing


def test_more_blocking_and_more_parallelism_dominate() -> None:
    samples = [
        sample(100, 10),
        sample(100, 9),  # dominated by 0: as large, less parallel
        sample(50, 20),
        sample(40, 20),  # dominated by 2: smaller, as parallel
        sample(10, 40),
        sample(5, 5),  # dominated by all
    ]
    assert pareto_front(samples, range(6)) == (0, 2, 4)
    assert pareto_front(samples, [1, 3, 5]) == (1, 3)


def test_of_equals_the_fastest_is_on_the_front() -> None:
    assert pareto_front([sample(8, 8, 2.0), sample(8, 8, 1.0)], [0, 1]) == (1,)


def test_even_spacing() -> None:
    assert evenly_spaced(range(9), 5) == (0, 2, 4, 6, 8)
    assert evenly_spaced(range(10), 4) == (0, 3, 6, 9)
    assert evenly_spaced(range(3), 5) == (0, 1, 2)
    assert evenly_spaced(range(9), 1) == (4,)
    assert evenly_spaced(range(9), 0) == ()


def test_finalists_are_static_fastest_and_the_front() -> None:
    front = [sample(100 - n, 10 + n, 5.0) for n in range(7)]
    samples = [sample(1, 1, 4.0), *front, sample(2, 2, 3.0), sample(200, 200, 99.0)]
    assert choose_finalists(samples, qos_us=9.0, slack=3.0, most=5) == (0, 8, 1, 4, 7)
    assert choose_finalists(samples, qos_us=9.0, slack=3.0, most=1) == (0, 8)
    assert choose_finalists([sample(1, 1)], qos_us=9.0, slack=3.0, most=5) == (0,)


def test_the_static_choice_is_first_unless_another_is_clearly_faster() -> None:
    assert fastest_alone([[10.0, 9.95, 12.0]]) == 0
    assert fastest_alone([[10.0, 9.5, 9.0]]) == 2
    assert fastest_alone([[10.0, 9.5, 9.0], [10.0, 9.5, 11.0]]) == 1  # 2 was luck
    assert fastest_alone([[10.0]]) == 0
