"""Leases that compute their first layers pass by pass, on real workers with a model that counts its tasks."""

import pytest

from gangway.executor import _native
from gangway.executor.leases import LeaseControl, PhaseKind, passes_for
from gangway.executor.messages import LeftReason
from gangway.executor.slots import SlotStatus

LAYERS = 5


def reasons(harness, workers):
    return {message.reason for message in harness.executor.left(workers)}


@pytest.mark.parametrize(
    ("pass_rows", "rows", "ranks", "passes"), [(1, 8, 1, 8), (1, 7, 2, 4), (4, 8, 2, 1), (3, 8, 1, 3)]
)
def test_each_rank_has_so_many_rows_at_a_time(pass_rows, rows, ranks, passes):
    assert passes_for(10, pass_rows, rows, ranks) == passes
    assert passes_for(0, pass_rows, rows, ranks) == 1


def test_pages_can_be_numbered():
    layers = 1000
    assert passes_for(layers, 1, 1 << 16, 1) * layers + _native.MAX_LAYERS <= _native.MAX_PHASES


@pytest.mark.parametrize("workers", [[0], [0, 1]])
@pytest.mark.parametrize("batch_rows", [0, 2])
@pytest.mark.parametrize(("pass_layers", "passes", "rows"), [(2, 3, 3), (3, 2, 7), (5, 4, 6), (1, 5, 5), (4, 1, 4)])
def test_every_task_is_executed_once(make_harness, workers, batch_rows, pass_layers, passes, rows):
    harness = make_harness(layers=LAYERS, batch_rows=batch_rows)
    slot, _ = harness.start(workers, rows, pass_layers=pass_layers, passes=passes)
    assert reasons(harness, workers) == {LeftReason.DONE}
    assert harness.executor.slots.outcome(slot).status is SlotStatus.OK
    assert harness.counters(rows) == {1}
    lease = harness.executor.lease(0)
    ends = [lease.start_ns(), *lease.layer_end_ns(0, LAYERS)]
    assert ends == sorted(ends)


def test_a_gang_stops_between_two_layers_of_a_pass(make_harness):
    harness = make_harness(layers=LAYERS)
    harness.orders(hang=1)
    lease = harness.executor.lease(0)
    harness.start([0, 1], rows=3, pass_layers=2, passes=3)
    lease.set_control(LeaseControl.STOP)
    harness.orders()
    assert LeftReason.STOPPED in reasons(harness, [0, 1])
    progress = lease.progress()
    assert (progress.kind, progress.next_layer, progress.phase) == (PhaseKind.STOPPED, 0, 1)
    assert lease.layer_end_ns(0, 1) == [0], "two phases of its step are to come"
    lease.resume(LAYERS, 2)
    for worker in (0, 1):
        harness.executor.join(0, worker, worker=worker)
    assert reasons(harness, [0, 1]) == {LeftReason.DONE}
    assert harness.counters(3) == {1}


def test_a_block_ends_after_its_steps(make_harness):
    harness = make_harness(layers=LAYERS)
    lease = harness.executor.lease(0)
    harness.start([0], rows=3, pass_layers=2, passes=3, end_layer=1)
    for next_layer, phase in ((1, 3), (2, 6), (3, 7), (4, 8)):
        assert reasons(harness, [0]) == {LeftReason.STOPPED}
        progress = lease.progress()
        assert (progress.kind, progress.next_layer, progress.phase) == (PhaseKind.STOPPED, next_layer, phase)
        lease.resume(next_layer + 1, 1)
        harness.executor.join(0, 0, worker=0)
    assert reasons(harness, [0]) == {LeftReason.DONE}
    assert harness.counters(3) == {1}


@pytest.mark.parametrize("changes", [{"pass_layers": 2, "passes": 4}, {"pass_layers": 6, "passes": 2}, {"passes": 2}])
def test_passes_that_a_worker_cannot_make_are_refused(make_harness, changes):
    harness = make_harness(layers=LAYERS)
    harness.start([0], rows=3, **changes)
    assert reasons(harness, [0]) == {LeftReason.INVALID}


@pytest.mark.parametrize("changes", [{"passes": 0}, {"pass_layers": 1 << 20}, {"pass_layers": 4000, "passes": 17}])
def test_passes_that_no_lease_can_have_are_refused(make_harness, changes):
    harness = make_harness(layers=LAYERS)
    with pytest.raises(ValueError, match="passes of"):
        harness.start([0], rows=3, **changes)
