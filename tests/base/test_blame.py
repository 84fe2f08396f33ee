"""What counts against a process: to sleep, to be stopped, to compute; not to wait for a core."""

import os
import signal
import time
from pathlib import Path

import pytest

from gangway.base.blame import LEAST_LOOKS, LOOK_EVERY_US, Blame, activity_of
from gangway.executor.launch import available_cores
from tests.helpers.busy_core import SPIN, busy_core

LIMIT_US = 4 * LOOK_EVERY_US
SLEEP = "import time\ntime.sleep(60)"
BEST_EFFORT = f"os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))\n{SPIN}"
DEADLINE_S = 20.0
THREADS = "import threading\nwhile True:\n    threading.Thread(target=int).start()"
NOBODY = 1 << 30  # no process has such a number


def running(script):
    """A process on the first core that runs a script, which has begun."""
    return busy_core(available_cores()[0], script)


def await_state(pid, state):
    deadline = time.monotonic() + DEADLINE_S
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != state:
        assert time.monotonic() < deadline


def looks_until_too_much(pid, looks):
    """How many looks at the test's own pace it takes; None if that many are not enough."""
    blame = Blame(pid, LIMIT_US, 0.0)
    for look in range(1, looks + 1):
        if blame.is_too_much(look * LOOK_EVERY_US):
            return look
    return None


def test_sleeping_counts():
    with running(SLEEP) as pid:
        await_state(pid, "S")
        assert looks_until_too_much(pid, 10) == LIMIT_US / LOOK_EVERY_US + 1


def test_being_stopped_counts():
    with running(SPIN) as pid:
        os.kill(pid, signal.SIGSTOP)
        await_state(pid, "T")
        assert looks_until_too_much(pid, 10) == LIMIT_US / LOOK_EVERY_US + 1


def test_a_core_that_is_wanted_does_not_count_only_the_time_on_it_does():
    with running(SPIN) as pid:
        assert looks_until_too_much(pid, 100) is None, "in no time at all, however late the clock says it is"
        begin_cpu_us, begin_us = activity_of(pid).cpu_us, time.monotonic_ns() / 1e3
        blame = Blame(pid, LIMIT_US, begin_us)
        while not blame.is_too_much(time.monotonic_ns() / 1e3):
            assert time.monotonic_ns() / 1e3 < begin_us + DEADLINE_S * 1e6
            time.sleep(0.01)
        assert activity_of(pid).cpu_us - begin_cpu_us > LIMIT_US


def test_threads_that_end_are_not_the_end_of_their_process():
    with running(THREADS) as pid:
        assert all(activity_of(pid) for _ in range(500))


def test_one_look_is_too_few():
    blame = Blame(NOBODY, LIMIT_US, 0.0)
    late_us = [100 * look * LIMIT_US for look in range(1, LEAST_LOOKS + 1)]
    assert [blame.is_too_much(now_us) for now_us in late_us] == [False] * (LEAST_LOOKS - 1) + [True]


@pytest.mark.alone
def test_who_waits_behind_others_for_a_core_is_let_be():
    with running(SPIN), running(BEST_EFFORT) as pid:
        begin_us = time.monotonic_ns() / 1e3
        blame = Blame(pid, LIMIT_US, begin_us)
        while (now_us := time.monotonic_ns() / 1e3) < begin_us + 3 * LIMIT_US:
            assert not blame.is_too_much(now_us)
            time.sleep(0.02)
