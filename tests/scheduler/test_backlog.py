"""How many late and best-effort queries may wait in an overload, worked out by hand."""

import pytest

from gangway.scheduler.limits import BURST_US, MEMORY_US, OVERLOAD_US, OVERLOADED_US, PATIENCE_US, LateBacklog
from gangway.scheduler.policy import Query
from gangway.scheduler.profiles import ModelProfile
from gangway.scheduler.waiting import WaitingQueries

SECOND_US = 1e6
NOW_US = 1000 * SECOND_US
CORES = 2


def model(number: int, layer_us: float, varies: bool = False) -> ModelProfile:
    times = (((layer_us, layer_us / 2),),)
    return ModelProfile(number, f"m{number}", 1, 2, times, isolated_us=layer_us / 2, measured=True, varies=varies)


# half a second, a tenth, and one second of the whole machine
MODELS = {
    1: model(1, SECOND_US),
    2: model(2, SECOND_US / 5),
    3: ModelProfile(3, "m3", 1, 2, (((2 * SECOND_US, SECOND_US),),)),
}
MODELS[4] = model(4, 2 * SECOND_US, varies=True)


def waiting(*queries: Query) -> WaitingQueries:
    queue = WaitingQueries()
    for query in queries:
        queue.add(query)
    return queue


def late(number: int, model_id: int = 1, priority: int = 0, rows: int = 1, started: bool = False) -> Query:
    arrival_us = NOW_US - 100 * SECOND_US + number
    return Query(number, model_id, rows, arrival_us, arrival_us + 1.0, priority, started=started)


def hopeful(number: int) -> Query:
    return Query(number, 1, 1, NOW_US - SECOND_US, NOW_US + SECOND_US)


def excess(queue: WaitingQueries, backlog: LateBacklog | None = None) -> list[int]:
    return (backlog or LateBacklog()).excess(queue.groups, MODELS, NOW_US, CORES)


def test_two_seconds_of_the_machine_may_wait_in_any_case() -> None:
    assert excess(waiting(*map(late, range(4)))) == []


def test_of_more_the_oldest_go_until_there_is_room() -> None:
    """5 halves of a second are 2.5; until 1.75 remain, 2 have to go."""
    assert excess(waiting(*map(late, range(5)), *map(hopeful, range(50, 90)))) == [0, 1]


def test_when_some_had_to_go_only_half_a_second_may_wait_for_some_time() -> None:
    backlog = LateBacklog()
    assert excess(waiting(*map(late, range(4))), backlog) == []
    assert backlog.most_us(NOW_US) == BURST_US
    assert excess(waiting(*map(late, range(5))), backlog) == [0, 1]
    assert excess(waiting(*map(late, range(2, 5))), backlog) == [2, 3, 4]
    assert backlog.most_us(NOW_US + OVERLOADED_US - 1) == OVERLOAD_US
    assert backlog.most_us(NOW_US + OVERLOADED_US) == BURST_US


def test_the_lowest_class_goes_first() -> None:
    queue = waiting(*(late(number, priority=number % 2) for number in range(5)))
    assert excess(queue) == [1, 3]


def test_rows_count() -> None:
    assert excess(waiting(*(late(number, model_id=2, rows=10) for number in range(2)))) == []
    assert excess(waiting(*(late(number, model_id=2, rows=11) for number in range(2)))) == [0]


@pytest.mark.parametrize("model_id", [3, 4, 9])
def test_those_whose_time_nobody_knows_stay(model_id: int) -> None:
    assert excess(waiting(*(late(number, model_id) for number in range(100)))) == []


def test_what_has_started_stays() -> None:
    assert excess(waiting(*(late(number, started=True) for number in range(100)))) == []


def test_more_may_wait_where_late_ones_are_most_of_what_is_served() -> None:
    """Half of the machine's time for so long as is remembered: half a minute of work may wait."""
    backlog = LateBacklog()
    for number in range(int(MEMORY_US / SECOND_US)):
        assert backlog.most_us(NOW_US) == BURST_US
        backlog.answered(late(number), MODELS[1], NOW_US, CORES)
    assert backlog.most_us(NOW_US) == pytest.approx(PATIENCE_US / 2)
    assert excess(waiting(*map(late, range(60))), backlog) == []
    assert excess(waiting(*map(late, range(61))), backlog)[0] == 0
    assert backlog.most_us(NOW_US + 10 * MEMORY_US) == BURST_US


def test_answers_in_time_say_nothing() -> None:
    backlog = LateBacklog()
    for number in range(100):
        backlog.answered(hopeful(number), MODELS[1], NOW_US, CORES)
    assert backlog.most_us(NOW_US) == BURST_US


def test_beside_much_late_work_few_of_best_effort_may_wait() -> None:
    """The oldest of the highest class. Three halves of a second are much, two are not."""
    best_effort = [Query(100 + number, 1, 1, float(number), None, priority=number == 0) for number in range(34)]
    started = Query(200, 1, 1, 99.0, None, started=True)
    assert excess(waiting(*best_effort, started, *map(late, range(2)))) == []
    assert excess(waiting(*best_effort, started, *map(late, range(3)))) == [133, 100]
    lower = [late(number, priority=1) for number in range(3)]
    assert excess(waiting(*best_effort, started, *lower)) == [], "those of a higher class have their turn before"
