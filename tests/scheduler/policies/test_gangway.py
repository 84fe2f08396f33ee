"""The default policy in situations whose numbers can be worked out by hand. Times are microseconds."""

import math
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from gangway.scheduler.policies.gangway import Gangway, ask, candidates
from gangway.scheduler.policies.gangway_jobs import DecisionContext, Job
from gangway.scheduler.policies.gangway_order import classify, in_order
from gangway.scheduler.policy import (
    Decision,
    Query,
    Replan,
    Resize,
    RunningBlock,
    Snapshot,
    Start,
    StartOver,
    Stop,
    Wake,
)
from gangway.scheduler.policy_config import DEFAULT
from gangway.scheduler.profiles import ModelProfile
from gangway.simulator.loop import simulate
from gangway.simulator.machine import Machine
from gangway.simulator.results import Result
from gangway.workload.arrivals import poisson
from gangway.workload.mix import Mix, MixModel

SHORT, LONG, LAZY = 0, 1, 2


def model(model_id: int, layer_us: float, layers: int, qos_us: float | None, cores: int = 2) -> ModelProfile:
    """Layers that scale perfectly: `layer_us` on one core, half of it on two."""
    grid = tuple(layer_us / count for count in range(1, cores + 1))
    return ModelProfile(
        model_id=model_id,
        name=f"model {model_id}",
        layers=layers,
        max_ranks=cores,
        latency_us=((grid,),) * layers,
        isolated_us=layers * grid[-1],
        qos_us=qos_us,
        measured=True,
    )


# On both cores: SHORT takes 4000, LONG 40000 (20 layers of 2000), LAZY 50000 without a target.
MODELS = {
    SHORT: model(SHORT, 1000.0, 8, 12_000.0),
    LONG: model(LONG, 4000.0, 20, 120_000.0),
    LAZY: model(LAZY, 2000.0, 50, None),
}

# As LONG, but for one core only.
NARROW = replace(MODELS[LONG], max_ranks=1, latency_us=(((4000.0, 4000.0),),) * 20)


def query(query_id: int, model_id: int, arrival_us: float, layer: int = 0, priority: int = 0) -> Query:
    target_us = MODELS[model_id].qos_us
    deadline_us = None if target_us is None else arrival_us + target_us
    return Query(query_id, model_id, 1, arrival_us, deadline_us, priority, layer, layer > 0)


def running(
    of: Query, now_us: float, layer: int = 0, cores: tuple[int, ...] = (0, 1), in_layer_us: float = 0.0
) -> RunningBlock:
    layers = MODELS[of.model_id].layers
    return RunningBlock(of, layers, cores, now_us - in_layer_us - 1e-3, layer, now_us - in_layer_us)


def decide(
    now_us: float, waiting: list[Query], blocks: list[RunningBlock], policy: Gangway | None = None
) -> list[Decision]:
    used = {core for block in blocks for core in block.cores}
    free = tuple(core for core in range(2) if core not in used)
    return list((policy or Gangway()).decide(Snapshot(now_us, waiting, blocks, free, 2, MODELS)))


def test_a_lone_query_has_the_machine_to_its_end() -> None:
    [start] = decide(0.0, [query(1, SHORT, 0.0)], [])
    assert isinstance(start, Start)
    assert (start.cores, start.end_layer, start.wanted) == ((0, 1), 8, 2)


def test_an_urgent_query_stops_one_that_has_time() -> None:
    # LONG needs 40000 of its 120000; SHORT would wait 40000 and has 12000.
    [stop, *_] = decide(0.0, [query(2, SHORT, 0.0)], [running(query(1, LONG, 0.0), 0.0)])
    assert isinstance(stop, Stop) and stop.query_id == 1


@pytest.mark.parametrize(("in_layer_us", "at_once"), [(1900.0, False), (200.0, True)])
def test_it_waits_for_a_layer_boundary_that_is_near(in_layer_us: float, at_once: bool) -> None:
    block = running(query(1, LONG, 0.0), 2000.0, in_layer_us=in_layer_us)
    [stop, *_] = decide(2000.0, [query(2, SHORT, 2000.0)], [block])
    assert isinstance(stop, Stop) and stop.at_once == at_once


