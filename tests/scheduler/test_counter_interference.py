"""The level from counters: by hand, and with events that every machine has in the place of the cache's."""

import mmap
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from gangway.artifact.proxy import InterferenceProxy, write_proxy
from gangway.executor.counters import CONTEXT_SWITCHES, MINOR_FAULTS, PAGE_FAULTS, CounterRates, cache_events, countable
from gangway.scheduler.interference import INTERVAL_US, LEAST_EXPLAINED, CounterInterference, from_profiles

PROXY = InterferenceProxy("0123456789ab", "page faults", "context switches", 0.0, 1.0, 10.0, 1.0, 1.0, 9, 1)


class Script:
    """Rates that are told beforehand."""

    def __init__(self, *rates: tuple[float, ...] | None) -> None:
        self.rates = list(rates)
        self.looked: list[Sequence[int]] = []

    def look(self, cores: Sequence[int]) -> tuple[float, ...] | None:
        self.looked.append(cores)
        return self.rates.pop(0)


def test_the_level_of_the_last_interval() -> None:
    script = Script(None, (0.5, 0.1), None, (0.2, 0.0))
    level = CounterInterference(PROXY, script, (7, 8), clock_ns=lambda: 0).level
    assert level(1000.0) == 0.0
    assert level(1000.0 + INTERVAL_US - 1) == 0.0 and script.looked == [(7, 8)]
    assert level(1000.0 + INTERVAL_US) == 0.5 + 10 * 0.2
    assert level(1000.0 + 2 * INTERVAL_US) == 2.5, "workers that were idle say nothing new"
    assert level(1000.0 + 9 * INTERVAL_US) == 0.2


def test_looks_that_take_long_are_rare() -> None:
    class Slow(Script):
        def look(self, cores: Sequence[int]) -> tuple[float, ...] | None:
            time.sleep(0.001)
            return super().look(cores)

    slow = Slow((0.5, 0.0), (0.2, 0.0))
    level = CounterInterference(PROXY, slow, (0,)).level
    assert level(0.0) == level(10 * INTERVAL_US) == 0.5
    assert level(1e7) == 0.2


@pytest.mark.skipif(not countable([PAGE_FAULTS]), reason="this user may not count what happens on cores")
def test_with_real_events() -> None:
    with CounterRates([PAGE_FAULTS, CONTEXT_SWITCHES], per=MINOR_FAULTS) as rates:
        interference = CounterInterference(PROXY, rates, sorted(os.sched_getaffinity(0)))
        interference.level(0.0)
        sum(range(1000))
        interference.level(1e6)
        memory = mmap.mmap(-1, 2000 * mmap.PAGESIZE)
        for page in range(2000):
            memory[page * mmap.PAGESIZE] = 1
        assert interference.level(2e6) > 0.01


def test_only_what_the_machine_counts_is_used(tmp_path: Path) -> None:
    assert from_profiles(tmp_path, "0123456789ab", ()) is None
    path = write_proxy(tmp_path, PROXY)
    assert from_profiles(tmp_path, "0123456789ab", ()) is None, "fitted to other events than the cache's"
    path.write_text("{}")
    assert from_profiles(tmp_path, "0123456789ab", ()) is None
    if (events := cache_events()) is not None:
        names = [event.name for event in events]
        good = InterferenceProxy("0123456789ab", *names, 0.0, 1.0, 1.0, 1.0, 1.0, 9, 1)
        write_proxy(tmp_path, good)
        assert from_profiles(tmp_path, "0123456789ab", ()) is not None
        write_proxy(tmp_path, replace(good, r_squared=LEAST_EXPLAINED - 0.01))
        assert from_profiles(tmp_path, "0123456789ab", ()) is None, "it explains too little"
        write_proxy(tmp_path, replace(good, per_miss_rate=-1.0))
        assert from_profiles(tmp_path, "0123456789ab", ()) is None, "misses cannot mean that it is calm"
