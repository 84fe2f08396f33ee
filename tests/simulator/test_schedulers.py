"""Several schedulers on one simulated machine: each request goes to one of them, and none is lost."""

from dataclasses import replace

import numpy as np
import pytest

from gangway.scheduler.policies.registry import DEFAULT_POLICY, make_policies, make_policy
from gangway.simulator.loop import simulate
from gangway.simulator.machine import Machine
from gangway.simulator.node_choice import choose_node
from gangway.simulator.scenario import WHOLE_TURNS, MachineLayout, make_scenario
from gangway.simulator.turn_cost import MEASURED_TURN, front_end_us, processes_needed
from gangway.workload.mix import read_mix
from tests.simulator.conftest import Ledger, profile, trace
from tests.simulator.test_command import simulate as run_command
from tests.simulator.test_invariants import models, random_trace

PAIR = Machine(4, schedulers=2, leases=6)


def test_one_scheduler_decides_as_its_policy_alone():
    """The part of a machine that its only scheduler has is the machine."""
    machine = Machine(4, level_per_demand=0.1)
    assert machine.of_scheduler() == machine
    alone, listed = (
        simulate(policy, models(), random_trace(5), machine)
        for policy in (make_policy(DEFAULT_POLICY), make_policies(DEFAULT_POLICY, machine.scheduler_nodes))
    )
    assert alone.counters == listed.counters
    assert alone.outcomes.latency_us.tobytes() == listed.outcomes.latency_us.tobytes()


@pytest.mark.parametrize("name", [DEFAULT_POLICY, "veltair", "model_fcfs"])
def test_every_query_is_answered_once_and_no_gang_crosses(name):
    ledger, arrivals = Ledger(), random_trace(3)
    result = simulate(make_policies(name, PAIR.scheduler_nodes), models(), arrivals, PAIR, ledger)
    assert result.outcomes.answered.all() and len(result.outcomes) == len(arrivals)
    used = [set(cores) for _, cores, *_ in ledger.stretches]
    assert all(cores <= {0, 1} or cores <= {2, 3} for cores in used)
    assert set().union(*used) == {0, 1, 2, 3}


def test_a_closed_loop_sends_all_its_queries():
    scenario = make_scenario(read_mix("light"), 4, overheads=WHOLE_TURNS, layout=MachineLayout(schedulers=2))
    scenario = replace(scenario, requests=replace(scenario.requests, clients=6))
    arrivals, machine = scenario.arrivals(1.0, 60, 1), scenario.machine
    result = simulate(make_policies(DEFAULT_POLICY, machine.scheduler_nodes), scenario.models, arrivals, machine)
    assert result.outcomes.answered.all() and len(result.outcomes) == 60


def test_predicted_slack_avoids_the_scheduler_that_round_robin_fills():
    """Long and short queries by turns, the long ones faster than one core computes them: round robin sends it all."""
    known = {0: profile([1000.0], 1, 0, 3500.0), 1: profile([10.0], 1, 1, 3500.0)}
    queries = [(400.0 * number, number % 2) for number in range(80)]
    policies = make_policies("edf", Machine(2, schedulers=2).scheduler_nodes)
    chosen = simulate(policies, known, trace(*queries), Machine(2, schedulers=2))
    by_turns = [
        simulate(make_policy("edf"), known, trace(*(each for each in queries if each[1] == place)), Machine(1))
        for place in range(2)
    ]
    late = sum(int((result.outcomes.latency_us > 3500.0).sum()) for result in by_turns)
    assert (chosen.outcomes.latency_us <= 3500.0).all() and late > 10


def test_the_least_work_per_core_is_chosen():
    assert choose_node([30.0, 10.0, 20.0], [1, 1, 1]) == 1
    assert choose_node([30.0, 20.0], [4, 2]) == 0
    assert choose_node([5.0, 5.0, 5.0], [1, 1, 1], turn=5) == 2
    assert choose_node([0.0, 9.0], [0, 1]) == 1
    assert choose_node([0.0, 9.0], [0, 1], allowed=(0,)) == 0
    with pytest.raises(ValueError, match="no node"):
        choose_node([1.0], [1], allowed=())


def test_a_turn_takes_its_time():
    """A query alone is later by the turn in which it begins, and by nothing else."""
    known = {0: profile([1000.0], 1)}
    free, charged = (
        simulate(make_policy("edf"), known, trace((0, 0)), Machine(1, charges_turns=charges))
        for charges in (False, True)
    )
    later_us = charged.outcomes.latency_us - free.outcomes.latency_us
    assert later_us == pytest.approx(np.array([MEASURED_TURN.us(1)]))
    assert charged.counters.scheduler_us >= later_us[0] and free.counters.scheduler_us == 0


def test_bytes_make_front_ends():
    assert front_end_us(1.0) > 2 * front_end_us(0.0)
    assert processes_needed(0.0) == processes_needed(0.7) == 1 and processes_needed(1.5) == 3


def test_machines_that_cannot_be_split():
    for machine in ({"schedulers": 5}, {"schedulers": 3, "nodes": 2}):
        with pytest.raises(ValueError, match="cannot be split"):
            Machine(12, **machine)


def test_the_command_says_how_many_processes(tmp_path, capsys):
    arguments = ("--cores", 4, "--mix", "light", "--rate", 60, "--queries", 60, "--overheads", "turns")
    assert run_command(*arguments, "--schedulers", 2, "-o", tmp_path) == 0
    said = capsys.readouterr().out
    assert "2 schedulers" in said and "schedulers needed" in said and "front ends needed" in said
    with pytest.raises(SystemExit):
        run_command("--cores", 4, "--schedulers", 3, "-o", tmp_path)
    assert "4 cores cannot be split evenly over 3 schedulers" in capsys.readouterr().err
