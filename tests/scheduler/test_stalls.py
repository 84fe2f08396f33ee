"""A gang that stands still is noticed, one that works is not. The clock is the test's; the lease is real."""

import struct

import pytest

from gangway.base import blame
from gangway.base.blame import Activity
from gangway.executor.control import ControlLayout, ControlSegment
from gangway.executor.leases import LeaseSpec, Member
from gangway.scheduler.gangs import Gang, GangTable
from gangway.scheduler.messages import LoadModel
from gangway.scheduler.policy import Query
from gangway.scheduler.units import whole_request
from gangway.scheduler.watchdog import (
    CHECK_EVERY_US,
    LONGEST_TASK_US,
    STALLED_AFTER_US,
    STUCK_AFTER_US,
    StallWatch,
)


@pytest.fixture
def control():
    control = ControlSegment.create(ControlLayout(workers=2, front_ends=1, leases=2))
    yield control
    control.segment.close()


def make_gang(control, outstanding=frozenset({0}), long_layers=(), cores=(1,)):
    """A gang on core 1 whose only rank never joins."""
    spec = LeaseSpec(0, (Member(0, 0, 1),), arena_offset=0, arena_stride=64, first_layer=0, end_layer=3)
    generation = control.leases[0].initialise(spec)
    unit = whole_request(Query(1, 0, 1, 0.0, None))
    model = LoadModel(0, "", "", layers=3, max_ranks=1, arena_bytes=64, max_rows=1, long_layers=tuple(long_layers))
    gang = Gang(unit, 0, control.leases[0], 0, model)
    gang.generation, gang.cores, gang.outstanding = generation, cores, set(outstanding)
    return gang


def found_us(watch, gang, until_us, start_us=0.0):
    """Return when the watch, asked ten times as often as it looks, finds that the gang stands still."""
    times = [start_us + step * CHECK_EVERY_US / 10 for step in range(int((until_us - start_us) / CHECK_EVERY_US * 10))]
    return next((now_us for now_us in times if watch.stalled([gang], now_us)), None)


def test_a_gang_without_progress_is_found_and_given_up_once(control):
    watch, gang, gangs = StallWatch(control), make_gang(control), GangTable(control)
    now_us = found_us(watch, gang, 3 * STALLED_AFTER_US)
    assert STALLED_AFTER_US < now_us <= STALLED_AFTER_US + 3 * CHECK_EVERY_US
    gangs.give_up(gang, now_us)
    assert gang.shared.progress().aborted and gangs.ending == (gang,)
    assert found_us(watch, gang, now_us + 3 * STALLED_AFTER_US, now_us) is None


def test_a_layer_that_may_last_has_longer(control):
    for layer, limit_us in ((0, LONGEST_TASK_US), (1, STALLED_AFTER_US)):
        now_us = found_us(StallWatch(control), make_gang(control, long_layers=(layer,)), 1.5 * LONGEST_TASK_US)
        assert limit_us < now_us <= limit_us + 3 * CHECK_EVERY_US


def test_a_gang_is_let_be_while_one_of_its_ranks_waits_for_a_core(control, monkeypatch):
    """Rank 0 sleeps until rank 1 has done its tasks, and that wants a core and gets none."""
    activities = {100: Activity(wants_core=False, cpu_us=0.0), 101: Activity(wants_core=True, cpu_us=0.0)}
    monkeypatch.setattr(blame, "activity_of", activities.get)
    for core in range(2):
        struct.pack_into("<I", control.segment.view, control.layout.worker_status(core), 100 + core)
    watch, gang = StallWatch(control), make_gang(control, outstanding={0, 1}, cores=(0, 1))
    assert found_us(watch, gang, 10 * STALLED_AFTER_US) is None
    activities[101] = activities[100]  # it sleeps, too
    assert found_us(watch, gang, 12 * STALLED_AFTER_US, 10 * STALLED_AFTER_US) is not None


def test_a_rank_that_does_not_leave_is_found(control):
    watch, gang = StallWatch(control), make_gang(control)
    times = [step * CHECK_EVERY_US / 5 for step in range(100)]
    assert [now_us for now_us in times if watch.stuck_cores([gang], now_us)] == [], "it has not ended"
    gang.ended_us = 0.0
    now_us = next(now_us for now_us in times if watch.stuck_cores([gang], now_us) == [1])
    assert STUCK_AFTER_US < now_us < 2 * STUCK_AFTER_US


def test_progress_starts_the_time_anew(control):
    watch = StallWatch(control)
    gang = make_gang(control)
    half_us = STALLED_AFTER_US / 2
    assert found_us(watch, gang, half_us) is None
    gang = make_gang(control)  # the next query on the same lease
    assert found_us(watch, gang, 3 * STALLED_AFTER_US, half_us) > half_us + STALLED_AFTER_US


def test_a_paused_gang_may_stand_still(control):
    assert found_us(StallWatch(control), make_gang(control, outstanding=()), 3 * STALLED_AFTER_US) is None
