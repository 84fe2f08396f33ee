"""What this process may take of the host: CPU, memory and processes, by its cgroups (versions 1 and 2) and its rlimits.

In a container the path in /proc/self/cgroup may not exist below the mount; the mount itself is the container's own
group then. The limit of a group holds for all groups below it, so the tightest one on the way to the root counts.
"""

import os
import resource
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

CGROUPS: Final = Path("/sys/fs/cgroup")


def cpu_quota(cgroups: Path = CGROUPS, membership: str | None = None) -> float | None:
    """Return the tightest CPU quota (in cores) of this process's cgroup and those above it, None if there is none.

    `membership` is the text of /proc/self/cgroup. Version 2: `cpu.max`; version 1: `cpu.cfs_*_us`.
    """
    quotas = []
    for version, folder in _group_folders("cpu", cgroups, membership):
        try:
            if version == 2:
                limit, period = (folder / "cpu.max").read_text().split()
            else:
                limit, period = (_text_of(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
        except OSError:
            continue
        if limit != "max" and int(limit) > 0:
            quotas.append(int(limit) / int(period))
    return min(quotas, default=None)


def memory_limit_bytes(cgroups: Path = CGROUPS, membership: str | None = None) -> int:
    """Return how much memory processes may take here: the tightest of the machine's, the cgroups' and RLIMIT_AS."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), *_rlimit(resource.RLIMIT_AS)]
    limits += _integers("memory", {2: "memory.max", 1: "memory.limit_in_bytes"}, cgroups, membership)
    return min(limits)


def process_limit(cgroups: Path = CGROUPS, membership: str | None = None) -> int | None:
    """Return how many processes and threads there may be (tightest `pids.max`, RLIMIT_NPROC); None: any number."""
    of_user = _rlimit(resource.RLIMIT_NPROC) if os.getuid() else []  # the kernel does not hold root to it
    limits = [*of_user, *_integers("pids", {2: "pids.max", 1: "pids.max"}, cgroups, membership)]
    return min(limits, default=None)


def _group_folders(controller: str, cgroups: Path, membership: str | None) -> Iterator[tuple[int, Path]]:
    """Yield version and folder of each cgroup that may limit this process by a controller, its own one first."""
    text = Path("/proc/self/cgroup").read_text() if membership is None else membership
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mounts, version = [cgroups, cgroups / "unified"], 2
        elif controller in controllers.split(","):
            mounts, version = list(dict.fromkeys((cgroups / controller, cgroups / controllers))), 1
        else:
            continue
        for mount in mounts:
            folder = mount / path.lstrip("/")
            yield from ((version, group) for group in (folder, *folder.parents) if group.is_relative_to(mount))


def _text_of(path: Path) -> str:
    return path.read_text().strip()


def _integers(controller: str, files: Mapping[int, str], cgroups: Path, membership: str | None) -> list[int]:
    found = []
    for version, folder in _group_folders(controller, cgroups, membership):
        try:
            found.append(int(_text_of(folder / files[version])))
        except (OSError, ValueError):  # no such controller here, or "max"
            continue
    return found


def _rlimit(which: int) -> list[int]:
    soft, _ = resource.getrlimit(which)
    return [] if soft == resource.RLIM_INFINITY else [soft]
