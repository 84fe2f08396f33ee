"""Turns of Python models: who leaves its core to others, and when."""

from gangway.executor.slots import GOES_ON
from gangway.scheduler.policies.turns import DUE_TURN_US, TURN_US, Holder, over
from gangway.scheduler.policy import Query

LONG, OTHER = 1, 2  # models
BEGIN_US = 1e6


def query(
    number: int, model_id: int = OTHER, deadline_us: float | None = None, priority: int = 0, join_key: int = 0
) -> Query:
    return Query(number, model_id, 1, BEGIN_US, deadline_us, priority, join_key=join_key)


def holder(number: int = 7, since_us: float = BEGIN_US, usual_us: float = 1e9, **more: float) -> Holder:
    return Holder(query(number, LONG, **more), since_us, usual_us)  # type: ignore[arg-type]


def test_a_turn_ends_when_another_model_waits() -> None:
    for waiting, turn_us in ((query(8), TURN_US), (query(8, deadline_us=2e6), DUE_TURN_US)):
        assert over([waiting], [holder()], 0, BEGIN_US + turn_us - 1) == ([], BEGIN_US + turn_us)
        assert over([waiting], [holder()], 0, BEGIN_US + turn_us) == ([7], None)
    assert over([], [holder()], 0, 9e6) == ([], None)


def test_who_usually_ends_in_two_turns_has_two() -> None:
    for waiting, turn_us in ((query(8), TURN_US), (query(8, deadline_us=2e6), DUE_TURN_US)):
        ending = holder(usual_us=2 * turn_us)
        assert over([waiting], [ending], 0, BEGIN_US + 2 * turn_us - 1) == ([], BEGIN_US + 2 * turn_us)
        assert over([waiting], [ending], 0, BEGIN_US + 2 * turn_us) == ([7], None)
        for usual_us in (turn_us / 2, 2 * turn_us + 1):
            assert over([waiting], [holder(usual_us=usual_us)], 0, BEGIN_US + turn_us) == ([7], None)


def test_the_more_urgent_one_keeps_its_core() -> None:
    now_us = BEGIN_US + TURN_US
    assert over([query(8)], [holder(deadline_us=2e6)], 0, now_us) == ([], None)
    assert over([query(8, deadline_us=3e6)], [holder(deadline_us=2e6)], 0, now_us) == ([], None)
    assert over([query(8, deadline_us=2e6)], [holder(deadline_us=3e6)], 0, now_us) == ([7], None)
    assert over([query(8, priority=1)], [holder()], 0, now_us) == ([], None)
    assert over([query(8)], [holder(priority=1)], 0, now_us) == ([7], None)


def test_requests_of_one_model_follow_each_other() -> None:
    """But what has had a turn before makes room for the first one of others."""
    now_us = BEGIN_US + TURN_US
    assert over([query(8, LONG)], [holder()], 0, now_us) == ([], None)
    assert over([query(8, LONG)], [holder(join_key=GOES_ON)], 0, now_us) == ([7], None)


def test_as_many_leave_as_wait() -> None:
    holders = [holder(7, BEGIN_US + 1), holder(5), holder(6, BEGIN_US + 2)]
    now_us = BEGIN_US + 2 * TURN_US
    assert over([query(8), query(9)], holders, 0, now_us) == ([5, 7], None)
    assert over([query(8), query(9)], holders, 1, now_us) == ([5], None)
    assert over([query(8), query(9)], holders, 2, now_us) == ([], None)
    assert over([query(number) for number in range(8, 20)], holders, 0, now_us) == ([5, 7, 6], None)
