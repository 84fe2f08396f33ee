"""Which queries have to wait for others, although cores are free."""

from collections.abc import Sequence

from gangway.executor.slots import GOES_ON
from gangway.scheduler.messages import LoadModel, decode, encode
from gangway.scheduler.models import KEPT_US, RateLimiter
from gangway.scheduler.policy import Query


def model(model_id: int, *limits: tuple[str, int, int], priority: int = 0) -> LoadModel:
    return LoadModel(model_id, "m", "key", 1, 1, 64, 1, limits=limits, limit_priority=priority)


def query(query_id: int, model_id: int, **values: object) -> Query:
    values = {"deadline_us": None, **values}
    return Query(query_id, model_id, 1, arrival_us=query_id, **values)  # type: ignore[arg-type]


def ids(queries: Sequence[Query]) -> list[int]:
    return [query.query_id for query in queries]


def limits_of(*models: LoadModel) -> RateLimiter:
    limits = RateLimiter()
    for spec in models:
        limits.add(spec)
    return limits


def test_without_limits_there_are_none() -> None:
    limits = limits_of(model(1))
    assert not limits
    waiting = [query(1, 1), query(2, 1)]
    assert limits.admissible(waiting, [1] * 50, 9) is waiting


def test_so_many_queries_of_a_model_as_it_has_instances() -> None:
    limits = limits_of(model(1, ("a", 1, 2)), model(2))
    waiting = [query(1, 1), query(2, 2), query(3, 1), query(4, 1), query(5, 2)]
    assert ids(limits.admissible(waiting, [], 9)) == [1, 2, 3, 5]
    assert ids(limits.admissible(waiting, [1, 2], 9)) == [1, 2, 5]
    assert ids(limits.admissible(waiting, [1, 1], 9)) == [2, 5]
    assert ids(limits.admissible(waiting, [1, 1, 1], 9)) == [2, 5]  # there were more before it was loaded again


def test_a_limit_of_at_least_as_many_as_cores_cannot_bind() -> None:
    limits = limits_of(model(1, ("a", 1, 2)), model(2, ("r", 1, 4)), model(3, ("r", 2, 4)), model(4))
    assert [limits.may_bind(number, cores=2) for number in (1, 2, 3, 4)] == [False] * 4
    assert [limits.may_bind(number, cores=3) for number in (1, 2, 3, 4)] == [True, True, True, False]
    limits.remove(3)
    assert not limits.may_bind(2, cores=3)


def test_only_limits_that_can_bind_are_looked_at() -> None:
    limits = limits_of(model(1, ("a", 1, 2)), model(2, ("b", 1, 1)))
    waiting = [query(number, number % 2 + 1) for number in range(6)]
    assert ids(limits.admissible(waiting, [], 2)) == [0, 1, 2, 4]  # all of model 1, of which 2 at most can begin
    assert ids(limits.admissible(waiting, [], 3)) == [0, 1, 2]  # one is stopped


def test_own_limits() -> None:
    limits = limits_of(model(1, ("a", 1, 2)), model(2, ("b", 2, 5), ("c", 1, 3)), model(3, ("c", 1, 3)))
    assert [limits.own_limit(number) for number in (1, 2, 3)] == [2, 0, 0]
    limits.remove(3)
    assert limits.own_limit(2) == 2


def test_a_stopped_query_has_what_it_needs() -> None:
    limits = limits_of(model(1, ("a", 1, 1)))
    assert ids(limits.admissible([query(1, 1, started=True), query(2, 1)], [1], 9)) == [1]


def test_the_most_urgent_goes_first() -> None:
    limits = limits_of(model(1, ("a", 1, 1)))
    late, soon, first = query(1, 1, deadline_us=90.0), query(2, 1, deadline_us=50.0), query(3, 1, priority=-1)
    assert ids(limits.admissible([query(0, 1), late, soon, first], [], 9)) == [3]
    assert ids(limits.admissible([query(0, 1), late, soon], [], 9)) == [2]


def test_models_share_a_resource() -> None:
    limits = limits_of(model(1, ("r", 2, 3)), model(2, ("r", 1, 1)), model(3, ("other", 1, 1)))
    waiting = [query(1, 1), query(2, 1), query(3, 2), query(4, 2), query(5, 3)]
    assert ids(limits.admissible(waiting, [], 9)) == [1, 3, 5]
    assert ids(limits.admissible(waiting, [1], 9)) == [3, 5]
    limits.remove(1)
    assert ids(limits.admissible([query(3, 2), query(4, 2)], [], 9)) == [3]


