"""Versions and blocks that the default policy plans, in cases worked out by hand."""

from dataclasses import replace

from gangway.scheduler.policies.gangway import Gangway
from gangway.scheduler.policies.gangway_blocks import REASON, BlockPlanner, cut
from gangway.scheduler.policies.gangway_jobs import DecisionContext, Job
from gangway.scheduler.policy import Decision, PlannedBlock, Query, Replan, Resize, RunningBlock, Snapshot, Start
from gangway.scheduler.policy_config import DEFAULT, PolicyConfig
from gangway.scheduler.prediction import demands
from gangway.scheduler.profiles import ModelProfile

CORES = 4
WIDE = tuple(8000.0 / count for count in range(1, CORES + 1))  # scales perfectly
NARROW = (2000.0,) * CORES  # does not scale
# The layers have their share of 60 ms by their time on one core: so all can be in time on one core each.
MODEL = ModelProfile(
    0, "uneven", 6, CORES, ((WIDE,), (WIDE,), (NARROW,), (NARROW,), (WIDE,), (NARROW,)), qos_us=60e3, measured=True,
    isolated_us=12e3,
)  # fmt: skip
TUNED = replace(MODEL, latency_us=((WIDE, NARROW),) * 6, slope=((1.0, 0.0),) * 6, model_id=1)
MODELS = {0: MODEL, 1: TUNED}


def test_a_block_keeps_the_cores_that_are_efficient_in_it() -> None:
    """Every layer asks for one core; where a limit of 2 finds no pivot the model is one block."""
    assert cut(demands(MODEL, adaptive=True), 4, 1, 1.0, 0.8).blocks == ()
    urgent = replace(MODEL, qos_us=15e3)  # the wide layers need 4 cores, or nearly
    table = demands(urgent, adaptive=True)
    found = cut(table, 4, 1, 0.0, 0.8)
    pivots = [layer for layer in range(1, 6) if table.layer_cores[layer] >= table.average_cores]
    assert pivots[-1] == 4 and [block.layer for block in found.blocks] == pivots
    assert {block.cores for block in cut(table, 4, 4, 0.0, 0.8).blocks} == {4}, "nobody takes what others do not want"
    cores = [4, *(block.cores for block in found.blocks)]
    assert cores == sorted(cores, reverse=True)
    assert found.longer_us >= 0.0


def query(number: int, model_id: int = 0, priority: int = 0, deadline_us: float | None = None) -> Query:
    return Query(number, model_id, 1, 0.0, deadline_us, priority)


def decided(policy: Gangway, state: Snapshot) -> list[Decision]:
    return list(policy.decide(state))


def test_a_running_query_gets_other_versions_when_the_level_changes() -> None:
    """Version 1 takes 2 ms on any number of cores and level, version 0 8 ms x (1 + level) on one."""
    policy = Gangway()
    [start] = decided(policy, Snapshot(0.0, [query(1, 1)], [], (0,), 1, MODELS))
    assert isinstance(start, Start) and start.versions == (1,) * 6
    running = RunningBlock(query(1, 1), 6, (0, 1, 2, 3), 0.0, versions=())
    newcomer = [query(2, 1)]
    [replan] = decided(policy, Snapshot(10.0, newcomer, [running], (), CORES, MODELS, level=0.5))
    assert isinstance(replan, Replan) and replan.versions == (1,) * 6  # 2 ms instead of 3
    assert decided(policy, Snapshot(20.0, newcomer, [running], (), CORES, MODELS, level=0.0)) == []


