"""What processes ask of the kernel, where the system lets them."""

import os
import subprocess
import sys

import pytest

from gangway.base.process import FRONT_END_NICE, SERVING_NICE, SHORT_SLICE_NS, WORKER_NICE
from tests.helpers.nice_values import WITHOUT_PRIVILEGE

SCRIPT = """
import os, threading
from gangway.base.process import use_realtime_priority
use_realtime_priority()
of_thread = []
thread = threading.Thread(target=lambda: of_thread.append(os.sched_getscheduler(0)))
thread.start()
thread.join()
print(os.sched_getscheduler(0) & ~os.SCHED_RESET_ON_FORK, of_thread[0])
"""


def may_go_first() -> bool:
    """Whether this machine lets us take a real-time policy."""
    probe = "import os; os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))"
    return subprocess.run([sys.executable, "-c", probe], check=False, stderr=subprocess.DEVNULL).returncode == 0


def test_the_scheduler_goes_first_and_what_it_starts_does_not() -> None:
    output = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True).stdout
    first = os.SCHED_FIFO if may_go_first() else os.SCHED_OTHER
    assert output.split() == [str(first), str(os.SCHED_OTHER)]


ALONE = """
import os, subprocess, sys
from gangway.base.process import raise_own_priority
raise_own_priority()
child = "import os; print(os.getpriority(os.PRIO_PROCESS, 0))"
print(os.getpriority(os.PRIO_PROCESS, 0), flush=True)
subprocess.run([sys.executable, "-c", child], check=True)
"""


def test_what_the_supervisor_starts_has_no_precedence_of_its_own() -> None:
    output = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, check=True).stdout
    supervisor, child = map(int, output.split())
    assert supervisor == SERVING_NICE or not may_go_first()
    assert child == os.getpriority(os.PRIO_PROCESS, 0)


RANKS = """
import os, threading
from gangway.base.process import missing_privilege, use_short_slices, use_worker_priority
print(missing_privilege().partition(" (")[0] or "all")
nices = []  # of threads, whose each is its own
def of(set_priority):
    def run():
        set_priority()
        nices.append(os.getpriority(os.PRIO_PROCESS, 0))
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
of(use_worker_priority)
of(use_short_slices)
print(*nices, os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0))
"""


@pytest.mark.parametrize("prefix", [(), WITHOUT_PRIVILEGE], ids=["as it is", "without privilege"])
def test_a_front_end_goes_before_workers_with_and_without_privilege(prefix: tuple[str, ...]) -> None:
    command = [*prefix, sys.executable, "-c", RANKS]
    run = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    told, numbers = run.stdout.splitlines()
    worker, front_end, own, policy = map(int, numbers.split())
    assert worker - front_end == WORKER_NICE - FRONT_END_NICE
    assert (own, policy) == (os.getpriority(os.PRIO_PROCESS, 0), os.SCHED_OTHER)
    may_raise = not prefix and may_go_first()
    assert (front_end, told) == (
        (FRONT_END_NICE, "all") if may_raise else (0, "the system permits no higher priorities")
    )


TURNS = """
import ctypes, os, platform, struct, threading
from gangway.base.process import use_short_slices
def slice_ns():
    attributes = ctypes.create_string_buffer(48)
    number = {"x86_64": 315, "aarch64": 275}[platform.machine()]  # sched_getattr
    assert ctypes.CDLL(None).syscall(number, 0, attributes, len(attributes), 0) == 0
    return struct.unpack("=IIQiIQQQ", attributes)[5]
before = slice_ns()
use_short_slices()
found = [slice_ns()]
thread = threading.Thread(target=lambda: found.append(slice_ns()))
thread.start()
thread.join()
print(before, *found, os.getpriority(os.PRIO_PROCESS, 0))
"""


def test_the_front_end_and_its_threads_take_short_turns_where_the_kernel_knows_them() -> None:
    run = subprocess.run([sys.executable, "-c", TURNS], capture_output=True, text=True, timeout=30, check=True)
    before_ns, after_ns, of_thread_ns, nice = map(int, run.stdout.split())
    knows_slices = before_ns > 0  # since Linux 6.12
    assert after_ns == of_thread_ns == (SHORT_SLICE_NS if knows_slices else 0)
    assert nice == FRONT_END_NICE or not may_go_first()
