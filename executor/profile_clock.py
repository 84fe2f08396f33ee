"""Small things that the parts of a measurement share."""

import time
from collections.abc import Callable

from gangway.artifact.format import Manifest

Progress = Callable[[str, float], None]
"""`progress(phase, share)`: the share of the whole measurement's time that is over, 0 to 1."""


class Clock:
    """Time since the beginning of a measurement (CLOCK_MONOTONIC seconds) that shall take `seconds`."""

    def __init__(self, begin: float, seconds: float, progress: Progress) -> None:
        self._begin, self.seconds, self._progress = begin, seconds, progress

    def passed_s(self, phase: str) -> float:
        """Seconds since the beginning; shown to whoever watches."""
        passed_s = time.monotonic() - self._begin
        self._progress(phase, min(1.0, passed_s / self.seconds))
        return passed_s


def version_count(manifest: Manifest) -> int:
    """Return the largest number of versions of any layer."""
    return max(len(layer.versions) for layer in manifest.layers)


def powers_of_two(limit: int) -> list[int]:
    """Return 1, 2, 4, ... up to `limit`."""
    return [1 << power for power in range(limit.bit_length())]
