"""Works that are remembered between decisions say the same as new ones, whatever has changed meanwhile."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from gangway.scheduler.policies.base import Policy
from gangway.scheduler.policies.gangway import ask, share_out
from gangway.scheduler.policies.gangway_jobs import DecisionContext, Job, JobTable
from gangway.scheduler.policies.gangway_moves import moves
from gangway.scheduler.policies.gangway_order import classify, in_order
from gangway.scheduler.policy import Decision, Query, RunningBlock, Snapshot, Wake
from gangway.scheduler.profiles import ModelProfile
from gangway.simulator.contention import Contention
from gangway.simulator.loop import simulate
from gangway.simulator.scenario import make_scenario
from gangway.workload.mix import read_mix

DECIDED = {"area_us", "due_us", "gang", "context", "tier"}  # what a decision sets before it reads it
SEEN = sorted(set(Job.__slots__) - DECIDED)


def seen(job: Job) -> dict[str, object]:
    return {name: getattr(job, name) for name in SEEN}


class Compared(Policy):
    """The steps of the default policy on remembered works, each of which is compared with a new one.

    What it is shown changes as in a server: models are profiled anew, predictions miss, workers die.
    """

    name = "compared"

    def __init__(self, seed: int) -> None:
        self.compared = self.remembered = 0
        self._source = random.Random(seed)
        self._table = JobTable()
        self._before: list[Job] = []  # jobs of the decision before
        self._models: Mapping[int, ModelProfile] | None = None  # in place of those that it is shown
        self._factors: dict[int, float] = {}  # by model: times, over those of the profile

    def decide(self, snapshot: Snapshot) -> Sequence[Decision]:
        snapshot = self._changed(snapshot)
        jobs = self._table.at(snapshot, snapshot.waiting)
        context = DecisionContext(snapshot)
        fresh = [Job(query, None, context) for query in snapshot.waiting]
        fresh += [Job(block.query, block, context) for block in snapshot.running]
        assert list(map(seen, jobs)) == list(map(seen, fresh))
        self.compared += len(jobs)
        self.remembered += len(set(map(id, jobs)) & set(map(id, self._before)))
        self._before = jobs
        if not jobs:
            return ()
        classify(jobs)
        for job in jobs:
            ask(job)
        ordered = in_order(jobs)
        share_out(ordered, snapshot.core_count, snapshot.free_leases)
        decisions = moves(ordered, snapshot)
        if self._source.random() < 0.1:  # the driver may be unable to do what was decided, and asks again soon
            return [Wake(snapshot.now_us + 10.0)]
        return decisions

    def _changed(self, snapshot: Snapshot) -> Snapshot:
        source = self._source
        if source.random() < 0.02:
            self._factors[source.choice(list(snapshot.models))] = source.uniform(0.8, 1.2)
        if source.random() < 0.05:
            anew = {
                number: replace(snapshot.models[number], latency_us=_times(snapshot, number, factor))
                for number, factor in self._factors.items()
            }
            self._models = {**snapshot.models, **anew}
        return replace(
            snapshot,
            models=self._models or snapshot.models,
            level=source.choice([snapshot.level] * 9 + [0.5]),
            prediction_errors={number: source.uniform(1.0, 1.5) for number in self._factors},
            gang_slowdown=source.choice([1.0] * 9 + [1.3]),
            core_count=snapshot.core_count - (source.random() < 0.05),
        )


def _times(snapshot: Snapshot, number: int, factor: float) -> tuple[tuple[tuple[float, ...], ...], ...]:
    layers = snapshot.models[number].latency_us
    return tuple(tuple(tuple(factor * time_us for time_us in times) for times in versions) for versions in layers)


@pytest.mark.parametrize(
    ("contention", "rate_per_s"),
    [(None, 160.0), pytest.param(None, 400.0, marks=pytest.mark.long), (Contention(), 120.0)],
)
def test_remembered_works_are_as_new_ones(contention: Contention | None, rate_per_s: float) -> None:
    scenario = make_scenario(read_mix("mix"), 16, contention=contention)
    policy = Compared(1)
    simulate(policy, scenario.models, scenario.arrivals(rate_per_s, 200, 1), scenario.machine)
    assert policy.compared > 1000 and policy.remembered > 300


def test_a_query_that_ran_and_waits_again_is_seen_as_one_that_waits() -> None:
    # After the death of a worker the same query may wait again from its first layer on.
    scenario = make_scenario(read_mix("light"), 4)
    table, query = JobTable(), Query(1, 0, 1, 0.0, 1e6)
    block = RunningBlock(query, scenario.models[0].layers, (0, 1), 10.0, layer=5, layer_started_us=20.0)
    first, then = (
        Snapshot(50.0, (), (block,), (2, 3), 4, scenario.models),
        Snapshot(60.0, (query,), (), (0, 1, 2, 3), 4, scenario.models),
    )
    [running] = table.at(first, ())
    [waiting] = table.at(then, (query,))
    assert waiting is running
    assert seen(waiting) == seen(Job(query, None, DecisionContext(then)))
