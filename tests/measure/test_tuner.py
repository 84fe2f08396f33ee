"""Algorithm 1's decisions on cases computed by hand."""

import random
from dataclasses import replace

from gangway.artifact.tuning import CandidateTime, KnobCandidate
from gangway.measure.version_choice import (
    STATIC,
    KernelChoice,
    acceptable,
    choose_finalists,
    evenly_spaced,
    fastest_alone,
    layer_qos_us,
    pareto_front,
    tuned_kernel,
)
from gangway.scheduler.prediction import demands
from gangway.scheduler.profiles import ModelProfile


def sample(blocking_bytes: int, parallelism: int, latency_us: float = 1.0) -> CandidateTime:
    return CandidateTime(KnobCandidate("", "", 1, blocking_bytes, parallelism), latency_us)


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


CANDIDATES = tuple(KnobCandidate(f"knob={n}", "", 1, 100 - n, n) for n in range(5))
KERNEL = KernelChoice("", "Conv", 1, CANDIDATES)
SAMPLES = [CandidateTime(candidate, 1.0) for candidate in CANDIDATES]


def test_a_version_that_only_one_core_needs_is_kept() -> None:
    """On 1 and 2 cores the static choice takes 20 and 12, the others 24 and 9, or 21 and 10."""
    gang_us = [[20.0, 12.0], [24.0, 9.0], [21.0, 10.0]]
    for least_loss in (0.1, 9.0):
        tuned = tuned_kernel(KERNEL, 9.0, SAMPLES, (0, 1, 2), [gang_us, gang_us], (), least_loss, 5)
        assert [version.knobs for version in tuned.versions] == ["knob=1", "knob=0"]
    noise = [[24.5, 12.0], [24.0, 9.0], [21.0, 10.0]]  # the static choice was fast in one table only
    tuned = tuned_kernel(KERNEL, 9.0, SAMPLES, (0, 1, 2), [gang_us, noise], (), 9.0, 5)
    assert [version.knobs for version in tuned.versions] == ["knob=1"]


def test_no_tuned_model_is_slower_on_any_gang() -> None:
    """Random layers on 1, 2, 4 and 8 cores, at four levels: as policies predict it, and without what is noise."""
    source = random.Random(5)
    for _ in range(40):
        untuned, tuned = [], []
        for _ in range(6):
            gang_us = [[source.uniform(50.0, 100.0) / cores for cores in (1, 2, 4, 8)] for _ in CANDIDATES]
            levels = [[source.uniform(0.5, 1.0) * row[2] * (1 + level) for level in range(4)] for row in gang_us]
            kernel = tuned_kernel(KERNEL, 9.0, SAMPLES, range(5), [gang_us], [levels], source.uniform(0, 0.5), 5)
            chosen = [int(version.knobs.removeprefix("knob=")) for version in kernel.versions]
            untuned.append((tuple(every_count(gang_us[STATIC])),))
            tuned.append(tuple(tuple(every_count(gang_us[number])) for number in chosen))
        before = ModelProfile(0, "untuned", 6, 8, tuple(untuned), qos_us=300.0)
        after = replace(before, latency_us=tuple(tuned))
        for cores in range(1, 9):
            slowest_us = 1.01 * demands(before, adaptive=True).span_us(0, 6, cores)
            assert demands(after, adaptive=True).span_us(0, 6, cores) <= slowest_us


def every_count(times_us: list[float]) -> list[float]:
    """Times on 1 to 8 cores of those on 1, 2, 4 and 8: between them as on fewer."""
    return [times_us[count.bit_length() - 1] for count in range(1, 9)]
