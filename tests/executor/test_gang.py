"""Gangs of real worker processes on a tiny model whose kernels count what they execute."""

import pytest

from gangway.executor.leases import LeaseControl, PhaseKind
from gangway.executor.messages import LeaseLeft, LeftReason, RunLease
from gangway.executor.slots import SlotRequest, SlotStatus
from testing.waiting import until

WAIT_US = 10_000_000


def reasons(lefts):
    return [left.reason for left in lefts]


@pytest.mark.parametrize("workers", [[0], [1], [0, 1], [1, 0]])
@pytest.mark.parametrize("rows", [1, 3])
def test_query_is_computed_once_and_answered(harness, workers, rows):
    slot, _ = harness.start(workers, rows=rows)
    assert harness.executor.slots.wait(slot, WAIT_US)
    assert set(reasons(harness.executor.left(workers))) == {LeftReason.DONE}
    assert harness.counters(rows) == {1}
    outcome = harness.executor.slots.outcome(slot)
    assert outcome.status is SlotStatus.OK
    assert outcome.ranks <= len(workers)
    assert outcome.attempts == 1
    ends = harness.executor.lease(0).layer_end_ns(0, harness.model.layers)
    assert [harness.executor.lease(0).start_ns(), *ends] == sorted([harness.executor.lease(0).start_ns(), *ends])
    assert harness.executor.slots.release(slot)


def test_many_queries_in_a_row(harness):
    for _ in range(200):
        slot, _ = harness.start([0, 1])
        assert harness.executor.slots.wait(slot, WAIT_US)
        harness.executor.left([0, 1])
        assert harness.counters() == {1}
        harness.executor.slots.release(slot)


def test_two_ranks_share_the_work(harness):
    for workers in ([0], [0, 1]):
        harness.orders(task_ns=100_000, hang=1)  # until all are in
        slot, _ = harness.start(workers)
        until(lambda workers=workers: harness.executor.lease(0).progress().present == 2 ** len(workers) - 1)
        harness.orders(task_ns=100_000)
        assert harness.executor.slots.wait(slot, WAIT_US)
        harness.executor.left(workers)
        outcome = harness.executor.slots.outcome(slot)
        assert outcome.ranks == len(workers)
        assert outcome.compute_us > harness.model.layers * harness.model.tasks * 100 / len(workers)


def test_stop_at_a_boundary_and_resume(harness):
    harness.orders(hang=1)  # nobody gets beyond layer 0 before the control word says so
    lease = harness.executor.lease(0)
    slot, _ = harness.start([0, 1])
    lease.set_control(LeaseControl.STOP)
    harness.orders()
    assert set(reasons(harness.executor.left([0, 1]))) == {LeftReason.STOPPED}
    progress = lease.progress()
    assert (progress.kind, progress.next_layer, progress.finished_tasks) == (PhaseKind.STOPPED, 1, 0)
    assert progress.present == 0
    assert not harness.executor.slots.wait(slot, 0)
    lease.resume(harness.model.layers, 1)
    harness.executor.join(0, 0, worker=1)
    assert harness.executor.slots.wait(slot, WAIT_US)
    assert reasons(harness.executor.left([1])) == [LeftReason.DONE]
    assert harness.counters() == {1}


def test_stop_now_inside_a_layer(harness):
    harness.orders(hang=1)
    lease = harness.executor.lease(0)
    slot, _ = harness.start([0])
    until(lambda: lease.progress().present == 1)
    lease.set_control(LeaseControl.STOP_NOW)
    harness.orders()
    assert reasons(harness.executor.left([0])) == [LeftReason.STOPPED]
    progress = lease.progress()
    assert (progress.kind, progress.next_layer) == (PhaseKind.OPEN, 0)
    assert progress.finished_tasks <= harness.model.tasks // 2  # the first claim, if there was one
    lease.resume(harness.model.layers, 2)
    harness.executor.join(0, 0, worker=0)
    harness.executor.join(0, 1, worker=1)
    assert harness.executor.slots.wait(slot, WAIT_US)
    harness.executor.left([0, 1])
    assert harness.counters() == {1}


def test_block_ends_and_goes_on(harness):
    slot, _ = harness.start([0, 1], end_layer=2)
    assert set(reasons(harness.executor.left([0, 1]))) == {LeftReason.STOPPED}
    assert harness.executor.lease(0).progress().next_layer == 2
    harness.executor.lease(0).resume(harness.model.layers, 1)
    harness.executor.join(0, 0, worker=0)
    assert harness.executor.slots.wait(slot, WAIT_US)
    harness.executor.left([0])
    assert harness.counters() == {1}


