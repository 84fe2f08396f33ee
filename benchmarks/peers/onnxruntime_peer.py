"""onnxruntime as a function that runs one query, pinned to some cores and timed."""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from gangway.clients.inputs import Array
from testing.reference import open_session

RunOnce = Callable[[], object]
Timed = Callable[[], float]  # runs one query, returns its milliseconds


@contextmanager
def pinned(cores: Sequence[int]) -> Iterator[None]:
    """Keep this thread, and the threads it makes meanwhile, on some cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def timed_ms(run_once: RunOnce, cores: Sequence[int]) -> Timed:
    """Return a function that runs a query on some cores and returns its milliseconds."""

    def timed() -> float:
        with pinned(cores):
            begin_ns = time.perf_counter_ns()
            run_once()
            return (time.perf_counter_ns() - begin_ns) / 1e6

    return timed


def onnxruntime_peer(path: Path, inputs: Mapping[str, Array], threads: int, spinning: bool = True) -> RunOnce:
    """Return a query of onnxruntime; its threads spin between queries by default, as onnxruntime's do."""
    session = open_session(path, threads, rows=len(next(iter(inputs.values()))), spinning=spinning)
    feeds = dict(inputs)
    return lambda: session.run(None, feeds)
