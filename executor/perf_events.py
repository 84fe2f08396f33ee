"""Counters of the processor and of the kernel, through perf_event_open(2): how often a thread did what.

Most virtual machines expose no hardware counters; the kernel's own (software events) are there always. No library, no
C: the structure of the call is part of the kernel's binary interface.
"""

import ctypes
import os
import platform
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

_HARDWARE, _SOFTWARE, _CACHE = 0, 1, 3  # PERF_TYPE_*
_LAST_LEVEL, _MISS = 2, 1 << 16  # of PERF_TYPE_HW_CACHE: PERF_COUNT_HW_CACHE_LL, read, RESULT_MISS
_FORMAT = 1 | 2  # PERF_FORMAT_TOTAL_TIME_ENABLED | _RUNNING
_EXCLUDE_KERNEL, _EXCLUDE_HYPERVISOR = 1 << 5, 1 << 6
_CLOSE_ON_EXEC = 8
_ATTRIBUTES: Final = struct.Struct("<IIQQQQQIIQ")  # perf_event_attr, its first published size: 64 bytes
_READING: Final = struct.Struct("<QQQ")
_SYSCALLS: Final = {"x86_64": 298, "aarch64": 241}


@dataclass(frozen=True)
class Event:
    """Something that can be counted. Hardware events are counted outside of the kernel only: so anybody may."""

    name: str
    kind: int
    config: int

    @property
    def hardware(self) -> bool:
        """Whether the processor counts it."""
        return self.kind != _SOFTWARE


CACHE_ACCESSES: Final = Event("last-level cache accesses", _CACHE, _LAST_LEVEL)
CACHE_MISSES: Final = Event("last-level cache misses", _CACHE, _LAST_LEVEL | _MISS)
# What processors map to their last level where they have no event of that name (older AMD).
REFERENCES: Final = Event("cache references", _HARDWARE, 2)
MISSES: Final = Event("cache misses", _HARDWARE, 3)
INSTRUCTIONS: Final = Event("instructions", _HARDWARE, 1)
CYCLES: Final = Event("cycles", _HARDWARE, 0)
CPU_CLOCK: Final = Event("cpu clock", _SOFTWARE, 0)  # nanoseconds
TASK_CLOCK: Final = Event("task clock", _SOFTWARE, 1)  # nanoseconds on a core
PAGE_FAULTS: Final = Event("page faults", _SOFTWARE, 2)
CONTEXT_SWITCHES: Final = Event("context switches", _SOFTWARE, 3)


class Counter:
    """One event of one thread, from now on. Raises OSError where it cannot be counted (ENOENT: the machine cannot)."""

    def __init__(self, event: Event, thread: int = 0) -> None:
        """Begin to count; `thread` is its id, 0 the calling one. A process's id is that of its first thread."""
        self.event = event
        self._fd = _open(event, thread)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def read(self) -> float:
        """Return the count so far; where events take turns on too few counters, what it would be without that."""
        count, enabled_ns, running_ns = _READING.unpack(os.read(self._fd, _READING.size))
        return float(count) * enabled_ns / running_ns if running_ns else 0.0

    def close(self) -> None:
        """End it. Does nothing the second time."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class ThreadCounters:
    """The same events of several threads, added up. Raises OSError where one of them cannot be counted."""

    def __init__(self, events: Sequence[Event], threads: Sequence[int]) -> None:
        self.events = tuple(events)
        self._counters: list[list[Counter]] = []
        try:
            for event in events:
                self._counters.append([])
                for thread in threads:
                    self._counters[-1].append(Counter(event, thread))
        except OSError:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def read(self) -> tuple[float, ...]:
        """Return the counts so far, one per event. Threads that have ended keep theirs."""
        return tuple(sum(counter.read() for counter in counters) for counters in self._counters)

    def close(self) -> None:
        """End all of them."""
        for counters in self._counters:
            for counter in counters:
                counter.close()


def countable(events: Sequence[Event]) -> bool:
    """Say whether this process may count these events here."""
    try:
        ThreadCounters(events, [0]).close()
    except OSError:
        return False
    return True


def cache_events() -> tuple[Event, Event] | None:
    """Return what counts accesses to the last-level cache and misses there; None where nothing does."""
    for pair in ((CACHE_ACCESSES, CACHE_MISSES), (REFERENCES, MISSES)):
        if countable(pair):
            return pair
    return None


def _open(event: Event, thread: int) -> int:
    if platform.machine() not in _SYSCALLS:
        raise OSError(f"perf_event_open is not known for {platform.machine()}")
    flags = _EXCLUDE_KERNEL | _EXCLUDE_HYPERVISOR if event.hardware else 0
    attributes = _ATTRIBUTES.pack(event.kind, _ATTRIBUTES.size, event.config, 0, 0, _FORMAT, flags, 0, 0, 0)
    buffer = ctypes.create_string_buffer(attributes, _ATTRIBUTES.size)
    call = ctypes.CDLL(None, use_errno=True).syscall
    any_core, no_group = -1, -1
    numbers = (thread, any_core, no_group, _CLOSE_ON_EXEC)
    fd = int(call(_SYSCALLS[platform.machine()], buffer, *map(ctypes.c_long, numbers)))
    if fd < 0:
        raise OSError(ctypes.get_errno(), f"{event.name} cannot be counted: {os.strerror(ctypes.get_errno())}")
    return fd