def test_grow_joins_inside_a_layer(harness):
    harness.orders(hang=1)  # rank 0 stays in layer 0 with its first claim, rank 1 can only do the rest
    lease = harness.executor.lease(0)
    slot, _ = harness.start([0])
    until(lambda: lease.progress().present == 1)
    assert lease.resize(1, 2)
    harness.executor.join(0, 1, worker=1)
    until(lambda: lease.progress().finished_tasks > 0)
    assert lease.progress().next_layer == 0
    harness.orders()
    assert harness.executor.slots.wait(slot, WAIT_US)
    assert set(reasons(harness.executor.left([0, 1]))) == {LeftReason.DONE}
    assert harness.counters() == {1}
    assert harness.executor.slots.outcome(slot).ranks == 2


def test_shrink_lets_the_upper_rank_go(harness):
    harness.orders(hang=1)
    slot, _ = harness.start([0, 1])
    until(lambda: harness.executor.lease(0).progress().present == 3)
    assert harness.executor.lease(0).resize(2, 1)
    harness.orders(task_ns=1_000_000)
    assert reasons(harness.executor.left([1])) == [LeftReason.SHRUNK]
    harness.orders()
    assert harness.executor.slots.wait(slot, WAIT_US)
    assert reasons(harness.executor.left([0])) == [LeftReason.DONE]
    assert harness.counters() == {1}


def test_late_rank_finds_the_end(harness):
    slot, _ = harness.start([0])
    assert harness.executor.slots.wait(slot, WAIT_US)
    harness.executor.slots.release(slot)
    harness.executor.join(0, 1, worker=1)
    assert reasons(harness.executor.left([1])) == [LeftReason.DONE]


def recover(harness, slot, generation, dead):
    """What a scheduler does after a death; then the next query must be right."""
    harness.executor.lease(0).abort()
    harness.orders()
    assert reasons(harness.executor.left([1 - dead])) == [LeftReason.ABORTED]
    harness.executor.restart(dead)
    harness.executor.load(1, harness.model.key, [dead])
    assert harness.executor.slots.requeue(slot, generation)
    assert harness.executor.slots.finish(slot, generation, SlotStatus.UNAVAILABLE)
    slot, _ = harness.start([0, 1])
    assert harness.executor.slots.wait(slot, WAIT_US)
    assert set(reasons(harness.executor.left([0, 1]))) == {LeftReason.DONE}
    assert harness.counters() == {1}


@pytest.mark.parametrize("dead", [0, 1])
def test_killed_rank_does_not_hang_the_other(harness, dead):
    harness.orders(task_ns=1_000_000_000)
    slot, generation = harness.start([0, 1])
    until(lambda: harness.executor.lease(0).progress().present == 3)
    harness.executor.workers[dead].kill()
    harness.executor.workers[dead].wait(10)
    recover(harness, slot, generation, dead)


def test_crashed_rank_does_not_hang_the_other(harness):
    harness.orders(crash=1)
    slot, generation = harness.start([0, 1])
    workers = harness.executor.workers
    until(lambda: any(process.poll() is not None for process in workers))
    recover(harness, slot, generation, 0 if workers[0].poll() is not None else 1)


def test_hung_rank_is_noticed_by_the_other(harness):
    harness.orders(hang=1)
    slot, generation = harness.start([0, 1], timeout_us=50_000)
    lease = harness.executor.lease(0)
    until(lambda: lease.progress().aborted and lease.progress().present in (1, 2))
    hung = lease.progress().present - 1  # the task may have been stolen
    assert reasons(harness.executor.left([1 - hung])) == [LeftReason.TIMEOUT]
    harness.orders()
    assert reasons(harness.executor.left([hung])) == [LeftReason.ABORTED]
    assert harness.executor.slots.finish(slot, generation, SlotStatus.INTERNAL)


HOSTILE = [
    {"model_id": 2},
    {"model_id": 1 << 31},
    {"front_end": 1},
    {"front_end": 0xFFFFFFFF},
    {"slot": 1 << 30},
    {"generation": 0xFFFFFFFF},
    {"arena_offset": 1 << 60},
    {"arena_offset": (1 << 64) - 64},
    {"arena_offset": 8},
    {"arena_stride": 0},
    {"arena_stride": 1 << 63},
    {"rows": 0xFFFFFFFF},
    {"rows": 1 << 20},
    {"end_layer": 4096},
]


@pytest.mark.parametrize("changes", HOSTILE, ids=str)
def test_lease_that_leads_outside_is_refused(harness, changes):
    harness.start([0, 1], **changes)
    assert set(reasons(harness.executor.left([0, 1]))) == {LeftReason.INVALID}


def test_first_layer_beyond_the_model_is_refused(harness):
    harness.start([0], first_layer=4000, end_layer=4001)
    assert reasons(harness.executor.left([0])) == [LeftReason.INVALID]


