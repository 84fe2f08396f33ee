"""Searches for compound schedules: never worse than the plain ones, the best of what was measured, resumable."""

from itertools import islice
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gangway.scheduler.profiles import ModelProfile
from gangway.scheduler.stages.ir import parallel, schedule, schedule_us, sequential
from gangway.scheduler.stages.search import PointerSpace, best, coordinate_descent, random_search


def stream(number, layers_us, serial, cores=8):
    """Layers of which a part does not scale: Amdahl's law."""
    times = tuple((tuple(us * (serial + (1 - serial) / k) for k in range(1, cores + 1)),) for us in layers_us)
    return ModelProfile(number, f"m{number}", len(times), cores, times)


@st.composite
def spaces(draw):
    layers = st.lists(st.integers(1, 1000), min_size=1, max_size=6)
    models = draw(st.lists(st.tuples(layers, st.floats(0, 1)), min_size=1, max_size=4))
    streams = tuple(stream(number, *model) for number, model in enumerate(models))
    return PointerSpace(streams, draw(st.integers(1, 8)), len(streams) - 1 + draw(st.integers(0, 2)))


def hostile(seed):
    """A machine that has nothing to do with the profiles: each schedule takes a time of its own."""
    return lambda stages: Random(f"{seed} {stages}").uniform(1.0, 1000.0)


SEARCHES = (
    lambda measure, space, seed, **known: random_search(measure, space, 12, seed, **known),
    lambda measure, space, seed, **known: coordinate_descent(measure, space, 2, 3, seed, **known),
)


@pytest.mark.parametrize("search", SEARCHES)
@given(space=spaces(), seed=st.integers(0, 99))
@settings(max_examples=15)
def test_nothing_found_is_worse_than_the_plain_schedules(search, space, seed):
    measure = hostile(seed)
    records = list(search(measure, space, seed))
    found = best(records)
    for plain in (sequential(space.streams), parallel(space.streams)):
        assert found.time_us <= measure(schedule(space.streams, plain, space.cores))
    assert found.time_us == measure(found.stages) == min(record.time_us for record in records)
    assert all(schedule(space.streams, record.pointers, space.cores) == record.stages for record in records)


@pytest.mark.parametrize("search", SEARCHES)
@given(space=spaces(), seed=st.integers(0, 99), stopped=st.integers(0, 12))
@settings(max_examples=15)
def test_a_stopped_search_goes_on_without_measuring_anything_twice(search, space, seed, stopped):
    whole = list(search(hostile(seed), space, seed))
    calls = []

    def measure(stages):
        calls.append(stages)
        return hostile(seed)(stages)

    known = {record.pointers: record.time_us for record in islice(search(measure, space, seed), stopped)}
    assert list(search(measure, space, seed, known=known)) == whole
    assert len(calls) == len(set(calls))


@given(space=spaces(), seed=st.integers(0, 99))
@settings(max_examples=20)
def test_descent_changes_one_row_of_the_best_so_far(space, seed):
    records = list(coordinate_descent(hostile(seed), space, 2, 3, seed))
    for count, record in enumerate(records[2:], 2):
        current = best(records[:count]).pointers
        assert sum(ours != theirs for ours, theirs in zip(record.pointers, current, strict=True)) <= 1


def test_a_staged_schedule_beats_both_plain_ones():
    """A model whose second half is serial beside one that scales: neither all in turn nor all at once is good."""
    halves = stream(0, [800.0] * 4, 0.0).latency_us + stream(0, [100.0] * 4, 1.0).latency_us
    streams = tuple(ModelProfile(number, f"m{number}", 8, 8, halves) for number in range(3))
    space = PointerSpace(streams, 8, 3)
    found = best(coordinate_descent(lambda stages: schedule_us(streams, stages), space, 4, 6, 1))
    assert found.time_us < 0.9 * min(map(space.modelled_us, space.starts()))


def test_promising_candidates_come_first():
    streams = tuple(stream(number, [100.0 * k for k in range(1, 9)], 0.3) for number in range(3))
    space = PointerSpace(streams, 8, 3)
    records = list(random_search(hostile(1), space, 20, 1))[2:]
    modelled = [space.modelled_us(record.pointers) for record in records]
    assert modelled == sorted(modelled)
    assert len(set(modelled)) > 5


def test_spaces_hold_the_sequential_schedule():
    streams = tuple(stream(number, [1.0], 0.0) for number in range(3))
    with pytest.raises(ValueError, match="2 barriers"):
        PointerSpace(streams, 2, 1)
    with pytest.raises(ValueError, match="at least one model"):
        PointerSpace((), 2, 1)
