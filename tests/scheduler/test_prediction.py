"""VELTAIR's Algorithm 2 against the paper's examples and cases worked out by hand."""

import random
import time

import pytest

from gangway.scheduler.prediction import (
    Block,
    Demands,
    demands,
    layer_targets,
    target_shares,
    target_us,
    threshold_share,
)
from gangway.scheduler.profiles import ModelProfile

CORES = 64


def model(
    core_us: list[float],
    compute_us: list[float],
    qos_us: float | None,
    serial: float = 0.0,
    cores: int = CORES,
    slope: tuple[tuple[float, ...], ...] = (),
) -> ModelProfile:
    """Layers that take `core_us` on one core, and scale as Amdahl's law says."""
    latency_us = tuple(
        (tuple(time_us * (serial + (1 - serial) / count) for count in range(1, cores + 1)),) for time_us in core_us
    )
    return ModelProfile(
        model_id=0,
        name="by hand",
        layers=len(core_us),
        max_ranks=cores,
        latency_us=latency_us,
        compute_us=tuple(compute_us),
        memory_us=tuple(0.0 for _ in core_us),
        slope=slope,
        qos_us=qos_us,
    )


def walk(layer_cores: tuple[int, ...], average: float) -> Demands:
    """Layers with these demands: with layers of one second each, `layer_cores` of one-core seconds."""
    counts = range(1, CORES + 1)
    times = [[0.0] for _ in counts]
    for demand in layer_cores:
        for count, row in zip(counts, times, strict=True):
            row.append(row[-1] + demand / count)
    goals = [float(layer) for layer in range(len(layer_cores) + 1)]
    return Demands((0,) * len(layer_cores), tuple(times), goals, layer_cores, average)


def test_thresholds_of_the_paper() -> None:
    averages = (12.0, 12.0, 24.0)
    assert [threshold_share(64, average, sum(averages)) for average in averages] == [4.0, 4.0, 8.0]


def test_a_lone_model_may_have_every_core_and_a_crowd_none() -> None:
    assert threshold_share(64, 12.0, 12.0) == 52.0
    assert threshold_share(64, 12.0, 72.0) == 0.0


def test_the_walk_of_figure_10() -> None:
    """Four blocks: each begins at a layer above the blue line, and asks for less than that layer."""
    layer_cores = (20, 10, 12, 34, 14, 8, 10, 40, 12, 10, 48, 6, 8, 10)
    found = walk(layer_cores, average=18.0).blocks(threshold_cores=14.0)
    assert [(block.begin, block.end) for block in found] == [(0, 3), (3, 7), (7, 10), (10, 14)]
    assert [block.cores for block in found] == [14, 17, 21, 18]  # the rounded-up means of their layers
    assert max(block.cores for block in found) <= 18 + 14 < max(layer_cores)


def test_the_threshold_itself_is_a_pivot_and_the_first_layer_is_not_looked_at() -> None:
    of = walk((64, 30, 32, 31), average=20.0)
    assert [(block.begin, block.end) for block in of.blocks(12.0)] == [(0, 2), (2, 4)]
    assert of.pivot(2, 32.0) == 4


def test_a_high_threshold_makes_one_block_and_none_one_for_each_demanding_layer() -> None:
    of = walk((4, 40, 4, 4, 40, 4), average=16.0)
    assert of.blocks(48.0) == [Block(0, 6, 16)]
    assert of.blocks(0.0) == [Block(0, 1, 4), Block(1, 4, 16), Block(4, 6, 16)]  # 16 is all that Avg_C + 0 allows


def test_the_walk_from_the_middle() -> None:
    of = walk((4, 40, 4, 4, 40, 4), average=16.0)
    assert of.blocks(4.0, begin=2) == [Block(2, 4, 4), Block(4, 6, 20)]


def test_layers_of_one_core_are_never_pivots() -> None:
    assert walk((1, 1, 1, 1), average=0.4).blocks(0.2) == [Block(0, 4, 1)]


