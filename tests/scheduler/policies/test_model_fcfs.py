"""model_fcfs against cases worked out by hand."""

import pytest

from gangway.scheduler.policies.registry import DEFAULT_POLICY, make_policy
from gangway.scheduler.policies.veltair import ModelFcfs
from gangway.scheduler.policy import Query, RunningBlock, Snapshot, Start
from gangway.scheduler.profiles import ModelProfile

WIDE, NARROW, TRIPLE, PROMPT = 1, 2, 3, 4
MODELS = {
    WIDE: ModelProfile(WIDE, "wide", layers=10, max_ranks=64),
    NARROW: ModelProfile(NARROW, "narrow", layers=3, max_ranks=1),
    TRIPLE: ModelProfile(TRIPLE, "triple", layers=5, max_ranks=3),
    # 30 ms on one core, 15 on two, 10 on three; of its 14 ms 12.6 are for its layers: three cores
    PROMPT: ModelProfile(
        PROMPT, "prompt", 2, 4, ((((10e3, 5e3, 10e3 / 3, 2.5e3),)), ((20e3, 10e3, 20e3 / 3, 5e3),)), qos_us=14e3
    ),
}


def query(query_id: int, model_id: int) -> Query:
    return Query(query_id, model_id, rows=1, arrival_us=float(query_id), deadline_us=None)


def snapshot(waiting: list[Query], free: tuple[int, ...], core_count: int = 4) -> Snapshot:
    busy = tuple(sorted(set(range(core_count)) - set(free)))
    running = [RunningBlock(query(99, WIDE), 10, busy, 0.0)] if busy else []
    return Snapshot(100.0, waiting, running, free, core_count, MODELS)


def started(state: Snapshot) -> list[tuple[int, int, tuple[int, ...]]]:
    decisions = ModelFcfs().decide(state)
    assert all(isinstance(one, Start) and one.wanted == len(one.cores) and not one.versions for one in decisions)
    return [(one.query_id, one.end_layer, one.cores) for one in decisions]


def test_one_model_has_all_cores() -> None:
    assert started(snapshot([query(1, WIDE), query(2, WIDE)], (0, 1, 2, 3))) == [(1, 10, (0, 1, 2, 3))]


def test_narrow_models_run_side_by_side() -> None:
    assert started(snapshot([query(i, NARROW) for i in range(6)], (0, 1, 2, 3))) == [(i, 3, (i,)) for i in range(4)]


def test_the_gang_is_what_the_model_can_use() -> None:
    waiting = [query(1, TRIPLE), query(2, NARROW), query(3, NARROW)]
    assert started(snapshot(waiting, (0, 1, 2, 3))) == [(1, 5, (0, 1, 2)), (2, 3, (3,))]


def test_a_target_fixes_the_gang() -> None:
    assert started(snapshot([query(1, PROMPT)], (0, 1, 2, 3))) == [(1, 2, (0, 1, 2))]
    assert started(snapshot([query(1, PROMPT), query(2, NARROW)], (1, 2))) == []
    assert started(snapshot([query(1, PROMPT)], (0, 1), core_count=2)) == [(1, 2, (0, 1))]


def test_nobody_overtakes_the_oldest() -> None:
    assert ModelFcfs().decide(snapshot([query(1, WIDE), query(2, NARROW)], (1, 3))) == []


def test_a_lost_core_makes_the_gang_smaller() -> None:
    state = Snapshot(1.0, [query(1, WIDE)], [], (0, 3), core_count=2, models=MODELS)
    assert started(state) == [(1, 10, (0, 3))]


@pytest.mark.parametrize("state", [snapshot([], (0, 1, 2, 3)), Snapshot(1.0, [query(1, WIDE)], [], (), 0, MODELS)])
def test_nothing_to_start(state: Snapshot) -> None:
    assert ModelFcfs().decide(state) == []


def test_registry() -> None:
    assert make_policy(DEFAULT_POLICY).name == DEFAULT_POLICY
    with pytest.raises(ValueError, match=r"unknown scheduler 'fifo'; known: .*model_fcfs"):
        make_policy("fifo")
