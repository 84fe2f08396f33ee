"""Short calls against the clock."""

import time
from collections.abc import Callable, Iterator

SAMPLE_S = 2e-3  # a sample calls for about this long


def sampled(call: Callable[[], None], samples: int) -> Iterator[float]:
    """Seconds per call, measured over batches of calls."""
    call()
    begin = time.perf_counter()
    call()
    calls = max(1, round(SAMPLE_S / max(time.perf_counter() - begin, 1e-7)))
    for _ in range(samples):
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        yield (time.perf_counter() - begin) / calls
