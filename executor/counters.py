"""How often something happens on cores, relative to how much they do."""

import ctypes
import os
import platform
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

# Counters of the processor and of the kernel, through perf_event_open(2): how often something happened on a core.
#
# Of cores, never of threads: those are stopped and started at each change of threads, and a virtual machine that does
# so with hardware events may stand still, all of it, for 100 ms and more (docs/profile.md). Many virtual machines
# expose no hardware events; the kernel's own (software events) are there always. No library, no C: the structure of
# the call is part of the kernel's binary interface.

_HARDWARE, _SOFTWARE, _CACHE = 0, 1, 3  # PERF_TYPE_*
_LAST_LEVEL, _MISS = 2, 1 << 16  # of PERF_TYPE_HW_CACHE: PERF_COUNT_HW_CACHE_LL, read, RESULT_MISS
_FORMAT = 1 << 3  # PERF_FORMAT_GROUP
_EXCLUDE_KERNEL, _EXCLUDE_HYPERVISOR = 1 << 5, 1 << 6
_CLOSE_ON_EXEC = 8
_ATTRIBUTES: Final = struct.Struct("<IIQQQQQIIQ")  # perf_event_attr, its first published size: 64 bytes
_SYSCALLS: Final = {"x86_64": 298, "aarch64": 241}


@dataclass(frozen=True)
class Event:
    """Something that can be counted; hardware events outside of the kernel only, where layers are computed."""

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
PAGE_FAULTS: Final = Event("page faults", _SOFTWARE, 2)
CONTEXT_SWITCHES: Final = Event("context switches", _SOFTWARE, 3)
MINOR_FAULTS: Final = Event("minor page faults", _SOFTWARE, 5)


class CoreCounters:
    """The same events of several cores, whatever runs there, added up. They are counted together or not at all.

    Raises OSError where one of them cannot be counted: ENOENT if the machine does not, EACCES if the process may not
    (root, CAP_PERFMON, or kernel.perf_event_paranoid at 0 or below).
    """

    def __init__(self, events: Sequence[Event], cores: Sequence[int]) -> None:
        self._reading = struct.Struct(f"<{1 + len(events)}Q")  # their number, their counts
        self._groups: list[list[int]] = []  # of descriptors, one per core; a group's first is read
        try:
            for core in cores:
                group: list[int] = []
                self._groups.append(group)
                for event in events:
                    group.append(open_event(event, core=core, group=group[0] if group else -1))
        except OSError:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def read(self) -> tuple[int, ...]:
        """Return the counts so far, one per event."""
        counts = (self._reading.unpack(os.read(group[0], self._reading.size))[1:] for group in self._groups)
        return tuple(map(sum, zip(*counts, strict=True)))

    def close(self) -> None:
        """End it. Does nothing the second time."""
        for group in self._groups:
            for descriptor in group:
                os.close(descriptor)
        self._groups = []


def countable(events: Sequence[Event]) -> bool:
    """Say whether this process may count these events here."""
    try:
        CoreCounters(events, [min(os.sched_getaffinity(0))]).close()
    except OSError:
        return False
    return True


def cache_events() -> tuple[Event, Event] | None:
    """Return what counts accesses to the last-level cache and misses there, beside CYCLES; None where nothing does."""
    for pair in ((CACHE_ACCESSES, CACHE_MISSES), (REFERENCES, MISSES)):
        if countable((CYCLES, *pair)):
            return pair
    return None


def open_event(event: Event, thread: int = -1, core: int = -1, group: int = -1) -> int:
    """Return the descriptor of a counter that runs: of a thread or a core, in the group of another or its own.

    Raises OSError where it cannot be counted.
    """
    if platform.machine() not in _SYSCALLS:
        raise OSError(f"perf_event_open is not known for {platform.machine()}")
    flags = _EXCLUDE_KERNEL | _EXCLUDE_HYPERVISOR if event.hardware else 0
    attributes = _ATTRIBUTES.pack(event.kind, _ATTRIBUTES.size, event.config, 0, 0, _FORMAT, flags, 0, 0, 0)
    buffer = ctypes.create_string_buffer(attributes, _ATTRIBUTES.size)
    call = ctypes.CDLL(None, use_errno=True).syscall
    numbers = (thread, core, group, _CLOSE_ON_EXEC)
    fd = int(call(_SYSCALLS[platform.machine()], buffer, *map(ctypes.c_long, numbers)))
    if fd < 0:
        raise OSError(ctypes.get_errno(), f"{event.name} cannot be counted: {os.strerror(ctypes.get_errno())}")
    return fd


class CounterRates:
    """How often events happened on cores since the last look, per thousand cycles that they ran. A context manager.

    `per`: another event than cycles to relate to. Without events it opens nothing, and says nothing.
    """

    def __init__(self, events: Sequence[Event], per: Event = CYCLES) -> None:
        self._events = (per, *events)
        self._cores: tuple[int, ...] = ()
        self._counters: CoreCounters | None = None
        self._seen: tuple[int, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the events, in the order of the rates."""
        return tuple(event.name for event in self._events[1:])

    def look(self, cores: Sequence[int]) -> tuple[float, ...] | None:
        """Return the rates, one per event, since the last look at these same cores; nothing without events.

        None at the first look at them, when they have not run since, and where a core cannot be counted.
        """
        if len(self._events) == 1:
            return ()
        if self._counters is None or tuple(cores) != self._cores:
            self._open(tuple(cores))
            return None
        counts = self._counters.read()
        run, *events = (now - before for now, before in zip(counts, self._seen, strict=True))
        self._seen = counts
        return tuple(1e3 * count / run for count in events) if run > 0 else None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop counting."""
        if self._counters is not None:
            self._counters.close()
            self._counters = None

    def _open(self, cores: tuple[int, ...]) -> None:
        self.close()
        try:
            self._counters = CoreCounters(self._events, cores)
        except OSError:  # a core is offline
            return
        self._cores = cores
        self._seen = self._counters.read()