def test_nobody_is_stopped_who_is_nearly_done() -> None:
    # LONG is in its last layer with 200 to go: a switch costs more.
    block = running(query(1, LONG, 0.0), 39_800.0, layer=19, in_layer_us=1800.0)
    assert not any(isinstance(each, Stop) for each in decide(39_800.0, [query(2, SHORT, 39_800.0)], [block]))


def test_nobody_is_stopped_if_that_costs_as_many_deadlines_as_it_saves() -> None:
    # LONG, with 6000 to do, has 7000 left: 4000 for SHORT make it late.
    # SHORT has 9500, and would be late if it waited for LONG.
    late_start = query(1, LONG, -113_000.0, layer=17)
    decisions = decide(0.0, [query(2, SHORT, -2500.0)], [running(late_start, 0.0, layer=17)])
    assert not any(isinstance(each, Stop | Resize) for each in decisions)


def test_one_that_was_given_up_yields_to_one_that_takes_far_less() -> None:
    # LONG, with half of its work (20000) to do, has 21000 left, SHORT 12000 for 4000: one of them will be late.
    late_start = query(1, LONG, -99_000.0, layer=10)
    [stop, *_] = decide(0.0, [query(2, SHORT, 0.0)], [running(late_start, 0.0, layer=10)])
    assert isinstance(stop, Stop) and stop.query_id == 1


def test_best_effort_yields_to_a_deadline() -> None:
    [stop, *_] = decide(0.0, [query(2, SHORT, 0.0)], [running(query(1, LAZY, -100.0), 0.0)])
    assert isinstance(stop, Stop) and stop.query_id == 1


def test_a_query_certain_to_be_late_yields_to_one_that_can_be_in_time() -> None:
    # SHORT number 1 has 1000 left and needs 4000.
    [stop, *_] = decide(11_000.0, [query(2, SHORT, 11_000.0)], [running(query(1, SHORT, 0.0), 11_000.0)])
    assert isinstance(stop, Stop) and stop.query_id == 1


def test_late_queries_wait_behind_those_that_can_be_in_time() -> None:
    [start] = decide(11_000.0, [query(1, SHORT, 0.0), query(2, SHORT, 11_000.0)], [])
    assert isinstance(start, Start) and start.query_id == 2


def test_a_late_query_goes_before_a_longer_one_that_can_spare_the_time() -> None:
    # SHORT number 1 is lost. LONG needs 41600 with the margin: of 120000 it can spare 4160 for it, of 45000 it cannot.
    lost = query(1, SHORT, 0.0)
    [start] = decide(13_000.0, [lost, query(2, LONG, 13_000.0)], [])
    assert isinstance(start, Start) and start.query_id == 1
    [start] = decide(13_000.0, [lost, replace(query(2, LONG, 13_000.0), deadline_us=58_000.0)], [])
    assert isinstance(start, Start) and start.query_id == 2


@pytest.mark.parametrize(("slack_us", "first"), [(88_000.0, 1), (86_000.0, 2)])
def test_it_does_not_go_before_one_that_must_begin_on_its_only_core(slack_us: float, first: int) -> None:
    # LONG takes 80000 there, 83200 with the margin. That is half of the machine's time; SHORT would have all of it.
    waiting = [query(1, SHORT, 0.0), replace(query(2, LONG, 13_000.0), deadline_us=13_000.0 + slack_us)]
    state = Snapshot(13_000.0, waiting, [], (0, 1), 2, {**MODELS, LONG: NARROW})
    start, *_ = Gangway().decide(state)
    assert isinstance(start, Start) and start.query_id == first


def test_of_many_that_are_late_and_stopped_those_who_have_done_least_start_over() -> None:
    # Four may keep what they hold, on two cores. A best-effort query and one that can be in time keep it, too.
    now_us = 200_000.0
    late = [query(number, LONG, float(number), layer=1 + number) for number in range(1, 7)]
    others = [query(11, LAZY, 0.0, layer=1), query(12, LONG, 150_000.0, layer=1)]
    decisions = decide(now_us, [*late, *others], [])
    assert [each.query_id for each in decisions if isinstance(each, StartOver)] == [1, 2]
    assert not any(isinstance(each, StartOver) for each in decide(now_us, late[2:] + others, []))


