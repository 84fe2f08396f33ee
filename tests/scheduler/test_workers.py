"""Which workers can be given work. The rings are real, the workers' answers are the test's."""

import pytest

from gangway.executor.control import ControlLayout, ControlSegment
from gangway.executor.messages import LoadArtifact, unpack
from gangway.scheduler.resources import WorkerTable

KEY = "ab" * 32


@pytest.fixture
def control():
    control = ControlSegment.create(ControlLayout(workers=2, front_ends=1, leases=2))
    yield control
    control.segment.close()


@pytest.fixture
def table(control):
    table = WorkerTable(control)
    for index in range(2):
        table.start(index, pid=100 + index, loads=())
    return table


def test_a_worker_that_is_loading_goes_on_working(table):
    table.order_all(LoadArtifact(3, KEY))
    assert table.free == (0, 1) and table.in_service == 2
    table.answer(1, 3, has_model=True)
    assert not table.all_have(3) and not table.none_has(3)
    table.answer(0, 3, has_model=True)
    assert table.all_have(3) and table.free == (0, 1)


def test_a_worker_in_a_gang_is_not_free(table):
    table.occupy(1, lease=0)
    assert table.free == (0,)
    assert table.left(1, lease=0) and table.free == (0, 1)


def test_a_worker_that_will_leave_takes_work_ahead_but_once(table):
    table.occupy(1, lease=0)
    assert table.leaves(1, lease=0) and table.free == (0, 1)
    table.occupy(1, lease=1)
    assert not table.leaves(1, lease=1) and table.free == (0,)
    assert not table.left(1, lease=0), "it is in the next one"
    assert table.left(1, lease=1) and table.free == (0, 1)


def test_only_a_worker_in_service_gives_way_while_it_loads(control, table):
    def sent(index):
        return unpack(control.command_rings[index].receive())

    table.order_all(LoadArtifact(3, KEY))
    assert [sent(index) for index in range(2)] == [LoadArtifact(3, KEY), LoadArtifact(3, KEY)]
    for index in range(2):
        table.answer(index, 3, has_model=True)
    table.serve(3, True)
    table.start(1, pid=200, loads=[LoadArtifact(3, KEY), LoadArtifact(4, KEY)])
    assert sent(1) == LoadArtifact(3, KEY, at_once=True), "nobody can use it before"
    table.answer(1, 3, has_model=True)
    assert sent(1) == LoadArtifact(4, KEY), "gangs can have it now"
