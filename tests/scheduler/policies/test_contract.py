"""What every policy owes its driver, on random situations."""

import random

import pytest

from gangway.executor.fast_path import Completed
from gangway.scheduler.policies.base import Policy
from gangway.scheduler.policies.registry import POLICIES, make_policy
from gangway.scheduler.policy import (
    Decision,
    PlannedBlock,
    Query,
    Reject,
    Replan,
    Resize,
    RunningBlock,
    Snapshot,
    Start,
    StartOver,
    Stop,
    Wake,
)
from gangway.scheduler.profiles import ModelProfile

CORES = 8


def profile(model_id: int, layer_us: list[float], max_ranks: int, qos_us: float | None) -> ModelProfile:
    """A model whose layers scale as Amdahl's law says, one tenth of each serial."""
    latency_us = tuple(
        (tuple(time_us * (0.1 + 0.9 / min(count, max_ranks)) for count in range(1, CORES + 1)),) for time_us in layer_us
    )
    return ModelProfile(
        model_id=model_id,
        name=f"model {model_id}",
        layers=len(layer_us),
        max_ranks=max_ranks,
        latency_us=latency_us,
        slope=tuple((0.5,) for _ in layer_us),
        memory_us=tuple(time_us * (0.2 + index % 2) for index, time_us in enumerate(layer_us)),
        compute_us=tuple(time_us * 0.7 for time_us in layer_us),
        isolated_us=sum(layer[0][CORES - 1] for layer in latency_us),
        qos_us=qos_us,
        rejects_late=model_id == 2,
        measured=True,
    )


MODELS = {
    0: profile(0, [300.0, 900.0, 200.0, 1600.0, 400.0], CORES, 6000.0),
    1: profile(1, [5000.0] * 12, CORES, 90_000.0),
    2: profile(2, [50.0, 20.0, 60.0], 2, 1000.0),
    3: profile(3, [700.0] * 7, 4, None),
}


def situation(generator: random.Random) -> Snapshot:
    """Some queries on gangs, some waiting, some of those stopped before."""
    now_us = generator.uniform(0, 1e6)
    free = list(range(CORES))
    generator.shuffle(free)
    running = []
    waiting = []
    for query_id in range(generator.randrange(12)):
        model = MODELS[generator.randrange(len(MODELS))]
        arrival_us = now_us - generator.uniform(0, 1.5) * (model.qos_us or 50_000)
        layer = generator.randrange(model.layers)
        wants_gang = generator.random() < 0.4 and bool(free)
        next_layer = layer if wants_gang or generator.random() < 0.2 else 0
        query = Query(
            query_id=query_id,
            model_id=model.model_id,
            rows=generator.choice([1, 1, 1, 4]),
            arrival_us=arrival_us,
            deadline_us=None if model.qos_us is None else arrival_us + model.qos_us,
            priority=generator.choice([0, 0, 0, -1, 1]),
            next_layer=next_layer,
            started=next_layer > 0,
            ran_us=100.0 * next_layer,
            rejects_late=model.rejects_late,
        )
        if wants_gang:
            size = min(generator.randint(1, len(free)), model.max_ranks)
            gang, free = tuple(free[:size]), free[size:]
            end = generator.randint(layer + 1, model.layers)
            now = generator.randint(layer, end - 1)
            started_us = now_us - generator.uniform(0, 2000)
            running.append(RunningBlock(query, end, gang, started_us, now, started_us, generator.random() < 0.1))
        else:
            waiting.append(query)
    waiting.sort(key=lambda query: (query.arrival_us, query.query_id))
    return Snapshot(now_us, waiting, running, tuple(sorted(free)), CORES, MODELS, generator.choice([0.0, 0.6]))


def check_plan(versions: tuple[int, ...], blocks: tuple[PlannedBlock, ...], of: RunningBlock) -> None:
    assert len(versions) in (0, of.end_layer - of.query.next_layer)
    layers = [block.layer for block in blocks]
    assert layers == sorted(set(layers)) and all(of.layer < layer < of.end_layer for layer in layers)
    assert all(0 < block.cores <= CORES for block in blocks)


def check(decisions: list[Decision], state: Snapshot) -> None:
    waiting = {query.query_id: query for query in state.waiting}
    running = {block.query.query_id: block for block in state.running}
    free = set(state.free_cores)
    named = [decision.query_id for decision in decisions if not isinstance(decision, Wake)]
    assert len(named) == len(set(named)), "one decision for a query"
    assert sum(isinstance(decision, Wake) for decision in decisions) <= 1
    for decision in decisions:
        match decision:
            case Start(query_id, end_layer, cores, versions):
                query = waiting[query_id]
                assert query.next_layer < end_layer <= MODELS[query.model_id].layers
                assert cores and len(set(cores)) == len(cores) and set(cores) <= free
                assert len(versions) in (0, end_layer - query.next_layer)
                assert not decision.blocks or decision.blocks[0].layer > query.next_layer
                free -= set(cores)
            case Resize(query_id, cores):
                before = running[query_id].cores
                assert cores and cores != before
                if len(cores) < len(before):
                    assert cores == before[: len(cores)]
                else:
                    joining = set(cores[len(before) :])
                    assert cores[: len(before)] == before and joining <= free
                    assert len(joining) == len(cores) - len(before)
                    free -= joining
                check_plan(decision.versions or (), decision.blocks, running[query_id])
            case Replan(query_id, versions, blocks):
                check_plan(versions, blocks, running[query_id])
            case Stop(query_id):
                assert query_id in running
            case Reject(query_id):
                assert waiting[query_id].rejects_late
            case StartOver(query_id):
                assert waiting[query_id].started
            case Wake(at_us):
                assert at_us > state.now_us


@pytest.mark.parametrize("name", [*sorted(POLICIES), "veltair:use"])
def test_a_policy_keeps_its_contract(name: str) -> None:
    generator = random.Random(7)
    policy, twin = make_policy(name), make_policy(name)
    for _ in range(200):
        state = situation(generator)
        decisions = list(policy.decide(state))
        assert decisions == list(twin.decide(state)), "deterministic"
        check(decisions, state)


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_a_lone_query_is_started_on_idle_cores(name: str) -> None:
    query = Query(1, 0, 1, 0.0, 6000.0)
    state = Snapshot(10.0, [query], [], tuple(range(CORES)), CORES, MODELS)
    assert any(isinstance(decision, Start) for decision in make_policy(name).decide(state))


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_requests_that_were_answered_unseen_count_like_others(name: str) -> None:
    """A policy that is told of several at once decides what one decides that is told of each."""
    generator = random.Random(8)
    at_once, one_by_one = (make_policy(name) for _ in range(2))
    for number in range(100):
        state = situation(generator)
        assert at_once.decide(state) == one_by_one.decide(state)
        requests = [answered(generator, state.now_us) for _ in range(generator.randrange(1, 8))]
        model_id = generator.choice(list(MODELS))
        at_once.answered(model_id, requests, 1000 * (number + 1))
        Policy.answered(one_by_one, model_id, requests, 1000 * (number + 1))


def answered(generator: random.Random, now_us: float) -> Completed:
    """A request that one of the gaps between two decisions had time for."""
    arrival_us = now_us - generator.choice([10.0, 1e3, 1e5])
    deadline_us = generator.choice([None, arrival_us + 20.0, arrival_us + 1e6])
    return Completed(0, generator.choice([0, 0, 1]), arrival_us, deadline_us, arrival_us + 5.0, arrival_us + 100.0)
