"""weaving, layerweaver and layerweaver_plus against cases worked out by hand."""

import pytest

from gangway.scheduler.policies.layerweaver import (
    LayerCandidate,
    LayerChoice,
    Layerweaver,
    LayerweaverPlus,
    least_idle,
    two_modes,
)
from gangway.scheduler.policy import Query, RunningBlock, Snapshot, Start
from gangway.scheduler.profiles import ModelProfile

MEMORY, COMPUTE = 1, 2


def model(model_id: int, memory_us: float, compute_us: float) -> ModelProfile:
    """Ten layers; a second core helps perfectly."""
    one_core_us = max(memory_us, compute_us)
    layer = ((one_core_us, one_core_us / 2),)
    return ModelProfile(
        model_id, "", 10, 2, (layer,) * 10, memory_us=(memory_us,) * 10, compute_us=(compute_us,) * 10, measured=True
    )


MODELS = {MEMORY: model(MEMORY, 2000.0, 500.0), COMPUTE: model(COMPUTE, 400.0, 2100.0)}


def query(query_id: int, model_id: int, deadline_us: float | None = None, next_layer: int = 0) -> Query:
    return Query(query_id, model_id, 1, float(query_id), deadline_us, 0, next_layer, next_layer > 0)


def starts(
    policy: Layerweaver, waiting: list[Query], running: list[RunningBlock], free: tuple[int, ...]
) -> list[Start]:
    decisions = policy.decide(Snapshot(1000.0, waiting, running, free, 2, MODELS))
    return [
        Start(decision.query_id, decision.end_layer, decision.cores)
        for decision in decisions
        if isinstance(decision, Start)
    ]


def test_choice_of_the_paper() -> None:
    relaxed = LayerCandidate(idle_us=5.0, end_us=100.0, due_us=1000.0, remaining_us=300.0)
    urgent = LayerCandidate(idle_us=50.0, end_us=180.0, due_us=401.0, remaining_us=300.0)
    assert two_modes([relaxed, urgent]) == LayerChoice(0)  # 401 - 100 > 300
    at_the_limit = LayerCandidate(idle_us=50.0, end_us=180.0, due_us=400.0, remaining_us=300.0)
    assert two_modes([relaxed, at_the_limit]) == LayerChoice(1, urgent=True)
    assert least_idle([relaxed, at_the_limit]) == LayerChoice(0)
    tie = LayerCandidate(idle_us=5.0, end_us=100.0, due_us=900.0, remaining_us=300.0)
    assert two_modes([relaxed, tie]) == LayerChoice(1)
    assert least_idle([relaxed, tie]) == LayerChoice(0)


@pytest.mark.parametrize("policy", [Layerweaver(), LayerweaverPlus()])
def test_memory_is_paired_with_compute(policy: Layerweaver) -> None:
    # Loads apart: 1500 us with a memory-bound layer, 1700 with a compute-bound one; then 3000 against 200.
    waiting = [query(1, MEMORY), query(2, MEMORY), query(3, COMPUTE)]
    assert starts(policy, waiting, [], (0, 1)) == [Start(1, 1, (0,)), Start(3, 1, (1,))]
    beside = RunningBlock(query(9, COMPUTE), 1, (0,), 900.0)
    assert starts(policy, [query(1, COMPUTE), query(2, MEMORY)], [beside], (1,)) == [Start(2, 1, (1,))]


def test_alone_a_chunk_has_the_machine() -> None:
    assert starts(Layerweaver(), [query(1, MEMORY, next_layer=3)], [], (0, 1)) == [Start(1, 4, (0, 1))]


def test_fig_3_an_imminent_deadline_goes_first_and_only_then() -> None:
    """Requests A and C of one kind, B of the other, which is late if it has to wait."""
    running = RunningBlock(query(9, COMPUTE), 1, (0,), 900.0)
    a, c = query(1, MEMORY, 90_000.0), query(3, MEMORY, 95_000.0)
    # B needs 10 x 1050 us on both cores. After A's layer on one core it would begin at 3000.
    late = query(2, COMPUTE, 1000.0 + 2000.0 + 10_500.0)
    in_time = query(2, COMPUTE, 1000.0 + 2000.0 + 10_501.0)
    assert starts(LayerweaverPlus(), [a, late, c], [running], (1,)) == [Start(2, 1, (1,))]
    assert starts(LayerweaverPlus(), [a, in_time, c], [running], (1,)) == [Start(1, 1, (1,))]
    assert starts(Layerweaver(), [a, late, c], [running], (1,)) == [Start(1, 1, (1,))]


def test_an_urgent_one_has_all_free_cores() -> None:
    late = query(2, COMPUTE, 2000.0)
    assert starts(LayerweaverPlus(), [query(1, MEMORY, 90_000.0), late], [], (0, 1)) == [Start(2, 1, (0, 1))]