def run(limits: RateLimiter, models: Sequence[int], turns: int) -> list[int]:
    """Whose turn it is, when always one query of each model waits."""
    order = []
    for _ in range(turns):
        (admitted,) = limits.admissible([query(10 + model_id, model_id) for model_id in models], [], 9)
        limits.started(admitted.model_id)
        order.append(admitted.model_id)
    return order


def test_a_model_of_priority_2_gets_half_the_turns() -> None:
    limits = limits_of(model(1, ("r", 1, 1), priority=1), model(2, ("r", 1, 1), priority=2))
    order = run(limits, [1, 2], 30)
    assert (order.count(1), order.count(2)) == (20, 10)
    limits.add(model(3, ("r", 1, 1), priority=1))
    order = run(limits, [1, 2, 3], 25)
    assert (order.count(1), order.count(2), order.count(3)) == (10, 5, 10)  # what was before is not made good


def test_more_than_there_is_is_never_given() -> None:
    limits = limits_of(model(1, ("r", 5, 5), ("a", 1, 9)))
    assert ids(limits.admissible([query(1, 1), query(2, 1)], [], 9)) == [1]


def test_limits_travel() -> None:
    spec = model(1, ("r", 2, 3), ("a", 1, 1), priority=2)
    assert decode(encode(spec)) == spec


def test_what_is_held_without_a_run_counts() -> None:
    """An instance of a Python model that waits has no core; on two cores its limit of two binds all the same."""
    limits = limits_of(model(1, ("a", 1, 2)), model(2))
    waiting = [query(1, 1), query(2, 1), query(3, 2), query(4, 1)]
    assert ids(limits.admissible(waiting, [], 2)) == [1, 2, 3, 4]
    assert not limits.is_held(1)
    limits.hold(0, 1, 1)
    assert limits.is_held(1)
    assert ids(limits.admissible(waiting, [], 2)) == [1, 3]
    limits.hold(1, 1, 1)
    assert ids(limits.admissible(waiting, [], 2)) == [3]
    limits.hold(0, 1, 0)
    assert ids(limits.admissible(waiting, [], 2)) == [1, 3]
    limits.forget(1)
    assert not limits.is_held(1)
    assert ids(limits.admissible(waiting, [], 2)) == [1, 2, 3, 4]


def test_what_goes_on_holds_already_what_it_needs() -> None:
    limits = limits_of(model(1, ("a", 1, 1)))
    limits.hold(0, 1, 1)
    waiting = [query(1, 1), query(2, 1, join_key=GOES_ON)]
    assert ids(limits.admissible(waiting, [], 9)) == [2]


def test_what_is_kept_counts_until_a_front_end_tells_of_it() -> None:
    limits = limits_of(model(1, ("a", 1, 2)), model(2))
    waiting = [query(1, 1), query(2, 1), query(3, 1)]
    limits.keep(1, now_us=100.0)
    limits.keep(2, now_us=100.0)
    assert limits.is_held(1)
    assert not limits.is_held(2), "it has no limits"
    assert limits.next_us(100.0) == 100.0 + KEPT_US
    assert ids(limits.admissible(waiting, [], 2)) == [1]
    limits.hold(0, 1, 1)
    assert limits.next_us(100.0) is None
    assert ids(limits.admissible(waiting, [], 2)) == [1], "it is counted once"
    limits.hold(0, 1, 0)
    assert ids(limits.admissible(waiting, [], 2)) == [1, 2, 3]


def test_a_front_end_that_does_not_tell_is_not_waited_for() -> None:
    limits = limits_of(model(1, ("a", 1, 1)))
    limits.keep(1, now_us=0.0)
    assert limits.admissible([query(1, 1)], [], 9) == []
    assert limits.next_us(KEPT_US + 1) is None
    assert ids(limits.admissible([query(1, 1)], [], 9)) == [1]
    assert not limits.is_held(1)


def test_a_newcomer_waits_for_those_of_its_model_that_could_not_begin() -> None:
    limits = limits_of(model(1, ("a", 1, 1)), model(2, ("b", 1, 1)))
    assert limits.refused_before(query(1, 1)) is None
    assert ids(limits.admissible([query(1, 1), query(2, 1), query(3, 2)], [], 9)) == [1, 3]
    assert limits.refused_before(query(4, 1)) == 2
    for other in (query(4, 2), query(4, 1, deadline_us=90.0), query(4, 1, priority=-1), query(4, 1, join_key=GOES_ON)):
        assert limits.refused_before(other) is None
    assert ids(limits.admissible([query(2, 1)], [], 9)) == [2]
    assert limits.refused_before(query(4, 1)) is None