def test_demands_by_hand() -> None:
    """30 ms for 3 layers of equal operations, 10 ms each: they take 40, 10 and 25 ms on one core."""
    of = demands(model([40e3, 10e3, 25e3], [1.0, 1.0, 1.0], 30e3))
    assert list(of.target_us) == pytest.approx([0, 10e3, 20e3, 30e3])
    assert of.layer_cores == (4, 1, 3)
    assert of.average_cores == pytest.approx(2.5)  # 75 ms of work in 30
    assert [of.block_cores(0, 3), of.block_cores(0, 2), of.block_cores(1, 3)] == [3, 3, 2]


def test_a_model_may_need_less_than_a_core() -> None:
    of = demands(model([6e3, 3e3], [2.0, 1.0], 12e3))
    assert of.average_cores == pytest.approx(0.75)
    assert of.layer_cores == (1, 1)


def test_a_fraction_between_two_counts_follows_amdahl() -> None:
    """100 ms, a tenth of it serial: 10 + 90 / c = 25 ms needs exactly 6 cores, 26.5 needs 5.45."""
    assert demands(model([100e3], [1.0], 25e3, serial=0.1)).average_cores == pytest.approx(6.0)
    assert demands(model([100e3], [1.0], 26.5e3, serial=0.1)).average_cores == pytest.approx(90 / 16.5)


def test_a_target_that_no_number_of_cores_meets() -> None:
    """Alone on 64 cores it takes 10 + 90/64 = 11.41 ms; within 5 % of that, 11.98 ms, are 46 cores and more."""
    of = demands(model([100e3], [1.0], 5e3, serial=0.1))
    assert of.layer_cores == (46,)
    assert of.average_cores == 46.0


def test_more_cores_never_hurt() -> None:
    times = ((9.0, 5.0, 7.0, 4.0),)
    of = demands(ModelProfile(0, "rough", 1, 4, (times,), qos_us=5.0))
    assert [of.span_us(0, 1, cores) for cores in (1, 2, 3, 4, 9)] == [9, 5, 5, 4, 4]
    assert of.layer_cores == (2,)


def test_shares_follow_the_roofline() -> None:
    profile = ModelProfile(0, "m", 3, 1, (((5.0,),),) * 3, memory_us=(1.0, 6.0, 2.0), compute_us=(2.0, 1.0, 0.0))
    assert target_shares(profile) == [0.2, 0.6, 0.2]
    assert target_shares(ModelProfile(0, "m", 2, 1, (((1.0,),), ((3.0,),)))) == [0.25, 0.75]


def test_a_model_without_target_has_three_times_its_isolated_time() -> None:
    profile = model([30.0, 60.0], [1.0, 1.0], None, cores=3)
    assert target_us(profile) == pytest.approx(90.0)
    assert target_us(ModelProfile(0, "m", 1, 1, (((10.0,),),), isolated_us=12.0)) == 36.0


def test_waiting_takes_its_share_of_the_target() -> None:
    profile = model([40e3], [1.0], 10e3)
    assert [demands(profile, share=share).layer_cores for share in (1.0, 0.8, 0.5)] == [(4,), (5,), (8,)]


def test_every_layer_has_room_for_being_a_unit_and_a_block_needs_it_once() -> None:
    profile = model([20e3, 20e3], [1.0, 1.0], 20.4e3)
    assert demands(profile, unit_us=500.0).layer_cores == (3, 3)  # 20 ms in 9.7
    assert demands(profile, unit_us=500.0).block_cores(0, 2) == 3  # 40 ms in 19.9
    assert demands(profile, unit_us=200.0).block_cores(0, 2) == 2  # 40 ms in 20.2
    assert demands(profile, unit_us=200.0).layer_cores == (2, 2)  # 20 ms in 10


