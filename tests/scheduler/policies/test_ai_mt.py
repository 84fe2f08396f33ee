"""ai_mt against cases worked out by hand."""

from gangway.scheduler.policies.layerweaver import AiMt
from gangway.scheduler.policy import Decision, Query, Resize, RunningBlock, Snapshot, Start
from gangway.scheduler.profiles import ModelProfile

MEMORY, COMPUTE = 1, 2


def model(model_id: int, memory_us: float, compute_us: float) -> ModelProfile:
    return ModelProfile(
        model_id, "", 5, 8, (((3000.0,) * 8,),) * 5, memory_us=(memory_us,) * 5, compute_us=(compute_us,) * 5
    )


MODELS = {MEMORY: model(MEMORY, 3000.0, 100.0), COMPUTE: model(COMPUTE, 100.0, 3000.0)}


def query(query_id: int, model_id: int) -> Query:
    return Query(query_id, model_id, 1, float(query_id), None)


def decide(waiting: list[Query], running: list[RunningBlock], leases: int = 9) -> list[Decision]:
    busy = {core for block in running for core in block.cores}
    free = tuple(core for core in range(8) if core not in busy)
    return AiMt().decide(Snapshot(100.0, waiting, running, free, 8, MODELS, free_leases=leases))


def starts(decisions: list[Decision]) -> list[tuple[int, int, tuple[int, ...]]]:
    return [(one.query_id, one.end_layer, one.cores) for one in decisions if isinstance(one, Start)]


def test_the_oldest_of_either_kind_run_side_by_side() -> None:
    waiting = [query(1, COMPUTE), query(2, COMPUTE), query(3, MEMORY), query(4, MEMORY)]
    assert starts(decide(waiting, [])) == [(3, 1, (0, 1)), (1, 1, (2, 3, 4, 5, 6, 7))]


def test_alone_a_chunk_has_the_machine() -> None:
    assert starts(decide([query(1, MEMORY)], [])) == [(1, 1, tuple(range(8)))]


def test_a_memory_block_is_fetched_early() -> None:
    running = RunningBlock(query(1, COMPUTE), 1, tuple(range(8)), 0.0)
    assert decide([query(2, MEMORY)], [running]) == [Resize(1, tuple(range(6)), "room for a memory-bound chunk")]
    assert decide([query(2, COMPUTE)], [running]) == []
    shrunk = RunningBlock(query(1, COMPUTE), 1, tuple(range(6)), 0.0)
    assert starts(decide([query(2, MEMORY), query(3, MEMORY)], [shrunk])) == [(2, 1, (6, 7))]


def test_leases() -> None:
    assert starts(decide([query(1, COMPUTE), query(2, MEMORY)], [], leases=1)) == [(1, 1, tuple(range(8)))]
