"""What the kernel knows of a process: children, CPU time, private and shared memory. Linux's /proc."""

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

PROC = Path("/proc")
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def children_of(pid: int) -> list[int]:
    """Return the process's children, oldest first; none when it has ended."""
    children: list[int] = []
    with suppress(OSError):
        for task in (PROC / str(pid) / "task").iterdir():
            children += map(int, (task / "children").read_text().split())
    return sorted(children)


def descendants_of(pid: int) -> list[int]:
    """Return children, their children, and so on."""
    return [found for child in children_of(pid) for found in (child, *descendants_of(child))]


def running_below(pid: int, words: str) -> list[int]:
    """Return the descendants whose command line has these words, without what they have forked: that has them, too."""
    found: list[int] = []
    for child in children_of(pid):
        found += [child] if words in command_of(child) else running_below(child, words)
    return found


def command_of(pid: int) -> str:
    """Return the command line, arguments separated by blanks; empty when the process has ended."""
    try:
        return (PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def cpu_ns(pid: int) -> int:
    """Return nanoseconds that the process's living threads have run (schedstat: exact, where stat counts in ticks)."""
    total = 0
    with suppress(OSError):
        for task in (PROC / str(pid) / "task").iterdir():
            with suppress(OSError):
                total += int((task / "schedstat").read_text().split()[0])
    return total


class CoreUse(NamedTuple):
    """What threads have used so far: nanoseconds on a core and waiting for one, and how often they were given one."""

    run_ns: int = 0
    wait_ns: int = 0
    turns: int = 0


def core_use(pid: int) -> CoreUse:
    """Return the sum over a process's living threads; zeros when it has ended."""
    used = [(0, 0, 0)]
    with suppress(OSError):
        for task in (PROC / str(pid) / "task").iterdir():
            with suppress(OSError):
                run_ns, wait_ns, turns = map(int, (task / "schedstat").read_text().split())
                used.append((run_ns, wait_ns, turns))
    return CoreUse(*map(sum, zip(*used, strict=True)))


def process_cpu_ns(pid: int) -> int:
    """Return nanoseconds that the process has run, to a tick, threads that have ended included. Raises OSError."""
    fields = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * (10**9 // TICKS_PER_S)


@dataclass(frozen=True)
class Memory:
    """Bytes of a process: private to it, and its proportional share of everything it maps."""

    private_bytes: int
    pss_bytes: int


def memory_of(pid: int) -> Memory:
    """Read smaps_rollup. Raises OSError when the process has ended."""
    fields = _kilobyte_fields((PROC / str(pid) / "smaps_rollup").read_text())
    return Memory(fields["Private_Clean"] + fields["Private_Dirty"], fields["Pss"])


@dataclass(frozen=True)
class FileMapping:
    """Bytes of one mapped file that a process has resident, its proportional share of them, and two special parts.

    `only_here_bytes` are pages of the page cache that nobody else has touched: the kernel calls them private, but they
    are no copy. `copied_bytes` are: pages that were written to.
    """

    path: str
    rss_bytes: int
    pss_bytes: int
    only_here_bytes: int
    copied_bytes: int


def file_mappings(pid: int, name: str) -> list[FileMapping]:
    """Return the mappings of files called `name`."""
    mappings, path, block = [], "", ""
    for line in [*(PROC / str(pid) / "smaps").read_text().splitlines(), "0-0 end"]:
        if "-" in line.split(" ", 1)[0]:  # a mapping's first line: addresses, permissions, ..., path
            if Path(path).name == name:
                fields = _kilobyte_fields(block)
                copied = fields["Anonymous"]
                only_here = fields["Private_Clean"] + fields["Private_Dirty"] - copied
                mappings.append(FileMapping(path, fields["Rss"], fields["Pss"], only_here, copied))
            path, block = line.split(maxsplit=5)[-1], ""
        else:
            block += line + "\n"
    return mappings


def shm_names() -> set[str]:
    """Return the names that servers of ours have in /dev/shm; other programs have theirs there, too."""
    return {path.name for path in Path("/dev/shm").glob("gangway.*")}


def open_descriptors(pid: int) -> int:
    """Return how many file descriptors the process holds. Raises OSError when it has ended."""
    return len(list((PROC / str(pid) / "fd").iterdir()))


def _kilobyte_fields(text: str) -> dict[str, int]:
    fields = {}
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if value.endswith("kB"):
            fields[key] = int(value.split()[0]) * 1024
    return fields


class CoreTimes(NamedTuple):
    """Of all cores since the machine was started. `busy_s` has `stolen_s` in it: what its host gave to others."""

    busy_s: float
    stolen_s: float
    all_s: float


def core_times() -> CoreTimes:
    """Return what the machine's cores have done so far."""
    numbers = [int(text) / TICKS_PER_S for text in (PROC / "stat").read_text().split("\n", 1)[0].split()[1:9]]
    _user, _nice, _system, idle, wait, _irq, _softirq, stolen = numbers
    return CoreTimes(sum(numbers) - idle - wait, stolen, sum(numbers))


def threads_of(pid: int) -> int:
    """Return how many threads a process has."""
    (line,) = (text for text in Path(f"/proc/{pid}/status").read_text().splitlines() if text.startswith("Threads:"))
    return int(line.split()[1])
