"""What this machine is and what its cores can do: name, caches, peak arithmetic, bandwidth of memory, cores at once."""

import mmap
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from gangway.artifact.format import TargetSpec
from gangway.artifact.profile import ProfiledMachine, machine_id
from gangway.base.host_limits import cpu_name, idle_seconds
from gangway.executor import _probes

DEFAULT_L3_BYTES: Final = 32 << 20  # where the system names no such cache
_MOST_BYTES: Final = 256 << 20
_ROUNDS: Final = 100_000  # multiply-adds of each register: a few milliseconds
_REPEATS: Final = 9
_CACHES: Final = Path("/sys/devices/system/cpu/cpu0/cache")
_LANES: Final = 4  # every machine has such vectors, and none lowers its clock for them
_WHOLE_ROUNDS: Final = 50_000_000  # of multiply-adds: about 0.1 s, since hosts share out cores in parts of that


def measure_machine(core: int, cores: int, target: TargetSpec) -> ProfiledMachine:
    """Measure one core, in about 0.3 s.

    Peak: independent multiply-adds in registers of the target's width. Bandwidth: reading memory in order, four times
    as much as the last-level cache holds. The best of several counts for both.
    """
    with pinned(core):
        rates = [flops * 1e3 / time_ns for flops, time_ns in (_multiply_add(target) for _ in range(_REPEATS))]
        memory = touched(min(4 * l3_bytes(), _MOST_BYTES))
        times_ns = [_probes.read_memory(memory) for _ in range(_REPEATS)]
    name = cpu_name()
    return ProfiledMachine(
        machine_id=machine_id(name, cores, target.name),
        cpu=name,
        cores=cores,
        target=target.name,
        peak_flops_per_us=max(rates),
        bandwidth_bytes_per_us=len(memory) * 1e3 / min(times_ns),
    )


def _multiply_add(target: TargetSpec) -> tuple[float, int]:
    return _probes.multiply_add(target.lanes, _ROUNDS)


def share_of_cores(cores: Sequence[int]) -> float:
    """Return how fast the slowest of these cores is while all of them work, as a share of one alone; 1.0 of one core.

    Takes 0.2 s, or longer where the share is small.
    """
    if len(cores) == 1:
        return 1.0
    [alone] = speeds_at_once(cores[:1], _LANES, _WHOLE_ROUNDS)
    together = speeds_at_once(cores, _LANES, _WHOLE_ROUNDS)
    return min(together) / max(alone, *together)


class OtherWork:
    """Measures the share of some cores that other processes, or a virtual machine's host, take from now on."""

    def __init__(self, cores: Sequence[int]) -> None:
        self._cores = cores
        self._begin = self._spent()

    def share(self) -> float:
        """Return it, from 0 to 1; 0 where the system does not say. Children count as others until they have ended."""
        begin, end = self._begin, self._spent()
        if begin is None or end is None:
            return 0.0
        (wall_s, own_s), (begin_s, begin_own_s) = end, begin
        return min(1.0, max(0.0, 1 - (own_s - begin_own_s) / (len(self._cores) * (wall_s - begin_s))))

    def _spent(self) -> tuple[float, float] | None:
        """Return the time, and how long the cores were idle or worked for this process, in seconds."""
        idle = idle_seconds(self._cores)
        return None if idle is None else (time.monotonic(), sum(idle) + sum(os.times()[:4]))


def speeds_at_once(cores: Sequence[int], lanes: int, rounds: int) -> list[float]:
    """Return the floating-point operations per microsecond of each core while all of these work.

    Each does `rounds` multiply-adds of vectors of `lanes` floats.
    """

    def speed_of(core: int) -> float:
        os.sched_setaffinity(0, {core})  # of this thread
        flops, taken_ns = _probes.multiply_add(lanes, rounds)
        return 1e3 * flops / taken_ns

    with ThreadPoolExecutor(len(cores)) as threads:  # the probe lets go of the interpreter
        return list(threads.map(speed_of, cores))


def touched(size_bytes: int) -> memoryview:
    """Return memory whose every page exists (pages never written to would all be the one page of zeros).

    In huge pages, where the system has them: memory is to be measured, and not the translation of addresses.
    """
    memory = mmap.mmap(-1, size_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    view = memoryview(memory)
    for page in range(0, size_bytes, mmap.PAGESIZE):
        view[page] = 1
    return view


def l3_bytes(caches: Path = _CACHES) -> int:
    """Return the size of the last-level cache."""
    try:
        text = (caches / "index3" / "size").read_text().strip()
    except OSError:
        return DEFAULT_L3_BYTES
    return int(text.removesuffix("K")) * 1024


@contextmanager
def pinned(core: int) -> Iterator[None]:
    """Keep this thread on one core for a while."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