def test_units_leave_the_layers_their_fastest_time() -> None:
    """Of 200 us the layers take 400 / 64 x 1.05 at least, on 64 cores; units would need 1000."""
    of = demands(model([100.0, 300.0], [1.0, 3.0], 200.0), unit_us=500.0)
    least_us = 400 / 64 * 1.05
    assert list(of.target_us) == pytest.approx([0.0, (200 - least_us) / 2 + least_us / 4, 200.0])
    assert all(1 <= cores <= CORES for cores in of.layer_cores)


def test_a_layer_that_cannot_keep_to_its_share_has_more_from_the_others() -> None:
    """12 ms by 1 : 2 : 1 are 3, 6, 3; the first takes 4.2 at best, so 7.8 are left for 2 : 1."""
    flat = (4e3,) * 4
    scaling = tuple(9.6e3 / count for count in range(1, 5))
    profile = ModelProfile(
        0, "m", 3, 4, ((flat,), (scaling,), (scaling,)), compute_us=(1.0, 2.0, 1.0), memory_us=(0.0,) * 3, qos_us=12e3
    )
    assert layer_targets(profile, 12e3) == pytest.approx([4.2e3, 5.2e3, 2.6e3])
    assert demands(profile).layer_cores == (1, 2, 4)
    assert layer_targets(profile, 4e3) == pytest.approx([1e3, 2e3, 1e3])  # nothing helps


def test_interference_raises_demands_by_the_slope() -> None:
    profile = model([40e3, 40e3], [1.0, 1.0], 20e3, slope=((1.0,), (0.0,)))
    assert demands(profile, level=0.5).layer_cores == (6, 4)
    assert demands(profile, level=0.52) is demands(profile, level=0.48)
    assert demands(profile, level=99.0) is demands(profile, level=4.0)


def test_versions_change_with_the_level() -> None:
    fragile, tolerant = tuple(40e3 / count for count in (1, 2, 3, 4)), tuple(48e3 / count for count in (1, 2, 3, 4))
    profile = ModelProfile(
        0, "two", 2, 4, ((fragile, tolerant), (fragile,)), slope=((1.0, 0.2), (1.0,)), qos_us=30e3
    )  # fmt: skip
    assert demands(profile, level=0.2, adaptive=True).versions_on(1) == ()
    assert demands(profile, level=0.3, adaptive=True).versions_on(1) == (1, 0)  # 50.9 ms, not 52
    assert demands(profile, level=0.3).versions_on(1) == ()
    assert demands(profile, level=0.3, adaptive=True).layer_cores == (4, 4)


def test_rows_are_rounded_up_to_a_power_of_two() -> None:
    profile = model([10e3], [1.0], 10e3)
    assert [demands(profile, rows=rows).layer_cores[0] for rows in (1, 2, 3, 4)] == [1, 2, 4, 4]


def test_demands_are_found_by_the_definition() -> None:
    """Against a search by brute force, on random models."""
    generator = random.Random(3)
    for _ in range(30):
        layers = generator.randint(1, 12)
        core_us = [generator.uniform(50, 5000) for _ in range(layers)]
        profile = model(core_us, [generator.uniform(10, 900) for _ in core_us], sum(core_us) / 9, serial=0.05)
        of = demands(profile)
        begin = generator.randrange(layers)
        end = generator.randint(begin + 1, layers)
        goal = of.target_us[end] - of.target_us[begin]
        times = [profile.span_us(begin, end, count) for count in range(1, CORES + 1)]
        meeting = [count for count in range(1, CORES + 1) if times[count - 1] <= goal]
        fastest = [count for count in range(1, CORES + 1) if times[count - 1] <= 1.05 * times[-1]]
        assert of.block_cores(begin, end) == (meeting or fastest)[0]


def test_deciding_is_cheap() -> None:
    """A block of a model of 500 layers is found in microseconds, once its tables are there."""
    generator = random.Random(1)
    of = demands(model([generator.uniform(50, 5000) for _ in range(500)], [1.0] * 500, 90e3))
    of.blocks(5.0)
    begun = time.process_time()
    for begin in range(450):
        of.next_block(begin, 5.0)
    assert (time.process_time() - begun) / 450 < 50e-6
