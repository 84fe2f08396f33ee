"""Packrat's figures, small, and its way to serve."""

import csv
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.papers import packrat, packrat_splits, packrat_step
from benchmarks.papers.__main__ import FIGURES
from benchmarks.papers.figures import FigureRequest
from benchmarks.papers.packrat_server import Change, PackratServer, by_burst
from gangway.base.console import Console
from gangway.scheduler.policies.registry import DEFAULT_POLICY
from gangway.scheduler.profiles import ModelProfile
from gangway.simulator.measured import MeasuredModel, encode_measured, read_measured, shipped_models
from gangway.simulator.scaling import scale_model
from gangway.simulator.scenario import make_scenario
from gangway.workload.mix import parse_mix
from gangway.workload.qos import Qos
from tests.simulator.test_row_scaling import measured

CORES = 4


def point(model: MeasuredModel) -> packrat_splits.Point:
    """256 rows on 16 cores."""
    return packrat_splits.points_of(model, 16, [256])[0]


def test_a_serial_part_is_what_splitting_saves() -> None:
    model = measured(share=0.05, tasks=256)
    one = point(model)
    assert str(one.split) == "<16, 1, 16>"
    assert one.speedup == pytest.approx((0.05 + 0.95 / 16) * 16, rel=0.01)
    assert one.expected == pytest.approx(one.actual) == pytest.approx(one.thin)
    assert point(measured(tasks=256)).speedup == 1.0, "nothing is serial, nothing is split"


def test_what_the_optimiser_does_not_know_makes_its_gangs_slower_than_expected() -> None:
    one = point(measured(share=0.05, crowding=1.3, tasks=256))
    assert one.expected == pytest.approx(1.3 * one.actual, rel=0.05)
    assert 1.0 <= one.actual <= one.speedup


def test_what_neighbours_may_cause_is_drawn_beside_what_is_serial() -> None:
    one = point(measured(crowding=1.05, tasks=256))
    assert one.neighbours == 1.0
    assert one.speedup > 1.5, "read as serial, 5 % of two cores are much of sixteen"


@pytest.mark.parametrize("cores", packrat_splits.CORES)
@pytest.mark.parametrize("name", packrat_splits.MODELS)
def test_a_page_has_one_machine(name: str, cores: int) -> None:
    """One row had taken 5.01 ms in VELTAIR's mixes and 3.61 ms in Packrat's batches: ResNet-50 on 64 cores."""
    in_mix = make_scenario(parse_mix(f"{name}=1").with_qos(Qos(milliseconds=15.0)), cores)
    profile = packrat_splits.profile_of(read_measured(shipped_models()[name]), cores)
    assert profile.rows_us(cores, 1) == pytest.approx(in_mix.isolated_us[0])


def tiny(serial: float = 0.2) -> ModelProfile:
    """One layer, 1 ms a row, of which a share is serial."""
    model = measured()
    times = scale_model(model, CORES, 0)
    parts = [serial + (1 - serial) / cores for cores in range(1, CORES + 1)]
    return replace(
        times,
        latency_us=((tuple(1000.0 * part for part in parts),),),
        rows_factor=((*(float(rows) for rows in times.batches),),) * CORES,
        together_factor=((*(float(rows) for rows in times.batches),),) * CORES,
        slope=(),
    )


def test_a_configuration_takes_its_batch_and_no_more() -> None:
    server = PackratServer(tiny(), CORES, 4)
    # <4, 1, 1>: four rows in a millisecond; eight take two turns.
    assert server.serve(np.zeros(8)) == [1000.0] * 4 + [2000.0] * 4
    assert server.serve(np.array([0.0, 500.0])) == [1000.0, 1500.0]


def test_a_change_of_configuration_takes_its_time() -> None:
    """Bursts of 16 every 10 ms. For 4 rows they take 4 ms; changed for 16, <4, 1, 4>, still 4, but all together."""
    times_us = np.repeat(np.arange(0, 2_000_000, 10_000.0), 16)
    kept = PackratServer(tiny(), CORES, 4).serve(times_us)
    changed = PackratServer(tiny(), CORES, 4, Change(16, 500_000.0, 1_000_000.0, slowdown=2.0)).serve(times_us)
    bursts = by_burst(kept, [16] * 200)
    assert bursts[0] == bursts[-1] == (2500.0, 4000.0)
    line = by_burst(changed, [16] * 200)
    assert line[49] == (2500.0, 4000.0)
    assert line[99] == (5000.0, 8000.0), "while both configurations are on the cores"
    assert line[100] == line[-1] == (4000.0, 4000.0)


def test_the_figure_is_registered() -> None:
    assert "packrat" in FIGURES


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_figures_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two models made up; the load step is cut short."""
    for name in ("inception_v3", "bert_base"):
        made = replace(measured(share=0.03, tasks=96), model_name=name)
        (tmp_path / f"{name}.json").write_bytes(encode_measured(made))
    files = {path.stem: path for path in tmp_path.glob("*.json")}
    for module in (packrat_splits, packrat_step):
        monkeypatch.setattr(module, "shipped_models", lambda: files)
    monkeypatch.setattr(packrat_splits, "CORES", (16,))
    monkeypatch.setattr(packrat_step, "STEP_S", 0.4)
    monkeypatch.setattr(packrat_step, "END_S", 1.2)
    packrat.draw(FigureRequest(tmp_path, 100, 1, Console(quiet=True)))
    rows = {name: rows_of(tmp_path / f"packrat_{name}.csv") for name in ("losses", "fig1", "fig4", "table2", "fig6")}
    assert len(rows["fig4"]) == 2 * len(packrat_splits.ALL_BATCHES)
    assert all(float(row["speedup"]) >= 1.0 for row in rows["fig4"])
    assert [row["paper"] for row in rows["table2"]][9] == "<1, 6, 8>, <2, 4, 4>"
    assert float(rows["losses"][0]["share"]) == pytest.approx(0.03, abs=1e-3)
    last = rows["fig6"][-1]
    assert last["requests"] == "64"
    assert float(last[f"{DEFAULT_POLICY}, last ms"]) <= 1.25 * float(last["kept for 8, last ms"])
    for name in ("fig4", "fig6"):
        assert (tmp_path / f"packrat_{name}.png").read_bytes().startswith(b"\x89PNG")


def test_models_measured_in_batches_come_with_the_simulator() -> None:
    assert set(shipped_models()) >= {"resnet50", "inception_v3", "gpt2", "bert_base"}
    assert all(read_measured(path).model_name == name for name, path in shipped_models().items())
