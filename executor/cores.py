"""Which cores to use: the affinity mask (cpusets show there), the cgroup's CPU quota, and the user's wish."""

import math
import os
from pathlib import Path
from typing import Final

_CGROUPS: Final = Path("/sys/fs/cgroup")


def available_cores(request: str = "all", cgroups: Path = _CGROUPS, membership: str | None = None) -> list[int]:
    """Return the cores to use, ascending: at least one, at most as many as the CPU quota pays for (rounded down).

    `request` is "all", or a list such as "0,2-5". Raises ValueError for a malformed list, a core that is not available,
    or more cores than the quota pays for.
    """
    allowed = sorted(os.sched_getaffinity(0))
    quota = cpu_quota(cgroups, membership)
    count = len(allowed) if quota is None else max(1, min(len(allowed), math.floor(quota)))
    if request == "all":
        return allowed[:count]
    cores = _parse(request)
    missing = [core for core in cores if core not in allowed]
    if missing:
        raise ValueError(f"cores {_text(missing)} are not available to this process; available: {_text(allowed)}")
    if len(cores) > count:
        raise ValueError(f"{len(cores)} cores requested, but the CPU quota of this container pays for {quota:.2f}")
    return cores


def cpu_quota(cgroups: Path = _CGROUPS, membership: str | None = None) -> float | None:
    """Return the tightest CPU quota (in cores) of this process's cgroup and those above it, None if there is none.

    `membership` is the text of /proc/self/cgroup. Version 2: `cpu.max`; version 1: `cpu.cfs_*_us`.
    In a container the path in /proc may not exist below the mount; the mount itself is the container's own group then.
    """
    text = Path("/proc/self/cgroup").read_text() if membership is None else membership
    quotas = []
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            quotas += [_quota_v2(folder) for folder in _ancestry(cgroups, path)]
        elif "cpu" in controllers.split(","):
            for mount in (cgroups / "cpu", cgroups / controllers):
                quotas += [_quota_v1(folder) for folder in _ancestry(mount, path)]
    return min((quota for quota in quotas if quota is not None), default=None)


def _ancestry(mount: Path, path: str) -> list[Path]:
    folder = mount / path.lstrip("/")
    return [folder, *(parent for parent in folder.parents if parent.is_relative_to(mount))]


def _quota_v2(folder: Path) -> float | None:
    try:
        limit, period = (folder / "cpu.max").read_text().split()
    except OSError:
        return None
    return None if limit == "max" else int(limit) / int(period)


def _quota_v1(folder: Path) -> float | None:
    try:
        limit = int((folder / "cpu.cfs_quota_us").read_text())
        period = int((folder / "cpu.cfs_period_us").read_text())
    except OSError:
        return None
    return None if limit <= 0 else limit / period


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
