"""VELTAIR's spatial policies against cases worked out by hand, on 8 cores.

A unit takes `UNIT` beside its layers, and a tenth of each target is for waiting. `LADDER`: 10 ms and one `UNIT` are
there for each of its layers. They take 10, 40, 20 and 10 ms on one core, and scale perfectly: so they ask for 1, 4, 2
and 1 cores, and the whole model for 2. `FRAGILE`: one layer with two versions, for which 8 ms and one `UNIT` are there:
16 ms x (1 + level), and 20 ms x (1 + 0.2 level).
"""

from dataclasses import replace

import pytest

from gangway.scheduler.policies.registry import make_policy
from gangway.scheduler.policy import Query, Resize, RunningBlock, Snapshot, Start
from gangway.scheduler.profiles import ModelProfile

CORES = 8
UNIT = 30.0
LADDER, FRAGILE = 1, 2


def scaled(core_us: float) -> tuple[float, ...]:
    return tuple(core_us / count for count in range(1, CORES + 1))


MODELS = {
    LADDER: ModelProfile(
        LADDER, "ladder", 4, CORES, tuple((scaled(1e3 * time),) for time in (10, 40, 20, 10)), compute_us=(1.0,) * 4,
        memory_us=(0.0,) * 4, slope=((0.0,),) * 4, qos_us=(40e3 + 4 * UNIT) / 0.9,
    ),
    FRAGILE: ModelProfile(
        FRAGILE, "fragile", 1, CORES, ((scaled(16e3), scaled(20e3)),), slope=((1.0, 0.2),), qos_us=(8e3 + UNIT) / 0.9
    ),
}  # fmt: skip


def query(query_id: int, model_id: int = LADDER, next_layer: int = 0) -> Query:
    return Query(query_id, model_id, 1, 1e3 * query_id, None, next_layer=next_layer, started=next_layer > 0)


def running(
    query_id: int, cores: tuple[int, ...], next_layer: int = 0, end: int = 4, share: float = 0.0
) -> RunningBlock:
    """A block of the ladder of which this share of its predicted time is over at 1 s."""
    of = query(query_id, LADDER, next_layer)
    time_us = MODELS[LADDER].span_us(next_layer, end, len(cores))
    return RunningBlock(of, end, cores, 1e6 - share * time_us, next_layer, 1e6)


def state(waiting: list[Query], free: int, blocks: list[RunningBlock] | None = None, level: float = 0.0) -> Snapshot:
    """The last `free` cores are free."""
    return Snapshot(1e6, waiting, blocks or [], tuple(range(CORES - free, CORES)), CORES, MODELS, level)


def started(policy: str, snapshot: Snapshot) -> list[tuple[int, int, int, int]]:
    """Each query that is started: its number, its block's end, cores, and cores wanted."""
    return [
        (one.query_id, one.end_layer, len(one.cores), one.wanted)
        for one in make_policy(policy).decide(snapshot)
        if isinstance(one, Start)
    ]


@pytest.mark.parametrize(("layer", "cores"), [(0, 1), (1, 4), (2, 2), (3, 1)])
def test_planaria_gives_each_layer_its_cores(layer: int, cores: int) -> None:
    assert started("planaria", state([query(1, next_layer=layer)], 8)) == [(1, layer + 1, cores, cores)]


def test_planaria_starts_units_by_arrival_and_the_last_on_what_is_left() -> None:
    waiting = [query(1, next_layer=1), query(2, next_layer=2), query(3, next_layer=1), query(4)]
    assert started("planaria", state(waiting, 8)) == [(1, 2, 4, 4), (2, 3, 2, 2), (3, 2, 2, 4)]


def test_a_unit_in_conflict_grows_before_younger_ones_start() -> None:
    policy = make_policy("planaria")
    (start,) = policy.decide(state([query(1, next_layer=1)], 2))
    assert isinstance(start, Start) and (start.cores, start.wanted) == ((6, 7), 4)
    short = running(1, (6, 7), 1, 2)
    first = replace(state([query(2)], 1, [short]), free_cores=(0,))
    assert [(type(one), one.cores) for one in policy.decide(first)] == [(Resize, (6, 7, 0))]
    short = replace(short, cores=(6, 7, 0))
    then = replace(state([query(2)], 3, [short]), free_cores=(1, 2, 3))
    assert [(type(one), one.cores) for one in policy.decide(then)] == [(Resize, (6, 7, 0, 1)), (Start, (2,))]
    assert policy.decide(replace(state([], 1, [replace(short, cores=(6, 7, 0, 1))]), free_cores=(4,))) == []


