"""triton against cases worked out by hand."""

import pytest

from gangway.scheduler.policies.baselines import SLICE_US, Triton, make_triton
from gangway.scheduler.policies.registry import make_policy
from gangway.scheduler.policy import Decision, Query, RunningBlock, Snapshot, Start, Stop, Wake
from gangway.scheduler.profiles import ModelProfile

MODELS = {model_id: ModelProfile(model_id, "", 3, 4, (((100.0,) * 4,),) * 3) for model_id in (1, 2, 3)}


def query(query_id: int, model_id: int, started: bool = False) -> Query:
    return Query(query_id, model_id, 1, float(query_id), None, 0, int(started), started)


def block(query_id: int, model_id: int, cores: tuple[int, ...], started_us: float) -> RunningBlock:
    return RunningBlock(query(query_id, model_id), 3, cores, started_us)


def decide(policy: Triton, waiting: list[Query], running: list[RunningBlock], now_us: float = 0.0) -> list[Decision]:
    busy = {core for one in running for core in one.cores}
    free = tuple(core for core in range(4) if core not in busy)
    return policy.decide(Snapshot(now_us, waiting, running, free, 4, MODELS))


def gangs(decisions: list[Decision]) -> list[tuple[int, tuple[int, ...]]]:
    return [(one.query_id, one.cores) for one in decisions if isinstance(one, Start)]


def test_an_instance_runs_one_query_at_a_time() -> None:
    policy = make_triton("instances=1,threads=2")
    waiting = [query(1, 1), query(2, 1), query(3, 2)]
    assert gangs(decide(policy, waiting, [])) == [(1, (0, 1)), (3, (2, 3))]
    assert gangs(decide(make_triton("instances=2,threads=2"), waiting, [])) == [(1, (0, 1)), (2, (2, 3))]
    assert decide(policy, [query(2, 1)], [block(1, 1, (0, 1), 0.0)]) == []


def test_too_many_threads_take_turns() -> None:
    policy = make_triton("")
    whole = (0, 1, 2, 3)
    assert decide(policy, [query(2, 2)], [block(1, 1, whole, 0.0)], 100.0) == [Wake(SLICE_US)]
    assert decide(policy, [query(2, 2)], [block(1, 1, whole, 0.0)], SLICE_US) == [Stop(1, True, "end of its slice")]
    # The one that was stopped goes behind the one that waited, and behind another that came meanwhile.
    decide(policy, [query(2, 2), query(3, 3)], [block(1, 1, whole, 0.0)], SLICE_US + 1)
    assert gangs(decide(policy, [query(1, 1, started=True), query(2, 2), query(3, 3)], [])) == [(2, whole)]
    after = [query(1, 1, started=True), query(2, 2, started=True), query(3, 3)]
    decide(policy, after[::2], [block(2, 2, whole, 0.0)])
    assert gangs(decide(policy, after, [])) == [(3, whole)]


def test_only_as_many_are_stopped_as_are_needed() -> None:
    policy = make_triton("threads=2")
    running = [block(1, 1, (0, 1), 10.0), block(2, 2, (2, 3), 0.0)]
    assert decide(policy, [query(3, 3)], running, SLICE_US + 20) == [Stop(2, True, "end of its slice")]


def test_nobody_is_stopped_for_a_query_that_has_no_instance() -> None:
    assert decide(make_triton(""), [query(2, 1)], [block(1, 1, (0, 1, 2, 3), 0.0)], 1e6) == []


@pytest.mark.parametrize("text", ["instances", "threads=0", "threads=x", "cores=3", "instances=-1"])
def test_arguments(text: str) -> None:
    with pytest.raises(ValueError, match=r"takes instances=I,threads=T"):
        make_policy(f"triton:{text}")