def test_their_leases_are_for_those_who_come() -> None:
    now_us = 200_000.0
    late = [query(number, LONG, float(number), layer=1 + number) for number in range(1, 6)]
    state = Snapshot(now_us, [*late, query(9, SHORT, now_us)], [], (0, 1), 2, MODELS, free_leases=0)
    over, start = Gangway().decide(state)
    assert isinstance(over, StartOver) and over.query_id == 1
    assert isinstance(start, Start) and start.query_id == 9


@pytest.mark.parametrize(("late_since_us", "first"), [(100_000.0, 1), (109_000.0, 2)])
def test_who_is_late_by_ten_times_the_target_does_not_go_before_others(late_since_us: float, first: int) -> None:
    # There are hundreds of them in an overload: whoever can spare the time would wait for all of them.
    now_us = 12_000.0 + late_since_us
    late, long = query(1, SHORT, 0.0), query(2, LONG, now_us)
    context = DecisionContext(Snapshot(now_us, [late, long], [], (0, 1), 2, MODELS))
    jobs = [Job(each, None, context) for each in (late, long)]
    classify(jobs)
    for job in jobs:
        ask(job)
    assert in_order(jobs)[0].query.query_id == first


def test_a_late_query_takes_the_cores_of_a_longer_one_that_can_spare_the_time() -> None:
    lost, long = query(1, SHORT, 0.0), query(2, LONG, 10_000.0)
    [stop, *_] = decide(13_000.0, [lost], [running(long, 13_000.0, layer=1)])
    assert isinstance(stop, Stop) and stop.query_id == 2
    hurried = replace(long, deadline_us=55_000.0)
    assert not any(isinstance(each, Stop) for each in decide(13_000.0, [lost], [running(hurried, 13_000.0, layer=1)]))


def test_as_few_as_possible_are_given_up() -> None:
    # LONG, due at 45000, needs 41600 with the margin; after it no SHORT (4160) would be in time. Without it all are.
    first = Query(1, LONG, 1, -79_000.0, 45_000.0)
    shorts = [Query(number, SHORT, 1, 0.0, 46_000.0 + number) for number in (2, 3, 4)]
    [start] = decide(0.0, [first, *shorts], [])
    assert isinstance(start, Start) and start.query_id == 2


def test_a_higher_class_goes_first_whatever_the_deadlines() -> None:
    soon, higher = query(1, SHORT, 0.0), query(2, LONG, 0.0, priority=-1)
    [start] = decide(0.0, [soon, higher], [])
    assert isinstance(start, Start) and start.query_id == 2
    [stop, *_] = decide(0.0, [higher], [running(soon, 0.0)])
    assert isinstance(stop, Stop) and stop.query_id == 1


def test_idle_cores_are_used_and_given_back() -> None:
    of = query(1, LONG, 0.0)
    [grow] = decide(0.0, [], [running(of, 0.0, cores=(0,))])
    assert grow == Resize(1, (0, 1), grow.reason)
    nearly_done = running(of, 0.0, layer=19, cores=(0,), in_layer_us=3900.0)
    assert decide(0.0, [], [nearly_done]) == []


def test_a_waiting_query_is_looked_at_again_when_it_gets_urgent() -> None:
    # SHORT can wait 5000 for the end of LONG, but not much longer: 12000 - 4160 - 300 - 150 from now.
    block = running(query(1, LONG, -35_000.0), 0.0, layer=17, in_layer_us=1000.0)
    decisions = decide(0.0, [query(2, SHORT, 0.0)], [block])
    [wake] = [each for each in decisions if isinstance(each, Wake)]
    assert wake.at_us == pytest.approx(12_000.0 - DEFAULT.prediction.min_margin_factor * 4000.0 - 300.0 - 150.0)


def test_what_takes_longer_than_predicted_lately_gets_urgent_earlier() -> None:
    block = running(query(1, LONG, -35_000.0), 0.0, layer=17, in_layer_us=1000.0)
    state = Snapshot(0.0, [query(2, SHORT, 0.0)], [block], (), 2, MODELS, prediction_errors={SHORT: 1.5})
    [wake] = [each for each in Gangway().decide(state) if isinstance(each, Wake)]
    assert wake.at_us == pytest.approx(12_000.0 - 1.5 * 4000.0 - 300.0 - 150.0)


