"""Batches on N cores, by the model that docs/explanation/simulator.md states."""

from dataclasses import replace

import numpy as np
import pytest

from gangway.simulator.measured import MeasuredModel, read_measured, shipped_models
from gangway.simulator.scaling import TURN_US, losses, scale_model, scale_rows

PACKRAT = ("bert_base", "gpt2", "inception_v3", "resnet50")  # their batches are studied
BATCHES = (1, 2, 4, 8, 16, 32, 64)
ROW_US = 10_000.0


def measured(share: float = 0.0, start_us: float = 0.0, crowding: float = 1.0, tasks: int = 64) -> MeasuredModel:
    """One layer, made by the model itself: on two cores half the tasks each, and a serial part."""
    alone = np.array(BATCHES) * ROW_US
    serial = start_us + share * alone
    two = crowding * (alone / 2 + TURN_US) * (1 - serial / alone) + serial
    grid = (tuple(alone.tolist()), tuple(two.tolist()))
    together = (tuple((crowding * alone).tolist()), grid[1])
    return MeasuredModel(
        model_name="layer",
        cpu="cpu",
        target="avx2",
        cores=(1, 2),
        latency_us=(((grid[0][0], grid[1][0]),),),
        slope=((0.1,),),
        tasks=((tasks,),),
        memory_us=(ROW_US / 10,),
        compute_us=(ROW_US,),
        batches=BATCHES,
        batch_us=(grid,),
        isolated_us=grid,
        together_us=together,
        kernel_rows=(0,),
        kernel_tasks=(0,),
    )


@pytest.mark.parametrize(
    ("share", "start_us", "crowding"), [(0.0, 0.0, 1.0), (0.04, 0.0, 1.0), (0.03, 500.0, 1.0), (0.02, 100.0, 1.1)]
)
def test_what_a_model_was_made_of_is_found_again(share, start_us, crowding):
    found = losses(measured(share, start_us, crowding))
    assert found.crowding == pytest.approx(crowding)
    assert found.share == pytest.approx(share, abs=1e-6)
    assert found.start_us == pytest.approx(start_us, abs=0.1)
    assert found.residual < 1e-6 and found.uncertain < 1e-6 + start_us


def test_noise_that_makes_two_cores_faster_than_ideal_gives_no_serial_part():
    model = measured()
    fast = tuple(0.97 * time_us for time_us in model.isolated_us[1])
    found = losses(replace(model, isolated_us=(model.isolated_us[0], fast)))
    assert (found.share, found.start_us, found.inside) == (0.0, 0.0, 1.0)
    assert found.residual == pytest.approx(1 / 0.97 - 1, rel=0.01)


def test_gangs_that_share_what_they_read_disturb_each_other_less_than_gangs_of_their_own():
    """Two gangs of one core take 1.3 times as long as one, a gang of both 1.1 times half of it."""
    model = measured(crowding=1.3)
    shared = tuple(time_us * 1.1 / 1.3 for time_us in model.isolated_us[1])
    model = replace(model, isolated_us=(model.isolated_us[0], shared))
    found = losses(model)
    assert (found.crowding, found.share) == (pytest.approx(1.3), 0.0)
    assert found.inside == pytest.approx(1.1, rel=1e-4)
    times = scale_rows(model, 16)
    assert times.together_us[0, 6] == pytest.approx(1.3 * 64 * ROW_US)
    assert times.alone_us[15, 10] == pytest.approx(1.1 * 64 * ROW_US, rel=1e-3)


def test_noise_of_single_batches_averages_out():
    """Two of the times on two cores are 4 % too long, two too short: the serial part is right to 1 % of the whole."""
    model = measured(share=0.03)
    factors = (1.0, 1.04, 0.96, 1.0, 1.04, 0.96, 1.0)
    noisy = tuple(time_us * factor for time_us, factor in zip(model.isolated_us[1], factors, strict=True))
    found = losses(replace(model, isolated_us=(model.isolated_us[0], noisy)))
    assert found.serial_us(np.array([64 * ROW_US]))[0] / (64 * ROW_US) == pytest.approx(0.03, abs=0.01)


def test_a_batch_that_was_measured_in_a_bad_moment_makes_no_step():
    model = measured()
    slow = (*model.isolated_us[0][:-1], 1.2 * model.isolated_us[0][-1])
    times = scale_rows(replace(model, batch_us=((slow, model.isolated_us[1]),)), 16).alone_us[0]
    np.testing.assert_allclose(np.diff(times) / np.diff([1 << power for power in range(11)]), ROW_US, rtol=0.08)


