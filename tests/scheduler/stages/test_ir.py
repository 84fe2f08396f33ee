"""Schedules of compound tasks: every layer once, in order, on the cores that there are."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gangway.scheduler.profiles import ModelProfile
from gangway.scheduler.stages.ir import parallel, schedule, schedule_us, sequential, stage_us


def stream(number, *layers_us, scales=True, cores=8):
    """Layers that scale perfectly, or not at all."""
    times = tuple((tuple(us / k if scales else us for k in range(1, cores + 1)),) for us in layers_us)
    return ModelProfile(number, f"m{number}", len(times), cores, times)


@st.composite
def cuts(draw):
    models = draw(st.lists(st.lists(st.integers(1, 1000), min_size=1, max_size=6), min_size=1, max_size=5))
    streams = [stream(number, *layers) for number, layers in enumerate(models)]
    barriers = draw(st.integers(0, 4))
    one = st.integers(0, 6)
    rows = [sorted(min(draw(one), s.layers) for _ in range(barriers)) for s in streams]
    return streams, tuple(map(tuple, rows)), draw(st.integers(1, 8))


@given(cuts())
def test_each_layer_once_in_order_on_cores_that_exist(cut):
    streams, pointers, cores = cut
    stages = schedule(streams, pointers, cores)
    for stage in stages:
        assert 0 < sum(segment.cores for segment in stage) <= cores
        assert len({segment.stream for segment in stage}) == len(stage)
    for number, one in enumerate(streams):
        spans = [(s.begin, s.end) for stage in stages for s in stage if s.stream == number]
        assert [layer for begin, end in spans for layer in range(begin, end)] == list(range(one.layers))


def test_the_longest_segment_gets_the_cores():
    streams = [stream(0, 600.0), stream(1, 100.0), stream(2, 100.0)]
    (stage,) = schedule(streams, parallel(streams), 8)
    assert [segment.cores for segment in stage] == [6, 1, 1]
    assert stage_us(streams, stage) == 100.0


@given(st.lists(st.lists(st.integers(1, 9), min_size=6, max_size=6), min_size=1, max_size=3), st.integers(3, 6))
def test_no_other_shares_of_cores_make_the_stage_shorter(curves, cores):
    """Times by number of cores are any: more cores may be slower."""
    streams = [ModelProfile(number, "m", 1, 6, ((tuple(map(float, us)),),)) for number, us in enumerate(curves)]
    (stage,) = schedule(streams, parallel(streams), cores)
    shares = (counts for counts in product(range(1, cores + 1), repeat=len(curves)) if sum(counts) <= cores)
    least_us = min(max(us[count - 1] for us, count in zip(curves, counts, strict=True)) for counts in shares)
    assert stage_us(streams, stage) == least_us


def test_models_that_do_not_scale_gain_from_running_side_by_side():
    streams = [stream(0, 50.0, 50.0, scales=False), stream(1, 100.0, scales=False)]
    one_by_one = schedule(streams, sequential(streams), 8)
    assert [[segment.stream for segment in stage] for stage in one_by_one] == [[0], [1]]
    assert schedule_us(streams, one_by_one) == 200.0
    assert schedule_us(streams, schedule(streams, parallel(streams), 8)) == 100.0


def test_more_models_than_cores_take_turns():
    streams = [stream(number, 10.0) for number in range(3)]
    assert [len(stage) for stage in schedule(streams, parallel(streams), 2)] == [2, 1]


@pytest.mark.parametrize("pointers", [((1,),), ((2, 1), (0, 0)), ((0, 3), (0, 0)), ((-1,), (0,)), ((1,), ())])
def test_pointers_that_cut_nothing_are_refused(pointers):
    with pytest.raises(ValueError, match=r"pointer|model"):
        schedule([stream(0, 1.0, 1.0), stream(1, 1.0)], pointers, 2)
