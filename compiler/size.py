"""Models that no memory can hold are refused before anybody reads them. Only the standard library."""

import os
from collections.abc import Iterable
from pathlib import Path

from gangway.compiler.errors import UnsupportedModelError

_CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def refuse_too_large(files: Iterable[Path]) -> None:
    """Raise UnsupportedModelError if the files have more bytes than this machine, or container, has memory."""
    size_bytes, limit_bytes = sum(path.stat().st_size for path in files), memory_bytes()
    if size_bytes > limit_bytes:
        raise UnsupportedModelError(f"the model has {size_bytes >> 20} MiB, the machine {limit_bytes >> 20} of memory")


def memory_bytes(limits: Iterable[Path] = _CGROUP_LIMITS) -> int:
    """Return how much memory processes may take here."""
    sizes = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for path in limits:
        try:
            sizes.append(int(path.read_text()))
        except (OSError, ValueError):  # another version of cgroups, or "max"
            continue
    return min(sizes)
