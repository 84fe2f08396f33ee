"""What processes ask of the kernel, where the system lets them."""

import os
import subprocess
import sys

from gangway.executor.process import FRONT_END_NICE, SERVING_NICE, SHORT_SLICE_NS

SCRIPT = """
import os, threading
from gangway.executor.process import use_realtime_priority
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
from gangway.executor.process import raise_own_priority
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


TURNS = """
import ctypes, os, platform, struct, threading
from gangway.executor.process import use_short_slices
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