def test_thin_gangs_side_by_side_against_a_fat_one():
    """A serial part of 4 %: on 16 cores the fat gang takes 4 + 96 / 16 percent of the time, 16 thin ones 100 / 16."""
    times = scale_rows(measured(share=0.04), 16)
    rows = times.batches.index(64), times.batches.index(1024)
    fat_us, thin_us = times.alone_us[15, rows[1]], times.together_us[0, rows[0]]
    assert thin_us == pytest.approx(64 * ROW_US)
    assert fat_us == pytest.approx(1024 * ROW_US * (0.04 + 0.96 / 16), rel=1e-4)


def test_crowding_slows_thin_gangs_and_the_fat_one_alike():
    """What cores lose to each other is no reason to split: no serial part, so both take 1.2 times the ideal time."""
    times = scale_rows(measured(crowding=1.2), 16)
    rows = times.batches.index(64), times.batches.index(1024)
    assert times.alone_us[15, rows[1]] == pytest.approx(1.2 * 64 * ROW_US, rel=1e-4)
    assert times.together_us[0, rows[0]] == pytest.approx(1.2 * 64 * ROW_US)
    assert times.alone_us[0, rows[0]] == pytest.approx(64 * ROW_US), "alone on the machine nobody disturbs it"


def test_tasks_bound_what_cores_bring_and_rows_multiply_them():
    times = scale_rows(measured(tasks=4), 16)
    assert times.alone_us[15, 0] == pytest.approx(ROW_US / 4 + 3 * TURN_US), "four tasks, four ranks"
    assert times.alone_us[15, 2] == pytest.approx(4 * ROW_US / 16 + 15 * TURN_US), "16 tasks of four rows"
    kernel = replace(measured(tasks=4), kernel_rows=(8,), kernel_tasks=(4,))
    assert scale_rows(kernel, 16).alone_us[15, 3] == pytest.approx(8 * ROW_US / 4 + 3 * TURN_US), "one call, four tasks"


def test_batches_are_a_line_and_no_core_hurts():
    model = measured(share=0.05, start_us=200.0, crowding=1.05)
    times = scale_rows(model, 64)
    assert times.batches == (*BATCHES, 128, 256, 512, 1024)
    np.testing.assert_allclose(times.alone_us[0, :7], model.isolated_us[0])
    assert (np.diff(times.alone_us, axis=0) <= 0).all() and (np.diff(times.together_us, axis=0) <= 0).all()
    assert (np.diff(times.alone_us, axis=1) > 0).all()
    assert (times.together_us >= times.alone_us).all()
    np.testing.assert_allclose(times.together_us[63], times.alone_us[63], err_msg="one gang on all cores is alone")


def test_less_memory_per_core_bounds_what_cores_bring():
    """A tenth of the time is traffic at one core's bandwidth; 64 cores that share that of two are bound by it."""
    plenty, scarce = (scale_rows(measured(), 64, share).alone_us[63, 6] for share in (1.0, 1 / 32))
    assert plenty == pytest.approx(ROW_US, rel=0.01)
    assert scarce == pytest.approx(64 * ROW_US / 10 / 2)


def test_profiles_of_batches_add_up():
    model = measured(share=0.03, start_us=100.0, crowding=1.1)
    times, profile = scale_rows(model, 16), scale_model(model, 16, 0)
    assert profile.batches == times.batches
    for cores in (1, 2, 5, 16):
        for rows in (1, 8, 1024):
            index = times.batches.index(rows)
            assert profile.rows_us(cores, rows) == pytest.approx(times.alone_us[cores - 1, index])
            assert profile.together_us(cores, rows) == pytest.approx(times.together_us[cores - 1, index])
    assert profile.max_ranks == 16
    assert profile.isolated_us == pytest.approx(times.alone_us[15, 0])


@pytest.mark.parametrize("name", PACKRAT)
def test_what_comes_with_the_simulator(name):
    model = read_measured(shipped_models()[name])
    assert model.model_name == name and model.batches[-1] >= 8
    profile = scale_model(model, 16, 0)
    assert profile.rows_us(1, 8) == pytest.approx(model.isolated_us[0][3], rel=0.25)
    assert profile.together_us(1, 64) >= profile.rows_us(1, 64)
    assert losses(model).residual < 0.15, "the model describes what was measured"
