"""Processor time of sides that take turns."""

import time

import pytest

from benchmarks.precision.processor_time import least_ms


def test_waiting_is_no_processor_time_and_the_first_turn_does_not_count() -> None:
    calls = {"waits": 0, "works": 0}

    def wait() -> None:
        calls["waits"] += 1
        time.sleep(0.02)

    def work() -> None:
        calls["works"] += 1
        end = time.process_time() + 0.02
        while time.process_time() < end:
            pass

    found = least_ms({"waits": wait, "works": work}, turns=2)
    assert calls == {"waits": 3, "works": 3}
    assert found["waits"] < 5
    assert found["works"] == pytest.approx(20, abs=5)
