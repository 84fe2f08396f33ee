"""The blocks by which scheduler and supervisor tell the metrics about themselves."""

import os
import struct
import time
from collections.abc import Iterator

import pytest

from gangway.executor import _native
from gangway.executor.control import (
    STALE_AFTER_S,
    VERSION,
    ControlLayout,
    ControlSegment,
    DecisionBlock,
    ModelAccount,
    SchedulerStatus,
)


@pytest.fixture
def control() -> Iterator[ControlSegment]:
    made = ControlSegment.create(ControlLayout(workers=3, front_ends=1, leases=1))
    yield made
    made.segment.close()


def attached(control: ControlSegment) -> ControlSegment:
    return ControlSegment.attach(os.dup(control.segment.fd))


def test_what_the_scheduler_writes_others_read(control: ControlSegment) -> None:
    reader = attached(control)
    last = _native.MAX_MODELS - 1
    accounts = {0: ModelAccount(1, 2, 3, 4, 5, 6, 7), last: ModelAccount(arena_bytes=1 << 40)}
    compounds = (1, 2, 3, 4, 5, 6)
    written = SchedulerStatus(7, 8, 9 << 32, 0.25, compounds, accounts)
    control.scheduler_block.write(written)
    assert reader.scheduler_block.read([0, last]) == written
    assert reader.scheduler_block.read([0]).account([0, 5]) == accounts[0]
    assert written.account([0, last]) == ModelAccount(1, 2, 3, 4, 5, 6, 7 + (1 << 40))
    assert written.account([]) == ModelAccount()
    reader.segment.close()


def test_models_that_are_gone_leave_no_numbers(control: ControlSegment) -> None:
    control.scheduler_block.write(SchedulerStatus(models={1: ModelAccount(growths=1), 2: ModelAccount(growths=2)}))
    control.scheduler_block.write(SchedulerStatus(models={2: ModelAccount(growths=3)}))
    assert control.scheduler_block.read([1, 2]).models == {1: ModelAccount(), 2: ModelAccount(growths=3)}
    successor = attached(control)  # knows what its predecessor has written
    successor.scheduler_block.write(SchedulerStatus())
    assert control.scheduler_block.read([2]).models == {2: ModelAccount()}
    successor.segment.close()


def test_a_writer_that_died_holds_no_reader_and_no_successor(control: ControlSegment) -> None:
    control.scheduler_block.write(SchedulerStatus(waiting=1))
    sequence = control.layout.scheduler_block + 4
    struct.pack_into("<I", control.segment.view, sequence, 0xFFFFFFFF)  # odd, and the last one
    assert control.scheduler_block.read([]).waiting == 1
    control.scheduler_block.write(SchedulerStatus(waiting=2))
    assert control.scheduler_block.read([]).waiting == 2
    assert struct.unpack_from("<I", control.segment.view, sequence) == (0,)


def test_restarts_are_counted(control: ControlSegment) -> None:
    block = control.server_block
    block.init([4, 6, 7], 1234.5)
    block.front_end_restarted()
    block.scheduler_restarted()
    block.scheduler_restarted()
    block.worker_restarted(2)
    reader = attached(control)
    status = reader.server_block.read()
    assert (status.started_s, status.front_end_restarts, status.scheduler_restarts) == (1234.5, 1, 2)
    assert (list(status.worker_restarts), list(status.cores)) == ([0, 0, 1], [4, 6, 7])
    reader.segment.close()


@pytest.mark.parametrize("block", ["scheduler_block", "server_block"])
def test_another_layout_is_refused(control: ControlSegment, block: str) -> None:
    struct.pack_into("<I", control.segment.view, getattr(control.layout, block), VERSION + 1)
    with pytest.raises(ValueError, match=f"layout {VERSION + 1}, this program knows {VERSION}"):
        attached(control)


def test_blocks_do_not_overlap() -> None:
    layout = ControlLayout(workers=9, front_ends=2, leases=16)
    assert layout.scheduler_block % 64 == layout.server_block % 64 == layout.size_bytes % 64 == 0
    assert layout.lease_table < layout.scheduler_block < layout.server_block < layout.size_bytes
    assert layout.heartbeats - layout.server_block == 64 + 128
    assert layout.lost_regions - layout.heartbeats == (2 + 1) * 64, "of supervisor, front end and scheduler"
    assert layout.decision_block - layout.lost_regions == 4 * _native.MAX_REGIONS
    assert layout.size_bytes - layout.decision_block == 64 + DecisionBlock.MAX_TEXT_BYTES


def test_heartbeats_grow_stale(control: ControlSegment, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = control.heartbeats, attached(control).heartbeats
    assert theirs.all_fresh(), "nobody has begun"
    ours.beat(ours.SUPERVISOR)
    ours.beat(ours.scheduler)
    later_ns = time.monotonic_ns() + int(STALE_AFTER_S * 1e9)
    assert theirs.all_fresh()
    monkeypatch.setattr(time, "monotonic_ns", lambda: later_ns)
    assert not theirs.all_fresh()
    ours.beat(ours.scheduler)
    assert not theirs.all_fresh(), "both must get on"
    ours.beat(ours.SUPERVISOR)
    assert theirs.all_fresh()


def test_the_slowest_loop_of_all_front_ends_is_told() -> None:
    control = ControlSegment.create(ControlLayout(workers=1, front_ends=3, leases=1))
    ours, theirs = control.heartbeats, attached(control).heartbeats
    assert theirs.loop_lag_s() == 0.0
    for process in range(ours.SUPERVISOR + 1, ours.scheduler):
        ours.beat(process, lag_s=0.004 / process)
    assert theirs.loop_lag_s() == pytest.approx(0.004)
    ours.beat(1)
    assert theirs.loop_lag_s() < 0.004
