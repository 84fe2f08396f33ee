"""NUMA nodes of a simulated machine: whatever the policy, no gang crosses them, and all queries are answered."""

import numpy as np
import pytest

from gangway.scheduler.policies.registry import DEFAULT_POLICY, POLICIES, make_policy
from gangway.simulator.batching import Batching
from gangway.simulator.loop import simulate
from gangway.simulator.machine import Machine
from tests.simulator.conftest import Ledger, profile
from tests.simulator.test_command import rows
from tests.simulator.test_command import simulate as run_command
from tests.simulator.test_invariants import models, random_trace

TWO = Machine(4, nodes=2, leases=6)


def crossing(ledger: Ledger, machine: Machine) -> list[tuple[int, ...]]:
    node_of = {core: node for node, cores in enumerate(machine.node_cores) for core in cores}
    return [cores for _, cores, *_ in ledger.stretches if len({node_of[core] for core in cores}) > 1]


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_no_gang_crosses_nodes(name):
    one, two = Ledger(), Ledger()
    simulate(make_policy(name), models(), random_trace(3), Machine(4, leases=6), one)
    result = simulate(make_policy(name, TWO.node_cores), models(), random_trace(3), TWO, two)
    assert result.outcomes.answered.all()
    assert crossing(two, TWO) == [] and {core for _, cores, *_ in two.stretches for core in cores} == {0, 1, 2, 3}
    if name != "parties":  # four models, four cores: a core for each
        assert crossing(one, TWO), "on one node of as many cores there are such gangs"


def test_parts_of_one_batch_use_both_nodes():
    known = {0: profile([400.0] * 4, 2, 0, 50_000.0)}
    arrivals, ledger = random_trace(1, 1), Ledger()
    arrivals = type(arrivals)(arrivals.times_us, np.zeros(1, np.int64), np.array([8]))
    machine = Machine(4, nodes=2)
    policy = make_policy(DEFAULT_POLICY, machine.node_cores)
    result = simulate(policy, known, arrivals, machine, ledger, batching=Batching(8))
    assert result.outcomes.answered.all() and crossing(ledger, machine) == []
    assert {core for _, cores, *_ in ledger.stretches for core in cores} == {0, 1, 2, 3}


def test_one_node_decides_as_no_node():
    first, second = (
        simulate(make_policy(DEFAULT_POLICY, nodes), models(), random_trace(5), Machine(4))
        for nodes in ((), Machine(4).node_cores)
    )
    assert first.counters == second.counters
    assert first.outcomes.latency_us.tobytes() == second.outcomes.latency_us.tobytes()


def test_the_command(tmp_path, capsys):
    arguments = ("--cores", 4, "--nodes", 2, "--mix", "light", "--rate", 60, "--queries", 100)
    assert run_command(*arguments, "--trace-decisions", "-o", tmp_path) == 0
    assert "2 nodes" in capsys.readouterr().out
    assert float(rows(tmp_path / f"{DEFAULT_POLICY}.csv")[-1]["satisfied"]) > 50
    with pytest.raises(SystemExit):
        run_command("--cores", 4, "--nodes", 3, "-o", tmp_path)
    assert "4 cores cannot be split evenly over 3 nodes" in capsys.readouterr().err
