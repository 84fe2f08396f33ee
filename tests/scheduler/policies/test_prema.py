"""prema against cases worked out by hand."""

from gangway.scheduler.policies.baselines import QUOTA_US, Prema
from gangway.scheduler.policy import Decision, Query, RunningBlock, Snapshot, Start, Stop, Wake
from gangway.scheduler.profiles import ModelProfile

SHORT, LONG = 1, 2  # 1 ms and 10 ms on the whole machine of two cores


def model(model_id: int, layer_us: float) -> ModelProfile:
    return ModelProfile(model_id, "", 10, 2, (((2 * layer_us, layer_us),),) * 10, measured=True)


MODELS = {SHORT: model(SHORT, 100.0), LONG: model(LONG, 1000.0)}


def query(query_id: int, model_id: int, waited_us: float, priority: int = 0) -> Query:
    return Query(query_id, model_id, 1, 1e6 - waited_us, None, priority)


def decide(waiting: list[Query], running: list[RunningBlock]) -> list[Decision]:
    free = () if running else (0, 1)
    return Prema().decide(Snapshot(1e6, waiting, running, free, 2, MODELS))


def started(decisions: list[Decision]) -> list[int]:
    return [decision.query_id for decision in decisions if isinstance(decision, Start)]


def test_the_shortest_candidate_has_the_machine_alone() -> None:
    decisions = decide([query(1, LONG, 0.0), query(2, SHORT, 0.0)], [])
    assert decisions[0] == Start(2, 10, (0, 1), wanted=2, reason="shortest of those with tokens")
    assert decisions[1:] == [Wake(1e6 + QUOTA_US)]


def test_tokens_decide_who_is_a_candidate() -> None:
    # 3 (1 + 25 / 10) = 10.5 >= 9: a candidate. The short one has 3 (1 + 1 / 1) = 6 < 9: none, though shorter.
    assert started(decide([query(1, LONG, 25_000.0), query(2, SHORT, 1000.0)], [])) == [1]
    # After 2 ms it has 9, too.
    assert started(decide([query(1, LONG, 25_000.0), query(2, SHORT, 2000.0)], [])) == [2]


def test_priority_multiplies_tokens() -> None:
    # 9 at once against 3 (1 + 1.9) = 8.7
    assert started(decide([query(1, SHORT, 1900.0), query(2, LONG, 0.0, priority=-1)], [])) == [2]
    # 1 (1 + 1.9) = 2.9 is below the threshold 3 of one that has just come
    assert started(decide([query(1, SHORT, 1900.0, priority=1), query(2, LONG, 0.0)], [])) == [2]


def test_a_short_query_preempts_a_long_one_unless_that_is_about_to_end() -> None:
    long_one = query(1, LONG, 5000.0)
    early = RunningBlock(long_one, 10, (0, 1), 1e6 - 5000.0, layer=5)
    assert decide([query(2, SHORT, 0.0)], [early])[0] == Stop(1, reason="others go first")
    # Tokens are for the long one, but waiting for the last layer costs it 0.1 / 10, being stopped the other one 10 / 1.
    nearly_done = RunningBlock(query(1, SHORT, 900.0), 10, (0, 1), 1e6 - 900.0, layer=9)
    assert decide([query(2, LONG, 30_000.0)], [nearly_done]) == [Wake(1e6 + QUOTA_US)]


def test_waiting_counts_only_off_the_cores() -> None:
    # The stopped one ran for 24 of its 25 ms: 3 (1 + 0.1) tokens; nobody reaches 9, so the shorter one goes.
    stopped = Query(1, LONG, 1, 1e6 - 25_000.0, None, next_layer=2, started=True, ran_us=24_000.0)
    assert started(decide([stopped, query(2, SHORT, 0.0)], [])) == [2]
