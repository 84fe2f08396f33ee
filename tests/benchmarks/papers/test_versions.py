"""Models with fewer versions of each layer, and the figure that says what versions are worth."""

import csv
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.papers.__main__ import main
from benchmarks.papers.fewer_versions import best_us, limit_versions
from benchmarks.papers.veltair_versions import COUNTS, tuned_mix, tuned_models
from gangway.scheduler.profiles import ModelProfile
from gangway.simulator.measured import encode_measured, one_row, read_measured
from gangway.simulator.scaling import scale_model
from gangway.workload.qos import WorkloadError
from tests.simulator.conftest import measured_by_hand, profile

# On one core of one. Version 1 is the best at levels of 0.5 and 1, version 2 at 0.25, by 4 %, version 3 at none.
CROSSING = ((10.0,), (12.0,), (10.5,), (20.0,))
SLOPES = (2.0, 0.0, 0.4, 0.0)


def crossing() -> ModelProfile:
    """One layer of four versions, and one of one."""
    return replace(profile([0.0, 5.0], 1), latency_us=(CROSSING, ((5.0,),)), slope=(SLOPES, (0.5,)))


def test_what_is_missed_least_goes_first() -> None:
    model = crossing()
    assert limit_versions(model, 4) == limit_versions(model, 5) == model
    assert limit_versions(model, 3).latency_us[0] == CROSSING[:3]
    assert limit_versions(model, 2).latency_us[0] == CROSSING[:2], "at level 1 they take 30, 12 and 14.7 us"
    one = limit_versions(model, 1)
    assert (one.latency_us, one.slope) == ((CROSSING[:1], ((5.0,),)), (SLOPES[:1], (0.5,)))


def test_a_version_may_be_worth_having_for_large_gangs_only() -> None:
    """Version 1 is for interference, 2 for gangs: of 64 tasks where the others have 4."""
    times = ((100.0, 50.2), (101.0, 50.7), (104.0, 52.2))
    measured = measured_by_hand((times,), ((0.0, 0.0, 0.0),), ((4, 4, 64),))
    model = limit_versions(scale_model(measured, 16, 0), 2)
    assert [curve[0] for curve in model.latency_us[0]] == [100.0, 104.0]
    assert best_us(model, 1, 0.0) == 100.0 and best_us(model, 16, 0.0) < 25.0 / 2


def test_slopes_that_are_not_known_stay_so() -> None:
    assert limit_versions(replace(crossing(), slope=()), 2).slope == ()


def test_times_of_the_best_versions() -> None:
    assert best_us(crossing(), 1, 0.0) == 15.0
    assert best_us(crossing(), 1, 1.0) == 12.0 + 7.5
    assert best_us(limit_versions(crossing(), 1), 1, 1.0) == 30.0 + 7.5


def test_a_model_measured_in_batches_keeps_its_slopes() -> None:
    layer = ((100.0, 50.2), (110.0, 55.2))
    single = measured_by_hand((layer,), ((2.0, 0.5),), ((64, 64),))
    several = replace(
        single,
        batches=(1, 2),
        batch_us=(((100.0, 200.0), (50.2, 100.4)),),
        isolated_us=((100.0, 200.0), (50.2, 100.4)),
        together_us=((100.0, 200.0), (50.2, 100.4)),
    )
    assert one_row(several) == single
    assert scale_model(one_row(several), 4, 0).slope == ((2.0, 0.5),)


def tiny(name: str, versions: int) -> bytes:
    """A model of three layers of 10 ms; version 1 is made for gangs, the next ones are for nothing."""
    times = [(10000.0, 5000.2), (10100.0, 5050.2), *[(11000.0, 5500.2)] * 3][:versions]
    slopes, tasks = [2.0, 0.5, 2.0, 2.0, 2.0][:versions], [8, 64, 8, 8, 8][:versions]
    return encode_measured(measured_by_hand([times] * 3, [slopes] * 3, [tasks] * 3, name))


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_the_figure_of_given_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [tmp_path / "one.json", tmp_path / "two.json"]
    paths[0].write_bytes(tiny("one", 3))
    paths[1].write_bytes(tiny("untuned", 1))
    arguments = ("veltair_versions", "--queries", 60, "--profile", *paths, "-o", tmp_path)
    assert main([*map(str, arguments)]) == 0
    found = rows(tmp_path / "veltair_fig14b.csv")
    assert len(found) == 2 * 3 * len(COUNTS)
    line = [row for row in found if (row["policy"], row["memory_share"]) == ("veltair_ac", "1")]
    assert [row["versions"] for row in line] == ["1", "2", "3", "4", "5"]
    assert [float(row["versions_per_layer"]) for row in line] == [1, 2, 3, 3, 3]
    assert [row["paper"] for row in line] == ["", "", "", "", "1.5"]
    gains = [float(row["over_one"]) for row in line]
    assert gains[0] == 1.0 and gains[2:] == [gains[2]] * 3
    times = rows(tmp_path / "veltair_fig14b_times.csv")
    saved = {(row["cores"], row["level"], row["versions"]): float(row["time_over_first"]) for row in times}
    assert len(saved) == 6 * len(COUNTS)
    assert saved["1", "0", "5"] == 1.0 and saved["1", "1", "2"] == pytest.approx(1010 * 1.5 / 3000, 1e-4)
    assert saved["64", "0", "2"] < 0.3 and saved["64", "0", "1"] == 1.0
    assert (tmp_path / "veltair_fig14b.png").read_bytes().startswith(b"\x89PNG")
    assert "veltair_ac, 2 versions: " in capsys.readouterr().out


def test_models_without_versions_cannot_be_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "untuned.json"
    path.write_bytes(tiny("untuned", 1))
    assert main(["veltair_versions", "--profile", str(path), "-o", str(tmp_path)]) == 1
    assert "no model with several versions of a layer is given" in capsys.readouterr().err
    with pytest.raises(WorkloadError):
        tuned_models({"untuned": read_measured(path)})


def test_the_papers_targets_where_it_has_them() -> None:
    models = {
        name: measured_by_hand((((9.0, 5.0),) * 2,), ((0.0,) * 2,), ((1,) * 2,), name) for name in ("resnet50", "x")
    }
    assert [str(model.qos) for model in tuned_mix(tuned_models(models)).models] == ["15 ms", "3x"]
