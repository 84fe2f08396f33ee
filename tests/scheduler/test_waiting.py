"""The queue of waiting queries, by arrival and by kind."""

import random
from dataclasses import replace

import pytest

from gangway.scheduler.policy import Query
from gangway.scheduler.waiting import KIND, WaitingQueries


def query(number: int, rng: random.Random) -> Query:
    deadline_us = rng.choice((None, rng.uniform(0, 100)))
    return Query(number, rng.randrange(3), rng.randint(1, 4), rng.uniform(0, 100), deadline_us, rng.randrange(2))


# Groups are kept from when somebody asks for them.
@pytest.mark.parametrize("asked_at", [pytest.param(0, marks=pytest.mark.long), 100])
def test_groups_are_the_queue_by_kind_whatever_comes_and_goes(asked_at: int) -> None:
    rng = random.Random(3)
    waiting, known = WaitingQueries(), dict[int, Query]()
    for step in range(300):
        if known and rng.random() < 0.4:
            number = rng.choice(list(known))
            assert waiting.find(number) is known[number]
            taken = waiting.take(number)
            assert taken is known.pop(number)
            if rng.random() < 0.5:
                known[number] = replace(taken, started=True)
                waiting.add(known[number])
        else:
            known[step + 1] = query(step + 1, rng)
            waiting.add(known[step + 1])
        in_order = sorted(known.values(), key=lambda each: (each.arrival_us, each.query_id))
        assert waiting.in_order == in_order and len(waiting) == len(in_order)
        if step < asked_at:
            continue
        groups = {KIND(group.in_order[0]): group for group in waiting.groups}
        assert {kind: group.in_order for kind, group in groups.items()} == {
            kind: [each for each in in_order if KIND(each) == kind] for kind in map(KIND, in_order)
        }
        assert all(group.rows == sum(each.rows for each in group.in_order) for group in groups.values())


def test_what_does_not_wait_is_not_found() -> None:
    waiting = WaitingQueries()
    for missing in (waiting.find, waiting.take):
        with pytest.raises(KeyError):
            missing(1)


@pytest.mark.parametrize("seed", range(10))
def test_the_earliest_deadlines_from_some_time_on_and_the_oldest_others(seed: int) -> None:
    rng = random.Random(seed)
    waiting = WaitingQueries()
    for number in range(1, rng.randint(2, 80)):
        waiting.add(query(number, rng))
    for group in waiting.groups:
        from_us, on_time, others = rng.uniform(0, 100), rng.randrange(6), rng.randrange(6)
        in_time = [each for each in group.in_order if each.deadline_us is not None and each.deadline_us >= from_us]
        late = [each for each in group.in_order if each.deadline_us is not None and each not in in_time]
        best_effort = [each for each in group.in_order if each.deadline_us is None]
        in_time.sort(key=lambda each: (each.deadline_us or 0, each.query_id))
        rest = sorted(late[:others] + best_effort[:others], key=lambda each: (each.arrival_us, each.query_id))
        assert group.split_at(from_us, on_time, others) == (in_time[:on_time], rest)
