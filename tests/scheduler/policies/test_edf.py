"""edf, and what it shares with others (sharing, urgency), against cases worked out by hand."""

from gangway.scheduler.policies.baselines import EarliestDeadlineFirst
from gangway.scheduler.policy import Query, Resize, RunningBlock, Snapshot, Start, Stop
from gangway.scheduler.profiles import ModelProfile

WIDE, TRIPLE, WHOLE = 1, 2, 3


def model(model_id: int, max_ranks: int, indivisible: bool = False) -> ModelProfile:
    """Four layers of 400 us on one core, that scale perfectly."""
    layer = (tuple(400.0 / min(cores, max_ranks) for cores in range(1, 5)),)
    return ModelProfile(model_id, "", 4, max_ranks, (layer,) * 4, indivisible=indivisible, measured=True)


MODELS = {
    WIDE: model(WIDE, 8),
    TRIPLE: model(TRIPLE, 3),
    WHOLE: model(WHOLE, 1, indivisible=True),
}


def query(query_id: int, model_id: int, deadline_us: float | None, priority: int = 0, next_layer: int = 0) -> Query:
    return Query(query_id, model_id, 1, float(query_id), deadline_us, priority, next_layer, next_layer > 0)


def decide(waiting: list[Query], running: list[RunningBlock], leases: int = 99, now_us: float = 1000.0) -> list[object]:
    busy = {core for block in running for core in block.cores}
    free = tuple(core for core in range(4) if core not in busy)
    state = Snapshot(now_us, waiting, running, free, 4, MODELS, free_leases=leases)
    return [_plain(decision) for decision in EarliestDeadlineFirst().decide(state)]


def _plain(decision: object) -> object:
    """Return it without its reason."""
    match decision:
        case Start(query_id, end_layer, cores):
            return Start(query_id, end_layer, cores)
        case Stop(query_id):
            return Stop(query_id)
        case Resize(query_id, cores):
            return Resize(query_id, cores)
    return decision


def test_the_machine_goes_to_the_earliest_deadline_and_what_it_leaves_to_the_next() -> None:
    waiting = [query(1, WIDE, 9000.0), query(2, TRIPLE, 5000.0), query(3, WIDE, 8000.0)]
    assert decide(waiting, []) == [Start(2, 4, (0, 1, 2)), Start(3, 4, (3,))]


def test_a_later_deadline_makes_room() -> None:
    running = RunningBlock(query(1, WIDE, 9000.0), 4, (0, 1, 2, 3), 900.0)
    assert decide([query(2, WIDE, 5000.0)], [running]) == [Stop(1)]
    assert decide([query(2, TRIPLE, 5000.0)], [running]) == [Resize(1, (0,))]
    assert decide([query(2, WIDE, 9500.0)], [running]) == []


def test_a_query_begins_on_what_is_free_and_grows() -> None:
    leaving = RunningBlock(query(1, WIDE, 9000.0), 4, (0, 1, 2), 900.0, stopping=True)
    urgent = query(2, WIDE, 5000.0)
    assert decide([urgent], [leaving]) == [Start(2, 4, (3,))]
    begun = RunningBlock(urgent, 4, (3,), 950.0)
    assert decide([query(1, WIDE, 9000.0, next_layer=1)], [begun]) == [Resize(2, (3, 0, 1, 2))]


def test_priority_goes_before_deadlines_and_best_effort_ages() -> None:
    idle = query(1, WIDE, None)
    assert decide([idle, query(2, WIDE, 5000.0)], []) == [Start(2, 4, (0, 1, 2, 3))]
    assert decide([query(1, WIDE, None, priority=-1), query(2, WIDE, 5000.0)], []) == [Start(1, 4, (0, 1, 2, 3))]
    second_later = query(2, WIDE, 1_005_000.0)
    assert decide([idle, second_later], [], now_us=1_000_500.0) == [Start(1, 4, (0, 1, 2, 3))]


def test_leases_and_what_cannot_be_stopped() -> None:
    stopped = query(1, WIDE, 9000.0, next_layer=2)
    assert decide([stopped, query(2, WIDE, 5000.0)], [], leases=0) == [Start(1, 4, (0, 1, 2, 3))]
    whole = RunningBlock(query(3, WHOLE, 20_000.0), 4, (1,), 900.0)
    assert decide([query(4, WIDE, 5000.0)], [whole]) == [Start(4, 4, (0, 2, 3))]