def test_an_older_query_starts_before_a_younger_one_grows() -> None:
    policy = make_policy("planaria")
    policy.decide(state([query(5, next_layer=1)], 2))
    snapshot = replace(state([query(3, next_layer=2)], 2, [running(5, (6, 7), 1, 2)]), free_cores=(0, 1, 2))
    assert [(type(one), one.cores) for one in policy.decide(snapshot)] == [(Start, (0, 1)), (Resize, (6, 7, 2))]


def test_a_unit_that_is_told_to_stop_does_not_grow() -> None:
    policy = make_policy("planaria")
    policy.decide(state([query(1, next_layer=1)], 2))
    assert policy.decide(state([], 4, [replace(running(1, (0, 1), 1, 2), stopping=True)])) == []


def test_without_leases_only_started_queries_go_on() -> None:
    snapshot = replace(state([query(1), query(2, next_layer=3)], 8), free_leases=0)
    assert started("planaria", snapshot) == [(2, 4, 1, 1)]


def test_fixed_blocks() -> None:
    assert started("fixed_block:2", state([query(1)], 8)) == [(1, 2, 3, 3)]  # 50 ms in 20
    assert started("fixed_block:2", state([query(1, next_layer=2)], 8)) == [(1, 4, 2, 2)]  # 30 ms in 20
    assert started("fixed_block:3", state([query(1, next_layer=3)], 8)) == [(1, 4, 1, 1)]
    assert started("fixed_block", state([query(1)], 8)) == [(1, 4, 2, 2)]


@pytest.mark.parametrize("text", ["fixed_block:0", "fixed_block:six", "fixed_block:-1", "fixed_block:²"])
def test_a_fixed_block_needs_a_number(text: str) -> None:
    with pytest.raises(ValueError, match="a number of layers, as in fixed_block:6"):
        make_policy(text)


def test_veltair_alone_runs_a_whole_model() -> None:
    """Threshold 6, so 8 cores: no layer asks for so many. One block on the average demand."""
    assert started("veltair_as", state([query(1)], 8)) == [(1, 4, 2, 2)]


def test_veltair_in_company_cuts_blocks() -> None:
    """Two others: (8 - 6) x 2 / 6 = 0.67 of the idle cores: layers of 3 and more begin blocks, which have 3 at most."""
    others = [running(8, (0, 1)), running(9, (2, 3))]
    assert started("veltair_as", state([query(10)], 4, others)) == [(10, 1, 1, 1)]
    assert started("veltair_as", state([query(10, next_layer=1)], 4, others)) == [(10, 4, 3, 3)]  # 70 ms in 30


def test_veltair_in_a_crowd_has_its_average() -> None:
    """Three others, no idle core on average: the layer of 4 cores has 2, up to the next layer of 2."""
    others = [running(7, (0,)), running(8, (1,)), running(9, (2,))]
    assert started("veltair_as", state([query(10, next_layer=1)], 4, others)) == [(10, 2, 2, 2)]


def test_in_the_second_reading_a_block_takes_what_the_threshold_leaves() -> None:
    """Alone the ladder may have all cores, which make it faster than the 2 that it needs."""
    alone = state([query(1)], 8)
    assert started("veltair", alone) == [(1, 4, 2, 2)]
    assert started("veltair:use", alone) == [(1, 4, 8, 8)]
    with pytest.raises(ValueError, match="takes no argument or"):
        make_policy("veltair:cap")


def test_queries_that_start_together_count_as_active() -> None:
    """Each is cut by the load so far: alone; then of two, (8 - 4) x 2 / 4 = 2, so layers of 4 are pivots."""
    assert started("veltair_as", state([query(1), query(2)], 8)) == [(1, 4, 2, 2), (2, 1, 1, 1)]


