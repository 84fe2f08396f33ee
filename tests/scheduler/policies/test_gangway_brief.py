"""Queries that take next to nothing go first. Times are microseconds, two cores, models of `test_gangway`."""

from dataclasses import replace

import pytest

from gangway.scheduler.policies.gangway import Gangway, candidates
from gangway.scheduler.policy import Decision, Query, Resize, RunningBlock, Snapshot, Start, Stop
from gangway.scheduler.policy_config import DEFAULT, SWITCH_US
from gangway.simulator.loop import simulate
from gangway.simulator.machine import Machine
from gangway.workload.arrivals import Arrivals, poisson
from gangway.workload.mix import Mix, MixModel
from tests.scheduler.policies.test_gangway import LAZY, LONG, MODELS, SHORT, model, query, running

TINY, TARGET_US = 3, 1000.0
KNOWN = {**MODELS, TINY: replace(model(TINY, 20.0, 4, TARGET_US), max_ranks=1, latency_us=(((20.0, 20.0),),) * 4)}


def tiny(query_id: int, arrival_us: float, **changes: object) -> Query:
    """Takes 80 on one core, and is to be answered within 1000."""
    return replace(Query(query_id, TINY, 1, arrival_us, arrival_us + TARGET_US), **changes)  # type: ignore[arg-type]


def decide(
    now_us: float, waiting: list[Query], blocks: list[RunningBlock], policy: Gangway | None = None
) -> list[Decision]:
    used = {core for block in blocks for core in block.cores}
    free = tuple(core for core in range(2) if core not in used)
    return list((policy or Gangway()).decide(Snapshot(now_us, waiting, blocks, free, 2, KNOWN, way_back_us=3000.0)))


@pytest.mark.parametrize("waited_us", [0.0, 5000.0, 100_000.0])
@pytest.mark.parametrize(
    "block",
    [
        running(query(1, LONG, 0.0), 0.0),  # which has time
        running(query(1, LONG, -75_000.0), 0.0),  # which will just be in time
        running(query(1, LONG, -100_000.0), 0.0),  # which is late, as those of a model without a target
        running(query(1, LAZY, 0.0), 0.0),
    ],
)
def test_whoever_runs_makes_room(block: RunningBlock, waited_us: float) -> None:
    [stop, *_] = decide(0.0, [tiny(2, -waited_us)], [block])
    assert isinstance(stop, Stop | Resize) and stop.query_id == 1


@pytest.mark.parametrize("waited_us", [0.0, 5000.0, 100_000.0])
def test_it_begins_before_those_with_earlier_deadlines(waited_us: float) -> None:
    urgent = replace(query(1, SHORT, 0.0), deadline_us=7400.0)  # takes 4160, and has the way back of 3000
    start, *_ = decide(0.0, [urgent, tiny(2, -waited_us)], [])
    assert isinstance(start, Start) and (start.query_id, start.reason) == (
        2,
        "brief: it delays others by next to nothing",
    )


def test_classes_go_before_it_and_who_is_nearly_done() -> None:
    assert not decide(0.0, [tiny(2, 0.0)], [running(query(1, LONG, 0.0, priority=-1), 0.0)])
    assert not decide(0.0, [tiny(2, 0.0)], [running(query(1, LONG, 0.0), 0.0, layer=19, in_layer_us=1800.0)])


def test_others_are_as_ever() -> None:
    """Without a deadline, in a batch that takes longer, or of a model whose time nobody knows."""
    block = [running(query(1, LONG, -75_000.0), 0.0)]
    assert not decide(0.0, [tiny(2, 0.0, deadline_us=None)], block)
    assert not decide(0.0, [tiny(2, -5000.0, rows=40)], block)
    guessed = {**KNOWN, TINY: replace(KNOWN[TINY], varies=True)}
    assert not Gangway().decide(Snapshot(0.0, [tiny(2, -5000.0)], block, (), 2, guessed))


def test_among_themselves_they_go_by_deadlines() -> None:
    waiting = [tiny(1, -5000.0), tiny(2, 0.0), tiny(3, 0.0)]
    starts = Gangway().decide(Snapshot(0.0, waiting, [], (0, 1), 2, KNOWN))
    assert [start.query_id for start in starts if isinstance(start, Start)] == [2, 3]


def test_a_boundary_that_should_have_come_is_not_waited_for() -> None:
    # A layer of 2000 that has taken 2500: it began on one core, or the machine is slow.
    for in_layer_us, at_once in ((1900.0, False), (2500.0, True)):
        [stop, *_] = decide(2500.0, [tiny(2, 2500.0)], [running(query(1, LONG, 0.0), 2500.0, in_layer_us=in_layer_us)])
        assert isinstance(stop, Stop if at_once else Resize)


def test_what_they_take_from_others_is_bounded() -> None:
    """One waits at any time, beside a query that will just be in time: who goes first costs a switch on a core."""
    policy, step_us, steps, first = Gangway(), 500.0, 10_000, 0
    for number in range(steps):
        now_us = number * step_us
        waiting = [query(1, LONG, now_us - 75_390.0), tiny(number + 2, now_us - 5000.0)]
        starts = [each for each in decide(now_us, waiting, [], policy) if isinstance(each, Start)]
        first += starts[0].query_id != 1
    bound_us = DEFAULT.brief.burst_us + DEFAULT.brief.machine_share * step_us * steps
    assert first == pytest.approx(bound_us / ((80.0 + SWITCH_US) / 2), rel=0.02)


def test_late_ones_are_planned_beside_very_many_others() -> None:
    late = [query(number, SHORT, -1e6 + number) for number in range(500)]
    last = tiny(500, -2000.0)
    assert last in candidates([*late, last], 0.0, 2, KNOWN)


def test_they_are_in_time_and_others_lose_nothing() -> None:
    """LONG at 0.6 of what two cores can do, with and without 200 of the others a second."""
    arrivals = poisson(Mix("both", (MixModel("tiny", 200.0), MixModel("long", 15.0))).resolve(), 215.0, 4000, seed=1)
    known = {0: replace(KNOWN[TINY], model_id=0), 1: replace(KNOWN[LONG], model_id=1)}
    shares = []
    for among in (arrivals, Arrivals(arrivals.times_us[arrivals.models == 1], arrivals.models[arrivals.models == 1])):
        result = simulate(Gangway(), known, among, Machine(2))
        latency_us, models = result.outcomes.latency_us, result.outcomes.models
        shares.append(
            [(latency_us[models == number] <= known[number].qos_us).mean() for number in set(models.tolist())]
        )
    assert shares[0][0] > 0.99
    assert shares[0][1] > shares[1][0] - 0.02
