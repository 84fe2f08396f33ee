"""How often a model is asked, learned from its requests. Pure."""

from collections.abc import Iterable

from gangway.scheduler.policy_config import ARRIVALS


class ArrivalRate:
    """The smoothed gap between a model's requests, and their smoothed number of rows."""

    def __init__(self) -> None:
        self.gap_us: float | None = None  # None: fewer than two requests so far
        self._steady_gap_us = ARRIVALS.max_gap_us  # as if the first request had come after such a pause
        self._gaps = 1
        self._rows = 1.0
        self._latest_us: float | None = None

    @property
    def rows_per_us(self) -> float:
        """Rows that come in a microsecond, over some tens of requests."""
        return self._rows / max(self._steady_gap_us, 1.0)

    def rows_per_us_at(self, now_us: float) -> float:
        """Return the same, but no more than if the next request came now: a pause counts before it is over."""
        pause_us = now_us - self._latest_us if self._latest_us is not None else 0.0
        more_us = max(0.0, pause_us - self._steady_gap_us) * self._steady_gain
        return self._rows / max(self._steady_gap_us + more_us, 1.0)

    @property
    def rows(self) -> int:
        """Rows that the next request is expected to have."""
        return round(self._rows)

    def arrived(self, arrival_us: float, rows: int) -> None:
        """Note a request."""
        self.arrived_each((arrival_us,), rows)

    def arrived_each(self, arrivals_us: Iterable[float], rows: int) -> None:
        """Note requests of so many rows each."""
        gain, most_us, latest_us = ARRIVALS.gain, ARRIVALS.max_gap_us, self._latest_us
        for arrival_us in arrivals_us:
            if latest_us is None:
                self._rows = float(rows)
                latest_us = arrival_us
                continue
            gap_us = arrival_us - latest_us
            if gap_us < 0.0:
                gap_us = 0.0
            else:
                latest_us = arrival_us
                gap_us = min(gap_us, most_us)
            self.gap_us = gap_us if self.gap_us is None else self.gap_us + gain * (gap_us - self.gap_us)
            self._gaps += 1  # of the first ones it is the mean: a load is known after tens of requests
            self._steady_gap_us += self._steady_gain * (gap_us - self._steady_gap_us)
            self._rows += gain * (rows - self._rows)
        self._latest_us = latest_us

    @property
    def _steady_gain(self) -> float:
        return max(ARRIVALS.load_gain, 1 / self._gaps)
