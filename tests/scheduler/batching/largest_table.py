"""How long the largest table of splits takes that is asked for: 64 cores, 1024 rows."""

import time
from collections.abc import Callable

CORES, ROWS = 64, 1024
GOES = 40  # two seconds: virtual machines have stretches of a second in which both cores take twice the time


def latency_us(cores: int, rows: int) -> float:
    """A model that gains by cores and by rows."""
    return 1000 * ((20 + 30.0 * rows) * (0.1 + 0.9 / cores) + 10.0)


def takes_less_than(limit_ms: float, gangs: Callable[[], int]) -> bool:
    """Return whether one of many goes takes less CPU time; each must find a gang for each core."""
    for _ in range(GOES):
        begin_ns = time.thread_time_ns()
        assert gangs() == CORES
        if time.thread_time_ns() - begin_ns < limit_ms * 1e6:
            return True
    return False
