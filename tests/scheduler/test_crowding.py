"""Who makes room in a crowd, worked out by hand."""

from gangway.scheduler.admission import crowded_out
from gangway.scheduler.policy import Query
from gangway.scheduler.profiles import ModelProfile

MODELS = {
    1: ModelProfile(1, "model", layers=1, max_ranks=1, latency_us=(((100.0,),),), isolated_us=100.0, measured=True)
}


def query(
    query_id: int, deadline_us: float | None, priority: int = 0, started: bool = False, model_id: int = 1
) -> Query:
    return Query(query_id, model_id, 1, float(query_id), deadline_us, priority, started=started)


def out(waiting: list[Query], count: int) -> list[int]:
    return crowded_out(waiting, MODELS, now_us=1000.0, core_count=2, count=count)


def test_the_oldest_late_ones_go_first_and_the_hopeful_never() -> None:
    waiting = [query(1, 2000.0), query(2, 1050.0), query(3, 900.0), query(4, 1101.0)]
    assert out(waiting, 1) == [2]
    assert out(waiting, 9) == [2, 3]


def test_then_the_newest_without_a_deadline() -> None:
    waiting = [query(1, None), query(2, None), query(3, 900.0), query(4, None)]
    assert out(waiting, 3) == [3, 4, 2]


def test_lower_classes_before_higher_ones() -> None:
    waiting = [query(1, 900.0), query(2, 900.0, priority=1), query(3, None, priority=-1), query(4, None)]
    assert out(waiting, 4) == [2, 1, 4, 3]


def test_what_has_begun_or_has_no_profile_stays() -> None:
    assert out([query(1, 900.0, started=True), query(2, 900.0, model_id=9), query(3, None, started=True)], 9) == []
