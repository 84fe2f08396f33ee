"""`gangway capacity`: what it says agrees with itself and with the simulator."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from gangway.scheduler.profiles import ModelProfile
from gangway.simulator.capacity import carries, find_capacity
from gangway.simulator.machine import Machine
from gangway.simulator.rates import one_core_rate
from gangway.simulator.scenario import SHARED_CORES, SPARE_CORES, Scenario, make_scenario
from gangway.workload.mix import Mix, MixModel
from gangway.workload.qos import Qos, WorkloadError
from tests.helpers.started_command import status_of

pytestmark = pytest.mark.long

FIVE_TIMES = Qos(multiple=5.0)
QUERIES = 400
LOAD = ("mobilenetv2=30@5x", "resnet50=4@5x")


def load_on(cores: int, target: Qos | None = FIVE_TIMES) -> Scenario:
    mix = Mix("load", (MixModel("mobilenetv2", 30.0, target), MixModel("resnet50", 4.0, target)))
    return make_scenario(mix, cores, overheads=SHARED_CORES)


def test_the_load_is_carried_exactly_where_it_is_below_the_highest_one() -> None:
    answer = find_capacity(load_on, 2, 34.0, 0.95, QUERIES)
    highest = answer.highest.mean_per_s
    assert answer.carried == (highest >= 1)
    assert carries(load_on(2), 0.8 * highest * 34, 0.95, QUERIES)
    assert not carries(load_on(2), 1.3 * highest * 34, 0.95, QUERIES)


def test_the_cores_that_are_needed_carry_the_load_and_fewer_do_not() -> None:
    answer = find_capacity(load_on, 2, 150.0, 0.95, QUERIES)
    assert answer.cores_needed is not None and answer.cores_needed > 2
    assert carries(load_on(answer.cores_needed), 150.0, 0.95, QUERIES)
    assert not carries(load_on(answer.cores_needed - 1), 150.0, 0.95, QUERIES)


def test_targets_that_are_multiples_are_of_the_latency_on_these_cores() -> None:
    answer = find_capacity(load_on, 4, 10.0, 0.95, QUERIES)
    assert [model.target_us for model in answer.models] == pytest.approx([5 * m.isolated_us for m in answer.models])


def test_a_load_without_a_target_is_refused() -> None:
    with pytest.raises(WorkloadError, match="no model has a target"):
        find_capacity(partial(load_on, target=None), 2, 10.0, 0.95, QUERIES)


def on_spare_cores(cores: int) -> Scenario:
    """Return the load where front end and scheduler have cores of their own."""
    return replace(load_on(cores), machine=Machine(cores, SPARE_CORES))


def in_either_precision(cores: int) -> Scenario:
    """Return the load with models that are there in bf16, too, where they take a fifth of the time."""
    exact = on_spare_cores(cores)
    return replace(exact, models={number: with_bf16(model) for number, model in exact.models.items()})


def with_bf16(model: ModelProfile) -> ModelProfile:
    latency_us = tuple(tuple(tuple(us / 5 for us in times) for times in layer) for layer in model.latency_us)
    return replace(model, in_bf16=replace(model, latency_us=latency_us, isolated_us=model.isolated_us / 5))


def test_cores_carry_more_than_they_can_in_fp32_where_deadlines_choose_bf16() -> None:
    rate_per_s = 1.2 * one_core_rate(load_on(2))
    assert not carries(on_spare_cores(2), rate_per_s, 0.95, QUERIES)
    assert carries(in_either_precision(2), rate_per_s, 0.95, QUERIES)


def test_what_is_not_measured_in_the_precision_that_is_asked_for_is_warned_of(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    options = ("--cores=2", f"--queries={QUERIES}", f"--cache-dir={tmp_path}")
    status_of("capacity", *LOAD, "--precision=bf16", *options)
    in_bf16 = capsys.readouterr()
    status_of("capacity", *LOAD, *options)
    in_fp32 = capsys.readouterr()
    status_of("capacity", *LOAD, "--precision=deadline", *options)
    by_deadlines = capsys.readouterr()
    assert all(f"resnet50 is not measured in {each} on this" in by_deadlines.err for each in ("fp32", "bf16"))
    assert "resnet50 is not measured in bf16 on this machine" in in_bf16.err
    assert "resnet50 is not measured in fp32 on this machine" in in_fp32.err
    assert in_bf16.out == in_fp32.out, "the simulator's own models are in fp32"


def test_the_table_fits_80_columns(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert status_of("capacity", *LOAD, "--cores=2", f"--queries={QUERIES}", f"--cache-dir={tmp_path}") == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert any(line.startswith("cores for this load: ") for line in lines)
    assert any(line.startswith("plan with ") for line in lines)


def test_json_has_what_the_table_shows(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    status = status_of(
        "capacity", *LOAD, "gpt2=30", "--cores=2", f"--queries={QUERIES}", "--json", f"--cache-dir={tmp_path}"
    )
    answer = json.loads(capsys.readouterr().out)
    assert (status, answer["carried"], answer["models"][2]["in_time"]) == (1, False, None)
    assert answer["cores_needed"] is None or answer["cores_needed"] > 2
    assert 0 < answer["planned"] < 0.7 * answer["highest"] < 0.7


@pytest.mark.parametrize(
    "load", ["resnet50", "resnet50=", "=4@3x", "resnet50=-1@3x", "resnet50=inf@3x", "resnet50=1@soon"]
)
def test_a_wrong_load_is_a_usage_error_with_an_example(load: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of("capacity", load) == 2
    assert "resnet50=20@3x" in capsys.readouterr().err


def test_an_unknown_model_is_an_error_that_names_those_that_are_known(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert status_of("capacity", "resnt=1@3x", f"--cache-dir={tmp_path}") == 1
    assert "resnet50" in capsys.readouterr().err
