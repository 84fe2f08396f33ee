"""How long the largest table of splits takes that is asked for: 64 cores, 1024 rows."""

import time
from collections.abc import Callable

CORES, ROWS = 64, 1024
GOES = 40  # two seconds: virtual machines have stretches of a second in which both cores take twice the time


def latency_us(cores: int, rows: int) -> float:
    """A model that gains by cores and by rows."""
    return 1000 * ((20 + 30.0 * rows) * (0.1 + 0.9 / cores) + 10.0)


def ask_for_each_latency() -> None:
    """What no table can do without."""
    for cores in range(1, CORES + 1):
        for rows in range(1, ROWS + 1):
            latency_us(cores, rows)


def takes_less_than(limit: float, gangs: Callable[[], int]) -> bool:
    """Return whether the best of many goes takes less than `limit` times the CPU time of asking for each latency.

    Both are measured by turns, so that the machine's speed does not count. Each go must find a gang for each core.
    """
    ask_ns = table_ns = float("inf")
    for _ in range(GOES):
        begin_ns = time.thread_time_ns()
        ask_for_each_latency()
        asked_ns = time.thread_time_ns()
        assert gangs() == CORES
        ask_ns = min(ask_ns, asked_ns - begin_ns)
        table_ns = min(table_ns, time.thread_time_ns() - asked_ns)
    print(f"a table takes {table_ns / 1e6:.1f} ms, {table_ns / ask_ns:.2f} times as long as asking for its latencies")
    return table_ns < limit * ask_ns
