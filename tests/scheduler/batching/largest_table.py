"""How long the largest table of splits takes that is asked for: 64 cores, 1024 rows."""

import time
from collections.abc import Callable

CORES, ROWS = 64, 1024
GOES = 40  # two seconds: virtual machines have stretches of a second in which both cores take twice the time


def latency_us(cores: int, rows: int) -> float:
    """A model that gains by cores and by rows."""
    return 1000 * ((20 + 30.0 * rows) * (0.1 + 0.9 / cores) + 10.0)


def least_ms(gangs: Callable[[], int]) -> float:
    """Return the CPU time of the best of many goes; each must find a gang for each core."""
    taken_ms = []
    for _ in range(GOES):
        begin_ns = time.thread_time_ns()
        assert gangs() == CORES
        taken_ms.append((time.thread_time_ns() - begin_ns) / 1e6)
    return min(taken_ms)
