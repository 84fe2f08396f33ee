"""`gangway capacity`: what it says agrees with itself and with the simulator."""

import json
from functools import partial
from pathlib import Path

import pytest

from gangway.simulator.capacity import carries, find_capacity
from gangway.simulator.scenario import SHARED_CORES, Scenario, make_scenario
from gangway.workload.mix import Mix, MixModel
from gangway.workload.qos import Qos, WorkloadError
from tests.helpers.started_command import status_of

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


def test_the_table_fits_80_columns(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert status_of("capacity", *LOAD, "--cores=2", f"--queries={QUERIES}", f"--cache-dir={tmp_path}") == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert any(line.startswith("cores for this load: ") for line in lines)


def test_json_has_what_the_table_shows(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    status = status_of(
        "capacity", *LOAD, "gpt2=30", "--cores=2", f"--queries={QUERIES}", "--json", f"--cache-dir={tmp_path}"
    )
    answer = json.loads(capsys.readouterr().out)
    assert (status, answer["carried"], answer["models"][2]["in_time"]) == (1, False, None)
    assert answer["cores_needed"] is None or answer["cores_needed"] > 2


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
