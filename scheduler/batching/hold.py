"""Whether a batch waits for the next request, and how long. Pure.

n rows wait, and r more are expected in w. If the n go now, the others wait until they are done, then take L(r). If the
n wait, they lose w and what the larger batch takes longer; the others gain. It pays in sum if

    n * (w + L(n + r) - L(n)) < r * (max(L(n) - w, 0) + L(r) - L(n + r))

With a batch that takes no longer than a single row it pays up to w = L / 2 for one row, and never if all who are
expected have come: then n * w is L or more.
"""

from collections.abc import Callable

GAIN = 1 / 8  # weight of the latest request in the smoothed gap, as in TCP's round-trip time
STEADY_GAIN = 1 / 32  # the same for the load: a burst is not yet a load
LONGEST_GAP_US = 1_000_000.0  # a pause says no more about the next request than this


class ArrivalRate:
    """The smoothed gap between a model's requests, and their smoothed number of rows."""

    def __init__(self) -> None:
        self.gap_us: float | None = None  # None: fewer than two requests so far
        self._steady_gap_us = LONGEST_GAP_US  # as if the first request had come after such a pause
        self._gaps = 1
        self._rows = 1.0
        self._latest_us: float | None = None

    @property
    def rows_per_us(self) -> float:
        """Rows that come in a microsecond, over some tens of requests."""
        return self._rows / max(self._steady_gap_us, 1.0)

    @property
    def rows(self) -> int:
        """Rows that the next request is expected to have."""
        return round(self._rows)

    def arrived(self, arrival_us: float, rows: int) -> None:
        """Note a request."""
        if self._latest_us is None:
            self._rows = float(rows)
            self._latest_us = arrival_us
            return
        gap_us = min(max(arrival_us - self._latest_us, 0.0), LONGEST_GAP_US)
        self.gap_us = gap_us if self.gap_us is None else self.gap_us + GAIN * (gap_us - self.gap_us)
        self._gaps += 1  # of the first ones it is the mean: a load is known after tens of requests
        self._steady_gap_us += max(STEADY_GAIN, 1 / self._gaps) * (gap_us - self._steady_gap_us)
        self._rows += GAIN * (rows - self._rows)
        self._latest_us = max(arrival_us, self._latest_us)


def pays(rows: int, more: int, gap_us: float, latency_us: Callable[[int], float]) -> bool:
    """Return whether `rows` rows had better wait for `more` that are expected in `gap_us`."""
    together_us, now_us = latency_us(rows + more), latency_us(rows)
    cost_us = rows * (gap_us + together_us - now_us)
    return cost_us < more * (max(now_us - gap_us, 0.0) + latency_us(more) - together_us)
