"""How many late and best-effort queries may wait in an overload, worked out by hand."""

import pytest

from gangway.scheduler.admission import excess
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


def refused(queue: WaitingQueries) -> list[int]:
    return excess(queue.groups, MODELS, NOW_US, CORES)


def test_two_seconds_of_the_machine_may_wait_in_any_case() -> None:
    assert refused(waiting(*map(late, range(4)))) == []


def test_of_more_the_oldest_go_until_there_is_room() -> None:
    """5 halves of a second are 2.5; until 1.75 remain, 2 have to go."""
    assert refused(waiting(*map(late, range(5)), *map(hopeful, range(50, 90)))) == [0, 1]


def test_the_lowest_class_goes_first() -> None:
    queue = waiting(*(late(number, priority=number % 2) for number in range(5)))
    assert refused(queue) == [1, 3]


def test_rows_count() -> None:
    assert refused(waiting(*(late(number, model_id=2, rows=10) for number in range(2)))) == []
    assert refused(waiting(*(late(number, model_id=2, rows=11) for number in range(2)))) == [0]


@pytest.mark.parametrize("model_id", [3, 4, 9])
def test_those_whose_time_nobody_knows_stay(model_id: int) -> None:
    assert refused(waiting(*(late(number, model_id) for number in range(100)))) == []


def test_what_has_started_stays() -> None:
    assert refused(waiting(*(late(number, started=True) for number in range(100)))) == []


def test_beside_much_late_work_few_of_best_effort_may_wait() -> None:
    """The oldest of the highest class. Five halves of a second are too much, four are not."""
    best_effort = [Query(100 + number, 1, 1, float(number), None, priority=number == 0) for number in range(34)]
    started = Query(200, 1, 1, 99.0, None, started=True)
    assert refused(waiting(*best_effort, started, *map(late, range(4)))) == []
    assert refused(waiting(*best_effort, started, *map(late, range(5)))) == [133, 100, 0, 1]
    lower = [late(number, priority=1) for number in range(5)]
    assert refused(waiting(*best_effort, started, *lower)) == [0, 1], "those of a higher class have their turn before"
