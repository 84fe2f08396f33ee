"""VELTAIR's figures: small runs of what `python -m benchmarks.papers` draws."""

import csv
from pathlib import Path

import pytest

from benchmarks.papers import veltair_demands, veltair_efficiency, veltair_latency, veltair_rates
from benchmarks.papers.__main__ import FIGURES
from benchmarks.papers.figures import Csv, FigureRequest
from benchmarks.papers.veltair_granularity import run
from gangway.base.console import Console
from gangway.scheduler.policies.registry import POLICIES
from gangway.scheduler.prediction import threshold_share
from gangway.simulator.scenario import Scenario, make_scenario
from gangway.workload.mix import parse_mix, read_mix
from gangway.workload.qos import Qos


def request(folder: Path, queries: int = 100) -> FigureRequest:
    return FigureRequest(folder, queries, 1, Console(quiet=True))


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def resnet50() -> Scenario:
    return make_scenario(parse_mix("resnet50=1").with_qos(Qos(milliseconds=15.0)), 64)


def test_figures_are_registered() -> None:
    names = {name for name in FIGURES if name.startswith("veltair_")}
    assert names == {"veltair_demands", "veltair_efficiency", "veltair_granularity", "veltair_latency", "veltair_rates"}


def test_blocks_ask_for_less_at_most_than_layers_and_each_layer_is_in_one() -> None:
    of = veltair_demands.resnet50()
    threshold = threshold_share(64, of.average_cores, 2 * of.average_cores)
    plans = veltair_demands.granularities(of, of.blocks(threshold))
    assert all(len(veltair_demands.per_layer(plan)) == of.layers for plan in plans.values())
    uses = {name: veltair_demands.use(of, name, plan) for name, plan in plans.items()}
    assert uses["layer blocks"].most <= of.average_cores + threshold + 1
    assert uses["model-wise"].most == uses["model-wise"].mean < uses["layer-wise"].most
    assert uses["layer blocks"].most < uses["layer-wise"].most


def test_the_demands_are_drawn(tmp_path: Path) -> None:
    veltair_demands.draw(request(tmp_path))
    layers = rows(tmp_path / "veltair_fig4b_10a.csv")
    assert len(layers) == veltair_demands.resnet50().layers
    assert len({row["model-wise"] for row in layers}) == 1
    assert (tmp_path / "veltair_fig4b_10.png").read_bytes().startswith(b"\x89PNG")


def test_conflicts_come_with_the_rate(resnet50: Scenario) -> None:
    calm, crowded = (run("planaria", resnet50, rate, 40, 1) for rate in (1, 900))
    assert calm.in_time == 1.0 and calm.conflict_rate == 0.0
    assert calm.units == resnet50.models[0].layers
    assert crowded.conflict_rate > 0.1 and crowded.mean_ms > calm.mean_ms
    whole = run("model_fcfs", resnet50, 900, 40, 1)
    assert (whole.conflict_rate, whole.units) == (0.0, 1.0)


def test_rates_of_every_kind_of_policy_are_compared() -> None:
    names = {name.partition(":")[0] for name in veltair_rates.POLICIES}
    assert names == set(POLICIES) - {"layerweaver", "ai_mt"}
    assert {"veltair", "veltair:use", "gangway"} <= set(veltair_rates.POLICIES)


@pytest.mark.long
def test_rates_and_latencies_are_drawn(tmp_path: Path) -> None:
    """A run that ends early goes on where it was, and a policy that comes later has its rows behind the others."""
    policies = ["planaria", "gangway"]

    def draw(seeds: int) -> list[dict[str, str]]:
        veltair_rates.draw(request(tmp_path, 30), ["light"], policies, ["measured"], seeds)
        return rows(tmp_path / veltair_rates.RATES)

    first = draw(1)
    assert sorted(row["policy"] for row in first) == sorted(policies)
    both = draw(2)
    assert both[:2] == first and [row["seed"] for row in both[2:]] == ["2", "2"], "what is there is not made again"
    for row in both:
        assert 0 < float(row["each_per_s"]) <= float(row["all_per_s"]) <= float(row["bound_per_s"])
    begun = {row["policy"]: f"{float(row['all_per_s']):.4g}" for row in first}
    assert all(row["tried"].partition(":")[0] == begun[row["policy"]] for row in both[2:]), "from the rate before on"
    latencies = rows(tmp_path / veltair_rates.LATENCIES)
    assert len(latencies) == 12 and all(float(row["over_isolated"]) > 1 for row in latencies)
    assert (tmp_path / "veltair_fig12.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("mix", veltair_rates.MIXES)
def test_the_gang_is_the_narrowest_that_meets_the_target(mix: str) -> None:
    scenario = veltair_rates.scenario_of("measured", mix)
    for model in scenario.models.values():
        cores, gang_us = veltair_latency.meeting_gang(model, scenario.machine.overheads)
        assert model.qos_us and model.isolated_us <= gang_us < model.qos_us, model.name
        assert cores == 1 or model.qos_us < model.rows_us(cores - 1, 1) + 600, "it does not on one core less"


def test_latencies_below_the_highest_rate(tmp_path: Path) -> None:
    """Of the default policy and of the others that carry most: those that others exceed are left out."""
    with Csv(tmp_path / veltair_rates.RATES, veltair_rates.HEADERS[veltair_rates.RATES]) as file:
        for policy, rate_per_s in (("model_fcfs", 400), ("planaria", 300), ("edf", 100), ("gangway", 500)):
            file.write("measured", "light", policy, 1, rate_per_s, rate_per_s, 0, 3178, 2000, "", "")
    veltair_latency.draw(request(tmp_path, 50), ["light"], [0.5], seeds=1)
    found = rows(tmp_path / "veltair_latency.csv")
    assert [row["policy"] for row in found[::3]] == ["gangway", "model_fcfs", "planaria"]
    assert all(float(row["in_time"]) > 0.9 for row in found)
    whole = {row["model"]: float(row["over_gang"]) for row in found if row["policy"] == "model_fcfs"}
    assert 1 < whole["mobilenetv2"] < 1.2 and 1 < whole["tiny_yolov2"] < 1.2, "they have that gang, and hardly wait"
    assert all(float(row["over_isolated"]) > float(row["over_gang"]) for row in found)


def test_core_time_of_layers_and_of_units() -> None:
    """At a low rate nothing waits: what is held beyond the layers is dispatching, most where units are small."""
    scenario = make_scenario(read_mix("light"), 64)
    layers, whole = (
        veltair_efficiency.core_time(policy, scenario, 20.0, 30, 1) for policy in ("planaria", "model_fcfs")
    )
    assert layers.held > layers.of_layers and whole.held > whole.of_layers
    assert layers.held / layers.of_layers > 1.1 > whole.held / whole.of_layers
