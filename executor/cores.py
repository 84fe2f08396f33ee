"""Which cores to use: the affinity mask (cpusets show there), the cgroup's CPU quota, and the user's wish."""

import math
import os
from pathlib import Path

from gangway.artifact.host_limits import CGROUPS, cpu_quota


def available_cores(request: str = "all", cgroups: Path = CGROUPS, membership: str | None = None) -> list[int]:
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
