"""Compound tasks on the modelled machine: what stages gain over the sequential schedule and today's way."""

from dataclasses import replace

import pytest

from gangway.scheduler.stages.compound_policy import StagePlan
from gangway.scheduler.stages.ir import parallel, schedule, schedule_us, sequential
from gangway.server.cli import main
from gangway.simulator.compound import Staged, compare, makespan_us, today_us
from gangway.simulator.compound_load import compare_loaded
from gangway.simulator.machine import NO_OVERHEADS
from gangway.simulator.scenario import SPARE_CORES, MachineLayout, make_scenario
from gangway.workload.mix import parse_mix
from gangway.workload.qos import parse_qos

FIVE = "mobilenetv2=1,resnet50=1,googlenet=1,tiny_yolov2=1,efficientnet_b0=1"


def scenario(names, cores, overheads=SPARE_CORES, memory_share=1.0):
    return make_scenario(parse_mix(names), cores, None, overheads, layout=MachineLayout(memory_share))


@pytest.mark.parametrize("pointers", [sequential, parallel])
def test_the_simulated_time_is_the_sum_of_the_stages(pointers):
    """Without overheads, and with so much memory that nobody disturbs anybody."""
    machine = scenario("mobilenetv2=1,googlenet=1", 4, NO_OVERHEADS, memory_share=1e9)
    streams = tuple(machine.models.values())
    stages = schedule(streams, pointers(streams), 4)
    assert makespan_us(Staged(stages), machine) == pytest.approx(schedule_us(streams, stages))


@pytest.mark.parametrize(
    ("cores", "least", "over_today"), [(16, 1.5, 0.95), pytest.param(64, 2.0, 1.05, marks=pytest.mark.long)]
)
def test_stages_gain_over_one_model_after_the_other(cores, least, over_today):
    """On 16 cores this short search finds nothing faster than the default policy: a longer one gains 2 %."""
    found = compare(scenario(FIVE, cores), seed=1, rounds=2, candidates=6)
    assert found.over_sequential >= least
    assert found.over_today >= over_today
    assert found.coordinate_us <= min(found.sequential_us, found.split_us)
    assert found.random_us <= min(found.sequential_us, found.split_us)


def test_two_cores_gain_nothing_over_today():
    """Models that scale to two cores have nothing to gain from stages, and lose nothing."""
    machine = scenario("mobilenetv2=1,resnet50=1", 2)
    found = compare(machine, seed=1, rounds=1, candidates=4)
    assert found.coordinate_us <= found.sequential_us < found.split_us
    assert found.today_us == today_us(machine)
    assert found.over_today == pytest.approx(1.0, abs=0.05)


def test_the_command(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["simulate", "--cores", "4", "--compound", "mobilenetv2+googlenet"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "modelled, 4 cores" in lines[0]
    assert max(len(line.rstrip()) for line in lines) <= 80
    assert any(line.split()[:1] == ["mobilenetv2+"] and len(line.split()) == 8 for line in lines)


@pytest.mark.parametrize("text", ["mobilenetv2", "mobilenetv2+mobilenetv2", "mobilenetv2+"])
def test_what_is_no_compound_task_is_refused(text, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["simulate", "--compound", text])
    assert exit_.value.code == 2
    assert "two or more different models" in capsys.readouterr().err


def test_others_keep_their_targets_beside_compound_tasks():
    """Compound tasks gain while the machine has room for them, and lose nothing where it has none."""
    mix = parse_mix("mobilenetv2=1,googlenet=1,efficientnet_b0=1").with_qos(parse_qos("4x"))
    machine = make_scenario(mix, 8)
    best_effort = {number: replace(machine.models[number], qos_us=None) for number in (0, 1)}
    machine = replace(machine, models={**machine.models, **best_effort})
    streams = (machine.models[0], machine.models[1])
    stages = schedule(streams, parallel(streams), 8)
    plan = StagePlan((0, 1), stages, 8, schedule_us(streams, stages))
    runs = compare_loaded(machine, plan, 250, seed=1)
    for run in runs:
        assert run.planned.in_time >= run.today.in_time - 0.01
        assert run.planned.p99_us <= 1.1 * run.today.p99_us
    assert runs[0].planned.by_schedule > 0.4 > runs[-1].planned.by_schedule
    assert all(run.today.by_schedule == 0.0 for run in runs)


def test_what_stands_beside_compound_tasks_is_shown(capsys):
    arguments = ["simulate", "--cores", "4", "--compound", "mobilenetv2+googlenet", "--queries", "100"]
    assert main([*arguments, "--beside", "efficientnet_b0"]) == 0
    assert "mobilenetv2+googlenet beside efficientnet_b0, 4 cores" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["simulate", "--beside", "googlenet", "-o", "nowhere"])
    assert "it needs --compound" in capsys.readouterr().err