def test_tensor_outside_the_segment_is_refused(harness):
    for offset in (harness.executor.io.size_bytes - 64, (1 << 64) - 64, 8):
        slot, _ = harness.executor.begin(SlotRequest(1, 1, (1 << 16,), (offset,)))
        harness.start([0], slot=slot, generation=harness.executor.slots.entry(slot).generation)
        assert reasons(harness.executor.left([0])) == [LeftReason.INVALID]


@pytest.mark.parametrize("run", [RunLease(99, 0, 1), RunLease(0, 64, 1), RunLease(0xFFFFFFFF, 0xFFFFFFFF, 1)], ids=str)
def test_run_of_no_lease_is_refused(harness, run):
    harness.executor.control.command(0, run.pack())
    assert reasons(harness.executor.left([0])) == [LeftReason.INVALID]


def test_run_of_an_earlier_term_is_stale(harness):
    slot, _ = harness.start([0])
    assert harness.executor.slots.wait(slot, WAIT_US)
    harness.executor.left([0])
    harness.executor.control.command(1, RunLease(0, 0, harness.executor.lease(0).generation() - 1).pack())
    left = harness.executor.expect(1, LeaseLeft)
    assert left.reason is LeftReason.STALE


def test_layers_for_one_rank_keep_the_others_waiting(make_harness):
    harness = make_harness(layers=9, max_ranks=(1, 64, 2))
    for _ in range(20):
        slot, _ = harness.start([0, 1])
        assert harness.executor.slots.wait(slot, WAIT_US)
        assert set(reasons(harness.executor.left([0, 1]))) == {LeftReason.DONE}
        assert harness.counters() == {1}
        harness.executor.slots.release(slot)


# The plan: blocks that have fewer ranks than the one before.


def plan_of(harness, **ranks_at):
    """The ranks of blocks by layer: `layer3=1`."""
    ranks = bytearray(harness.model.layers)
    for layer, count in ranks_at.items():
        ranks[int(layer.removeprefix("layer"))] = count
    return bytes(ranks)


def test_a_planned_block_lets_ranks_go_and_the_gang_goes_on(harness):
    harness.orders(hang=1)
    lease = harness.executor.lease(0)
    slot, _ = harness.start([0, 1], block_ranks=plan_of(harness, layer3=1, layer4=1))
    until(lambda: lease.progress().present == 3)
    harness.orders(hang=1, layer=4)  # of the first block that has one rank
    (left,) = harness.executor.left([1])
    assert left.reason is LeftReason.SHRUNK
    assert lease.layer_end_ns(2, 3)[0] <= left.left_ns
    harness.orders()
    assert reasons(harness.executor.left([0])) == [LeftReason.DONE]
    assert harness.executor.slots.wait(slot, WAIT_US)
    assert harness.counters() == {1}
    assert lease.blocks() == (1, 2, 0)
    assert harness.executor.slots.outcome(slot).counts.blocks == 2


def test_the_plan_changes_ahead_of_the_gang(harness):
    harness.orders(hang=1)
    lease = harness.executor.lease(0)
    slot, _ = harness.start([0, 1], block_ranks=plan_of(harness, layer1=1), versions=bytes([0, 1, 1]))
    until(lambda: lease.progress().present == 3)
    lease.plan(0, bytes([1, 0, 2, 4]), plan_of(harness, layer5=2))  # layer 0 runs already
    harness.orders()
    assert harness.executor.slots.wait(slot, WAIT_US)
    assert reasons(harness.executor.left([0, 1])) == [LeftReason.DONE] * 2
    assert harness.counters() == {1}
    assert lease.blocks() == (2, 1, 2)
    assert harness.executor.slots.outcome(slot).counts.versions == 0b10101


def test_a_block_that_has_begun_keeps_its_ranks_against_an_older_wish(harness):
    harness.orders(hang=1)
    lease = harness.executor.lease(0)
    slot, _ = harness.start([0, 1], block_ranks=plan_of(harness, layer1=1))
    until(lambda: lease.progress().present == 3)
    harness.orders(hang=1, layer=2)
    assert reasons(harness.executor.left([1])) == [LeftReason.SHRUNK]
    assert not lease.resize(2, 3)
    assert lease.resize(1, 2)
    harness.executor.join(0, 1, worker=1)
    harness.orders()
    assert harness.executor.slots.wait(slot, WAIT_US)
    assert set(reasons(harness.executor.left([0, 1]))) == {LeftReason.DONE}
    assert harness.counters() == {1}


@pytest.mark.parametrize("plan", [(bytes([5]), b""), (b"", bytes([65])), (b"", bytes(4097))])
def test_a_plan_that_no_lease_can_have_is_refused(harness, plan):
    with pytest.raises(ValueError, match="no such plan"):
        harness.executor.lease(0).plan(0, *plan)
