"""Bounds of the histograms, as Prometheus has them: up to the first, up to the second, ..., beyond the last.

Counting a value costs one search and one addition, and histograms add up over servers.
"""

_STEPS = (1, 2.5, 5)  # of each decade
TIME_BOUNDS_NS = (
    *(round(step * 10**power) for power in range(5, 10) for step in _STEPS),
    10**10,
)  # 0.1 ms to 10 s
ROW_BOUNDS = tuple(2**power for power in range(11))  # 1 to 1024
