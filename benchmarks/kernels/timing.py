"""Short calls against the clock."""

import time
from collections.abc import Callable, Iterator

SAMPLE_S = 2e-3  # a sample calls for about this long


def elapsed_us(call: Callable[[], object]) -> float:
    """Return how long one call takes, in microseconds."""
    begin = time.perf_counter()
    call()
    return (time.perf_counter() - begin) * 1e6


def sampled(call: Callable[[], None], samples: int, clock: Callable[[], float] = time.perf_counter) -> Iterator[float]:
    """Seconds per call, measured over batches of calls.

    With `time.thread_time` for a clock, what counts is the time that this thread had a core.
    """
    call()
    begin = clock()
    call()
    calls = max(1, round(SAMPLE_S / max(clock() - begin, 1e-7)))
    for _ in range(samples):
        begin = clock()
        for _ in range(calls):
            call()
        yield (clock() - begin) / calls
