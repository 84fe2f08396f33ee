"""What this process may take of the host: CPU, memory and processes, by its cgroups (versions 1 and 2) and its rlimits.

In a container the path in /proc/self/cgroup may not exist below the mount; the mount itself is the container's own
group then. The limit of a group holds for all groups below it, so the tightest one on the way to the root counts.
"""

import contextlib
import ctypes
import functools
import gc
import os
import re
import resource
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

Result = TypeVar("Result")

CGROUPS: Final = Path("/sys/fs/cgroup")
PROC: Final = Path("/proc")
_MOST_BYTES: Final = 1 << 16  # of a file in /proc or of a cgroup
_MEMORY_FILES: Final = {2: "memory.max", 1: "memory.limit_in_bytes"}
# Lines of memory.stat whose memory the kernel cannot take back; pages of files, which it can, are in none of them.
_TAKEN: Final = {
    2: re.compile(rb"^(?:anon|shmem|kernel_stack|pagetables|percpu|sock|slab_unreclaimable) (\d+)", re.MULTILINE),
    1: re.compile(rb"^(?:total_rss|total_shmem) (\d+)", re.MULTILINE),
}
_AVAILABLE: Final = re.compile(rb"^MemAvailable: *(\d+) kB\n", re.MULTILINE)
_MALLINFO: Final = (  # numbers that malloc has, in their order
    *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
    *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
)
_FIRST_BYTES: Final = 256  # of /proc/meminfo have that line: the kernel then writes no others


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


def cpu_flags(proc: Path = PROC) -> frozenset[str]:
    """Return what the processor can do, as /proc/cpuinfo spells it; nothing where that names no flags."""
    for line in (proc / "cpuinfo").read_text().splitlines():
        if line.startswith("flags"):
            return frozenset(line.partition(":")[2].split())
    return frozenset()


def idle_seconds(cores: Sequence[int], proc: Path = PROC) -> tuple[float, ...] | None:
    """Return for how long each core has had nothing to do since the system began; None where /proc/stat lacks one.

    Time that a virtual machine's host took is none of it.
    """
    try:
        lines = [line.split() for line in (proc / "stat").read_text().splitlines()]
        ticks = {words[0]: int(words[4]) + int(words[5]) for words in lines if words[0].startswith("cpu")}
        return tuple(ticks[f"cpu{core}"] / os.sysconf("SC_CLK_TCK") for core in cores)
    except (OSError, KeyError):
        return None


class MemoryLimit(msgspec.Struct, frozen=True):
    """How much memory processes may take, and the name of the limit."""

    size_bytes: int
    name: str

    def __str__(self) -> str:
        return f"{self.size_bytes >> 20} MiB of memory ({self.name})"


def memory_limit(cgroups: Path = CGROUPS, membership: str | None = None) -> MemoryLimit:
    """Return the tightest limit of memory here: the machine's, a cgroup's or RLIMIT_AS."""
    limits = [MemoryLimit(machine_bytes(), "the machine's")]
    limits += [MemoryLimit(limit, "RLIMIT_AS") for limit in _rlimit(resource.RLIMIT_AS)]
    for _, _, name, limit in _limited_groups("memory", _MEMORY_FILES, cgroups, membership):
        limits.append(MemoryLimit(limit, f"{name} of the cgroup"))
    return min(limits, key=lambda limit: limit.size_bytes)


def memory_limit_bytes(cgroups: Path = CGROUPS, membership: str | None = None) -> int:
    """Return how much memory processes may take here."""
    return memory_limit(cgroups, membership).size_bytes


def address_space_bytes() -> int | None:
    """Return how much address space a process may have (RLIMIT_AS), None if there is no limit."""
    return min(_rlimit(resource.RLIMIT_AS), default=None)


class FreeMemory:
    """Measures how much memory this process could take now. Made once: limits are looked up, and files opened, then.

    Pages of files count as free: the kernel takes them back before anything else. Raises OSError without /proc.
    """

    def __init__(self, cgroups: Path = CGROUPS, membership: str | None = None, proc: Path = PROC) -> None:
        self._machine = os.open(proc / "meminfo", os.O_RDONLY)
        self._groups = []
        for version, folder, _, limit in _limited_groups("memory", _MEMORY_FILES, cgroups, membership):
            if limit < machine_bytes():
                with contextlib.suppress(OSError):
                    self._groups.append((limit, os.open(folder / "memory.stat", os.O_RDONLY), _TAKEN[version]))
        self._limit = address_space_bytes()
        self._mapped = os.open(proc / "self/statm", os.O_RDONLY) if self._limit is not None else -1

    def measure(self) -> int:
        """Return the bytes that are free by the tightest of the limits."""
        free = [1024 * (_sum_of(self._machine, _AVAILABLE, _FIRST_BYTES) or _sum_of(self._machine, _AVAILABLE))]
        free += [limit - _sum_of(group, lines) for limit, group, lines in self._groups]
        if self._limit is not None:
            free.append(self._limit - int(os.pread(self._mapped, 64, 0).split()[0]) * resource.getpagesize())
        return max(0, min(free))


def trim_heap() -> None:
    """Return all freed memory that malloc keeps to the kernel, whichever thread freed it."""
    ctypes.CDLL(None).malloc_trim(0)


def allocated_by(make: Callable[[], Result]) -> tuple[Result, int]:
    """Return what `make` makes, and how many bytes it has of malloc: what it needs beside mapped files.

    Resident memory may not grow: malloc gives out freed pages again. No garbage is collected meanwhile, so that none
    hides what is new. glibc before 2.33 counts in 32 bits.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        before_bytes = _allocated_bytes()
        result = make()
        return result, max(0, _allocated_bytes() - before_bytes)
    finally:
        if collects:
            gc.enable()


def _allocated_bytes() -> int:
    counts = _mallinfo()()
    return int(counts.uordblks + counts.hblkhd)


@functools.cache
def _mallinfo() -> Any:
    libc = ctypes.CDLL(None)
    name, number = ("mallinfo2", ctypes.c_size_t) if hasattr(libc, "mallinfo2") else ("mallinfo", ctypes.c_uint)
    function = getattr(libc, name)
    function.restype = type(name, (ctypes.Structure,), {"_fields_": [(field, number) for field in _MALLINFO]})
    return function


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


def _limited_groups(
    controller: str, files: Mapping[int, str], cgroups: Path, membership: str | None
) -> list[tuple[int, Path, str, int]]:
    """Return version, folder, file and limit of each cgroup that limits this process by a controller."""
    found = []
    for version, folder in _group_folders(controller, cgroups, membership):
        try:
            found.append((version, folder, files[version], int(_text_of(folder / files[version]))))
        except (OSError, ValueError):  # no such controller here, or "max"
            continue
    return found


def machine_bytes() -> int:
    """Return how much memory the machine has."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _sum_of(file: int, lines: re.Pattern[bytes], most_bytes: int = _MOST_BYTES) -> int:
    """Return the sum of the numbers in these lines."""
    try:
        text = os.pread(file, most_bytes, 0)
    except OSError:  # the group is gone, its limit with it
        return 0
    return sum(map(int, lines.findall(text)))


def _rlimit(which: int) -> list[int]:
    soft, _ = resource.getrlimit(which)
    return [] if soft == resource.RLIM_INFINITY else [soft]


def cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the CPU's name, family, model and stepping, as far as the system tells."""
    first = cpuinfo.read_text().partition("\n\n")[0]
    values = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in first.splitlines())}
    numbers = [values.get(key, "?") for key in ("cpu family", "model", "stepping")]
    return f"{values.get('model name', 'unknown CPU')} ({'/'.join(numbers)})"