def test_a_query_that_grows_or_shrinks_gets_versions_for_its_cores() -> None:
    """On 4 cores both take as long, the first one counts; on one core version 1 is faster."""
    policy = Gangway()
    narrow = RunningBlock(query(1, 1), 6, (0,), 0.0, versions=(1,) * 6)
    wider = replace(TUNED, latency_us=((WIDE, tuple(5000.0 for _ in range(CORES))),) * 6)
    [resize] = decided(policy, Snapshot(10.0, [], [narrow], (1, 2, 3), CORES, {1: wider}))
    assert isinstance(resize, Resize) and len(resize.cores) > 1 and resize.versions == ()
    unchanged = RunningBlock(query(1, 1), 6, (0,), 0.0)
    slow = replace(TUNED, latency_us=((WIDE, (9000.0,) * CORES),) * 6)
    [resize] = decided(policy, Snapshot(10.0, [], [unchanged], (1, 2, 3), CORES, {1: slow}))
    assert isinstance(resize, Resize) and resize.versions is None


def test_a_query_begins_with_a_plan_of_blocks() -> None:
    """On two cores only a model with versions does: others have one or all there."""
    urgent = replace(MODEL, qos_us=15e3)
    times = tuple((one, tuple(0.99 * us for us in one)) for (one,) in MODEL.latency_us)
    tuned = replace(urgent, latency_us=times, slope=((1.0, 0.0),) * 6)
    for model, cores, planned in ((urgent, 6, True), (urgent, 2, False), (tuned, 2, True)):
        waiting = [Query(number, 0, 1, 0.0, 26e3) for number in (1, 2)]
        [start, *_] = decided(Gangway(), Snapshot(0.0, waiting, [], tuple(range(cores)), cores, {0: model}))
        assert isinstance(start, Start) and bool(start.blocks) == planned, (cores, model.latency_us[0])


def plans_for(
    slack_us: float, grant: int, others: int = 0, config: PolicyConfig = DEFAULT, blocks: tuple[PlannedBlock, ...] = ()
) -> list[Replan]:
    """What becomes of a query in its first layer on all cores: it is to have `grant` of them, others the rest."""
    now_us = 9000.0
    urgent = replace(MODEL, qos_us=15e3)
    running = RunningBlock(query(1, deadline_us=now_us + slack_us), 6, (0, 1, 2, 3), now_us, 0, now_us, blocks=blocks)
    state = Snapshot(now_us, [], [running], (), CORES, {0: urgent}, way_back_us=0.0)
    context = DecisionContext(state, config)
    job, other = Job(running.query, running, context), Job(query(2), None, context)
    job.grant, other.grant = grant, others or CORES - grant
    return list(BlockPlanner([other, job], config).changes([other, job], []))


def test_a_query_gives_up_what_is_not_efficient_at_the_next_block() -> None:
    """Its layers need 3, 3, 1, 1, 3 and 1 cores, and 8/3 on average: those of 3 are pivots when no core is idle.

    From the second layer on 3 cores are needed, and each of 4 does less than 0.8 of what it does alone.
    """
    planned = [Replan(1, (), (PlannedBlock(1, 3), PlannedBlock(4, 3)), REASON)]
    assert plans_for(1e6, grant=1) == planned, "others are to have its cores"
    assert plans_for(1e6, grant=4, others=1) == planned, "its cores are its own, and no core is idle"
    assert plans_for(1e6, grant=4) == [], "cores are idle"
    same = (PlannedBlock(1, 3), PlannedBlock(3, 3))
    assert plans_for(1e6, grant=1, blocks=same) == [], "no block has other cores"
    assert plans_for(8e3, grant=1) == [], "it would be late"
    assert plans_for(1e6, grant=1, config=DEFAULT.without("blocks")) == []


def test_a_plan_ends_when_nobody_waits_any_more() -> None:
    running = RunningBlock(query(1), 6, (0, 1, 2, 3), 0.0, blocks=(PlannedBlock(4, 1),))
    others = RunningBlock(query(2), 6, (4,), 0.0)
    state = Snapshot(10.0, [], [running, others], (5,), 6, {0: replace(MODEL, latency_us=MODEL.latency_us)})
    plans = [decision for decision in decided(Gangway(), state) if isinstance(decision, Replan)]
    assert [plan.query_id for plan in plans] == [1] and plans[0].blocks == ()
