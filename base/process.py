"""What a serving process asks of the kernel for itself: priority, end and heap; and a worker's lines to the log."""

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

from gangway.base.commands import ENDING
from gangway.base.parent import signal_at_parents_end

_M_ARENA_MAX: Final = -8

# A gang is as fast as its slowest rank, and each hop of a request waits for a core.
SERVING_NICE: Final = -5

# From -3 on a client on the same machine often waits until a worker's slice is over when its answer comes: 0.3 ms on
# average, 3.4 ms at the 99th percentile; here it takes the core at once. Measured with one that wakes up for 150 us.
WORKER_NICE: Final = -1

# The front end's weight is nine times a worker's: it wants a core for a fraction of a millisecond, often, and a
# request's latency begins and ends with that.
FRONT_END_NICE: Final = -11

# A worker's where nobody may have a nice value below 0: the same distance to the front end's, which is 0 then.
LOWERED_WORKER_NICE: Final = WORKER_NICE - FRONT_END_NICE

SHORT_SLICE_NS: Final = 1_000_000  # less than the kernel's default where there are two cores or more
_SCHED_ATTR = struct.Struct("=IIQiIQQQ")  # size, policy, flags, nice, priority, runtime (here a slice), two more
_SCHED_SETATTR: Final = {"x86_64": 314, "aarch64": 274}  # the C library has no function for it

LOG_WARNING = "<4>"  # in front of a line, as for systemd and the kernel
_STANDARD_ERROR = 2


def raise_priority(pid: int = 0, nice: int = SERVING_NICE) -> None:
    """Give a process (0: the calling one) more weight than those of ordinary priority, where the system permits it.

    It permits root, CAP_SYS_NICE and RLIMIT_NICE. The parent calls this for each process that it starts: on a busy
    machine most of an outage is what the new process has to import first.
    """
    with contextlib.suppress(PermissionError, ProcessLookupError):
        os.setpriority(os.PRIO_PROCESS, pid, nice)


def use_worker_priority(thread: int = 0) -> None:
    """Give a thread (0: the calling one) the ordinary policy and a ninth of the front end's weight.

    Where the system does not permit the front end more weight than others have, the thread gets less.
    """
    with contextlib.suppress(OSError):
        os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))
    with contextlib.suppress(ProcessLookupError, PermissionError):
        nice = WORKER_NICE if may_raise_priority(thread) else LOWERED_WORKER_NICE
        os.setpriority(os.PRIO_PROCESS, thread, nice)


def may_raise_priority(thread: int = 0) -> bool:
    """Whether a thread (0: the calling one) may have any priority again: found out by the front end's for a moment."""
    nice = os.getpriority(os.PRIO_PROCESS, thread)
    try:
        os.setpriority(os.PRIO_PROCESS, thread, FRONT_END_NICE)
    except PermissionError:
        return False
    os.setpriority(os.PRIO_PROCESS, thread, nice)
    return True


def missing_privilege() -> str:
    """Return what the system does not permit and what is done instead, for the log; empty if all is permitted.

    The calling thread tries, and has the ordinary policy afterwards.
    """
    if not may_raise_priority():
        return (
            f"the system permits no higher priorities (CAP_SYS_NICE, which containers give to root only): workers have"
            f" nice value {LOWERED_WORKER_NICE}, so that front ends and the scheduler go before them"
        )
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    except OSError as error:
        return f"the system permits no real-time policy (SCHED_FIFO: {error.strerror}): the scheduler waits for a core"
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    return ""


def raise_own_priority() -> None:
    """Do so for the calling process, but not for those that it starts."""
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_OTHER | os.SCHED_RESET_ON_FORK, os.sched_param(0))
        raise_priority()


def use_realtime_priority() -> None:
    """Preempt every ordinary process, workers included, as soon as there is something to do; else `raise_priority`.

    For the scheduler, whose turns are short and which all others wait for: with a worker's priority it waits for the
    slice that the kernel lets a worker finish. Threads and processes that it starts are of the ordinary kind.
    """
    raise_priority()
    with contextlib.suppress(OSError):  # without CAP_SYS_NICE; some containers forbid it altogether
        os.sched_setscheduler(0, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(1))


def use_short_slices() -> None:
    """Run before workers, in turn with them, in shorter slices than theirs. Threads started later do the same.

    For the front end, with which a request's latency begins and ends: since Linux 6.12 a thread with a short slice may
    interrupt one with a longer slice. Older kernels ignore slices. A real-time policy would stop the workers while more
    requests come than one core can read. Much shorter slices cost throughput and gain nothing.
    """
    raise_priority(nice=FRONT_END_NICE)
    number = _SCHED_SETATTR.get(platform.machine())
    if number is None or os.sched_getscheduler(0) != os.SCHED_OTHER:
        return
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    wanted = _SCHED_ATTR.pack(_SCHED_ATTR.size, os.SCHED_OTHER, 0, nice, 0, SHORT_SLICE_NS, 0, 0)
    ctypes.CDLL(None).syscall(number, 0, wanted, 0)


def use_idle_priority(pid: int = 0, alone: bool = False) -> None:
    """Let a process (0: the calling thread) run only while the core is idle; `alone`: not what it starts.

    A nice value is not enough: the kernel lets a nice thread finish its slice of 3 ms before one that wakes up.
    """
    policy = os.SCHED_IDLE | (os.SCHED_RESET_ON_FORK if alone else 0)
    with contextlib.suppress(OSError):  # some containers forbid it; or the process has ended
        os.sched_setscheduler(pid, policy, os.sched_param(0))


def leave_idle_priority(pid: int, nice: int) -> None:
    """Give a process or thread the ordinary policy and a nice value, where the system permits it."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, pid, max(nice, os.getpriority(os.PRIO_PROCESS, pid)))
        policy = os.SCHED_OTHER | (os.sched_getscheduler(pid) & os.SCHED_RESET_ON_FORK)
        os.sched_setscheduler(pid, policy, os.sched_param(0))


@contextlib.contextmanager
def restored_priority() -> Iterator[None]:
    """Restore the calling thread's priority after the block, where the system permits it.

    A thread must not keep the idle policy: a process ends only when each of its threads has run, which takes an idle
    one many seconds on a machine that others keep busy.
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
    """Have the kernel kill this process when the thread that started it ends, and ignore the signals that end a server.

    The supervisor ends its children itself: a Ctrl-C in the terminal, its end, or a service manager that signals every
    process, must not take them away while requests run.
    """
    for number in ENDING:
        signal.signal(number, signal.SIG_IGN)
    signal_at_parents_end(signal.SIGKILL)


def prefer_oom_kill() -> None:
    """Make this process the first one that the kernel ends when memory is full: it is soon replaced."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("500")


def use_one_malloc_arena() -> None:
    """Have all threads share one arena of malloc: each arena keeps megabytes after its thread has ended.

    To be called before there is a second thread. Raises ValueError if the C library refuses.
    """
    if ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1) != 1:
        raise ValueError("mallopt(M_ARENA_MAX, 1) was refused")


def write_log_line(text: str, level: str = "") -> None:
    """Write a line to standard error, the pipe to the supervisor, without Python's logging: a worker stays small.

    It never waits and never fails: a line may be lost. `level`: LOG_WARNING, or empty for an error.
    """
    line = level + " ".join(text.splitlines())
    with contextlib.suppress(OSError):
        os.write(_STANDARD_ERROR, f"{line}\n".encode(errors="backslashreplace"))
