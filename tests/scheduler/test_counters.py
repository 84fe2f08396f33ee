"""Counters and their lines in the log."""

import logging

import pytest

from gangway.scheduler.observability import PERIOD_US, ModelCounters, SchedulerCounters


def test_totals_are_sums_over_models() -> None:
    book = ModelCounters()
    book.of("a").blocks += 2
    book.of("b").blocks += 3
    book.of("b").conflicts += 1
    assert book.total() == SchedulerCounters(blocks=5, conflicts=1)
    assert ModelCounters().total() == SchedulerCounters()


def test_the_log_has_a_line_a_minute_if_something_happened(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    book = ModelCounters()
    book.write(1.0)
    book.of("a").blocks += 1
    book.write(PERIOD_US)
    assert not caplog.messages
    book.write(1.0 + PERIOD_US)
    assert caplog.messages == ["a: blocks 1"]
    book.write(2.0 + 2 * PERIOD_US)
    book.write_now()
    assert len(caplog.messages) == 1
    book.of("a").preemptions += 1
    book.write_now()
    assert caplog.messages[1] == "a: blocks 1, preemptions 1"
