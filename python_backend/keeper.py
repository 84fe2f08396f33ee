"""The keeper of an instance: the process that the supervisor starts. It forks, and the instance is its child.

Whichever ends first, instance, supervisor or keeper, nothing remains of what the model has started:

- The instance ends: orphans are the keeper's children (PR_SET_CHILD_SUBREAPER), whatever session they have made, and
  the keeper ends them before itself.
- The supervisor ends, also by SIGKILL: the kernel tells the keeper (PR_SET_PDEATHSIG), which ends the instance, too.
- The keeper is killed: the kernel ends the instance, and the supervisor what is left (`supervisor/processes.py`).
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import NamedTuple

from gangway.python_backend.cpu_clock import has_children

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_PARENT_ENDED = signal.SIGUSR1
_WATCHED = {signal.SIGCHLD, _PARENT_ENDED}
# From SIGTERM to SIGKILL: what multiprocessing keeps for its end (names in /dev/shm) is given back in that time.
GRACE_SECONDS = 0.25
KILL_SECONDS = 2.0  # what waits for a device ends later: nobody waits for it longer
_LOOK_SECONDS = 0.01


class Relation(NamedTuple):
    """What the kernel says of a process."""

    parent: int
    session: int


def keep(parent: int, descriptors: Iterable[int]) -> None:
    """Return in a new process, the instance's; the calling one becomes its keeper.

    `parent`: the supervisor. `descriptors`: those that the keeper has no use for. Raises OSError.
    """
    adopt_orphans()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
    _prctl(_PR_SET_PDEATHSIG, _PARENT_ENDED)
    _require_parent(parent)
    keeper = os.getpid()
    instance = os.fork()
    if instance:
        for descriptor in descriptors:  # the other ends of some learn by theirs that the instance has ended
            os.close(descriptor)
        os.chdir("/")
        _exit_like(_wait(instance, parent))
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    _require_parent(keeper)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _WATCHED)


def adopt_orphans() -> None:
    """Have orphans among the descendants of this process become its children."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def relations() -> dict[int, Relation]:
    """Return what the kernel says of all processes, by process id."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                _state, parent, _group, session = file.read().rpartition(b")")[2].split()[:4]
                found[int(name)] = Relation(int(parent), int(session))
    return found


def _wait(instance: int, parent: int) -> int:
    """Return the status of the instance when it and all that it has started have ended."""
    status = None
    while status is None:
        if signal.sigwait(_WATCHED) == _PARENT_ENDED and os.getppid() != parent:
            os.kill(instance, signal.SIGKILL)
        status = _reaped().get(instance)
    _signal_descendants(signal.SIGTERM)
    begin = time.monotonic()
    while has_children() and (passed_seconds := time.monotonic() - begin) < KILL_SECONDS:
        if passed_seconds > GRACE_SECONDS:
            _signal_descendants(signal.SIGKILL)
        _reaped()
        time.sleep(_LOOK_SECONDS)
    return status


def _signal_descendants(number: signal.Signals) -> None:
    for pid in _descendants():
        with suppress(OSError):
            os.kill(pid, number)


def _reaped() -> dict[int, int]:
    """Return the statuses of children that have ended."""
    found = {}
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            found[pid] = status
    return found


def _descendants() -> list[int]:
    known = relations()
    found = [os.getpid()]
    for each in found:
        found += [pid for pid, relation in known.items() if relation.parent == each]
    return found[1:]


def _exit_like(status: int) -> None:
    """End as the instance has ended, by the same signal or with the same status."""
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with suppress(OSError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
        os.kill(os.getpid(), -code)
    os._exit(code)


def _require_parent(parent: int) -> None:
    if os.getppid() != parent:  # it has ended before this process asked to be told
        os._exit(1)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl({option}): {os.strerror(error)}")
