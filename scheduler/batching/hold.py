"""Whether a batch waits for the next request, and how long. Pure.

n rows wait, and r more are expected in w. If the n go now, the others wait until they are done, then take L(r). If the
n wait, they lose w and what the larger batch takes longer; the others gain. It pays in sum if

    n * (w + L(n + r) - L(n)) < r * (max(L(n) - w, 0) + L(r) - L(n + r))

With a batch that takes no longer than a single row it pays up to w = L / 2 for one row, and never if all who are
expected have come: then n * w is L or more.
"""

from collections.abc import Callable


def pays(rows: int, more: int, gap_us: float, latency_us: Callable[[int], float]) -> bool:
    """Return whether `rows` rows had better wait for `more` that are expected in `gap_us`."""
    together_us, now_us = latency_us(rows + more), latency_us(rows)
    cost_us = rows * (gap_us + together_us - now_us)
    return cost_us < more * (max(now_us - gap_us, 0.0) + latency_us(more) - together_us)