def test_nothing_starves_nor_has_more_than_its_share() -> None:
    # A stream of SHORT that fills the machine, and one LAZY: a driver of one machine, without overheads.
    policy, now_us, served_us = Gangway(), 0.0, 0.0
    lazy = query(0, LAZY, 0.0)
    generator = random.Random(1)
    for number in range(1, 4000):
        short = query(number, SHORT, now_us)
        decisions = decide(now_us, [lazy, short], [], policy)
        [start] = [each for each in decisions if isinstance(each, Start)]
        ran_us = 4000.0 * generator.uniform(0.9, 1.1)
        if start.query_id == 0:
            served_us += ran_us
        now_us += ran_us
    assert served_us / (now_us - 1e6) == pytest.approx(DEFAULT.aging.machine_share, rel=0.1)


def test_a_model_whose_deadlines_are_missed_is_not_given_up_again() -> None:
    # What is left of LONG (36000) and four SHORT (4000 each) are all due within 50000: one of the five has to go.
    shorts = [Query(number, SHORT, 1, 0.0, 50_000.0) for number in (2, 3, 4, 5)]
    jobs = [Query(1, LONG, 1, -60_000.0, 50_000.0, 0, 2, True), *shorts]
    policy = Gangway()
    [start] = decide(0.0, jobs, [], policy)
    assert isinstance(start, Start) and start.query_id == 2
    for number in range(100, 130):
        policy.finished(Query(number, LONG, 1, 0.0, 1.0), now_us=2.0)
    [start] = decide(0.0, jobs, [], policy)
    assert isinstance(start, Start) and start.query_id == 1


def test_very_many_queries_are_not_all_planned() -> None:
    # 1000 that are late, one in the middle of a higher class, one that has begun, and the last one can be in time.
    late = [query(number, SHORT, -1e6 + number) for number in range(1000)]
    begun, higher, hopeful = (
        query(400, SHORT, -9e5, layer=3),
        query(600, SHORT, -8e5, priority=-1),
        query(1000, SHORT, 0.0),
    )
    late[400], late[600] = begun, higher
    found = candidates([*late, hopeful], 0.0, 2, MODELS)
    assert {begun.query_id, higher.query_id, hopeful.query_id} <= {each.query_id for each in found}
    assert len(found) < 100


def test_versions_follow_the_level_of_interference() -> None:
    # Version 1 takes 1200 instead of 1000, but interference does nothing to it.
    two = ((1000.0, 500.0), (1200.0, 600.0))
    tuned = replace(MODELS[SHORT], latency_us=(two,) * 8, slope=((1.0, 0.0),) * 8)
    for level, versions in ((0.0, ()), (0.1, ()), (0.5, (1,) * 8)):
        [start] = Gangway().decide(Snapshot(0.0, [query(1, SHORT, 0.0)], [], (0, 1), 2, {SHORT: tuned}, level))
        assert isinstance(start, Start) and start.versions == versions


@pytest.mark.parametrize(
    ("slack_us", "cores"), [(1e6, 2), (60_000.0, 2), (57_000.0, 3), (40_000.0, 4), (28_000.0, 8), (-1.0, 2)]
)
def test_a_query_asks_for_what_is_efficient_or_what_its_deadline_needs(slack_us: float, cores: int) -> None:
    # A layer takes 1000 + 5000 / cores. The second core adds 0.71 of what one does, the third 0.54. The 16 layers take
    # 56000, 42667, 36000, 26000 on 2, 3, 4, 8 cores; 4 % more are planned, and 150 for the way.
    assert asked([1000.0 + 5000.0 / count for count in range(1, 9)], slack_us).gang == cores


# Of 8 equal tiles each core takes as many: 5 to 7 cores, and 9 to 15, are as fast as 4 and 8.
IN_TILES = [math.ceil(8 / count) * 500.0 for count in range(1, 17)]


def test_a_query_asks_for_no_cores_that_do_not_pay() -> None:
    at_leisure = asked(IN_TILES, 1e6)
    assert at_leisure.gang == at_leisure.idle == 8
    slow = [4000.0, 3000.0, 2500.0, 2200.0, 2100.0, 2000.0, 1900.0, 1000.0]
    assert asked(slow, 1e6).gang == 1
    assert asked(slow, 35_500.0).gang == 8, "5 would do, but take 168 instead of 128 ms of core time"


