"""A gang that stands still is noticed, one that works is not. The clock is the test's; the lease is real."""

import pytest
from gangway.executor.control import ControlLayout, ControlSegment
from gangway.executor.leases import LeaseSpec, Member
from gangway.scheduler.gangs import Gang
from gangway.scheduler.policy import Query
from gangway.scheduler.stalls import CHECK_EVERY_US, LONGEST_TASK_US, STALLED_AFTER_US, StallWatch
from gangway.scheduler.units import Request, whole


@pytest.fixture
def control():
    control = ControlSegment.create(ControlLayout(workers=2, front_ends=1, leases=2))
    yield control
    control.segment.close()


def make_gang(control, outstanding=frozenset({0}), indivisible=False):
    """A gang on core 1 whose only rank never joins."""
    spec = LeaseSpec(0, (Member(0, 0, 1),), arena_offset=0, arena_stride=64, first_layer=0, end_layer=3)
    term = control.leases[0].initialise(spec)
    request = Request(Query(1, 0, 1, 0.0, None), 0, 0, 1)
    return Gang(whole(request), 0, control.leases[0], 0, indivisible, term, cores=(1,), outstanding=set(outstanding))


def reports(watch, gang, until_us, start_us=0.0):
    """Return when the watch, asked ten times as often as it looks, reports which cores."""
    times = [start_us + step * CHECK_EVERY_US / 10 for step in range(int((until_us - start_us) / CHECK_EVERY_US * 10))]
    found = [(now_us, watch.stalled_cores([gang], now_us)) for now_us in times]
    return [(now_us, cores) for now_us, cores in found if cores]


def test_a_gang_without_progress_is_reported_once(control):
    watch = StallWatch(control)
    ((now_us, cores),) = reports(watch, make_gang(control), 3 * STALLED_AFTER_US)
    assert cores == [1]
    assert STALLED_AFTER_US < now_us <= STALLED_AFTER_US + 2 * CHECK_EVERY_US


def test_a_query_of_one_task_has_longer(control):
    watch = StallWatch(control)
    ((now_us, cores),) = reports(watch, make_gang(control, indivisible=True), 1.5 * LONGEST_TASK_US)
    assert cores == [1]
    assert LONGEST_TASK_US < now_us <= LONGEST_TASK_US + 2 * CHECK_EVERY_US


def test_progress_starts_the_time_anew(control):
    watch = StallWatch(control)
    gang = make_gang(control)
    half_us = STALLED_AFTER_US / 2
    assert reports(watch, gang, half_us) == []
    gang = make_gang(control)  # the next query on the same lease
    ((now_us, _),) = reports(watch, gang, 3 * STALLED_AFTER_US, start_us=half_us)
    assert now_us > half_us + STALLED_AFTER_US


def test_a_paused_gang_may_stand_still(control):
    assert reports(StallWatch(control), make_gang(control, outstanding=()), 3 * STALLED_AFTER_US) == []
