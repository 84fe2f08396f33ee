"""Processor and memory of the whole machine, as Triton's CPU metrics have them. Linux's /proc."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

PROC = Path("/proc")
_IDLE_FIELDS = (3, 4)  # idle, iowait
_COUNTED_FIELDS = 8  # user, nice, system, idle, iowait, irq, softirq, steal; guests are in user already


@dataclass(frozen=True)
class MachineReading:
    """`utilization` is the share (0 to 1) of all cores' time that was not idle, since the last interval."""

    utilization: float
    memory_total_bytes: int
    memory_used_bytes: int


class _Ticks(NamedTuple):
    idle: int
    total: int


class Machine:
    """Reads when it is asked. The utilization is that of an interval of `interval_s` at least. Not safe for threads."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._begin = _read_ticks()
        self._begin_s = time.monotonic()
        self._utilization = 0.0

    def read(self) -> MachineReading:
        """Return how it is now. Raises OSError if /proc cannot be read."""
        now_s = time.monotonic()
        if now_s - self._begin_s >= self._interval_s:
            ticks = _read_ticks()
            if (total := ticks.total - self._begin.total) > 0:
                self._utilization = min(max(1 - (ticks.idle - self._begin.idle) / total, 0.0), 1.0)
            self._begin, self._begin_s = ticks, now_s
        total_bytes, used_bytes = _read_memory()
        return MachineReading(self._utilization, total_bytes, used_bytes)


def _read_ticks() -> _Ticks:
    with (PROC / "stat").open() as file:
        ticks = [int(field) for field in file.readline().split()[1 : 1 + _COUNTED_FIELDS]]
    return _Ticks(sum(ticks[field] for field in _IDLE_FIELDS), sum(ticks))


def _read_memory() -> tuple[int, int]:
    """Return bytes in all, and bytes that no process could have."""
    kilobytes = {}
    for line in (PROC / "meminfo").read_text().splitlines()[:8]:
        key, _, value = line.partition(":")
        kilobytes[key] = int(value.split()[0])
    total = kilobytes["MemTotal"]
    return total * 1024, (total - kilobytes["MemAvailable"]) * 1024
