"""Who is given up for those that are still to come. Times are microseconds."""

from dataclasses import replace

import pytest

from gangway.scheduler.policies.gangway import Gangway
from gangway.scheduler.policies.gangway_jobs import BEST_EFFORT, ON_TIME, DecisionContext, Job
from gangway.scheduler.policies.gangway_order import classify
from gangway.scheduler.policies.gangway_overload import Foresight
from gangway.scheduler.policy import Query, RunningBlock, Snapshot, Stop
from gangway.scheduler.policy_config import DEFAULT
from gangway.scheduler.profiles import ModelProfile

SHORT, LONG = 0, 1
CORES = 2


def model(model_id: int, core_us: float, qos_us: float) -> ModelProfile:
    """Ten layers that scale perfectly."""
    grid = (core_us / 10, core_us / 20)
    return ModelProfile(
        model_id=model_id,
        name=f"model {model_id}",
        layers=10,
        max_ranks=CORES,
        latency_us=((grid,),) * 10,
        isolated_us=core_us / 2,
        qos_us=qos_us,
        measured=True,
    )


# On both cores SHORT takes 2000 and has 10000, LONG 20000 and has 60000.
MODELS = {SHORT: model(SHORT, 4000.0, 10_000.0), LONG: model(LONG, 40_000.0, 60_000.0)}


def query(query_id: int, model_id: int, arrival_us: float, priority: int = 0) -> Query:
    target_us = MODELS[model_id].qos_us
    assert target_us is not None
    return Query(query_id, model_id, 1, arrival_us, arrival_us + target_us, priority)


def snapshot(now_us: float, waiting: list[Query], running: tuple[RunningBlock, ...] = ()) -> Snapshot:
    free = () if running else (0, 1)
    return Snapshot(now_us, waiting, running, free, CORES, MODELS, way_back_us=0.0)


def after(gap_us: float, until_us: float, model_id: int = SHORT, priority: int = 0) -> Foresight:
    """What is foreseen when requests came so often until then."""
    foresight = Foresight()
    for number in range(int(until_us / gap_us) + 1):
        foresight.arrived(query(number, model_id, number * gap_us, priority))
    return foresight


def tier(foresight: Foresight, of: Query, now_us: float, models: dict[int, ModelProfile] = MODELS) -> int:
    state = replace(snapshot(now_us, [of]), models=models)
    job = Job(of, None, DecisionContext(state))
    classify([job])
    foresight.give_up([job], state)
    return job.tier


def test_a_long_query_is_given_up_while_shorter_ones_take_the_machine() -> None:
    # Of each 1900 SHORT takes 2080: of the 60000 nothing is left for LONG's 20800.
    assert tier(after(1900.0, 1e6), query(9999, LONG, 1e6), 1e6) == BEST_EFFORT


def test_nobody_is_given_up_while_the_machine_can_carry_what_comes() -> None:
    # Four fifths: LONG would have 60000 - 0.8 * 50000, which is less than it needs, but pauses come as well.
    assert tier(after(2600.0, 1e6), query(9999, LONG, 1e6), 1e6) == ON_TIME


def test_who_has_no_more_time_than_they_is_served_before_them() -> None:
    foresight = after(1900.0, 1e6)
    assert tier(foresight, query(9999, SHORT, 1e6), 1e6) == ON_TIME
    # 20800 of the last 22000 are needed; those who come in 12000 of them take 13100 first.
    assert tier(foresight, query(9999, LONG, 1e6 - 38_000.0), 1e6) == BEST_EFFORT
    almost_done = replace(query(9999, LONG, 1e6 - 38_000.0), next_layer=9, started=True)
    assert tier(foresight, almost_done, 1e6) == ON_TIME


def test_what_all_ask_for_together_counts() -> None:
    # SHORT takes 0.69 of the machine, LONG 0.42. 60000 - 0.69 * 50000 is enough for one, 35000 - 0.69 * 25000 is not.
    for more, expected in ((0, ON_TIME), (101, BEST_EFFORT)):
        foresight = after(3000.0, 5e6)
        for number in range(more):
            foresight.arrived(query(number, LONG, number * 50_000.0))
        assert tier(foresight, query(9999, LONG, 5e6), 5e6) == ON_TIME
        assert tier(foresight, query(9998, LONG, 5e6 - 25_000.0), 5e6) == expected


@pytest.mark.parametrize(("priority", "expected"), [(-1, BEST_EFFORT), (0, ON_TIME), (1, ON_TIME)])
def test_a_higher_class_goes_first_however_much_time_it_has(priority: int, expected: int) -> None:
    # LONG fills the machine, and its deadlines are later than that of the SHORT one.
    assert tier(after(20_000.0, 3e6, LONG, priority), query(9999, SHORT, 3e6), 3e6) == expected


def test_a_pause_ends_it() -> None:
    foresight = after(1900.0, 1e6)
    assert tier(foresight, query(9999, LONG, 1.5e6), 1.5e6) == ON_TIME


def test_a_model_that_has_gone_asks_for_nothing() -> None:
    foresight = after(1900.0, 1e6)
    assert tier(foresight, query(9999, LONG, 1e6), 1e6, {LONG: MODELS[LONG]}) == ON_TIME


def test_predictions_that_are_exceeded_are_a_higher_load() -> None:
    of, state = query(9999, LONG, 1e6), snapshot(1e6, [])
    for stretch, expected in ((DEFAULT.prediction.min_margin_factor, ON_TIME), (1.6, BEST_EFFORT)):
        stretched = replace(state, prediction_errors={SHORT: stretch})
        job = Job(of, None, DecisionContext(stretched))
        classify([job])
        after(2600.0, 1e6).give_up([job], stretched)
        assert job.tier == expected


def test_a_running_one_that_is_given_up_makes_room() -> None:
    # SHORT would wait 14000 of its 10000, LONG would be late if it waits: of the two the shorter one is saved.
    policy, now_us = Gangway(), 1e6
    long = query(8000, LONG, now_us - 38_000.0)
    block = RunningBlock(long, 10, (0, 1), now_us - 6001.0, 3, now_us - 1.0)
    for number in range(530):
        policy.arrived(query(number, SHORT, number * 1900.0))
    decisions = policy.decide(snapshot(now_us, [query(9999, SHORT, now_us)], (block,)))
    assert isinstance(decisions[0], Stop) and decisions[0].query_id == long.query_id
