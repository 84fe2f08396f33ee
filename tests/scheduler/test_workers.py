"""Which workers can be given work. The rings are real, the workers' answers are the test's."""

import pytest
from gangway.executor.control import ControlLayout, ControlSegment
from gangway.executor.messages import Load
from gangway.scheduler.workers import WorkerTable

KEY = "ab" * 32


@pytest.fixture
def table():
    control = ControlSegment.create(ControlLayout(workers=2, front_ends=1, leases=2))
    table = WorkerTable(control)
    for index in range(2):
        table.start(index, pid=100 + index, loads=())
    yield table
    control.segment.close()


def test_a_worker_that_is_loading_goes_on_working(table):
    table.order_all(Load(3, KEY))
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
