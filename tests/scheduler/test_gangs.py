"""What a policy sees of the gangs. The leases are real, and no worker is there."""

import pytest

from gangway.executor.control import ControlLayout, ControlSegment
from gangway.executor.fast_path import InFlight
from gangway.executor.messages import LeaseLeft, LeftReason
from gangway.scheduler.gangs import GangTable
from gangway.scheduler.messages import LoadModel
from gangway.scheduler.policy import Query, Start
from gangway.scheduler.units import whole_request

LAYERS = 3
KNOWN = {7}
MODEL = LoadModel(7, "model", "0" * 64, LAYERS, max_ranks=1, arena_bytes=64, max_rows=1)


@pytest.fixture
def control():
    control = ControlSegment.create(ControlLayout(workers=2, front_ends=1, leases=4))
    yield control
    control.segment.close()


def take_over(gangs, number, core):
    """Let a gang have a query that the fast path has given to one worker."""
    lease = gangs.spare(1)[0]
    in_flight = InFlight((core,), (0,), False, lease, 1, 0, 7, 0, number, 1, 0, 1000, 0, 0, 0, 2000 + number, 0)
    unit = whole_request(Query(number, 7, 1, 1.0, None))
    return gangs.take_over(unit, Start(number, LAYERS, (core,)), in_flight, 0, MODEL, 10.0)


def test_of_those_that_wait_for_one_worker_the_last_is_seen(control):
    """A policy counts cores: two blocks on one of two would leave none for who waits."""
    gangs = GangTable(control)
    first, last, other = take_over(gangs, 1, 0), take_over(gangs, 2, 0), take_over(gangs, 3, 1)
    assert [(block.query.query_id, block.cores) for block in gangs.running(20.0, KNOWN)] == [(2, (0,)), (3, (1,))]
    assert gangs.count == 3 and gangs.models_under_way() == [7, 7, 7]
    for gang in (first, other):
        gangs.leave(LeaseLeft(gang.lease, 0, 1, LeftReason.DONE, 0, 0), 30.0)
        gangs.close(gang)
    assert [block.query.query_id for block in gangs.running(40.0, KNOWN)] == [2]
    assert not gangs.running(40.0, known=()), "its artifact is being unloaded"
    gangs.leave(LeaseLeft(last.lease, 0, 1, LeftReason.DONE, 0, 0), 50.0)
    assert not gangs.running(60.0, KNOWN)
