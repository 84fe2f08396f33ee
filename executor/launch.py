"""How a worker process is started."""

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gangway.executor.process import take_precedence


@dataclass(frozen=True)
class WorkerPlan:
    """One worker: its number, its core, the shared memory it inherits and where artifacts lie."""

    rank: int  # number of the worker, the index of its rings (in a lease it may have another rank)
    core: int
    control_fd: int
    arena_fd: int
    io_fds: tuple[int, ...]  # by front end
    cache_dir: Path
    spin_us: int = 20
    regions_fd: int = -1  # a socket for regions of clients' memory; -1: there are none


def start_worker(
    plan: WorkerPlan, extra_pass_fds: Sequence[int] = (), stderr: int | None = None
) -> "subprocess.Popen[bytes]":
    """Start `python -m gangway.executor.worker`; its first message is Ready.

    It dies with the THREAD that calls this (PR_SET_PDEATHSIG), so call it from one that lives as long as the process.
    The worker ignores SIGINT and SIGTERM: it ends by an Exit message or by SIGKILL. `stderr`: a descriptor for its
    complaints, None for the standard error of this process.
    """
    arguments = {
        "rank": plan.rank,
        "core": plan.core,
        "control-fd": plan.control_fd,
        "arena-fd": plan.arena_fd,
        "io-fds": ",".join(map(str, plan.io_fds)),
        "cache-dir": plan.cache_dir,
        "spin-us": plan.spin_us,
        "regions-fd": plan.regions_fd,
        "parent": os.getpid(),
    }
    command = [
        sys.executable,
        "-m",
        "gangway.executor.worker",
        *(f"--{key}={value}" for key, value in arguments.items()),
    ]
    regions = () if plan.regions_fd < 0 else (plan.regions_fd,)
    fds = (plan.control_fd, plan.arena_fd, *plan.io_fds, *regions, *extra_pass_fds)
    process = subprocess.Popen(command, pass_fds=fds, stdin=subprocess.DEVNULL, stderr=stderr)
    take_precedence(process.pid)
    return process