def asked(layer_us: Sequence[float], slack_us: float) -> Job:
    """Return a query of 16 layers that asks for cores; `layer_us`: of each on 1, 2, ... cores."""
    count = len(layer_us)
    models = {0: replace(MODELS[SHORT], layers=16, max_ranks=count, latency_us=((tuple(layer_us),),) * 16)}
    job = Job(
        Query(1, 0, 1, 0.0, slack_us), None, DecisionContext(Snapshot(0.0, [], [], tuple(range(count)), count, models))
    )
    classify([job])
    ask(job)
    return job


def under_load(share: float, weights: dict[int, float]) -> Result:
    """Simulate models on two cores at a rate that is so many times what they can do. Models are numbered from 0."""
    mix = Mix("test", tuple(MixModel(MODELS[number].name, weight) for number, weight in weights.items())).resolve()
    models = {index: replace(MODELS[number], model_id=index) for index, number in enumerate(weights)}
    capacity_per_us = 1 / sum(part * models[index].isolated_us for index, part in enumerate(mix.shares))
    arrivals = poisson(mix, share * capacity_per_us * 1e6, 1500, seed=1)
    return simulate(Gangway(), models, arrivals, Machine(2, leases=16))


def test_queries_are_in_time_and_stopped_seldom() -> None:
    result = under_load(0.45, {SHORT: 0.9, LONG: 0.1})
    latency_us, models = result.outcomes.latency_us, result.outcomes.models
    for number in (SHORT, LONG):
        assert (latency_us[models == number] <= MODELS[number].qos_us).mean() > 0.97
    assert result.counters.preemptions < 0.4 * len(models)


def test_too_many_queries_do_not_harm_each_other() -> None:
    met = []
    for share in (0.9, 3.0):
        result = under_load(share, {SHORT: 1.0})
        met.append(share * (result.outcomes.latency_us <= 12_000.0).mean())
    assert met[1] > 0.9 * met[0]


def test_best_effort_progresses_while_deadlines_fill_the_machine() -> None:
    result = under_load(1.5, {SHORT: 0.95, LAZY: 0.05})
    latency_us, models = result.outcomes.latency_us, result.outcomes.models
    arrivals_us = result.outcomes.scheduled_us
    first = (models == 1) & (arrivals_us < 0.1 * arrivals_us[-1])
    assert (arrivals_us + latency_us)[first].max() < arrivals_us[-1]


def test_parts_of_a_batch_have_the_cores_that_were_planned_for_them() -> None:
    parts = [replace(query(number, LONG, 0.0), rows=4, cores=1, formed=True) for number in (1, 2)]
    assert [(start.query_id, start.cores) for start in decide(0.0, parts, [])] == [(1, (0,)), (2, (1,))]


def test_a_part_of_a_batch_leaves_idle_cores_alone_until_it_runs() -> None:
    part = replace(query(1, LONG, 0.0), cores=1, formed=True)
    [start] = decide(0.0, [part], [])
    assert isinstance(start, Start) and start.cores == (0,)
    [resize] = decide(1000.0, [], [running(part, 1000.0, cores=(0,))])
    assert resize == Resize(1, (0, 1), "it can use idle cores")


def test_a_part_of_a_batch_does_not_ask_for_more_although_it_would_be_late() -> None:
    # 80000 on one core, 40000 on two; the other part is to have the second core.
    parts = [replace(query(number, LONG, 0.0), deadline_us=60_000.0, cores=1, formed=True) for number in (1, 2)]
    assert [start.cores for start in decide(0.0, parts, [])] == [(0,), (1,)]