def test_queries_about_to_end_are_not_active() -> None:
    others = [running(8, (0, 1), share=0.95), running(9, (2, 3), share=0.95)]
    assert started("veltair_as", state([query(10)], 4, others)) == [(10, 4, 2, 2)]
    others = [running(8, (0, 1), end=1, share=0.95), running(9, (2, 3), end=1, share=0.95)]  # they have more blocks
    assert started("veltair_as", state([query(10)], 4, others)) == [(10, 1, 1, 1)]


def version(policy: str, snapshot: Snapshot) -> tuple[tuple[int, ...], int]:
    (start,) = make_policy(policy).decide(snapshot)
    assert isinstance(start, Start)
    return start.versions, start.wanted


@pytest.mark.parametrize("policy", ["veltair", "veltair_ac", "protean"])
def test_versions_follow_the_level(policy: str) -> None:
    """Version 0 takes 16 (1 + i), version 1 20 (1 + 0.2 i): equal at 1 / 3; 8 ms are there."""
    others = [running(9, (0, 1))]
    assert version(policy, state([query(10, FRAGILE)], 6, others)) == ((), 2)
    assert version(policy, state([query(10, FRAGILE)], 6, others, level=0.3)) == ((), 3)  # 20.8 ms in 8
    assert version(policy, state([query(10, FRAGILE)], 6, others, level=0.5)) == ((1,), 3)  # 22 ms, not 24


@pytest.mark.parametrize("policy", ["planaria", "veltair_as", "fixed_block", "model_fcfs"])
def test_others_keep_the_first_version_and_its_demand(policy: str) -> None:
    assert version(policy, state([query(10, FRAGILE)], 6, [running(9, (0, 1))], level=2.0)) == ((), 2)


def test_the_level_that_ends_with_its_units_is_ignored() -> None:
    """Of 4 busy cores 2 are about to be left: half of the level stays."""
    others = [running(8, (0, 1), share=0.99), running(9, (2, 3))]
    assert version("veltair", state([query(10, FRAGILE)], 4, others, level=0.6)) == ((), 3)
    assert version("veltair", state([query(10, FRAGILE)], 4, others, level=1.0)) == ((1,), 3)
    assert version("veltair", state([query(10, FRAGILE)], 4, others[:1], level=2.0)) == ((), 2)


def test_growing_chooses_versions_anew() -> None:
    """Version 1 does not use more than one core, and version 0 is slower on one."""
    grids = ((20e3, 10e3, 5e3, 4e3), (16e3, 16e3, 16e3, 16e3))
    models = {0: ModelProfile(0, "two", 1, 4, (grids,), slope=((1.0, 1.0),), qos_us=6e3)}
    policy = make_policy("veltair")
    waiting = Query(1, 0, 1, 0.0, 6e3)
    (start,) = policy.decide(Snapshot(0.0, [waiting], [], (0,), 4, models))
    assert isinstance(start, Start) and start.versions == (1,) and start.wanted > 1
    block = RunningBlock(waiting, 1, (0,), 0.0, versions=start.versions)
    (resize,) = policy.decide(Snapshot(100.0, [], [block], (1, 2), 4, models))
    assert isinstance(resize, Resize) and len(resize.cores) == 3 and resize.versions == ()


def test_the_threshold_limits_what_a_block_needs_or_is_what_it_can_use() -> None:
    """Alone on 8 cores the model needs 2; its layers of 4 get faster with all."""
    assert started("veltair_as", state([query(1)], 8)) == [(1, 4, 2, 2)]
    (begun,) = started("veltair_as:use", state([query(1)], 8))
    assert begun[2] > 2 and begun[:2] == (1, 4)
    crowd = [running(7, (0,)), running(8, (1,)), running(9, (2,))]
    assert started("veltair_as:use", state([query(10, next_layer=1)], 4, crowd)) == [(10, 2, 2, 2)]
    with pytest.raises(ValueError, match="takes no argument or 'use'"):
        make_policy("veltair:cap")


def test_protean_waits_for_its_whole_gang() -> None:
    assert started("protean", state([query(1)], 2)) == [(1, 4, 2, 2)]
    assert started("protean", state([query(1), query(2, FRAGILE)], 1)) == []
