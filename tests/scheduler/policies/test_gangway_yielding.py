"""When those that run would make room for a newcomer. Times are microseconds, two cores, models of `test_gangway`."""

import pytest

from gangway.scheduler.policies.gangway import Gangway
from gangway.scheduler.policy import Query, RunningBlock, Snapshot
from gangway.scheduler.policy_config import DEFAULT, SWITCH_US
from gangway.scheduler.prediction import INFINITE
from tests.scheduler.policies.test_gangway import LAZY, LONG, MODELS, SHORT, query, running

MARGIN = DEFAULT.prediction.min_margin_factor

LONG_US, SHORT_US, WAY_BACK_US = 40_000.0, 4000.0, 150.0  # on both cores


def yields_in_us(waiting: list[Query], blocks: list[RunningBlock]) -> float | None:
    """Return from when on somebody yields, after a decision at time 0."""
    policy = Gangway()
    used = {core for block in blocks for core in block.cores}
    free = tuple(core for core in range(2) if core not in used)
    policy.decide(Snapshot(0.0, waiting, blocks, free, 2, MODELS))
    return policy.yields_from_us()


def long_with(slack_us: float, layer: int = 0) -> RunningBlock:
    """LONG, that has so much time, at a layer of its 20. It needs 40000 on both cores, and twice as much on one."""
    return running(query(1, LONG, slack_us + WAY_BACK_US - 120_000.0, layer), 0.0, layer)


def beside_best_effort(block: RunningBlock) -> float | None:
    """Return from when on it yields. Best effort waits: nobody is stopped for it, and LONG is the shortest there."""
    return yields_in_us([query(9, LAZY, 0.0)], [block])


def test_nothing_is_known_if_nobody_waited() -> None:
    assert Gangway().yields_from_us() is None
    assert yields_in_us([], [running(query(1, LONG, 0.0), 0.0)]) is None


def test_who_can_be_late_no_more_and_who_has_time_yield_at_once() -> None:
    assert beside_best_effort(running(query(1, LAZY, 0.0), 0.0)) == 0.0
    assert beside_best_effort(long_with(100_000.0)) == 0.0


@pytest.mark.parametrize("more_us", [-1.0, 1.0])
def test_who_has_too_little_time_yields_when_it_is_slower_than_predicted(more_us: float) -> None:
    # As late as it could still wait for another one like it, and on one core alone it would be late.
    found = beside_best_effort(long_with(LONG_US * MARGIN + SWITCH_US + LONG_US + more_us))
    assert found == (0.0 if more_us > 0 else pytest.approx(SWITCH_US + LONG_US - 1.0, abs=0.1))


def test_a_gang_yields_the_cores_that_it_can_do_without() -> None:
    # Half of it is done. One core has twice as long to do, which is less than waiting for another one like it.
    tight_us = 2 * LONG_US / 2 * MARGIN
    assert beside_best_effort(long_with(tight_us + 1.0, layer=10)) == 0.0
    assert beside_best_effort(long_with(tight_us - 1.0, layer=10)) == pytest.approx(tight_us / 2 - 1.0, abs=0.1)


def test_who_has_just_begun_counts_and_who_is_told_to_leave_does_not() -> None:
    # SHORT takes both cores of best effort, which leaves.
    waiting = query(9, SHORT, -2000.0)
    assert yields_in_us([waiting], [running(query(1, LAZY, 0.0), 0.0)]) == INFINITE
    # On a free machine SHORT can spare 12000 - 2000 - 150 - 4160, more than another one takes, or only 690.
    assert yields_in_us([waiting], []) == 0.0
    late = query(8, SHORT, -7000.0)
    assert yields_in_us([late], []) == pytest.approx(12_000 - 7000 - WAY_BACK_US - SHORT_US * MARGIN)
