"""Which wakeups a leaving rank spares: those for an answered query, while the scheduler skips completions."""

import os
import signal
import struct
import threading
from pathlib import Path

import pytest

from gangway.executor.leases import LeaseControl
from gangway.executor.segment import BELL
from testing.waiting import until
from tests.executor.conftest import HEAP

WAIT_US = 10_000_000


def state(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def word(control, name):
    return struct.unpack_from("<I", control.segment.view, control.layout.scheduler_bell + BELL.offset(name))[0]


@pytest.fixture
def slot(harness):
    """A query that worker 0 has tasks of in its hands, and worker 1 none; that one is stopped while it waits inside."""
    harness.orders(hang=2)
    slot, _ = harness.start([0], wanted=2)
    until(lambda: struct.unpack_from("<i", harness.executor.io.view, HEAP + 4096) == (1,))
    harness.executor.join(0, 1, worker=1)
    pid = harness.executor.workers[1].pid
    until(lambda: harness.executor.lease(0).progress().present == 3 and state(pid) == "S")
    os.kill(pid, signal.SIGSTOP)
    until(lambda: state(pid) == "T")
    return slot


@pytest.mark.parametrize("skips", [False, True])
def test_only_who_skips_nothing_is_woken_by_ranks_of_an_answered_query(harness, slot, skips):
    executor, control = harness.executor, harness.executor.control
    bell = control.scheduler_bell
    seen = bell.seen()
    scheduler = threading.Thread(target=bell.wait, args=(seen, 0, WAIT_US, skips))
    scheduler.start()
    until(lambda: word(control, "sleeping") == 1)
    assert word(control, "skip_completion_wakeups") == skips
    harness.orders()
    assert executor.slots.wait(slot, WAIT_US)
    until(lambda: control.quiet(0))
    assert control.completion_rings[0].pending() == 1, "what is not rung for is there none the less"
    assert bell.seen() - seen == (0 if skips else 1)
    assert scheduler.is_alive() or not skips
    os.kill(executor.workers[1].pid, signal.SIGCONT)
    until(lambda: control.quiet(1))
    assert control.completion_rings[1].pending() == 1
    assert bell.seen() - seen == (0 if skips else 2)
    bell.ring()
    scheduler.join(10)
    assert not scheduler.is_alive()
    assert word(control, "skip_completion_wakeups") == 0, "only as long as it waits"


def test_a_rank_that_was_stopped_wakes_a_scheduler_that_skips_completions(harness, slot):
    control = harness.executor.control
    bell = control.scheduler_bell
    seen = bell.seen()
    scheduler = threading.Thread(target=bell.wait, args=(seen, 0, WAIT_US, True))
    scheduler.start()
    until(lambda: word(control, "skip_completion_wakeups") == 1)
    harness.executor.lease(0).set_control(LeaseControl.STOP_NOW)
    harness.orders()
    scheduler.join(10)
    assert not scheduler.is_alive()
    until(lambda: control.quiet(0))
    assert bell.seen() - seen == 1
    os.kill(harness.executor.workers[1].pid, signal.SIGCONT)


@pytest.mark.parametrize("name", ["skip_completion_wakeups", "skip_best_effort_wakeups"])
def test_a_successor_does_not_skip_what_its_predecessor_did(harness, name):
    control = harness.executor.control
    at = control.layout.scheduler_bell + BELL.offset(name)
    struct.pack_into("<I", control.segment.view, at, 1)
    control.scheduler_bell.take_over()
    assert word(control, name) == 0
