"""Batches on real workers: groups of rows for batch kernels, ranks that grow with the rows."""

import struct

import pytest

from gangway.executor.leases import LeaseControl
from gangway.executor.messages import LeftReason
from gangway.executor.slots import SlotStatus
from testing.waiting import until

WAIT_US = 10_000_000


def group_sizes(harness, rows):
    """How many rows the last batch kernel computed together, as each row's arena tells."""
    return [struct.unpack_from("<i", harness.executor.arena.view, 64 * row + 4)[0] for row in range(rows)]


def workers_of_layer(harness, layer, rows):
    """Processes that have executed tasks of a layer; each row's arena names the last layer and the last process."""
    arenas = [struct.unpack_from("<3i", harness.executor.arena.view, 64 * row) for row in range(rows)]
    return {pid for last_layer, _, pid in arenas if last_layer == layer}


@pytest.mark.parametrize("workers", [[0], [0, 1]])
def test_rows_are_cut_into_groups_of_almost_equal_size(make_harness, workers):
    harness = make_harness(layers=5, batch_rows=3)
    sizes = {1: [0], 2: [2, 2], 3: [3, 3, 3], 4: [2, 2, 2, 2], 5: [2, 2, 3, 3, 3], 8: [2, 2, 3, 3, 3, 3, 3, 3]}
    for rows, expected in sizes.items():
        harness.executor.arena.view[: 64 * rows] = bytes(64 * rows)
        slot, _ = harness.start(workers, rows=rows)
        assert harness.executor.slots.wait(slot, WAIT_US)
        assert {left.reason for left in harness.executor.left(workers)} == {LeftReason.DONE}
        assert harness.executor.slots.outcome(slot).status is SlotStatus.OK
        assert harness.counters(rows) == {1}
        assert group_sizes(harness, rows) == expected
        harness.executor.slots.release(slot)


def test_a_stopped_batch_goes_on_inside_a_layer(make_harness):
    harness = make_harness(layers=3, batch_rows=4)
    harness.orders(task_ns=20_000_000)
    slot, _ = harness.start([0, 1], rows=8)
    lease = harness.executor.lease(0)
    until(lambda: harness.counters(8) != {0})
    lease.set_control(LeaseControl.STOP_NOW)
    harness.orders()
    assert {left.reason for left in harness.executor.left([0, 1])} == {LeftReason.STOPPED}
    assert lease.progress().next_layer == 0
    assert not harness.executor.slots.wait(slot, 1000)
    lease.resume(harness.model.layers, 1)
    harness.executor.join(0, 0, 1)
    assert harness.executor.slots.wait(slot, WAIT_US)
    harness.executor.left([1])
    assert harness.counters(8) == {1}


@pytest.mark.parametrize(
    ("row_ns", "rows", "shared"), [(0, 8, False), (1999, 8, False), (2000, 8, True), (9000, 2, True)]
)
def test_a_batch_gets_more_ranks_than_a_row(make_harness, row_ns, rows, shared):
    """Layers for one rank are shared from 16 us of work on: the second rank works while the first one is held up."""
    harness = make_harness(layers=2, max_ranks=(1,), row_ns=row_ns)
    harness.orders(hang=2, layer=1)
    slot, _ = harness.start([0], rows=rows, wanted=2)
    lease = harness.executor.lease(0)
    until(lambda: len(workers_of_layer(harness, 1, rows)) == 1)
    harness.executor.join(0, 1, 1)
    until(lambda: lease.progress().present == 3)
    if shared:
        until(lambda: len(workers_of_layer(harness, 1, rows)) == 2)
    harness.orders()
    assert harness.executor.slots.wait(slot, WAIT_US)
    harness.executor.left([0, 1])
    assert harness.counters(rows) == {1}
    assert len(workers_of_layer(harness, 1, rows)) == (2 if shared else 1)
