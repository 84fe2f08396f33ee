"""What every serving process asks of the kernel for itself, before it starts threads."""

import contextlib
import ctypes
import os
import platform
import signal
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_PR_SET_PDEATHSIG: Final = 1
_M_ARENA_MAX: Final = -8

# A gang is as fast as its slowest rank, and each hop of a request waits for a core. Measured with one client on two
# cores: 6 % off a tiny request's latency.
SERVING_NICE: Final = -5

# The front end's weight is nine times a worker's: it wants a core for a fraction of a millisecond, often, and a
# request's latency begins and ends with that. At a worker's nice value it waited 2.5 ms for each image of 600 KB, with
# 250 of them a second on two cores: half as many were answered in time.
FRONT_END_NICE: Final = -15

SHORT_SLICE_NS: Final = 1_000_000  # less than others have by themselves where there are two cores or more
_SCHED_ATTR = struct.Struct("=IIQiIQQQ")  # size, policy, flags, nice, priority, runtime (here a slice), two more
_SCHED_SETATTR: Final = {"x86_64": 314, "aarch64": 274}  # the C library has no function for it


def take_precedence(pid: int = 0, nice: int = SERVING_NICE) -> None:
    """Have a process (0: the calling one) go before those of ordinary priority, where the system lets us.

    That is root, CAP_SYS_NICE or RLIMIT_NICE. Who starts a process of ours does this for it: on a busy machine most of
    an outage is what a successor has to import first.
    """
    with contextlib.suppress(PermissionError, ProcessLookupError):
        os.setpriority(os.PRIO_PROCESS, pid, nice)


def take_precedence_alone() -> None:
    """Do so for this process, but not for what it starts from now on."""
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_OTHER | os.SCHED_RESET_ON_FORK, os.sched_param(0))
        take_precedence()


def go_first() -> None:
    """Take the core at once whenever there is something to do, also from workers; else as `take_precedence`.

    For the scheduler, whose turns are short and which all others wait for. Merely being as nice as a worker it waited
    0.3 ms a turn on two cores with images at a third of capacity, and some turns 3.7 ms: the slice that the kernel lets
    a worker finish. So seen, mean latency was 1.7 instead of 1.4 times isolated. Threads and processes that it starts
    are of the ordinary kind.
    """
    take_precedence()
    with contextlib.suppress(OSError):  # without CAP_SYS_NICE; some containers forbid it altogether
        os.sched_setscheduler(0, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(1))


def take_short_turns() -> None:
    """Go before workers, but in turn with them, in shorter slices than theirs, and so, since Linux 6.12, sooner.

    For the front end, with which a request's latency begins and ends: who asks for a short slice may interrupt who has
    a longer one. No real-time policy: while more requests come than one core can read, workers go on. With 600 KB
    images at a third of capacity of two cores the front end waits 1.4 ms a request instead of 1.65, and fewer requests
    are late. Slices of 0.1 ms gain no more, and cost 12 % of a tiny model's throughput with 32 clients, this one 2 %.
    Threads that the calling one starts do the same. Older kernels do not care for slices.
    """
    take_precedence(nice=FRONT_END_NICE)
    number = _SCHED_SETATTR.get(platform.machine())
    if number is None or os.sched_getscheduler(0) != os.SCHED_OTHER:
        return
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    wanted = _SCHED_ATTR.pack(_SCHED_ATTR.size, os.SCHED_OTHER, 0, nice, 0, SHORT_SLICE_NS, 0, 0)
    ctypes.CDLL(None).syscall(number, 0, wanted, 0)


def give_way(pid: int = 0, alone: bool = False) -> None:
    """Have a process (0: the calling thread) run only when nobody else wants the core; `alone`: not what it starts.

    Mere niceness is not enough: the kernel lets a nice thread finish its slice of 3 ms before one that wakes up.
    """
    policy = os.SCHED_IDLE | (os.SCHED_RESET_ON_FORK if alone else 0)
    with contextlib.suppress(OSError):  # some containers forbid it; or the process has ended
        os.sched_setscheduler(pid, policy, os.sched_param(0))


def give_way_less(pid: int, nice: int) -> None:
    """Take a process or thread out of that, where the system lets us (as in `take_precedence`), and make it nice."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, pid, max(nice, os.getpriority(os.PRIO_PROCESS, pid)))
        policy = os.SCHED_OTHER | (os.sched_getscheduler(pid) & os.SCHED_RESET_ON_FORK)
        os.sched_setscheduler(pid, policy, os.sched_param(0))


@contextlib.contextmanager
def as_before() -> Iterator[None]:
    """Where the system lets us, undo afterwards what makes the calling thread give way in the block.

    It must not be left so: a process has not died before each of its threads had a turn, which on a machine that others
    keep busy takes one that gives way many seconds.
    """
    thread = threading.get_native_id()
    nice = os.getpriority(os.PRIO_PROCESS, thread)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, nice)
            policy = os.SCHED_OTHER | (os.sched_getscheduler(thread) & os.SCHED_RESET_ON_FORK)
            os.sched_setscheduler(thread, policy, os.sched_param(0))


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends. Ignores SIGINT and SIGTERM from now on.

    The supervisor ends its children itself: a Ctrl-C in the terminal, or a service manager that signals every process,
    must not take them away while requests run.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl(PR_SET_PDEATHSIG): {os.strerror(error)}")


def be_ended_first() -> None:
    """Where the kernel has to end a process because memory is full, have it be this one: it is soon replaced."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("500")


def keep_one_heap() -> None:
    """Have all threads share malloc's memory: each that came and went would leave some behind, megabytes of it.

    Before there is a second thread.
    """
    if ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1) != 1:
        raise ValueError("mallopt(M_ARENA_MAX, 1) was refused")


def return_freed_memory() -> None:
    """Return all memory to the kernel that malloc keeps of what was freed, whichever thread has freed it."""
    ctypes.CDLL(None).malloc_trim(0)