def scaling(source: random.Random, model_id: int, cores: int) -> ModelProfile:
    """A model that has use for some of the cores, with versions that bear interference better or worse."""
    most, versions, layers = source.randint(1, cores), source.randint(1, 3), source.randint(1, 20)
    gain = source.uniform(0.2, 1.0)
    times = [
        tuple(
            tuple(us / (1 + gain * (min(count, most) - 1)) for count in range(1, cores + 1))
            for us in (source.choice([20.0, 1000.0]) * (1 + 0.1 * version) for version in range(versions))
        )
        for _ in range(layers)
    ]
    return ModelProfile(
        model_id=model_id,
        name=f"model {model_id}",
        layers=layers,
        max_ranks=most,
        latency_us=tuple(times),
        slope=tuple(tuple(source.uniform(0.0, 2.0) for _ in range(versions)) for _ in range(layers)),
        isolated_us=sum(layer[0][-1] for layer in times),
        qos_us=source.choice([None, 5000.0, 1e5]),
        measured=source.random() < 0.8,
        indivisible=source.random() < 0.1,
    )


def test_a_lone_query_begins_as_the_policy_says_beforehand() -> None:
    """What `lone_start` says. Nobody else waits, and those at work cannot grow."""
    source = random.Random(1)
    told = 0
    for _ in range(4000):
        now_us, cores = source.uniform(0.0, 1e6), source.randint(1, 6)
        kinds = [scaling(source, number, cores) for number in range(3)]
        level, way_back_us = source.choice([0.0, 0.5, 3.0]), source.choice([0.0, 150.0])
        busy: list[int] = []
        blocks = []
        for number in range(source.randint(0, cores)):
            kind = source.choice(kinds)
            if len(busy) + kind.max_ranks <= cores:
                gang = tuple(range(len(busy), len(busy) + kind.max_ranks))
                busy += gang
                blocks.append(block_of(source, arrived(source, number, kind, now_us), kind, gang, now_us))
        free = tuple(core for core in range(cores) if core not in busy)
        kind = source.choice(kinds)
        lone = arrived(source, 10, kind, now_us)
        policy = Gangway()
        start = policy.lone_start(kind, cores, level)
        assert start is not None
        slack_us = float("inf") if lone.deadline_us is None else lone.deadline_us - now_us - way_back_us
        if start.cores > len(free) or (start.may_grow and slack_us < start.min_slack_us):
            continue
        told += 1
        for of in [block.query for block in blocks] * 2:
            policy.finished(of, source.uniform(0.0, 2e6))
        models = {kind.model_id: kind for kind in kinds}
        errors = {0: source.uniform(1.0, 2.0)}
        leases, slowdown = source.randint(4, 16), source.choice([1.0, 1.3])
        decisions = policy.decide(
            Snapshot(now_us, [lone], blocks, free, cores, models, level, leases, way_back_us, errors, slowdown)
        )
        expected = Start(10, kind.layers, free[: start.cores], start.versions, start.cores)
        found = [decision for decision in decisions if not isinstance(decision, Replan)]  # of others, for what is next
        assert [replace(decision, reason="", blocks=()) for decision in found] == [expected]  # type: ignore[call-arg]
    assert told > 1500


def arrived(source: random.Random, number: int, kind: ModelProfile, now_us: float) -> Query:
    arrival_us = now_us - source.choice([0.0, 1e3, 1e5])
    deadline_us = None if kind.qos_us is None else arrival_us + kind.qos_us
    return Query(number, kind.model_id, 1, arrival_us, deadline_us, source.choice([0, 0, 1, 2]))


def block_of(
    source: random.Random, of: Query, kind: ModelProfile, gang: tuple[int, ...], now_us: float
) -> RunningBlock:
    layer = source.randrange(kind.layers)
    return RunningBlock(of, kind.layers, gang, now_us - 9.0, layer, now_us - 5.0, source.random() < 0.2)


def test_gangs_are_narrow_where_those_of_several_cores_lose_more() -> None:
    # Two cores do 1.8 times the work of one. If they wait for each other so that it takes a third longer, 1.35 times.
    grid = (1000.0, 1000.0 / 1.8)
    almost = replace(MODELS[LAZY], latency_us=((grid,),) * 8, layers=8, isolated_us=8 * grid[1])
    waiting = [query(1, LAZY, 0.0), query(2, LAZY, 0.0)]
    for gang_slowdown, cores in ((1.0, [(0, 1)]), (1.33, [(0,), (1,)])):
        state = Snapshot(0.0, waiting, [], (0, 1), 2, {LAZY: almost}, gang_slowdown=gang_slowdown)
        assert [start.cores for start in Gangway().decide(state) if isinstance(start, Start)] == cores
