"""Gangs of real worker processes on a tiny model."""

import pytest

from gangway.executor.messages import LeftReason
from gangway.executor.slots import SlotStatus

WAIT_US = 10_000_000


@pytest.mark.parametrize("workers", [[0], [1], [0, 1]])
@pytest.mark.parametrize("rows", [1, 3])
def test_query_is_computed_once_and_answered(harness, workers, rows):
    slot, _ = harness.start(workers, rows=rows)
    assert harness.executor.slots.wait(slot, WAIT_US)
    assert {left.reason for left in harness.executor.left(workers)} == {LeftReason.DONE}
    assert harness.counters(rows) == {1}
    outcome = harness.executor.slots.outcome(slot)
    assert outcome.status is SlotStatus.OK
    assert 1 <= outcome.ranks <= len(workers)
    assert outcome.attempts == 1
    assert harness.executor.slots.release(slot)
