"""A policy for each NUMA node: gangs inside, work spread, a started query at home; one node is no difference."""

from dataclasses import replace

import pytest

from gangway.scheduler.policies.base import Policy
from gangway.scheduler.policies.gangway import Gangway
from gangway.scheduler.policies.per_node import PerNode
from gangway.scheduler.policies.registry import DEFAULT_POLICY, make_policy
from gangway.scheduler.policy import Query, Resize, RunningBlock, Snapshot, Start
from tests.simulator.conftest import profile

NODES = ((0, 2, 4, 6), (1, 3, 5, 7))  # as many machines number them
LONG = profile([20_000.0] * 8, 8, 0, 300_000.0)
SHORT = profile([100.0], 8, 1, 3_000.0)
MODELS = {0: LONG, 1: SHORT}


def query(number: int, model: int = 0, **fields) -> Query:
    return Query(number, model, 1, float(number), 1_000_000.0, **fields)


def snapshot(waiting=(), running=(), out_of_service=(), **fields) -> Snapshot:
    busy = {core for block in running for core in block.cores} | {*out_of_service}
    free = tuple(core for core in range(8) if core not in busy)
    return Snapshot(100.0, waiting, running, free, 8 - len(out_of_service), MODELS, **fields)


def node_of(cores) -> int:
    (node,) = {node for node, there in enumerate(NODES) if {*cores} & {*there}}
    return node


def policy() -> PerNode:
    return PerNode(Gangway, NODES)


def starts(decisions) -> dict[int, tuple[int, ...]]:
    return {each.query_id: each.cores for each in decisions if isinstance(each, Start)}


def test_two_queries_go_to_two_nodes_and_each_gets_its_node():
    found = starts(policy().decide(snapshot([query(1), query(2)])))
    assert {*found[1]} == {*NODES[0]} and {*found[2]} == {*NODES[1]}


def test_a_lone_query_grows_to_its_node_only():
    block = RunningBlock(query(1), 8, (1,), 0.0)
    (grown,) = policy().decide(snapshot(running=[block]))
    assert isinstance(grown, Resize) and grown.cores[0] == 1 and {*grown.cores} == {*NODES[1]}


def test_the_node_with_least_work_is_chosen_per_core_in_service():
    long = RunningBlock(query(1), 8, (0,), 0.0)
    assert node_of(starts(policy().decide(snapshot([query(3)], [long])))[3]) == 1
    assert node_of(starts(policy().decide(snapshot([query(3)], out_of_service=(1, 3, 5, 7))))[3]) == 0
    assert node_of(starts(policy().decide(snapshot([query(3)], out_of_service=NODES[0])))[3]) == 1


class Looking(Policy):
    """Decides nothing, and shows which queries wait at its node."""

    name = "looking"

    def __init__(self) -> None:
        self.waiting: list[int] = []

    def decide(self, snapshot):
        self.waiting = [query.query_id for query in snapshot.waiting]
        return ()


def test_only_work_that_goes_first_counts_for_a_query():
    each = [Looking(), Looking()]
    made = iter(each)
    deciding = PerNode(lambda: next(made), NODES)
    long = RunningBlock(query(1), 8, NODES[0], 0.0)  # due at the very end
    soon = RunningBlock(replace(query(2), deadline_us=30_000.0), 8, NODES[1], 0.0, layer=7)
    urgent, patient = replace(query(3), deadline_us=50_000.0), query(4)
    deciding.decide(snapshot([patient, urgent], [long, soon]))
    assert [shown.waiting for shown in each] == [[3], [4]]


def test_what_has_started_waits_for_its_node_and_others_move():
    deciding = policy()
    first = deciding.decide(snapshot([query(1)]))
    assert node_of(starts(first)[1]) == 0
    running = [RunningBlock(query(1), 8, NODES[0], 0.0)]
    deciding.decide(snapshot(running=running))
    blocker = RunningBlock(query(2, priority=-1), 8, NODES[0], 0.0)
    stopped = query(1, started=True, next_layer=2)
    assert starts(deciding.decide(snapshot([stopped], [blocker]))) == {}
    newcomer = query(3)
    deciding = policy()
    deciding.arrived(newcomer)  # placed on node 0 while that is free
    assert node_of(starts(deciding.decide(snapshot([newcomer], [blocker])))[3]) == 1


def test_leases_are_shared_and_no_lone_start_takes_two_cores():
    assert len(starts(policy().decide(snapshot([query(1), query(2)], free_leases=1)))) == 1
    narrow = profile([10.0], 1, 0, 3_000.0)
    alone = [each.lone_start(model, 8, 0.0) for each in (Gangway(), policy()) for model in (LONG, narrow)]
    assert [start and start.cores for start in alone] == [8, 1, None, 1]


@pytest.mark.parametrize("nodes", [(), ((0, 1, 2, 3),)])
def test_one_node_is_the_policy_itself(nodes):
    assert type(make_policy(DEFAULT_POLICY, nodes)) is Gangway
