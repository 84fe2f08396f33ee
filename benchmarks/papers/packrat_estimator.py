"""Packrat's estimator of the batch size (2024, section 3.8), to compare with: here each batch is decided anew. Pure.

The queue's depth is smoothed by an exponentially weighted moving average and rounded down to a power of two; of the
last of these estimates the most frequent one counts. What the paper leaves open: both constants; that of equally
frequent estimates the latest counts; and that the average is first rounded to whole requests, since it comes to a power
of two only ever closer.
"""

from collections import Counter, deque

WEIGHT = 0.5  # alpha: of the latest depth
WINDOW = 16  # n: estimates of which the mode is taken


class BatchSizeEstimator:
    """Told of the queue's depth at regular times, it says for which batch size to configure."""

    def __init__(self, weight: float = WEIGHT, window: int = WINDOW) -> None:
        self._weight = weight
        self._average = 0.0
        self._estimates: deque[int] = deque(maxlen=window)

    def observe(self, depth: int) -> int:
        """Take a depth into account and return the batch size, at least 1."""
        self._average += self._weight * (depth - self._average)
        self._estimates.append(1 << max(0, round(self._average).bit_length() - 1))
        counts = Counter(reversed(self._estimates))
        return counts.most_common(1)[0][0]
