"""Workers: which cores they get, and how their processes are started."""

import math
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gangway.base.host_limits import CGROUPS, cpu_quota
from gangway.base.process import raise_priority
from gangway.base.python_process import start_of

NODES: Final = Path("/sys/devices/system/node")


def available_cores(request: str = "all", cgroups: Path = CGROUPS, membership: str | None = None) -> list[int]:
    """Return the cores to use, ascending: at least one, at most as many as the CPU quota pays for (rounded down).

    `request` is "all", or a list such as "0,2-5". "0,2-5x4" has each core four times, for four workers that share it:
    a wide machine for tests, whose times mean nothing. Raises ValueError for a malformed list, a core that is not
    available, or more cores than the quota pays for.
    """
    allowed = sorted(os.sched_getaffinity(0))
    quota = cpu_quota(cgroups, membership)
    count = len(allowed) if quota is None else max(1, min(len(allowed), math.floor(quota)))
    if request == "all":
        return allowed[:count]
    listed, shared, times = request.partition("x")
    cores = _parse(listed)
    missing = [core for core in cores if core not in allowed]
    if missing:
        raise ValueError(f"cores {_text(missing)} are not available to this process; available: {_text(allowed)}")
    if len(cores) > count:
        raise ValueError(f"{len(cores)} cores requested, but the CPU quota of this container pays for {quota:.2f}")
    if shared and not (times.isdecimal() and int(times)):
        raise ValueError(f"workers of each core must be a number behind 'x', got {request!r}")
    return cores * int(times) if shared else cores


def numa_nodes(cores: Sequence[int], root: Path = NODES) -> tuple[tuple[int, ...], ...]:
    """Return which of these cores are of one NUMA node, by node: nodes without any of them are left out.

    `root`: sysfs's folder of nodes. All cores are of one node where it is missing or does not name all of them.
    """
    found = []
    for folder in sorted(root.glob("node[0-9]*"), key=lambda folder: int(folder.name.removeprefix("node"))):
        try:
            text = (folder / "cpulist").read_text().strip()
        except OSError:
            continue
        there = set(_parse(text)) if text else set()  # a node of memory only has none
        if node := tuple([core for core in cores if core in there]):
            found.append(node)
    return tuple(found) if sorted(core for node in found for core in node) == sorted(cores) else (tuple(cores),)


def nodes_of(request: str, cores: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return the nodes that a list such as "0-3;4-7" names; "all" asks the system. Raises ValueError.

    Each of `cores` is in one of them, and no other.
    """
    if request == "all":
        return numa_nodes(cores)
    nodes = tuple(tuple(_parse(node)) for node in request.split(";"))
    if sorted(core for node in nodes for core in node) != sorted(cores):
        raise ValueError(f"each of the cores {_text(list(cores))} is in one node, got {request!r}")
    return nodes


MOST_THREADS: Final = 16  # a worker has a session, with threads, for each number up to here, of each model


def thread_counts(cores: int) -> list[int]:
    """Return with how many threads onnxruntime can run on a gang of so many cores or less: 1, 2, 4, ..."""
    return [1 << power for power in range(min(cores, MOST_THREADS).bit_length())]


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
    instances_fd: int = -1  # where Python models' instances are (`instance_addresses.py`); -1: there are none
    bell_fds: tuple[int, ...] = ()  # eventfds of front ends: the slot tables name them


def start_worker(
    plan: WorkerPlan, extra_pass_fds: Sequence[int] = (), stderr: int | None = None
) -> "subprocess.Popen[bytes]":
    """Start `python -m gangway.executor.worker`; its first message is Ready.

    It dies with the THREAD that calls this (PR_SET_PDEATHSIG), so call it from one that lives as long as the process.
    The worker ignores the signals that end a server: it ends by an Exit message or by SIGKILL. `stderr`: a descriptor
    for its log lines, None for the standard error of this process.
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
        "instances-fd": plan.instances_fd,
        "parent": os.getpid(),
    }
    start = start_of("gangway.executor.worker", [f"--{key}={value}" for key, value in arguments.items()])
    optional = [fd for fd in (plan.regions_fd, plan.instances_fd) if fd >= 0]
    fds = (plan.control_fd, plan.arena_fd, *plan.io_fds, *plan.bell_fds, *optional, *extra_pass_fds)
    process = subprocess.Popen(
        start.command, env=start.environment, pass_fds=fds, stdin=subprocess.DEVNULL, stderr=stderr
    )
    raise_priority(process.pid)
    return process


def _parse(request: str) -> list[int]:
    cores: set[int] = set()
    try:
        for part in request.split(","):
            first, dash, last = part.partition("-")
            cores.update(range(int(first), int(last if dash else first) + 1))
    except ValueError:
        raise ValueError(f"cores must be 'all' or a list such as 0,2-5, got {request!r}") from None
    if not cores:
        raise ValueError(f"no cores in {request!r}")
    return sorted(cores)


def _text(cores: list[int]) -> str:
    return ", ".join(map(str, cores))
