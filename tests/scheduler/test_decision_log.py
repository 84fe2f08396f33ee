"""The log of decisions: told while somebody watches, the newest first where there is no room for all."""

import json
import time
from typing import Any

import pytest

from gangway.executor.control import ControlLayout, ControlSegment
from gangway.executor.slots import SlotStatus
from gangway.scheduler.observability import KEPT_DECISIONS, TELLING_PERIOD_US, DecisionLog
from gangway.scheduler.policy import Decision, Query, Reject, Resize, RunningBlock, Snapshot, Start, Stop, Wake


@pytest.fixture
def control() -> ControlSegment:
    return ControlSegment.create(ControlLayout(2, 1, 1))


def snapshot(now_us: float, waiting: list[Query], running: list[RunningBlock]) -> Snapshot:
    return Snapshot(now_us, waiting, running, (0,), 2, {})


def told(control: ControlSegment) -> list[Any]:
    return [json.loads(line) for line in control.decision_block.read().splitlines()]


def test_each_decision_is_told_with_what_was_known(control: ControlSegment) -> None:
    now_us = time.monotonic_ns() / 1e3
    log = DecisionLog(control.decision_block)
    control.decision_block.watch()
    log.poll(now_us)
    assert log.is_watched
    waiting = [Query(1, 7, 3, now_us - 2000, now_us + 5000), Query(2, 8, 1, now_us - 1000, None)]
    running = [RunningBlock(Query(number, 9, 1, now_us, None), 4, (1,), now_us, 0) for number in (3, 4)]
    decisions: list[Decision] = [
        Stop(3, reason="others first"), Start(1, 12, (0,), wanted=2, reason="earliest deadline"),
        Resize(4, (0, 1), "idle cores"), Reject(2), Wake(now_us),
    ]  # fmt: skip
    log.add(decisions, snapshot(now_us, waiting, running))
    log.refused(waiting[1], SlotStatus.QUEUE_FULL, now_us + 1, 1, 2)
    log.poll(now_us + TELLING_PERIOD_US)
    by_query = {(each["decision"], each["model_id"]): each for each in told(control)}
    assert set(by_query) == {("Stop", 9), ("Start", 7), ("Resize", 9), ("Refuse", 8)}
    assert by_query["Stop", 9]["cores"] == [1]
    assert by_query["Resize", 9]["cores"] == [0, 1]
    start = by_query["Start", 7]
    assert (start["cores"], start["wanted"], start["end_layer"], start["rows"]) == ([0], 2, 12, 3)
    assert (start["slack_us"], start["age_us"], start["free"], start["waiting"]) == (5000, 2000, 1, 2)
    assert "queue" in by_query["Refuse", 8]["reason"]


def test_the_newest_are_told_if_there_is_no_room_for_all(control: ControlSegment) -> None:
    now_us = time.monotonic_ns() / 1e3
    log = DecisionLog(control.decision_block)
    control.decision_block.watch()
    log.poll(now_us)
    for number in range(300 * 2 * KEPT_DECISIONS):
        query = Query(number, number % 300, 1, now_us, None)
        log.add([Start(number, 1, (0,), reason="x" * 1000)], snapshot(now_us + number, [query], []))
    log.poll(now_us + TELLING_PERIOD_US)
    times = [each["at_us"] for each in told(control)]
    assert 50 < len(times) < 300 * KEPT_DECISIONS
    assert times == sorted(times)
    assert times[-1] == round(now_us + 300 * 2 * KEPT_DECISIONS - 1)


def test_nothing_is_told_of_what_nobody_watches(control: ControlSegment) -> None:
    log = DecisionLog(control.decision_block)
    log.poll(time.monotonic_ns() / 1e3)
    assert not log.is_watched
    assert not control.decision_block.read()
