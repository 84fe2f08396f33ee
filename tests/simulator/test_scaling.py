"""Times on N cores: measured ones stay, others follow the stated model."""

import json
from dataclasses import replace

import pytest

from gangway.artifact.profile import ProfileError
from gangway.simulator.measured import encode_measured, one_row, read_measured, shipped_models
from gangway.simulator.scaling import TURN_US, layer_curve, scale_model
from gangway.simulator.scenario import make_scenario
from gangway.workload.mix import parse_mix, read_mix
from gangway.workload.qos import WorkloadError
from tests.simulator.conftest import measured_by_hand


def test_a_layer_by_hand():
    # 10 tasks of 100 us and 50 us that nobody shares: on two cores five tasks each.
    curve = layer_curve({1: 1050.0, 2: 550.0 + TURN_US}, tasks=10, cores=16)
    assert curve[:2] == (1050.0, 550.0 + TURN_US)
    assert curve[2] == pytest.approx(50 + 400 + 2 * TURN_US)
    assert curve[4] == pytest.approx(50 + 200 + 4 * TURN_US)
    assert curve[9] == pytest.approx(50 + 100 + 9 * TURN_US)
    assert curve[15] == curve[9], "more ranks than tasks take no part"


def test_memory_limits_what_cores_bring():
    alone, cores = 100.0, 4
    unlimited = layer_curve({1: alone, 2: 50.0}, 64, cores)
    assert layer_curve({1: alone, 2: 50.0}, 64, cores, 60.0, memory_share=0.5)[3] == 60 / (4 * 0.5)
    assert layer_curve({1: alone, 2: 50.0}, 64, cores, 240.0, memory_share=0.5)[3] == 100 / (4 * 0.5)
    assert layer_curve({1: alone, 2: 50.0}, 64, cores, memory_us=80.0) == unlimited


def test_caches_and_single_tasks():
    faster = layer_curve({1: 100.0, 2: 45.0 + TURN_US}, 64, 4)
    assert faster[3] == pytest.approx(90.0 / 4 + 3 * TURN_US)
    assert layer_curve({1: 100.0, 2: 100.2}, 1, 4) == (100.0, 100.2, 100.2, 100.2)


def test_versions_of_a_layer_scale_alike_and_by_their_own_tasks():
    """Noise makes 10 % of the one serial and nothing of the other: both have 5 %. What cannot be shared is not."""
    times = ((100.0, 55.0 + TURN_US), (120.0, 60.0 + TURN_US), (110.0, 110.0))
    model = measured_by_hand((times,), ((0.0,) * 3,), ((64, 16, 1),))
    finer, coarser, whole = scale_model(model, 64, 0).latency_us[0]
    assert (finer[:2], coarser[:2]) == times[:2], "measured times stay"
    assert finer[7] == pytest.approx(5 + 95 / 8 + 7 * TURN_US)
    assert coarser[7] == pytest.approx(6 + 114 / 8 + 7 * TURN_US)
    assert coarser[63] == pytest.approx(6 + 114 / 16 + 15 * TURN_US)
    assert set(whole) == {110.0}
    alone = replace(model, latency_us=((times[1],),), slope=((0.0,),), tasks=((16,),))
    assert scale_model(alone, 64, 0).latency_us[0][0][7] == pytest.approx(120 / 8 + 7 * TURN_US), "as it was measured"


@pytest.mark.parametrize("name", sorted(shipped_models()))
def test_measured_times_are_reproduced_and_no_core_hurts(name):
    measured = one_row(read_measured(shipped_models()[name]))
    for cores in (1, 2, 64):
        model = scale_model(measured, cores, 0)
        for layer, versions in enumerate(measured.latency_us):
            for version, times in enumerate(versions):
                curve = model.latency_us[layer][version]
                assert len(curve) == cores
                assert curve[: len(times)] == times[:cores]
                assert list(curve[1:]) == sorted(curve[1:], reverse=True)
        assert 1 <= model.max_ranks <= cores
        assert model.isolated_us == pytest.approx(model.remaining_us(0, cores))


def test_every_mix_is_ready_on_64_cores():
    for name in ("light", "medium", "heavy", "mix"):
        scenario = make_scenario(read_mix(name), 64)
        assert all(model.qos_us and model.isolated_us < model.qos_us for model in scenario.models.values())
    assert sum(path.stat().st_size for path in shipped_models().values()) < 150_000, (
        "one folder, with the batches of all models"
    )


def test_targets_as_multiples_and_best_effort():
    scenario = make_scenario(parse_mix("resnet50=3,googlenet=1"), 2)
    assert scenario.targets_us == (None, None)
    assert scenario.mix.shares == (0.75, 0.25)
    with pytest.raises(WorkloadError, match="nobody measured 'other'"):
        make_scenario(parse_mix("other=1"), 2)


def test_files_are_read_strictly(tmp_path):
    good = read_measured(shipped_models()["tiny_yolov2"])
    path = tmp_path / "model.json"
    path.write_bytes(encode_measured(good))
    assert read_measured(path) == good
    fields = json.loads(path.read_text())
    for change in (
        {"cores": [2, 1]},
        {"tasks": []},
        {"extra": 1},
        {"format_version": 9},
        {"memory_us": [-1.0] * 17},
        {"slope": [[]] * 17},
    ):
        path.write_text(json.dumps({**fields, **change}))
        with pytest.raises(ProfileError, match=r"model\.json"):
            read_measured(path)
    path.write_text("[1, 2")
    with pytest.raises(ProfileError, match=r"model\.json"):
        read_measured(path)
    with pytest.raises(ProfileError, match="absent"):
        read_measured(tmp_path / "absent.json")
