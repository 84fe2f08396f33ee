"""Counters of the kernel, which every machine has; those of the processor where there are any."""

import errno
import os
import subprocess
import sys

import pytest

from gangway.executor.counters import (
    CONTEXT_SWITCHES,
    CYCLES,
    MINOR_FAULTS,
    PAGE_FAULTS,
    CoreCounters,
    CounterRates,
    cache_events,
    countable,
)

pytestmark = pytest.mark.skipif(not countable([PAGE_FAULTS]), reason="this user may not count what happens on cores")
FIRST, *_, LAST = sorted(os.sched_getaffinity(0)) * 2
PAGES = 500
FAULTS = f"""
import mmap, sys
for line in sys.stdin:
    memory = mmap.mmap(-1, {PAGES} * mmap.PAGESIZE)
    for page in range({PAGES}):
        memory[page * mmap.PAGESIZE] = 1
    print(flush=True)
"""


class Faulting:
    """A process on one core that touches PAGES new pages when it is told to."""

    def __init__(self, core: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", FAULTS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        os.sched_setaffinity(self.process.pid, {core})
        self.fault()  # it has started

    def fault(self) -> None:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write("\n")
        self.process.stdout.readline()

    def end(self) -> None:
        self.process.communicate()


@pytest.fixture
def faulting():
    process = Faulting(LAST)
    yield process
    process.end()


def test_events_of_whatever_runs_on_a_core(faulting: Faulting) -> None:
    with CoreCounters([PAGE_FAULTS, CONTEXT_SWITCHES], [LAST]) as counters:
        before = counters.read()
        faulting.fault()
        faults, switches = (now - then for now, then in zip(counters.read(), before, strict=True))
    assert faults >= PAGES
    assert switches >= 1, "it waited for its input"


@pytest.mark.skipif(FIRST == LAST, reason="there is one core")
def test_cores_add_up_and_one_says_nothing_of_another(faulting: Faulting) -> None:
    with CoreCounters([PAGE_FAULTS], [FIRST, LAST]) as both, CoreCounters([PAGE_FAULTS], [FIRST]) as one:
        for _ in range(20):
            faulting.fault()
        (first,), (all_faults,) = one.read(), both.read()
    assert all_faults >= first + 20 * PAGES


def test_a_core_that_is_not_there_leaves_nothing_open() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="cannot be counted") as caught:
        CoreCounters([CONTEXT_SWITCHES, PAGE_FAULTS], [FIRST, 2**20])
    assert caught.value.errno in (errno.ENODEV, errno.EINVAL)
    assert len(os.listdir("/proc/self/fd")) == before


def test_events_of_the_processor_count_or_are_refused() -> None:
    if countable([CYCLES]):
        with CoreCounters([CYCLES], sorted(os.sched_getaffinity(0))) as counters:
            sum(range(100_000))
            assert counters.read()[0] > 100_000
        counters.close()  # again: nothing happens
    else:
        with pytest.raises(OSError, match="cycles cannot be counted"):
            CoreCounters([CYCLES], [FIRST])
    assert cache_events() is None or countable(cache_events() or ())


def test_rates_are_per_what_a_core_ran_and_begin_anew_with_other_cores(faulting: Faulting) -> None:
    with CounterRates([PAGE_FAULTS, CONTEXT_SWITCHES], per=MINOR_FAULTS) as rates:
        assert rates.look([LAST]) is None
        faulting.fault()
        looked = rates.look([LAST])
        assert looked is not None and looked[0] >= 1000 and looked[1] > 0
        assert rates.look([LAST, LAST]) is None
        assert rates.look([2**20]) is None, "no such core"
        assert rates.look([LAST]) is None
    with CounterRates([]) as nothing:
        assert nothing.look([FIRST]) == ()
