"""Counters of the kernel, which every machine has; those of the processor where there are any."""

import errno
import subprocess
import sys
import threading

import pytest
from gangway.executor.counter_rates import CounterRates
from gangway.executor.perf_events import (
    CONTEXT_SWITCHES,
    CPU_CLOCK,
    CYCLES,
    PAGE_FAULTS,
    TASK_CLOCK,
    Counter,
    ThreadCounters,
    cache_events,
    countable,
)

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
    """A process that touches PAGES new pages when it is told to."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", FAULTS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        self.fault()  # it has started

    def fault(self) -> None:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write("\n")
        self.process.stdout.readline()

    def end(self) -> None:
        self.process.communicate()


@pytest.fixture
def faulting():
    process = Faulting()
    yield process
    process.end()


def test_events_of_another_process(faulting: Faulting) -> None:
    with ThreadCounters([PAGE_FAULTS, CONTEXT_SWITCHES, TASK_CLOCK], [faulting.process.pid]) as counters:
        before = counters.read()
        faulting.fault()
        faults, switches, clock_ns = (now - then for now, then in zip(counters.read(), before, strict=True))
    assert PAGES <= faults < 2 * PAGES
    assert switches >= 1, "it waited for its input"
    assert clock_ns > 0


def test_a_clock_counts_while_it_is_open() -> None:
    with Counter(CPU_CLOCK) as counter:
        first = counter.read()
        assert counter.read() > first
    counter.close()  # again: nothing happens


def test_only_the_thread_that_was_named_is_counted() -> None:
    with Counter(TASK_CLOCK) as counter:
        before_ns = counter.read()
        other = threading.Thread(target=sum, args=(range(2_000_000),))
        other.start()
        other.join()
        mine_ns = counter.read() - before_ns
    with Counter(TASK_CLOCK) as counter:
        before_ns = counter.read()
        sum(range(2_000_000))
        assert mine_ns < counter.read() - before_ns


def test_a_thread_that_is_not_there() -> None:
    with pytest.raises(OSError, match="page faults cannot be counted") as caught:
        Counter(PAGE_FAULTS, 2**22 + 1)
    assert caught.value.errno == errno.ESRCH


def test_events_of_the_processor_count_or_are_refused() -> None:
    if countable([CYCLES]):
        with Counter(CYCLES) as counter:
            sum(range(100_000))
            assert counter.read() > 100_000
    else:
        with pytest.raises(OSError, match="cycles cannot be counted"):
            Counter(CYCLES)
    assert cache_events() is None or countable(cache_events() or ())


def test_rates_are_per_time_on_cores_and_begin_anew_with_other_threads(faulting: Faulting) -> None:
    with CounterRates([PAGE_FAULTS]) as rates:
        assert rates.look([faulting.process.pid]) is None
        faulting.fault()
        looked = rates.look([faulting.process.pid])
        assert looked is not None and 0.001 < looked[0] < 10  # a fault takes a microsecond or so
        assert rates.look([faulting.process.pid, 0]) is None
        assert rates.look([2**22 + 1]) is None, "gone before it was looked at"
        assert rates.look([faulting.process.pid]) is None
    with CounterRates([]) as nothing:
        assert nothing.look([0]) == ()
