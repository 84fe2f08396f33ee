"""How much of the cores there is, all at once."""

import os
import time

import pytest

from gangway.artifact.profile import LEAST_WHOLE
from gangway.executor.launch import available_cores
from gangway.measure import machine
from gangway.measure.machine import OtherWork, share_of_cores
from tests.helpers.busy_core import busy_core

pytestmark = pytest.mark.alone  # it takes cores from whoever else runs


def test_one_core_is_whole() -> None:
    assert share_of_cores(available_cores()[:1]) == 1.0


@pytest.mark.skipif(len(available_cores()) < 2, reason="needs two cores")
def test_a_core_that_others_use_is_missed() -> None:
    first, *_, last = available_cores()
    assert 0 < share_of_cores((first, last)) <= 1
    with busy_core(last, count=3):
        assert share_of_cores((first, last)) < LEAST_WHOLE


def test_others_took_what_was_neither_idle_nor_this_process_s(monkeypatch: pytest.MonkeyPatch) -> None:
    clock_s, idle_s = 100.0, (50.0, 60.0)
    monkeypatch.setattr(time, "monotonic", lambda: clock_s)
    monkeypatch.setattr(os, "times", lambda: (0.0, 0.0, 0.0, 0.0, clock_s))
    monkeypatch.setattr(machine, "idle_seconds", lambda cores: idle_s)
    others = OtherWork((0, 1))
    clock_s, idle_s = 110.0, (58.0, 66.0)
    assert others.share() == pytest.approx(0.3)
    monkeypatch.setattr(os, "times", lambda: (1.0, 0.5, 2.0, 0.5, clock_s))
    assert others.share() == pytest.approx(0.1)
    monkeypatch.setattr(machine, "idle_seconds", lambda cores: None)
    assert others.share() == 0.0, "the system does not say"


def test_a_process_beside_this_one_is_seen() -> None:
    core = available_cores()[0]
    with busy_core(core), machine.pinned(core):
        others, end = OtherWork((core,)), time.monotonic() + 0.5
        while time.monotonic() < end:
            pass
        assert others.share() > 1 - LEAST_WHOLE
